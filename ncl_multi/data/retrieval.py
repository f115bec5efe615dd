"""Collections to search: documents, queries and their relevance."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from ncl_multi.data.fetch import user_data, user_files
from ncl_multi.files import read_bytes

log = logging.getLogger(__name__)

_MOST_BYTES = 2**30
_FILES = (
    "cranfield/cran.all.1400.xml", "cranfield/cran.qry.xml", "cranfield/cranqrel.trec.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Retrieval:
    """`relevant[q]` are the rows of `documents` that answer `queries[q]`."""

    documents: list[str]
    queries: list[str]
    relevant: list[list[int]]


def cranfield() -> Retrieval:
    """1,400 abstracts on aerodynamics, 225 queries."""
    paths = user_files("Cranfield", *_FILES)
    documents, queries, judgements = (read_bytes(path, _MOST_BYTES).decode() for path in paths)
    texts = dict(re.findall(r"<docno>\s*(\d+)\s*</docno>.*?<text>(.*?)</text>", documents, re.S))
    row = {number: index for index, number in enumerate(texts)}
    titles = re.findall(r"<top>.*?<title>(.*?)</title>", queries, re.S)
    relevant: list[list[int]] = [[] for _ in titles]
    for line in judgements.splitlines():
        # Topics are counted from 1 in file order; a last column of 0 means not relevant.
        topic, _, document, grade = line.split()
        if grade != "0" and document in row:
            relevant[int(topic) - 1].append(row[document])
    return Retrieval(
        [_plain(text) for text in texts.values()], [_plain(q) for q in titles], relevant
    )


def collection(source: str | Path) -> Retrieval:
    """`cranfield`, a folder in the layout of BEIR, or the name of one in NCL_DATA/retrieval.

    Such a folder contains `corpus.jsonl`, `queries.jsonl` and `qrels/test.tsv`. A title is put
    before its document. Queries without judgements are left out.
    """
    if source == "cranfield":
        return cranfield()
    folder = Path(source) if Path(source).is_dir() else user_data(f"retrieval/{source}")
    if folder is None or not (folder / "corpus.jsonl").is_file():
        raise FileNotFoundError(
            f"{source} is neither cranfield nor a folder with a corpus.jsonl, nor is "
            f"retrieval/{source} in NCL_DATA"
        )
    log.info(f"{folder.name} from {folder}")
    documents = _texts(folder / "corpus.jsonl")
    row = {name: index for index, name in enumerate(documents)}
    relevant: dict[str, list[int]] = {}
    judgements = folder / "qrels" / "test.tsv"
    for number, line in enumerate(_lines(judgements)[1:], 2):
        cells = line.split("\t")
        if len(cells) != 3 or not cells[2].strip().lstrip("-").isdigit():
            raise ValueError(
                f"line {number} of {judgements} must be a query, a document and a whole number, "
                f"separated by tabs; got {line[:60]!r}"
            )
        if int(cells[2]) > 0 and cells[1] in row:
            relevant.setdefault(cells[0], []).append(row[cells[1]])
    queries = _texts(folder / "queries.jsonl")
    judged = [name for name in queries if name in relevant]
    if not judged:
        raise ValueError(f"no query of {folder} has a relevant document in {judgements.name}")
    return Retrieval(
        list(documents.values()), [queries[name] for name in judged], [relevant[n] for n in judged]
    )


def _texts(path: Path) -> dict[str, str]:
    """Texts of a jsonl file by `_id`, with their titles."""
    texts: dict[str, str] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            text = f"{row.get('title') or ''} {row['text']}"
            texts[str(row["_id"])] = _plain(text)
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {path} must be a JSON object with _id and text: {error}"
            ) from error
    return texts


def _lines(path: Path) -> list[str]:
    return [line for line in read_bytes(path, _MOST_BYTES).decode().split("\n") if line.strip()]


def _plain(text: str) -> str:
    return " ".join(text.split())

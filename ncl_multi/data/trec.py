"""The Cranfield collection: documents, queries and which document answers which. Set NCL_DATA."""

import re
from dataclasses import dataclass

from ncl_multi.data.fetch import say, user_data
from ncl_multi.files import read_bytes

_MOST_BYTES = 2**26
_FILES = ("cran.all.1400.xml", "cran.qry.xml", "cranqrel.trec.txt")


@dataclass(frozen=True)
class Retrieval:
    """`relevant[q]` are the rows of `documents` that answer `queries[q]`."""

    documents: list[str]
    queries: list[str]
    relevant: list[list[int]]


def cranfield() -> Retrieval:
    """1,400 abstracts on aerodynamics, 225 queries."""
    root = user_data("cranfield")
    missing = [name for name in _FILES if not (root and (root / name).is_file())]
    if root is None or missing:
        raise FileNotFoundError(
            f"Cranfield comes in no package: set NCL_DATA to a folder that holds "
            f"{', '.join(f'cranfield/{name}' for name in missing)}"
        )
    say(f"cranfield from {root}")
    documents, queries, judgements = (
        read_bytes(root / name, _MOST_BYTES).decode() for name in _FILES
    )
    texts = dict(re.findall(r"<docno>\s*(\d+)\s*</docno>.*?<text>(.*?)</text>", documents, re.S))
    row = {number: index for index, number in enumerate(texts)}
    asked = re.findall(r"<top>.*?<title>(.*?)</title>", queries, re.S)
    relevant: list[list[int]] = [[] for _ in asked]
    for line in judgements.splitlines():
        # Topics are counted from 1 in file order; a last column of 0 means not relevant.
        topic, _, document, grade = line.split()
        if grade != "0" and document in row:
            relevant[int(topic) - 1].append(row[document])
    return Retrieval(
        [_plain(text) for text in texts.values()], [_plain(q) for q in asked], relevant
    )


def _plain(text: str) -> str:
    return " ".join(text.split())

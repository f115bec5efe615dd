"""Readers of sentences: examples with pairs, texts without, documents to be searched."""

import re
from collections.abc import Sequence
from pathlib import Path

from ncl_multi import data
from ncl_multi.adapters.sentence.corpus import Corpus
from ncl_multi.data.fetch import say
from ncl_multi.data.tables import read_table

# Columns that say whether the two sentences of a row belong together.
_JUDGEMENTS = ("score", "label", "gold_label", "similarity", "is_duplicate", "relevance")


def read_corpus(
    source: str,
    limit: int | None = None,
    texts: str = "none",
    most: int | None = None,
    columns: Sequence[str] | None = None,
) -> Corpus:
    """A corpus by name or file.

    `stsb` as `texts` adds the pairs of the STS-B training split with their scores, and leaves out
    every sentence that its dev or test split judges; sentences are the same if they differ in case
    and punctuation only. The first `limit` examples are read, and of everything at most the first
    `most`. `columns` are those of `read_examples`.
    """
    examples = read_examples(source, columns)[:limit][:most]
    if source != "snli" and texts == "none":
        return Corpus.of(examples, name=source)
    held = {plain(s) for split in ("dev", "test") for side in data.stsb(split)[:2] for s in side}
    scored: Sequence[tuple[Sequence[str], float]] = []
    if texts == "stsb":
        first, second, scores = data.stsb("train")
        pairs = zip(first, second, strict=True)
        scored = list(zip(pairs, scores, strict=True))[:most]

    def new(row: Sequence[str]) -> bool:
        return not held & set(map(plain, row))

    kept = [row for row in examples if new(row)]
    judged = [(row, score) for row, score in scored if new(row)]
    dropped = len(examples) + len(scored) - len(kept) - len(judged)
    if dropped:
        say(f"left out {dropped} examples whose sentences are in the STS-B dev or test split")
    return Corpus.of(kept, judged, name=source)


def plain(sentence: str) -> str:
    """A sentence without case and punctuation: what tells whether two are the same."""
    letters = (letter if letter.isalnum() else " " for letter in sentence.lower())
    return " ".join("".join(letters).split())


def read_examples(
    source: str | Path, columns: Sequence[str] | None = None
) -> list[tuple[str, ...]]:
    """Sentences, pairs or triplets of a table, and a notice of what was taken from it.

    A csv, tsv, jsonl or parquet file, or `hf:<name>` on the hub: see `read_table` for its columns.
    Documents, of `cranfield` or the lines of a txt file, give pairs of a passage and its document.
    """
    source = str(source)
    if source == "snli":
        return list(data.snli())
    if source == "cranfield":
        return passages_and_documents(data.cranfield().documents)
    if columns and len(columns) > 3:
        raise ValueError(f"examples have one to three columns; got {', '.join(columns)}")
    table = read_table(source, columns=columns, known=("snli", "cranfield"))
    say(table.describe())
    judged = [name for name in table.unused if name.lower() in _JUDGEMENTS]
    if len(table.columns) > 1 and judged:
        say(f"every row counts as a match, whatever its {judged[0]}: keep only rows that match")
    if source.lower().endswith(".txt"):
        return passages_and_documents([text for (text,) in table.rows])
    return table.rows


def passages_and_documents(documents: Sequence[str]) -> list[tuple[str, ...]]:
    """Sentences of documents, which stand for what may be asked, each with its document."""
    pairs: list[tuple[str, ...]] = [(p, text) for text in documents for p in passages_of(text)]
    if not pairs:
        raise ValueError("no document has a sentence of five words or more")
    return pairs


def passages_of(document: str, most: int = 4) -> list[str]:
    """The first sentence of a text and others spread over it, of five words or more.

    Example:
        >>> passages_of("A wing in a slipstream. Yes. It was tested in a tunnel.")
        ['A wing in a slipstream.', 'It was tested in a tunnel.']
    """
    parts = re.split(r"(?<=[.?!])\s+", document)
    parts = [part for part in parts if len(part.split()) >= 5]
    return parts[:: max(1, -(-len(parts) // most))]

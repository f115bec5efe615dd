"""Texts to train on, by name or file: broad texts, captions, documents to search, your own."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ncl_multi import data
from ncl_multi.adapters.sentence.corpus import Corpus, passages_of
from ncl_multi.data.tables import read_table

log = logging.getLogger(__name__)

Scored = Literal["stsb", "none"]
NAMES = ("broad", "wordnet", "snli", "cranfield")
HELD = 4000
"""Entries of WordNet that `broad` and `wordnet` leave for `held_out`."""
# Columns of judgements whether the two sentences of a row belong together.
_JUDGEMENTS = ("score", "label", "gold_label", "similarity", "is_duplicate", "relevance")


def read_corpus(
    source: str,
    limit: int | None = None,
    scored: Scored = "none",
    columns: Sequence[str] | None = None,
) -> Corpus:
    """A corpus by name or file.

    `broad` are dictionary entries of WordNet, each a text; entries with a sentence in which the
    word is used; triplets of SNLI; and abstracts of PubMed, each with its title and with a few of
    its own sentences. From these named sets, sentences of the STS-B and
    SICK test data are left out, compared without case and punctuation. Your own texts are not
    filtered.

    Args:
        source: `broad`, `wordnet`, `snli`; a file, or `hf:<name>` on the hub, see `read_examples`;
            documents of `cranfield` or of a folder in the layout of BEIR.
        limit: Take at most so many examples.
        scored: `stsb` adds the pairs of the STS-B training split with their human scores.
        columns: Those of `read_examples`.
    """
    if source not in ("broad", "wordnet", "snli") and scored == "none":
        return Corpus.of(read_examples(source, columns)[:limit], name=source)
    judged = _judged()
    kinds = _named(source, limit) or [read_examples(source, columns)[:limit]]
    if source in NAMES:
        kinds = [[row for row in examples if not judged & _plains(row)] for examples in kinds]
    pairs: list[Any] = []
    if scored == "stsb":
        first, second, scores = data.stsb("train")
        pairs = list(zip(zip(first, second, strict=True), scores, strict=True))
        allowed = [pair for pair in pairs if not judged & _plains(pair[0])]
        log.warning(
            f"left out {len(pairs) - len(allowed)} scored pairs with sentences of the test data"
        )
        pairs = allowed
    return Corpus.mixed(kinds, pairs, name=source)


def read_examples(source: str | Path, columns: Sequence[str] | None = None) -> list[Any]:
    """Texts, pairs or triplets of a table; what was read is logged.

    A csv, tsv, jsonl or parquet file, or `hf:<name>` on the hub: see `read_table` for its columns.
    The lines of a txt file and the documents of `cranfield` or of a folder in the layout of BEIR
    are texts.
    """
    source = str(source)
    if source == "cranfield" or (Path(source) / "corpus.jsonl").is_file():
        documents = data.collection(source).documents
        texts = [text for text in documents if text]
        if len(texts) < len(documents):
            log.warning(f"left out {len(documents) - len(texts)} documents without text")
        return texts
    if columns and len(columns) > 3:
        raise ValueError(f"examples have one to three columns; got {', '.join(columns)}")
    table = read_table(source, columns=columns, known=NAMES)
    log.info(table.describe())
    judged = [name for name in table.unused if name.lower() in _JUDGEMENTS]
    if len(table.columns) > 1 and judged:
        log.warning(
            f"every row counts as a match, whatever its {judged[0]}: keep only rows that match"
        )
    return [row[0] for row in table.rows] if len(table.columns) == 1 else table.rows


def held_out() -> tuple[list[str], list[int]]:
    """Entries of WordNet that `broad` and `wordnet` leave out, and their categories."""
    synsets = _shuffled()[:HELD]
    return [synset.entry for synset in synsets], [synset.category for synset in synsets]


def plain(sentence: str) -> str:
    """A sentence without case and punctuation, to compare sentences by."""
    letters = (letter if letter.isalnum() else " " for letter in sentence.lower())
    return " ".join("".join(letters).split())


def _named(source: str, limit: int | None) -> list[Any]:
    """The kinds of examples of a named set."""
    if source == "snli":
        return [data.snli(limit)]
    if source not in ("broad", "wordnet"):
        return []
    synsets = _shuffled()[HELD:]
    entries = [synset.entry for synset in synsets]
    # Shorter ones are phrases, which mean little without their headword.
    used = [(s.entry, text) for s in synsets for text in s.examples if len(text.split()) >= 4]
    if source == "wordnet":
        return [entries[:limit]]
    limit = limit or 2 * len(entries)
    kinds: list[Any] = [used[: limit // 8], data.snli(limit // 4), _found(limit // 5)]
    return [entries[: limit - sum(map(len, kinds))], *kinds]


def _found(limit: int) -> list[tuple[str, str]]:
    """Abstracts, each to be found by its title and by its own sentences."""
    pairs = [
        (query, abstract)
        for title, abstract in data.pubmed(limit // 4)
        for query in (title, *passages_of(abstract, 3))
    ]
    return pairs[:limit]


def _shuffled() -> list[Any]:
    """WordNet, always in the same random order."""
    synsets = list(data.wordnet())
    random.Random(0).shuffle(synsets)  # noqa: S311
    return synsets


def _judged() -> set[str]:
    """Sentences of STS-B's dev and test splits, and of SICK where NCL_DATA contains it."""
    pairs = [data.stsb(split) for split in ("dev", "test")]
    try:
        pairs += [data.sick(split) for split in ("train", "trial")]
    except FileNotFoundError:
        log.warning("SICK is not in NCL_DATA: its sentences cannot be left out")
    return {plain(text) for first, second, _ in pairs for text in (*first, *second)}


def _plains(row: Any) -> set[str]:
    return {plain(row)} if isinstance(row, str) else {plain(text) for text in row}

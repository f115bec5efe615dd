"""Sentences to train on: which belong together, which are near, and their cached features."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ncl_multi.adapters.sentence.config import SentenceConfig
from ncl_multi.data.fetch import cache
from ncl_multi.model import fingerprint
from ncl_multi.training.feature_cache import Shard, cached_shards
from ncl_multi.training.neighbours import Neighbours


@dataclass(frozen=True)
class Corpus:
    """Unique sentences; examples and pairs are their row numbers, pairs with human scores.

    An example is an anchor, its positive and its hard negative; -1 marks a positive or negative
    that was not given.
    """

    sentences: list[str]
    examples: Int[Tensor, "n columns"]
    pairs: Int[Tensor, "m 2"]
    scores: Tensor
    name: str = "texts"

    @classmethod
    def of(
        cls,
        examples: Sequence[str] | Sequence[Sequence[str]],
        scored: Sequence[tuple[Sequence[str], float]] = (),
        name: str = "texts",
        passages: bool | None = None,
    ) -> "Corpus":
        """A corpus of texts, documents, pairs or triplets, and pairs with human scores.

        A row that is not of the kind of the first one is refused with its number.

        Args:
            examples: Texts, pairs or triplets.
            scored: Pairs with the scores that people gave them.
            name: Name in the model card.
            passages: Whether texts are documents, whose positives are their own sentences; None if
                most of them have three sentences of five words or more.

        Example:
            >>> corpus = Corpus.of([("a dog", "a puppy"), ("a car", "a dog")])
            >>> corpus.sentences, corpus.examples
            (['a dog', 'a puppy', 'a car'], tensor([[0, 1],
                    [2, 0]]))
        """
        rows = _checked_rows(examples)
        return cls._numbered(_with_passages(rows, passages), scored, name)

    @classmethod
    def mixed(
        cls,
        kinds: Sequence[Sequence[str] | Sequence[Sequence[str]]],
        scored: Sequence[tuple[Sequence[str], float]] = (),
        name: str = "texts",
    ) -> "Corpus":
        """A corpus of several kinds of examples: texts, pairs and triplets together.

        Example:
            >>> Corpus.mixed([["dog", "car"], [("dog", "pup"), ("car", "van")]]).examples
            tensor([[ 0, -1],
                    [ 1, -1],
                    [ 0,  2],
                    [ 1,  3]])
        """
        rows = [row for examples in kinds for row in _checked_rows(examples)]
        return cls._numbered(rows, scored, name)

    @classmethod
    def _numbered(
        cls,
        rows: Sequence[tuple[str, ...]],
        scored: Sequence[tuple[Sequence[str], float]],
        name: str,
    ) -> "Corpus":
        number: dict[str, int] = {}

        def numbers(row: Sequence[str]) -> list[int]:
            return [number.setdefault(text, len(number)) for text in row]

        width = max(map(len, rows))
        if len({text for row in rows for text in row}) < 2:
            raise ValueError(f"fit needs texts that differ; all are {rows[0][0][:60]!r}")
        examples = torch.tensor([numbers(row) + [-1] * (width - len(row)) for row in rows])
        pairs = torch.tensor([numbers(row) for row, _ in scored]).view(-1, 2).long()
        scores = torch.tensor([score for _, score in scored])
        return cls(list(number), examples, pairs, scores, name)

    def fingerprint(self) -> str:
        """A hash of the sentences, examples, pairs and scores."""
        parts = [self.examples.tolist(), self.pairs.tolist(), self.scores.tolist()]
        return hashlib.sha256(json.dumps([self.sentences, *parts]).encode()).hexdigest()[:16]

    def draw_pairs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the two sides of random pairs, and their scores; empty if there are no pairs."""
        drawn = torch.randint(max(1, len(self.pairs)), (count if len(self.pairs) else 0,))
        return self.pairs[drawn, 0], self.pairs[drawn, 1], self.scores[drawn]


class Examples:
    """Anchors, positives and hard negatives of a batch; those that were not given are mined.

    An example without a positive gets one of its anchor's nearest others, or the anchor itself,
    which dropout makes another view. Where any example has a hard negative, one without gets
    its own positive, which counts as none.

    Args:
        h: The encoder's features of all sentences.
        config: How positives are mined.
    """

    def __init__(self, h: Tensor, config: SentenceConfig):
        self.h, self.config = h, config

    @cached_property
    def around(self) -> Neighbours:
        """The neighbours of all sentences, computed on first use."""
        return Neighbours(self.h, self.config.mined_among)

    def columns(self, batch: Int[Tensor, "n columns"]) -> list[Int[Tensor, " n"]]:
        """The columns of a batch of examples, each with a sentence for every row."""
        anchors, *others = batch.unbind(dim=1)
        positives = others[0] if others else torch.full_like(anchors, -1)
        if (positives < 0).any():
            near = torch.rand(len(anchors)) < self.config.mined
            mined = self.around.of(anchors) if near.any() else anchors
            positives = torch.where(positives < 0, torch.where(near, mined, anchors), positives)
        columns = [anchors, positives]
        if len(others) > 1:
            # Its own positive is a rival of the other anchors only, in `contrast`.
            columns.append(torch.where(others[1] < 0, positives, others[1]))
        return columns


def cached_features(model: Any, sentences: Sequence[str], precision: str = "fp32") -> Tensor:
    """The encoder's features of sentences, computed once and kept in the user's cache folder.

    The cache key is the encoder's weights, not its name. In `bf16` they differ from those
    in `fp32` by one part in ten thousand; processors that have it are three times as fast.
    """
    encoder = model.encoder
    about = {
        "model": type(encoder.model).__name__, "weights": fingerprint(encoder),
        "pooling": encoder.pooling, "precision": precision,
        "data": hashlib.sha256(json.dumps(list(sentences)).encode()).hexdigest(),
    }  # fmt: skip
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def compute(rows: Sequence[int], done: Callable[[int], object]) -> Shard:
        with torch.autocast(model.device.type, half, enabled=half is not None):
            h = model.embed([sentences[row] for row in rows])
        done(len(rows))
        return h, list(rows)

    return cached_shards(cache() / "sentence", "sentences", len(sentences), about, compute)[0]


def passages_of(document: str, most: int = 4) -> list[str]:
    """The first sentence of a text and others at even distances, of five words or more.

    Example:
        >>> passages_of("A wing in a slipstream. Yes. It was tested in a tunnel.")
        ['A wing in a slipstream.', 'It was tested in a tunnel.']
    """
    sentences = re.split(r"(?<=[.?!])\s+", document)
    sentences = [sentence for sentence in sentences if len(sentence.split()) >= 5]
    return sentences[:: max(1, -(-len(sentences) // most))]


def _with_passages(rows: list[tuple[str, ...]], passages: bool | None) -> list[tuple[str, ...]]:
    """Documents as pairs of a sentence, in place of a query, and its document."""
    if len(rows[0]) > 1 or passages is False:
        return rows
    split = [passages_of(text) for (text,) in rows]
    if passages is None and 2 * sum(len(sentences) >= 3 for sentences in split) <= len(rows):
        return rows
    pairs: list[tuple[str, ...]] = []
    for (text,), sentences in zip(rows, split, strict=True):
        pairs += [(sentence, text) for sentence in sentences if sentence != text] or [(text,)]
    return pairs


def _checked_rows(examples: Any) -> list[tuple[str, ...]]:
    """Every example as a tuple of texts, all of one length."""
    if isinstance(examples, str | bytes) or not hasattr(examples, "__len__") or not len(examples):
        raise ValueError(f"fit needs a list of texts, pairs or triplets; got {examples!r:.60}")
    rows: list[tuple[str, ...]] = []
    for row, example in enumerate(examples):
        texts = (example,) if isinstance(example, str) else example
        if not isinstance(texts, tuple | list) or not 1 <= len(texts) <= 3:
            raise ValueError(
                f"row {row} must be a text, a pair or a triplet of texts; got {str(example)[:60]!r}"
            )
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"row {row} has an entry that is not text; got {str(example)[:60]!r}")
        if rows and len(texts) != len(rows[0]):
            raise ValueError(
                f"all rows must have as many texts as the first, {len(rows[0])}; row {row} has "
                f"{len(texts)}"
            )
        rows.append(tuple(texts))
    if len(rows) < 2:
        raise ValueError("fit needs at least two examples; got one")
    return rows

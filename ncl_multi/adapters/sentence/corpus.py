"""Sentences to train on: which belong together, what is near, and their cached features."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ncl_multi.data.fetch import cache
from ncl_multi.model import fingerprint
from ncl_multi.training.feature_cache import Shard, cached_shards


@dataclass(frozen=True)
class Corpus:
    """Sentences, each once; examples and pairs are rows of them, with what people say of pairs."""

    sentences: list[str]
    examples: Tensor
    pairs: Tensor
    scores: Tensor
    name: str = "texts"

    @classmethod
    def of(
        cls,
        examples: Sequence[str] | Sequence[Sequence[str]],
        scored: Sequence[tuple[Sequence[str], float]] = (),
        name: str = "texts",
    ) -> "Corpus":
        """A corpus of texts, pairs or triplets, and pairs with human scores.

        A row that is not of the kind of the first one is refused with its number.

        Example:
            >>> corpus = Corpus.of([("a dog", "a puppy"), ("a car", "a dog")])
            >>> corpus.sentences, corpus.examples
            (['a dog', 'a puppy', 'a car'], tensor([[0, 1],
                    [2, 0]]))
        """
        rows = _checked_rows(examples)
        number: dict[str, int] = {}
        numbered = [
            torch.tensor([[number.setdefault(s, len(number)) for s in row] for row in some])
            for some in (rows, [row for row, _ in scored])
        ]
        pairs = numbered[1].view(-1, 2).long()
        scores = torch.tensor([score for _, score in scored])
        return cls(list(number), numbered[0], pairs, scores, name)

    def fingerprint(self) -> str:
        """A hash of the sentences and of what belongs together."""
        parts = [self.examples.tolist(), self.pairs.tolist(), self.scores.tolist()]
        return hashlib.sha256(json.dumps([self.sentences, *parts]).encode()).hexdigest()[:16]

    def draw_pairs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the two sides of random pairs, and their scores; none if there are none."""
        drawn = torch.randint(max(1, len(self.pairs)), (count if len(self.pairs) else 0,))
        return self.pairs[drawn, 0], self.pairs[drawn, 1], self.scores[drawn]


def cached_features(model: Any, sentences: Sequence[str]) -> Tensor:
    """The encoder's features of sentences, computed once and kept in the user's cache folder.

    They are found again by the encoder's weights, not by its name.
    """
    encoder = model.encoder
    about = {
        "model": type(encoder.model).__name__, "weights": fingerprint(encoder),
        "pooling": encoder.pooling,
        "data": hashlib.sha256(json.dumps(list(sentences)).encode()).hexdigest(),
    }  # fmt: skip

    def compute(rows: Sequence[int], done: Callable[[int], object]) -> Shard:
        h = model.embed([sentences[row] for row in rows])
        done(len(rows))
        return h, list(rows)

    return cached_shards(cache() / "sentence", "sentences", len(sentences), about, compute)[0]


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

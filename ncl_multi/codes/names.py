"""A name for every dimension, from the words or classes of the items that fire it most."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.codes.explain import unit_rows
from ncl_multi.codes.features import Features

_WORD = re.compile(r"[^\W\d_][\w'-]+")
_TOP_ITEMS = 50
_LIFT = 1.5


def name_dimensions(features: Features, codes: Any | None = None, words: int = 3) -> list[str]:
    """A name for every dimension, from the words or classes of the items that fire it most.

    Words are weighed like c-TF-IDF: by their share of a dimension's strongest items, times the
    logarithm of how much larger that is than their share of all items; so words that are
    everywhere name nothing. Where items have no words, the classes stand in. A dimension that
    never fires, or fires for anything, has the empty name. For CLIP, pass the text side.

    Args:
        features: Items with text, or labels with `about["classes"]`.
        codes: Name the dimensions of these codes of the same items instead of `features.z`.
        words: Longest name.

    Example:
        >>> import torch
        >>> items = ["a black dog", "a brown dog", "a red car", "a fast car"]
        >>> z = torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0], [0.0, 0.9]])
        >>> name_dimensions(Features(z, items=items), words=1)
        ['dog', 'car']
    """
    z = unit_rows(features.z if codes is None else codes, signed=True)
    tags, vocabulary = _bag_of_words(features.items or [])
    if not vocabulary:
        tags, vocabulary = _bag_of_classes(features)
    if not vocabulary:
        return [""] * z.shape[1]
    strongest = _strongest(z, _TOP_ITEMS)
    mass, background = strongest.sum(axis=1), tags.mean(axis=0)
    weights = csr_array(strongest @ tags)
    items_with = csr_array((strongest > 0).astype(np.float32) @ tags)
    names = []
    for dim, (start, end) in enumerate(zip(weights.indptr, weights.indptr[1:], strict=False)):
        tag, share = weights.indices[start:end], weights.data[start:end] / mass[dim]
        score = share * np.log(share / background[tag])
        # A word of a single item says what that item is, not what the dimension is.
        counts = items_with[[dim]].toarray()[0, tag]
        enough = counts >= min(2, strongest.indptr[dim + 1] - strongest.indptr[dim])
        score[~enough | (share < _LIFT * background[tag])] = 0
        best = np.argsort(-score, kind="stable")[:words]
        # Words far behind the best are noise.
        kept = [n for n in best if score[n] > 0.3 * score[best[0]]]
        names.append(", ".join(vocabulary[tag[n]] for n in kept))
    return names


def _strongest(z: csr_array, count: int) -> csr_array:
    """A row a dimension: its `count` largest positive entries, by item."""
    columns = csr_array(z.T)
    columns.data[columns.data < 0] = 0
    columns.eliminate_zeros()
    for dim in np.flatnonzero(np.diff(columns.indptr) > count):
        entries = columns.data[columns.indptr[dim] : columns.indptr[dim + 1]]
        entries[np.argpartition(-entries, count)[count:]] = 0
    columns.eliminate_zeros()
    return columns


def _bag_of_words(items: Sequence[str]) -> tuple[csr_array, list[str]]:
    """Which item holds which word; a word that only one item holds is left out."""
    found = [sorted(set(_WORD.findall(item.lower()))) for item in items]
    return _bag(found, at_least=min(2, len(found)))


def _bag_of_classes(features: Features) -> tuple[csr_array, list[str]]:
    if features.y is None or features.y.ndim != 1:
        return _bag([], at_least=1)
    names = features.about.get("classes")
    labels = features.y.tolist()
    return _bag([[names[y] if names else f"class {y}"] for y in labels], at_least=1)


def _bag(tags: Sequence[Sequence[str]], *, at_least: int) -> tuple[csr_array, list[str]]:
    flat = np.array([tag for own in tags for tag in own], dtype=object)
    rows = np.repeat(np.arange(len(tags)), [len(own) for own in tags])
    if not len(flat):
        return csr_array((len(tags), 0)), []
    vocabulary, columns, counts = np.unique(flat, return_inverse=True, return_counts=True)
    shape = (len(tags), len(vocabulary))
    bag = csr_array((np.ones(len(flat), np.float32), (rows, columns)), shape=shape)
    kept = np.flatnonzero(counts >= at_least)
    return bag[:, kept], vocabulary[kept].tolist()

"""Why two items match, what a dimension means, and how to search without it.

The cosine of two non-negative codes is a sum of non-negative parts, one per shared dimension, so a
match can be decomposed exactly. Signed codes cannot: their parts cancel.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array, issparse

from ncl_multi.codes.features import normalise_rows

if TYPE_CHECKING:
    from ncl_multi.codes.search import SparseIndex

Code = Any
"""One code, or rows of codes: a tensor, an array or a `scipy.sparse.csr_array`."""


class Part(NamedTuple):
    """The contribution of one dimension to a similarity."""

    dimension: int
    name: str
    share: float


class Match(NamedTuple):
    """One search result; its score is the sum of its parts."""

    id: int
    score: float
    parts: list[Part]


def explain(a: Code, b: Code, names: Sequence[str] | None = None) -> list[Part]:
    """The shared dimensions of two codes, largest share first.

    The shares sum to the cosine similarity. Codes that share nothing give an empty list.

    Example:
        >>> parts = explain(torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 1.0, 1.0]))
        >>> [(part.dimension, round(part.share, 3)) for part in parts]
        [(2, 0.566)]
    """
    rows = [unit_csr(code) for code in (a, b)]
    if any(row.shape[0] != 1 for row in rows):
        raise ValueError(
            f"explain takes one code and one code; got {rows[0].shape[0]} and "
            f"{rows[1].shape[0]} rows"
        )
    if rows[0].shape[1] != rows[1].shape[1]:
        raise ValueError(
            f"codes must have the same width; got {rows[0].shape[1]} and {rows[1].shape[1]}"
        )
    _check_names(names, rows[0].shape[1])
    shared = csr_array(rows[0] * rows[1])
    order = np.argsort(-shared.data, kind="stable")
    return [
        Part(int(dim), _name(names, int(dim)), float(share))
        for dim, share in zip(shared.indices[order], shared.data[order], strict=True)
        if share > 0
    ]


def why(
    query: Code, index: "SparseIndex", k: int = 10, names: Sequence[str] | None = None
) -> list[Match]:
    """The k best items of an index for one query, each with the parts of its score.

    Example:
        >>> from ncl_multi import SparseIndex
        >>> index = SparseIndex(2, names=["round", "red"])
        >>> index.add([7, 8], csr_array([[0.6, 0.8], [1.0, 0.0]]))
        >>> [(match.id, match.parts[0].name) for match in why(torch.tensor([0.0, 1.0]), index, 1)]
        [(7, 'red')]
    """
    ids, scores = index.search(query, k)
    hits = ids[0] >= 0
    codes = index.codes(ids[0][hits])
    return [
        Match(int(item), float(score), explain(query, codes[[row]], names or index.names))
        for row, (item, score) in enumerate(zip(ids[0][hits], scores[0][hits], strict=True))
    ]


def steer(
    code: Code,
    *,
    drop: Iterable[int | str] = (),
    boost: Mapping[int | str, float] | None = None,
    names: Sequence[str] | None = None,
) -> csr_array:
    """The code without some concepts and with more of others, to search again with.

    Dimensions are given by number, or by name where `names` are given (a name that several
    dimensions share means all of them). `boost` adds to the unit code: 0.5 adds a concept at half
    the length of the whole code, whether the code had it or not. The result has unit rows.

    Example:
        >>> steer(torch.tensor([[0.6, 0.8, 0.0]]), drop=[1], boost={2: 0.6}).toarray().round(3)
        array([[0.707, 0.   , 0.707]])
    """
    z = unit_csr(code)
    _check_names(names, z.shape[1])
    steered = z.tolil()
    for which in drop:
        steered[:, _dimensions(which, z.shape[1], names)] = 0
    for which, weight in (boost or {}).items():
        if not weight >= 0:
            raise ValueError(f"boost adds weight, at least 0; got {weight} for {which!r}. Use drop")
        for dim in _dimensions(which, z.shape[1], names):
            steered[:, [dim]] = steered[:, [dim]].toarray() + weight
    return unit_csr(csr_array(steered))


def unit_csr(code: Code, *, signed: bool = False) -> csr_array:
    """Codes in any form as sparse rows of unit length in double precision; zero rows stay zero."""
    if isinstance(code, torch.Tensor):
        code = code.detach().cpu().double().numpy()
    # A copy: sorting must not change the caller's arrays.
    z = csr_array(
        code if issparse(code) else np.atleast_2d(np.asarray(code)), dtype=np.float64, copy=True
    )
    if z.ndim == 1:
        z = csr_array(z.reshape(1, -1))
    z.sum_duplicates()
    if not np.isfinite(z.data).all():
        raise ValueError("codes contain NaN or infinity")
    if not signed and z.nnz and z.data.min() < 0:
        raise ValueError(
            f"codes must be non-negative; got {z.data.min():.4g}. Parts of signed codes cancel: "
            f"train with activation='relu', and pass codes of encode, not of queries"
        )
    return normalise_rows(z)


def _dimensions(which: int | str, dims: int, names: Sequence[str] | None) -> list[int]:
    if isinstance(which, str):
        matching = [dim for dim, name in enumerate(names or ()) if name == which]
        if not matching:
            raise ValueError(f"no dimension is called {which!r}; pass a number, or names=...")
        return matching
    if not 0 <= which < dims:
        raise ValueError(f"dimension must lie in 0..{dims - 1}; got {which}")
    return [int(which)]


def _check_names(names: Sequence[str] | None, dims: int) -> None:
    if names is not None and len(names) != dims:
        raise ValueError(f"expected one name per dimension, {dims}; got {len(names)}")


def _name(names: Sequence[str] | None, dim: int) -> str:
    return names[dim] if names is not None and names[dim] else f"dimension {dim}"

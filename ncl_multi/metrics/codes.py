"""Shared by all metrics: checked codes with unit rows, dense or sparse as given."""

from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.codes.features import normalise_rows
from ncl_multi.losses.checks import at_least_float32
from ncl_multi.training.health import ACTIVE

Codes: TypeAlias = Float[Tensor, "n d"] | csr_array
Labels = Int[Tensor, " n"]

# One multiplication of scipy's sparse product costs about this many of a dense one.
_SPARSE_COST = 100
_ROWS_AT_ONCE = 4096


def unit_rows(z: Codes) -> Codes:
    """Codes with rows of length one, in at least float32; a row of zeros stays zero."""
    check_codes(z)
    if isinstance(z, Tensor):
        return F.normalize(at_least_float32(z), dim=1)
    z = csr_array(z, dtype=np.promote_types(z.dtype, np.float32), copy=True)
    z.sum_duplicates()
    return normalise_rows(z)


def check_codes(z: Codes) -> None:
    """Refuse codes that no metric can measure."""
    if z.ndim != 2 or 0 in z.shape:
        raise ValueError(f"codes must be (n, d) with at least one row; got {tuple(z.shape)}")
    values = z if isinstance(z, Tensor) else torch.from_numpy(z.data)
    if not values.isfinite().all():
        raise ValueError("codes contain NaN or infinity; look for a training run that diverged")


def check_labels(y: Labels, z: Codes) -> Tensor:
    """Labels as 0..classes-1, one per row."""
    if y.ndim != 1 or len(y) != z.shape[0]:
        raise ValueError(f"expected one label per row: {z.shape[0]} rows, got {tuple(y.shape)}")
    return y.unique(return_inverse=True)[1]


def active_counts(z: Codes, y: Tensor | None = None) -> Float[np.ndarray, "classes d"]:
    """How many rows of each class each dimension is active in; unit rows, labels from 0.

    Without labels there is one class.
    """
    n, d = z.shape
    y = torch.zeros(n, dtype=torch.long) if y is None else y
    classes = int(y.max()) + 1
    if not isinstance(z, Tensor):
        active = np.abs(z.data) > ACTIVE
        cells = y.cpu().numpy()[_row_of(z)[active]] * d + z.indices[active]
        return np.bincount(cells, minlength=classes * d).reshape(classes, d).astype(np.float64)
    counts = torch.zeros(classes, d, dtype=torch.float64, device=z.device)
    for rows in _chunks(n):
        active = (z[rows].abs() > ACTIVE).double()
        counts.index_add_(0, y[rows].to(z.device), active)
    return counts.cpu().numpy()


def rows_active(z: Codes) -> Int[np.ndarray, " n"]:
    """How many dimensions are active in each of these unit rows."""
    if isinstance(z, Tensor):
        return (z.abs() > ACTIVE).sum(1).cpu().numpy()
    return np.bincount(_row_of(z)[np.abs(z.data) > ACTIVE], minlength=z.shape[0])


def gram(z: Codes) -> Float[Tensor, "d d"]:
    """Products of all pairs of dimensions, summed in float64."""
    n, d = z.shape
    if not isinstance(z, Tensor):
        pairs = np.square(np.diff(z.indptr), dtype=np.float64).sum()
        if pairs * _SPARSE_COST < n * d**2:
            wide = z.astype(np.float64)
            return torch.from_numpy((wide.T @ wide).toarray())
    total = torch.zeros(d, d, dtype=torch.float64, device=getattr(z, "device", None))
    for rows in _chunks(n):
        chunk = dense(z[rows]).double()
        total.addmm_(chunk.T, chunk)
    return total


def strongest_rows(z: Codes, count: int = 10) -> Int[np.ndarray, "d count"]:
    """The rows that fire each dimension of these unit codes most, strongest first; -1 means none.

    To fire is to be active and positive: only the positive end of a signed dimension is read. Of
    rows with the same value the first is stronger.
    """
    if isinstance(z, Tensor):
        least = z.topk(min(count, len(z)), dim=0).values[-1].clamp(min=0)
        row, column = ((z >= least) & (z > ACTIVE)).cpu().numpy().nonzero()
        value = z[row, column].cpu().numpy()
    else:
        fires = z.data > ACTIVE
        row, column, value = _row_of(z)[fires], z.indices[fires], z.data[fires]
    order = np.lexsort((row, -value, column))
    row, column = row[order], column[order]
    rank = np.arange(len(column)) - np.searchsorted(column, column)
    strongest = np.full((z.shape[1], count), -1)
    strongest[column[rank < count], rank[rank < count]] = row[rank < count]
    return strongest


def firing_rows(z: Codes) -> Int[np.ndarray, " d"]:
    """How many rows fire each dimension of these unit codes."""
    if isinstance(z, Tensor):
        return (z > ACTIVE).sum(0).cpu().numpy()
    return np.bincount(z.indices[z.data > ACTIVE], minlength=z.shape[1])


def entries(z: Codes, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The entries at these places."""
    if isinstance(z, Tensor):
        return z[torch.from_numpy(rows), torch.from_numpy(columns)].cpu().numpy()
    return np.asarray(z[rows.ravel(), columns.ravel()]).reshape(rows.shape)


def dense(z: Codes) -> Float[Tensor, "n d"]:
    """Codes as a tensor."""
    return z if isinstance(z, Tensor) else torch.from_numpy(z.toarray())


def _row_of(z: csr_array) -> Int[np.ndarray, " stored"]:
    """The row each stored entry belongs to."""
    return np.repeat(np.arange(z.shape[0]), np.diff(z.indptr))


def _chunks(n: int) -> list[slice]:
    return [slice(i, i + _ROWS_AT_ONCE) for i in range(0, n, _ROWS_AT_ONCE)]

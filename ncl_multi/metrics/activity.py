"""Active entries of codes: how many per row, for which classes, and how dimensions overlap.

Rows are brought to unit length first; an entry is active above 1e-5 in size. Codes are a tensor
or a `scipy.sparse.csr_array`.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ncl_multi.metrics.codes import Codes, Labels, active_counts, check_labels, gram, unit_rows


def sparsity(z: Codes) -> float:
    """Share of entries that are not active.

    Example:
        >>> sparsity(torch.eye(4))
        0.75
    """
    return 1 - active_dims(z) / z.shape[1]


def active_dims(z: Codes) -> float:
    """Active dimensions of a row, on average.

    Example:
        >>> active_dims(torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
        1.0
    """
    return float(active_counts(unit_rows(z)).sum() / z.shape[0])


def alive(z: Codes) -> float:
    """Share of dimensions active for at least one row.

    Example:
        >>> alive(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
        0.5
    """
    return float((active_counts(unit_rows(z)) > 0).mean())


def class_consistency(z: Codes, y: Labels) -> float:
    """Largest class share among the rows a dimension is active for, mean over alive dimensions.

    A dense code gives the share of the largest class: the value to compare with. Codes without
    an alive dimension give 0.

    Example:
        >>> class_consistency(torch.eye(3), torch.tensor([0, 1, 1]))
        1.0
    """
    z = unit_rows(z)
    return _consistency(active_counts(z, check_labels(y, z)))


def class_entropy(z: Codes, y: Labels) -> float:
    """Entropy, in nats, of the classes a dimension is active for, mean over alive dimensions.

    0 if every dimension fires for one class only; at most the logarithm of the number of classes.

    Example:
        >>> round(class_entropy(torch.ones(4, 2), torch.tensor([0, 1, 0, 1])), 4)
        0.6931
    """
    z = unit_rows(z)
    return _entropy(active_counts(z, check_labels(y, z)))


def correlation(z: Codes) -> float:
    """Mean absolute cosine between two different alive dimensions; 0 if fewer than two live.

    Example:
        >>> correlation(torch.eye(3)), round(correlation(torch.ones(3, 2)), 6)
        (0.0, 1.0)
    """
    z = unit_rows(z)
    return _correlation(gram(z), active_counts(z).sum(axis=0) > 0)


def effective_rank(z: Codes) -> float:
    """Exponential of the entropy of the singular values' shares: how many directions are used.

    Example:
        >>> round(effective_rank(torch.eye(5)), 4), round(effective_rank(torch.ones(5, 5)), 4)
        (5.0, 1.0)
    """
    return _effective_rank(gram(unit_rows(z)))


def activity_figures(z: Codes, y: Labels | None = None) -> dict[str, float]:
    """The figures a table of a run shows; class consistency only with labels.

    Example:
        >>> activity_figures(torch.eye(4), torch.tensor([0, 0, 1, 1]))["class_consistency"]
        1.0
    """
    return _figures(z, y)[0]


def interpretability(z: Codes, y: Labels | None = None) -> dict[str, float]:
    """`activity_figures`, the entropy of classes and the effective rank, in one pass.

    Example:
        >>> figures = interpretability(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        >>> figures["class_entropy"], round(figures["effective_rank"], 4)
        (0.0, 4.0)
    """
    row, counts, products = _figures(z, y)
    if y is not None:
        row["class_entropy"] = _entropy(counts)
    return row | {"effective_rank": _effective_rank(products)}


def _figures(z: Codes, y: Labels | None) -> tuple[dict[str, float], np.ndarray, Tensor]:
    """The row of `activity_figures`, with its counts and products."""
    z = unit_rows(z)
    counts = active_counts(z, None if y is None else check_labels(y, z))
    lives, products = counts.sum(axis=0) > 0, gram(z)
    row = {
        "sparsity": float(1 - counts.sum() / z.shape[0] / z.shape[1]),
        "active_dims": float(counts.sum() / z.shape[0]),
        "alive": float(lives.mean()),
        "correlation": _correlation(products, lives),
    }
    if y is not None:
        row["class_consistency"] = _consistency(counts)
    return row, counts, products


def _shares(counts: Float[np.ndarray, "classes d"]) -> Float[np.ndarray, "classes alive"]:
    counts = counts[:, counts.sum(axis=0) > 0]
    return counts / counts.sum(axis=0)


def _consistency(counts: Float[np.ndarray, "classes d"]) -> float:
    shares = _shares(counts)
    return float(shares.max(axis=0).mean()) if shares.size else 0.0


def _entropy(counts: Float[np.ndarray, "classes d"]) -> float:
    shares = _shares(counts)
    if not shares.size:
        return 0.0
    # The logarithm of one over a share: never -0.0 for a pure dimension.
    return float((shares * np.log(1 / np.where(shares > 0, shares, 1))).sum(axis=0).mean())


def _correlation(products: Float[Tensor, "d d"], lives: np.ndarray) -> float:
    indices = torch.from_numpy(lives).nonzero()[:, 0].to(products.device)
    if len(indices) < 2:
        return 0.0
    products = products[indices][:, indices]
    length = products.diagonal().sqrt()
    cosines = (products / length / length[:, None]).abs()
    off_diagonal = cosines.sum() - cosines.diagonal().sum()
    return float(off_diagonal / (len(indices) * (len(indices) - 1)))


def _effective_rank(products: Float[Tensor, "d d"]) -> float:
    squares = torch.linalg.eigvalsh(products).clamp(min=0)
    # Below this an eigenvalue is rounding noise, whose root would count as a direction.
    squares[squares <= squares.max() * len(squares) * torch.finfo(squares.dtype).eps] = 0
    values = squares.sqrt()
    if not values.any():
        return 0.0
    shares = values / values.sum()
    return float((-torch.xlogy(shares, shares).sum()).exp())

"""Nearest rows of features: positives if none are given."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from ncl_multi.head import k_means

_BLOCK = 1024


@torch.no_grad()
def nearest(
    h: Float[Tensor, "n d"], count: int, *, most_compared: int = 20_000
) -> Int[Tensor, "n m"]:
    """Rows of each row's `count` nearest others by cosine, the nearest first.

    Exact up to `most_compared` rows. More are first split into clusters of about a tenth of that,
    and a row's neighbours are looked for in its own cluster: a few at its edge are missed, but a
    hundred thousand rows take only seconds. A cluster of one row: the row is its own neighbour.

    Example:
        >>> nearest(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), 1)[:, 0]
        tensor([1, 0, 1])
    """
    if len(h) < 2:
        raise ValueError(f"neighbours need at least two rows; got {len(h)}")
    count = min(count, len(h) - 1)
    if len(h) <= most_compared:
        return _nearest(normalize(h, dim=1), count)
    size = max(2, most_compared // 10)
    sample = normalize(h[torch.randperm(len(h))[:most_compared]], dim=1)
    centres = k_means(sample, -(-len(h) // size), steps=5)
    length = centres.square().sum(dim=1)
    cluster = torch.cat(
        [
            torch.addmm(length, normalize(rows, dim=1), centres.T, alpha=-2).argmin(dim=1)
            for rows in h.split(8 * _BLOCK)
        ]
    )
    result = torch.arange(len(h))[:, None].expand(-1, count).clone()
    order = cluster.argsort()
    for rows in order.split(torch.bincount(cluster, minlength=len(centres)).tolist()):
        if len(rows) > 1:
            near = rows[_nearest(normalize(h[rows], dim=1), min(count, len(rows) - 1))]
            # In a small cluster the nearest are repeated.
            result[rows] = near[:, torch.arange(count) % near.shape[1]]
    return result


def _nearest(unit: Tensor, count: int) -> Tensor:
    parts = []
    for start in range(0, len(unit), _BLOCK):
        cosines = unit[start : start + _BLOCK] @ unit.T
        cosines[torch.arange(len(cosines)), start + torch.arange(len(cosines))] = -2
        parts.append(cosines.topk(count, dim=1).indices)
    return torch.cat(parts)


class Neighbours:
    """The nearest others of every row of the features."""

    def __init__(self, h: Tensor, count: int):
        self.nearest = nearest(h, count)

    def of(self, rows: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
        """For each of these rows one of its nearest others, the nearer, the likelier."""
        rank = self.nearest.shape[1] ** torch.rand(len(rows))
        return self.nearest[rows, rank.long() - 1]

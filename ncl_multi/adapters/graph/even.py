"""As many entries per node as bring all codes to about one length, k of them on average.

With k entries in every row, codes of unit length show how far an entry exceeds the others of its
row: nodes in no community, where all entries are small, get entries as large as typical members.
Rows of about one length before they are normalised keep their order.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ncl_multi.head import TopK


def even_top_k(z: Float[Tensor, "n d"], k: int, energy: float) -> Float[Tensor, "n d"]:
    """Keep the largest entries of each row until their squares sum to `energy`.

    At least half of k are kept, and at most twice k.

    Example:
        >>> even_top_k(torch.tensor([[5.0, 4.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.0]]), 2, energy=25.5)
        tensor([[5., 4., 0., 0.],
                [4., 3., 2., 0.]])
    """
    largest, indices = z.topk(min(2 * k, z.shape[1]), dim=1)
    kept = torch.arange(largest.shape[1], device=z.device) < _counts(largest, k, energy)[:, None]
    return torch.zeros_like(z).scatter_(1, indices, largest * kept)


def fit_energy(z: Float[Tensor, "n d"], k: int) -> float:
    """The energy with which these rows keep k entries on average, by bisection.

    Example:
        >>> z = torch.tensor([[6.0, 4.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
        >>> energy = fit_energy(z, k=2)
        >>> (even_top_k(z, 2, energy) > 0).sum(dim=1)
        tensor([1, 3])
    """
    largest = z.topk(min(2 * k, z.shape[1]), dim=1).values
    low, high = 0.0, float(largest.square().sum(dim=1).max())
    for _ in range(50):
        middle = (low + high) / 2
        few = _counts(largest, k, middle).float().mean() <= k
        low, high = (middle, high) if few else (low, middle)
    return low


class EvenTopK(TopK):
    """`even_top_k` for `nn.Sequential`."""

    def __init__(self, k: int, energy: float):
        super().__init__(k)
        self.energy = energy

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return even_top_k(z, self.k, self.energy)


def _counts(largest: Float[Tensor, "n most"], k: int, energy: float) -> Tensor:
    """How many entries each row keeps; `largest` are its entries in descending order."""
    squares = largest.square()
    before = squares.cumsum(dim=1) - squares
    return (before < energy).sum(dim=1).clamp(min=(k + 1) // 2)

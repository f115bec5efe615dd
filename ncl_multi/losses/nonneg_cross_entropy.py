"""Non-negative cross entropy: classification on codes that can be read."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.losses.checks import at_least_float32, check_finite, free_to_read

Scalar = Float[Tensor, ""]


def nonneg_cross_entropy(
    z: Float[Tensor, "n d"],
    weight: Float[Tensor, "classes d"],
    y: Int[Tensor, " n"],
    *,
    nonneg_weight: bool = False,
) -> Scalar:
    """Cross entropy of `z @ weight.T`, the paper's NCE when `z` comes from a `NonNegHead`.

    Signed `z` makes it plain cross entropy, its twin. `nonneg_weight` also keeps the class weights
    at or above zero, so that a dimension can only support a class, never oppose one.

    Example:
        >>> z = torch.eye(2) * 10
        >>> loss = nonneg_cross_entropy(z, torch.eye(2), torch.tensor([0, 1]))
        >>> round(loss.item(), 6)
        4.5e-05
    """
    if z.ndim != 2 or weight.ndim != 2 or z.shape[1] != weight.shape[1] or y.shape != z.shape[:1]:
        raise ValueError(
            f"z must be (n, d), weight (classes, d) and y (n,); "
            f"got {tuple(z.shape)}, {tuple(weight.shape)} and {tuple(y.shape)}"
        )
    if len(z) == 0:
        raise ValueError("cross entropy needs at least one row; got none")
    if y.is_floating_point():
        raise ValueError(f"labels must be whole numbers; got {y.dtype}")
    if free_to_read(y) and not _in_range(y, len(weight)):
        raise ValueError(
            f"labels must lie in 0..{len(weight) - 1}, one per row of weight; "
            f"got {y.min().item()}..{y.max().item()}"
        )
    with torch.autocast(z.device.type, enabled=False):
        z, weight = at_least_float32(z), at_least_float32(weight)
        logits = z @ (weight.relu() if nonneg_weight else weight).T
        loss = F.cross_entropy(logits, y.long())
    return check_finite(loss)


class NonNegCrossEntropy(nn.Module):
    """`nonneg_cross_entropy` with its class weights."""

    def __init__(self, in_dim: int, classes: int, *, nonneg_weight: bool = False):
        super().__init__()
        # Positive at the start where they must be non-negative: a negative weight has no gradient.
        start = torch.rand(classes, in_dim) if nonneg_weight else torch.randn(classes, in_dim)
        self.weight = nn.Parameter(start / in_dim**0.5)
        self.nonneg_weight = nonneg_weight

    def forward(self, z: Float[Tensor, "n d"], y: Int[Tensor, " n"]) -> Scalar:
        return nonneg_cross_entropy(z, self.weight, y, nonneg_weight=self.nonneg_weight)


def _in_range(y: Tensor, classes: int) -> bool:
    return bool(((y >= 0) & (y < classes)).all())

"""What one pair of views can teach another: which rows are near, and how near."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.losses.checks import at_least_float32

Scalar = Float[Tensor, ""]


def imitation(
    pupil: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    temperature: float | Scalar,
    *,
    most: int = 2048,
) -> Scalar:
    """How far one pair of views is from another in what its rows take for their partners.

    The Kullback-Leibler divergence of the softmax of cosines, the mean over rows, of both ways
    round. The two sides may differ in length. No gradient goes to the teacher. Keeps all logits of
    the first `most` rows, which are enough to learn from in a larger batch.
    """
    with torch.no_grad():
        wanted = _logits(*teacher, temperature, most)
    given = _logits(*pupil, temperature, most)
    both = (
        F.kl_div(
            given.log_softmax(side), wanted.log_softmax(side), log_target=True, reduction="sum"
        )
        / given.shape[1 - side]
        for side in (0, 1)
    )
    return sum(both, given.new_zeros(())) / 2


def _logits(za: Tensor, zb: Tensor, temperature: float | Scalar, most: int) -> Float[Tensor, "n m"]:
    """Cosines over temperature. The product is divided, not the rows, which are much larger."""
    with torch.autocast(za.device.type, enabled=False):
        za, zb = (at_least_float32(z[:most]) for z in (za, zb))
        lengths = (torch.linalg.vector_norm(z, dim=1).clamp_min(1e-12) for z in (za, zb))
        return za @ zb.T / torch.outer(*lengths) / temperature

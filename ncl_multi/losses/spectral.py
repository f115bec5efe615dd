"""The spectral contrastive loss: a factorisation of co-occurrence, in time linear in the batch."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ncl_multi.losses.checks import at_least_float32, check_finite, check_views

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]


def spectral(za: Batch, zb: Batch) -> Scalar:
    """-2 E f(x)'f(x+) + E (f(x)'f(x-))^2, unbiased: a negative is any row but one's partner.

    Rows are not normalised: their length carries P(x), and with non-negative codes the optimum is
    f(x)_j = P(class j | x) / sqrt(P(class j)) up to a permutation (NCL, theorem 5). The squares
    over all n^2 pairs are one product of two d x d matrices, so no n x n matrix is made at all.

    Example:
        >>> za = torch.eye(3) * 3**0.5
        >>> spectral(za, za).item()  # one-hot classes, the optimum: -(number of classes) * 2
        -6.0
    """
    check_views(za, zb)
    with torch.autocast(za.device.type, enabled=False):
        loss = _Spectral.apply(at_least_float32(za), at_least_float32(zb))
    return check_finite(loss)


class Spectral(nn.Module):
    """`spectral` for trainers that want a module."""

    def forward(self, za: Batch, zb: Batch) -> Scalar:
        return spectral(za, zb)


class _Spectral(torch.autograd.Function):
    """sum_ij (a_i'b_j)^2 is sum((a'a) * (b'b)); autograd would take twice the products for a'a."""

    @staticmethod
    def forward(ctx, a, b):
        gram_a, gram_b = a.T @ a, b.T @ b
        matches = (a * b).sum(dim=1)
        ctx.save_for_backward(a, b, gram_a, gram_b, matches)
        negatives = (gram_a * gram_b).sum() - matches.square().sum()
        return negatives / (len(a) * (len(a) - 1)) - 2 * matches.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, gram_a, gram_b, matches = ctx.saved_tensors
        n = len(a)
        with torch.autocast(a.device.type, enabled=False):
            unit = 2 * grad / (n * (n - 1))
            # A partner's pull, less its share of the squares, which the Gram matrices counted in.
            pull = (unit * (1 - n - matches))[:, None]
            return (b * pull).addmm_(a, gram_b * unit), (a * pull).addmm_(b, gram_a * unit)

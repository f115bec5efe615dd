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
        a, b = at_least_float32(za), at_least_float32(zb)
        n = len(a)
        matches = (a * b).sum(dim=1)
        negatives = _SquaredProducts.apply(a, b) - matches.square().sum()
        loss = -2 * matches.mean() + negatives / (n * (n - 1))
    return check_finite(loss)


class Spectral(nn.Module):
    """`spectral` for trainers that want a module."""

    def forward(self, za: Batch, zb: Batch) -> Scalar:
        return spectral(za, zb)


class _SquaredProducts(torch.autograd.Function):
    """sum_ij (a_i'b_j)^2 as sum((a'a) * (b'b)); autograd would take twice the products for a'a."""

    @staticmethod
    def forward(ctx, a, b):
        gram_a, gram_b = a.T @ a, b.T @ b
        ctx.save_for_backward(a, b, gram_a, gram_b)
        return (gram_a * gram_b).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, gram_a, gram_b = ctx.saved_tensors
        with torch.autocast(a.device.type, enabled=False):
            return a @ gram_b.mul(2 * grad), b @ gram_a.mul(2 * grad)

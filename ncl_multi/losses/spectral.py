"""The spectral contrastive loss: a factorisation of co-occurrence, in time linear in the batch."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ncl_multi.distributed import all_reduce_sum, world_size
from ncl_multi.losses.checks import check_finite, check_together, check_views, sum_dtype

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]


def spectral(za: Batch, zb: Batch, *, distributed: bool = False) -> Scalar:
    """-2 E f(x)'f(x+) + E (f(x)'f(x-))^2, unbiased: a negative is any row but the partner.

    Rows are not normalised: their length carries P(x), and with non-negative codes the optimum is
    f(x)_j = P(class j | x) / sqrt(P(class j)) up to a permutation (NCL, theorem 5). The squares
    over all n^2 pairs are one product of two d x d matrices, so no n x n matrix is made, unless it
    is the smaller one.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the whole batch, the same on every process, and after DDP's mean so is the
    gradient. Only the two d x d matrices are exchanged.

    Example:
        >>> za = torch.eye(3) * 3**0.5
        >>> spectral(za, za).item()  # one-hot classes, the optimum: -(number of classes) * 2
        -6.0
    """
    split = distributed and world_size() > 1
    if split:
        rows = sum(check_together(partial(check_views, za, zb, 1), za, zb))
    else:
        check_views(za, zb)
        rows = len(za)
    dtype = sum_dtype(za, zb)
    with torch.autocast(za.device.type, enabled=False):
        za, zb = za.to(dtype), zb.to(dtype)
        if rows < za.shape[1] and not split:
            loss = _of_all_pairs(za, zb)
        else:
            loss = _Spectral.apply(za, zb, rows, split)
    return check_finite(loss)


class Spectral(nn.Module):
    """`spectral` for trainers that want a module."""

    def __init__(self, *, distributed: bool = False):
        super().__init__()
        self.distributed = distributed

    def forward(self, za: Batch, zb: Batch) -> Scalar:
        return spectral(za, zb, distributed=self.distributed)


def _of_all_pairs(a: Batch, b: Batch) -> Scalar:
    """The same where rows are fewer than dimensions: n x n is then the smaller matrix."""
    products = a @ b.T
    n, matches = len(products), products.diagonal()
    negatives = products - matches.diag_embed()
    return negatives.square().sum() / (n * (n - 1)) - 2 * matches.mean()


class _Spectral(torch.autograd.Function):
    """sum_ij (a_i'b_j)^2 is sum((a'a) * (b'b)); autograd would take twice the products for a'a."""

    @staticmethod
    def forward(ctx, a, b, n, split):
        grams = torch.stack([a.T @ a, b.T @ b])
        matches = (a * b).sum(dim=1)
        sums = torch.stack([matches.sum(), matches.square().sum()])
        if split:
            grams, sums = all_reduce_sum(grams), all_reduce_sum(sums)
        ctx.save_for_backward(a, b, grams, matches)
        ctx.n, ctx.split = n, split
        return ((grams[0] * grams[1]).sum() - sums[1]) / (n * (n - 1)) - 2 * sums[0] / n

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, grams, matches = ctx.saved_tensors
        n = ctx.n
        with torch.autocast(a.device.type, enabled=False):
            # The loss is the same value on every process: sum the gradients of all of them.
            unit = 2 * (all_reduce_sum(grad) if ctx.split else grad) / (n * (n - 1))
            # The gradient of the match, without its square, which the Gram matrices include.
            pull = (unit * (1 - n - matches))[:, None]
            grad_a = (b * pull).addmm_(a, grams[1] * unit)
            return grad_a, (a * pull).addmm_(b, grams[0] * unit), None, None

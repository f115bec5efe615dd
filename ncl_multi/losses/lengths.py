"""Lengths of rows for cosine losses, with gradients that stay bounded for empty rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ncl_multi.distributed import exchange_counts, gather, world_size
from ncl_multi.losses.checks import sum_dtype

# The cosine does not depend on a row's length, so its gradient is proportional to one over it.
# Below this share of the median length, a row is nearly empty, and its direction mostly chance.
_NEARLY_EMPTY = 0.01
# Only against division by zero.
_TINY = 1e-12


def with_lengths(
    z: Tensor, dtype: torch.dtype, counts: Sequence[int] | None = None
) -> list[Tensor]:
    """Rows in `dtype`, and their lengths, which are never zero.

    In the backward pass, rows shorter than a hundredth of the median length (without rows of zeros)
    count as that long. Values, and gradients of the other rows, do not change. `counts`: the
    rows of each process, where the batch is split over processes.
    """
    _, share = lengths_and_shares(z, dtype, counts)
    rows = damped(z.to(dtype), share[:, None])
    return [rows, torch.linalg.vector_norm(rows, dim=1).clamp_min(_TINY)]


@torch.no_grad()
def lengths_and_shares(
    z: Tensor, dtype: torch.dtype, counts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Lengths of rows, never zero, and the shares of their gradients that `with_lengths` keeps."""
    # The median ignores single unusual rows, and scales with the rows. If all rows are tiny, a
    # fixed bound is used, so that the gradient fits fp16.
    least = max(1e-6, 256 * torch.finfo(z.dtype).tiny)
    lengths = torch.linalg.vector_norm(z, dim=1, dtype=dtype)
    everyone = lengths if counts is None else gather(lengths, counts)
    usual = everyone.where(everyone > 0, float("nan")).nanmedian()
    bound = (_NEARLY_EMPTY * usual).nan_to_num(1.0).clamp_min(least)
    lengths = lengths.clamp_min(_TINY)
    return lengths, lengths / lengths.maximum(bound)


def normalize_rows(z: Tensor, *, distributed: bool = False) -> Tensor:
    """Rows of length 1, in at least float32, with bounded gradients of empty rows.

    `F.normalize` gives an empty row a gradient of 1e12. With `distributed=True` all processes call
    this together, each with its own rows, and the median is that of all rows.

    Example:
        >>> normalize_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    split = distributed and world_size() > 1
    counts = exchange_counts(None, len(z), z.device) if split else None
    with torch.autocast(z.device.type, enabled=False):
        rows, lengths = with_lengths(z, sum_dtype(z), counts)
        return rows / lengths[:, None]


def cosines(za: Tensor, zb: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """The cosine of each row of one view and the same row of the other, 0 for an empty row."""
    with torch.autocast(za.device.type, enabled=False):
        dtype = sum_dtype(za, zb)
        (za, lengths_a), (zb, lengths_b) = (with_lengths(z, dtype, counts) for z in (za, zb))
        return (za * zb).sum(dim=1) / (lengths_a * lengths_b)


def damped(x: Tensor, share: Tensor) -> Tensor:
    """The same values; their gradients times a share."""
    return _Damped.apply(x, share)


class _Damped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, share):
        ctx.save_for_backward(share)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, grad):
        (share,) = ctx.saved_tensors
        return grad * share, None

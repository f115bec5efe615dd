"""InfoNCE on cosine similarity, exact, without ever keeping an n x n matrix.

Row i of `za` and row i of `zb` are a positive pair; every other row is a negative.
Nothing here knows about models, processes or non-negativity: pass codes from a
`NonNegHead` and InfoNCE becomes NCL, pass signed features and it is the baseline.
"""

from collections.abc import Iterator
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ncl_multi.losses.checks import at_least_float32, check_finite, check_views, free_to_read

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]
Groups = Int[Tensor, " n"]
_T = TypeVar("_T")

# A tile of logits should stay in a core's cache while it is exponentiated: 512 x 512 floats on a
# CPU. A GPU wants larger products and has the memory for them. Up to 256 rows, keeping the logits
# is faster than making them twice.
_CPU_TILE, _GPU_TILE, _DENSE = 512, 4096, 256

# exp of a logit up to 60 in size can be summed over any batch, and divided by, in float32. No
# cosine is above 1, so that is any temperature from 1/60: one exponential then serves both sides.
_SAFE_LOGIT = 60.0


def info_nce(
    za: Batch,
    zb: Batch,
    *,
    temperature: float | Scalar = 0.2,
    within_view: bool = False,
    groups: Groups | None = None,
    tile: int | None = None,
) -> Scalar:
    """Symmetric InfoNCE: pick out one's partner among rivals.

    `within_view=False` is CLIP (rivals come from the other view); `within_view=True` is
    SimCLR and GRACE (rivals also come from one's own view, oneself excepted).
    Rows of equal `groups` are never each other's rivals, so two captions of one image, or
    two images of one class, are not pushed apart. A row of zeros, which ReLU can produce,
    has similarity 0 to everything.

    Sums are taken in at least float32, whatever the inputs and autocast say. Logits are made
    `tile` x `tile` at a time and made again in the backward; the result does not depend on it.
    A small batch is done in one piece, by plain differentiable operations.

    Example:
        >>> za, zb = torch.eye(4), torch.eye(4)
        >>> round(info_nce(za, zb, temperature=0.5).item(), 4)
        0.3408
    """
    check_views(za, zb)
    known = not isinstance(temperature, Tensor) or free_to_read(temperature)
    if known and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0; got {float(temperature)}. Usual values are 0.01 to 1"
        )
    if groups is not None and groups.shape != za.shape[:1]:
        raise ValueError(
            f"groups must have one entry a row, shape ({len(za)},); got {tuple(groups.shape)}"
        )
    if tile is not None and tile < 1:
        raise ValueError(
            f"tile must be at least 1; got {tile}. Leave it out to let the size decide"
        )
    dense = tile is None and len(za) <= _DENSE
    tile = tile or (_CPU_TILE if za.device.type == "cpu" else _GPU_TILE)
    with torch.autocast(za.device.type, enabled=False):
        a, b = (_scaled(at_least_float32(z), temperature) for z in (za, zb))
        if dense:
            loss = _dense(a, b, within_view, groups)
        else:
            small = known and bool(temperature * _SAFE_LOGIT >= 1)
            loss = _Tiled.apply(a, b, within_view, groups, tile, small)
    return check_finite(loss)


class InfoNCE(nn.Module):
    """`info_nce` with its temperature, fixed or learnt.

    A learnt temperature is kept above `min_temperature`: CLIP's cap on the logit scale, 1/100,
    is the default; a higher floor (1/40) gives sparser codes.
    """

    def __init__(
        self,
        temperature: float = 0.2,
        *,
        learnable: bool = False,
        min_temperature: float = 0.01,
        within_view: bool = False,
    ):
        super().__init__()
        if not 0 < min_temperature <= temperature:
            raise ValueError(
                f"temperature must be at least min_temperature, and both above 0; "
                f"got {temperature} and {min_temperature}"
            )
        self.log_temperature = nn.Parameter(
            torch.tensor(float(temperature)).log(), requires_grad=learnable
        )
        self.min_temperature = min_temperature
        self.within_view = within_view

    @property
    def temperature(self) -> Scalar:
        """The temperature in force."""
        return self.log_temperature.exp().clamp(min=self.min_temperature)

    def forward(self, za: Batch, zb: Batch, groups: Groups | None = None) -> Scalar:
        return info_nce(
            za, zb, temperature=self.temperature, within_view=self.within_view, groups=groups
        )


def _scaled(z: Batch, temperature: float | Scalar) -> Batch:
    """Rows such that the product of two is their logit.

    Half of the temperature goes into each, so autograd gives a learnable one its exact gradient.
    Scaled once, not by the length and then by the temperature, which would keep one more copy of
    the batch for the backward; and multiplied, as the backward of a division makes two more.
    """
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-12)
    return z * (length * temperature**0.5).reciprocal()


def _dense(a: Batch, b: Batch, within_view: bool, groups: Groups | None) -> Scalar:
    """All logits at once."""
    everyone = slice(0, len(a))
    across = _logits(a, b, everyone, everyone, groups, own=False)
    rows, cols = across, across.T
    if within_view:
        rows = torch.cat([rows, _logits(a, a, everyone, everyone, groups, own=True)], dim=1)
        cols = torch.cat([cols, _logits(b, b, everyone, everyone, groups, own=True)], dim=1)
    match = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(rows, match) + F.cross_entropy(cols, match)) / 2


class _Tiled(torch.autograd.Function):
    """The same loss, a tile of logits at a time, twice: for the normalisers, for the gradient."""

    @staticmethod
    def forward(ctx, a, b, within_view, groups, tile, small):
        lse_a = a.new_full((len(a),), float("-inf"))
        lse_b = lse_a.clone()
        for x, y, lse_x, lse_y in _sides(a, b, lse_a, lse_b, within_view):
            own = x is y
            for rows, cols, room in _tiles(x, tile, upper=own):
                logits = _logits(x, y, rows, cols, groups, own=own, out=room)
                by_row, by_col = _both_logsumexps(logits, small)
                lse_x[rows] = lse_x[rows].logaddexp(by_row)
                if not own or rows != cols:
                    lse_y[cols] = lse_y[cols].logaddexp(by_col)
        ctx.save_for_backward(a, b, lse_a, lse_b, groups)
        ctx.within_view, ctx.tile, ctx.small = within_view, tile, small
        return (lse_a.mean() + lse_b.mean()) / 2 - (a * b).sum(dim=1).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, lse_a, lse_b, groups = ctx.saved_tensors
        with torch.autocast(a.device.type, enabled=False):
            # The positives' pull, in units of grad / 2n like everything below.
            grad_a, grad_b = -2 * b, -2 * a
            for x, y, (lse_x, grad_x), (lse_y, grad_y) in _sides(
                a, b, (lse_a, grad_a), (lse_b, grad_b), ctx.within_view
            ):
                own = x is y
                for rows, cols, room in _tiles(x, ctx.tile, upper=own):
                    logits = _logits(x, y, rows, cols, groups, own=own, out=room)
                    push = _both_softmaxes(logits, lse_x[rows], lse_y[cols], ctx.small)
                    grad_x[rows].addmm_(push, y[cols])
                    if not own or rows != cols:
                        grad_y[cols].addmm_(push.T, x[rows])
            unit = grad / (2 * len(a))
        return grad_a.mul_(unit), grad_b.mul_(unit), None, None, None, None


def _sides(
    a: Batch, b: Batch, of_a: _T, of_b: _T, within_view: bool
) -> list[tuple[Batch, Batch, _T, _T]]:
    """Which rows meet which, each with what belongs to it: the other view's, then one's own's."""
    across = [(a, b, of_a, of_b)]
    return [*across, (a, a, of_a, of_a), (b, b, of_b, of_b)] if within_view else across


def _tiles(z: Batch, tile: int, *, upper: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of an n x n matrix, of a symmetric one those on and above the diagonal, with room.

    The room is the same memory for every block: fresh pages cost as much as an exponential.
    """
    n = len(z)
    room = z.new_empty(min(tile, n) ** 2)
    for i in range(0, n, tile):
        for j in range(i if upper else 0, n, tile):
            rows, cols = slice(i, min(i + tile, n)), slice(j, min(j + tile, n))
            shape = rows.stop - i, cols.stop - j
            yield rows, cols, room[: shape[0] * shape[1]].view(shape)


def _logits(
    a: Tensor,
    b: Tensor,
    rows: slice,
    cols: slice,
    groups: Groups | None,
    *,
    own: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Similarities of `a[rows]` to `b[cols]`, with those ruled out that are not rivals."""
    logits = torch.mm(a[rows], b[cols].T, out=out)
    on_diagonal = rows == cols
    if groups is None and not (own and on_diagonal):
        return logits
    if groups is None:
        ruled_out = torch.zeros_like(logits, dtype=torch.bool)
    else:
        ruled_out = groups[rows, None] == groups[None, cols]
    if on_diagonal:
        # One is not a rival of oneself, but one's partner is always in the running.
        diagonal = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        ruled_out = ruled_out | diagonal if own else ruled_out & ~diagonal
    return logits.masked_fill(ruled_out, float("-inf"))


def _both_logsumexps(logits: Tensor, small: bool) -> tuple[Tensor, Tensor]:
    """Over each row and over each column; `logits` may be overwritten."""
    if not small:
        return logits.logsumexp(dim=1), logits.logsumexp(dim=0)
    powers = logits.exp_()
    return powers.sum(dim=1).log_(), powers.sum(dim=0).log_()


def _both_softmaxes(logits: Tensor, lse_rows: Tensor, lse_cols: Tensor, small: bool) -> Tensor:
    """Each row's softmax plus each column's, from normalisers over more than this tile."""
    if small:
        return logits.exp_().mul_((-lse_rows).exp_()[:, None] + (-lse_cols).exp_())
    by_row = (logits - lse_rows[:, None]).exp_()
    return by_row.add_((logits - lse_cols).exp_())

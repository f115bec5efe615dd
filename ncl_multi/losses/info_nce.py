"""InfoNCE on cosine similarity, exact, without ever keeping an n x n matrix.

Row i of `za` and row i of `zb` are a positive pair; every other row is a negative.
Nothing here knows about models, processes or non-negativity: pass codes from a
`NonNegHead` and InfoNCE becomes NCL, pass signed features and it is the baseline.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ncl_multi.losses.checks import at_least_float32, check_finite, check_views, free_to_read

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]
Groups = Int[Tensor, " n"]

# A tile of logits should stay in the cache while it is exponentiated: 1024 x 1024 floats on a CPU.
# A GPU wants larger products and has the memory for them. Up to 256 rows, keeping the logits is
# faster than making them twice.
_CPU_TILE, _GPU_TILE, _DENSE = 1024, 4096, 256


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
        # Every logit is a product of two rows, so half of the temperature goes into each:
        # autograd then gives a learnable temperature its exact gradient.
        root = temperature**0.5
        a, b = (F.normalize(at_least_float32(z), dim=1) / root for z in (za, zb))
        if dense:
            loss = _dense(a, b, within_view, groups)
        else:
            loss = _Tiled.apply(a, b, within_view, groups, tile)
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
    def forward(ctx, a, b, within_view, groups, tile):
        lse_a = a.new_full((len(a),), float("-inf"))
        lse_b = lse_a.clone()
        for rows, cols in _tiles(len(a), tile):
            logits = _logits(a, b, rows, cols, groups, own=False)
            _add_logsumexp(lse_a, rows, logits, dim=1)
            _add_logsumexp(lse_b, cols, logits, dim=0)
        for z, lse in ((a, lse_a), (b, lse_b)) if within_view else ():
            for rows, cols in _tiles(len(z), tile, upper=True):
                logits = _logits(z, z, rows, cols, groups, own=True)
                _add_logsumexp(lse, rows, logits, dim=1)
                if rows != cols:
                    _add_logsumexp(lse, cols, logits, dim=0)
        ctx.save_for_backward(a, b, lse_a, lse_b, groups)
        ctx.within_view, ctx.tile = within_view, tile
        return (lse_a.mean() + lse_b.mean()) / 2 - (a * b).sum(dim=1).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, lse_a, lse_b, groups = ctx.saved_tensors
        with torch.autocast(a.device.type, enabled=False):
            # The positives' pull, in units of grad / 2n like everything below.
            grad_a, grad_b = -2 * b, -2 * a
            for rows, cols in _tiles(len(a), ctx.tile):
                logits = _logits(a, b, rows, cols, groups, own=False)
                push = _both_softmaxes(logits, lse_a[rows], lse_b[cols])
                grad_a[rows].addmm_(push, b[cols])
                grad_b[cols].addmm_(push.T, a[rows])
            own = ((a, lse_a, grad_a), (b, lse_b, grad_b)) if ctx.within_view else ()
            for z, lse, grad_z in own:
                for rows, cols in _tiles(len(z), ctx.tile, upper=True):
                    logits = _logits(z, z, rows, cols, groups, own=True)
                    push = _both_softmaxes(logits, lse[rows], lse[cols])
                    grad_z[rows].addmm_(push, z[cols])
                    if rows != cols:
                        grad_z[cols].addmm_(push.T, z[rows])
            unit = grad / (2 * len(a))
        return grad_a.mul_(unit), grad_b.mul_(unit), None, None, None


def _tiles(n: int, tile: int, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Blocks of an n x n matrix; of a symmetric one, those on and above the diagonal."""
    starts = range(0, n, tile)
    for i in starts:
        for j in starts:
            if j >= i or not upper:
                yield slice(i, min(i + tile, n)), slice(j, min(j + tile, n))


def _logits(
    a: Tensor, b: Tensor, rows: slice, cols: slice, groups: Groups | None, *, own: bool
) -> Tensor:
    """Similarities of `a[rows]` to `b[cols]`, with those ruled out that are not rivals."""
    logits = a[rows] @ b[cols].T
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


def _add_logsumexp(lse: Tensor, index: slice, logits: Tensor, dim: int) -> None:
    """Take more terms into a running logsumexp."""
    lse[index] = torch.logaddexp(lse[index], logits.logsumexp(dim))


def _both_softmaxes(logits: Tensor, lse_rows: Tensor, lse_cols: Tensor) -> Tensor:
    """Each row's softmax plus each column's, from normalisers over more than this tile."""
    by_row = (logits - lse_rows[:, None]).exp_()
    return by_row.add_((logits - lse_cols).exp_())

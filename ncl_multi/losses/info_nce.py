"""InfoNCE on cosine similarity, exact, without ever keeping an n x n matrix.

Row i of `za` and row i of `zb` are a positive pair; every other row is a negative.
Nothing here knows about models or non-negativity: pass codes from a
`NonNegHead` and InfoNCE becomes NCL, pass signed features and it is the baseline.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ncl_multi.distributed import (
    Exchange,
    GatherExchange,
    RingExchange,
    Views,
    all_reduce_logsumexp,
    all_reduce_sum,
    gather,
    world_size,
)
from ncl_multi.losses.checks import (
    check_finite,
    check_together,
    check_views,
    free_to_read,
    sum_dtype,
)
from ncl_multi.losses.lengths import with_lengths

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]
Groups = Int[Tensor, " n"]
ExchangeName = Literal["gather", "ring"]
_EXCHANGES: dict[str, type[Exchange]] = {"gather": GatherExchange, "ring": RingExchange}

# A tile of logits should stay in a core's cache while it is exponentiated: 512 x 512 floats on a
# CPU. A GPU wants larger products and has the memory for them. Up to 256 rows, keeping the logits
# is faster than making them twice; up to 512 where making them takes longer, as rows are wide.
_CPU_TILE, _GPU_TILE, _DENSE, _DENSE_IF_WIDE = 512, 4096, 256, 512

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
    distributed: bool = False,
    exchange: ExchangeName = "gather",
    tile: int | None = None,
) -> Scalar:
    """Symmetric InfoNCE: pick out a row's partner among its rivals.

    `within_view=False` is CLIP (rivals come from the other view); `within_view=True` is
    SimCLR and GRACE (rivals also come from the same view, except the row itself).
    Rows of equal `groups` are never each other's rivals, so two captions of one image, or
    two images of one class, are not pushed apart. A row of zeros, which ReLU can produce,
    has similarity 0 to everything.

    Sums are taken in at least float32, whatever the inputs and autocast say. Logits are made
    `tile` x `tile` at a time and made again in the backward; the result does not depend on it.
    A small batch is done in one piece, by plain differentiable operations.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the whole batch, the same on every process, and after DDP's mean so is the
    gradient; each process computes its share. `exchange="ring"` sends blocks of rows round instead
    of gathering all of them: slower, for batches whose gathered rows do not fit.

    Example:
        >>> za, zb = torch.eye(4), torch.eye(4)
        >>> round(info_nce(za, zb, temperature=0.5).item(), 4)
        0.3408
    """
    split = distributed and world_size() > 1
    check = partial(_check, za, zb, temperature, groups, exchange, tile, 1 if split else 2)
    if split:
        counts = check_together(
            check, za, zb, temperature=temperature, within_view=within_view,
            groups=groups is not None, exchange=exchange,
        )  # fmt: skip
    else:
        check()
        counts = [len(za)]
    known = not isinstance(temperature, Tensor) or free_to_read(temperature)
    small = known and bool(temperature * _SAFE_LOGIT >= 1)
    few = _DENSE_IF_WIDE if len(za) <= za.shape[1] else _DENSE
    dense = tile is None and not split and len(za) <= few
    tile = tile or (_CPU_TILE if za.device.type == "cpu" else _GPU_TILE)
    with torch.autocast(za.device.type, enabled=False):
        dtype = sum_dtype(za, zb)
        a, b = (_scaled(z, temperature, dtype, counts if split else None) for z in (za, zb))
        if dense:
            loss = _dense(a, b, within_view, groups)
        else:
            meet = _EXCHANGES[exchange](counts) if split else Exchange(counts)
            if split and groups is not None:
                groups = gather(groups, counts)
            loss = _Tiled.apply(a, b, within_view, groups, tile, small, meet)
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
        distributed: bool = False,
        exchange: ExchangeName = "gather",
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
        self.distributed, self.exchange = distributed, exchange

    @property
    def temperature(self) -> Scalar:
        """The temperature in force."""
        return self.log_temperature.exp().clamp(min=self.min_temperature)

    def forward(self, za: Batch, zb: Batch, groups: Groups | None = None) -> Scalar:
        return info_nce(
            za, zb, temperature=self.temperature, within_view=self.within_view, groups=groups,
            distributed=self.distributed, exchange=self.exchange,
        )  # fmt: skip


def _scaled(
    z: Batch, temperature: float | Scalar, dtype: torch.dtype, counts: list[int] | None
) -> Batch:
    """Rows such that the product of two is their logit.

    Half of the temperature goes into each, so autograd gives a learnable one its exact gradient.
    Scaled once, not by the length and then by the temperature, which would keep one more copy of
    the batch for the backward; and multiplied, as the backward of a division makes two more.
    """
    rows, lengths = with_lengths(z, dtype, counts)
    return rows * (lengths * temperature**0.5).reciprocal()[:, None]


def _check(
    za: Tensor,
    zb: Tensor,
    temperature: float | Scalar,
    groups: Tensor | None,
    exchange: str,
    tile: int | None,
    least_rows: int,
) -> None:
    check_views(za, zb, least_rows)
    known = not isinstance(temperature, Tensor) or free_to_read(temperature)
    if known and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0; got {float(temperature)}. Usual values are 0.01 to 1"
        )
    if groups is not None and groups.shape != za.shape[:1]:
        raise ValueError(
            f"groups must have one entry per row, shape ({len(za)},); got {tuple(groups.shape)}"
        )
    if tile is not None and tile < 1:
        raise ValueError(
            f"tile must be at least 1; got {tile}. Leave it out to let the size decide"
        )
    if exchange not in _EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(_EXCHANGES)}; got {exchange!r}")


def _dense(a: Batch, b: Batch, within_view: bool, groups: Groups | None) -> Scalar:
    """All logits at once."""
    across = _rule_out(a @ b.T, groups, groups, diagonal=True, own=False)
    rows, cols = across, across.T
    if within_view:
        same = (_rule_out(z @ z.T, groups, groups, diagonal=True, own=True) for z in (a, b))
        rows, cols = (torch.cat(pair, dim=1) for pair in zip((rows, cols), same, strict=True))
    match = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(rows, match) + F.cross_entropy(cols, match)) / 2


class _Tiled(torch.autograd.Function):
    """The same loss, a tile of logits at a time, twice: for the normalisers, for the gradient.

    Rows of this process meet the blocks that the exchange brings, its own rows among them. With
    one process that is the only block. Views are counted from the end, -2 and -1: without
    `within_view`, only the second one travels.
    """

    @staticmethod
    def forward(ctx, a, b, within_view, groups, tile, small, exchange):
        own = a, b
        lse = a.new_full((2, exchange.rows), float("-inf"))
        for owner, theirs in exchange.blocks(own if within_view else own[1:]):
            for x, y, rows, cols, logits in _tiles(
                own, theirs, groups, exchange, owner, tile, within_view
            ):
                by_row, by_col = _both_logsumexps(logits, small)
                lse_rows, lse_cols = (
                    lse[x, exchange.span(exchange.rank)],
                    lse[y, exchange.span(owner)],
                )
                lse_rows[rows] = lse_rows[rows].logaddexp(by_row)
                if x != y or owner != exchange.rank or rows != cols:
                    lse_cols[cols] = lse_cols[cols].logaddexp(by_col)
        matches = (a * b).sum()
        if len(exchange.counts) > 1:
            lse, matches = all_reduce_logsumexp(lse), all_reduce_sum(matches)
        ctx.save_for_backward(a, b, lse, groups)
        ctx.options = within_view, tile, small, exchange
        return (lse.sum() / 2 - matches) / exchange.rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, lse, groups = ctx.saved_tensors
        within_view, tile, small, exchange = ctx.options
        with torch.autocast(a.device.type, enabled=False):
            own = a, b
            # The positives' pull, in units of grad / 2n like everything below.
            grads = -2 * b, -2 * a
            travelling = slice(0 if within_view else 1, 2)
            for owner, theirs, their_grads in exchange.blocks_with_gradients(
                own[travelling], grads[travelling]
            ):
                for x, y, rows, cols, logits in _tiles(
                    own, theirs, groups, exchange, owner, tile, within_view
                ):
                    lse_rows = lse[x, exchange.span(exchange.rank)][rows]
                    lse_cols = lse[y, exchange.span(owner)][cols]
                    push = _both_softmaxes(logits, lse_rows, lse_cols, small)
                    grads[x][rows].addmm_(push, theirs[y][cols])
                    if x != y or owner != exchange.rank or rows != cols:
                        their_grads[y][cols].addmm_(push.T, own[x][rows])
            if len(exchange.counts) > 1:
                # Every process's value is this loss: the sum of what is made of it on all of them.
                grad = all_reduce_sum(grad)
            unit = grad / (2 * exchange.rows)
        return *(g.mul_(unit) for g in grads), None, None, None, None, None


def _tiles(
    own: Views,
    theirs: Views,
    groups: Groups | None,
    exchange: Exchange,
    owner: int,
    tile: int,
    within_view: bool,
) -> Iterator[tuple[int, int, slice, slice, Tensor]]:
    """Logits of own rows against an owner's, tile by tile: which views, which rows, the logits.

    They may be overwritten. All tiles are made in the same memory: fresh pages cost as much as an
    exponential.
    """
    n, m = len(own[-1]), len(theirs[-1])
    home = owner == exchange.rank
    of_rows, of_cols = (
        None if groups is None else groups[exchange.span(process)]
        for process in (exchange.rank, owner)
    )
    everyone = slice(0, n), slice(0, m)
    meetings = [(-2, -1, *everyone)]
    if within_view:
        part = _symmetric_share(exchange.rank, owner, len(exchange.counts), n, m)
        meetings += [(view, view, *part) for view in (-2, -1)]
    room = own[-1].new_empty(min(tile, n) * min(tile, m))
    for x, y, all_rows, all_cols in meetings:
        upper = home and x == y
        for i in range(all_rows.start, all_rows.stop, tile):
            for j in range(i if upper else all_cols.start, all_cols.stop, tile):
                rows = slice(i, min(i + tile, all_rows.stop))
                cols = slice(j, min(j + tile, all_cols.stop))
                shape = rows.stop - i, cols.stop - j
                out = room[: shape[0] * shape[1]].view(shape)
                logits = torch.mm(own[x][rows], theirs[y][cols].T, out=out)
                yield (
                    x,
                    y,
                    rows,
                    cols,
                    _rule_out(
                        logits,
                        None if of_rows is None else of_rows[rows],
                        None if of_cols is None else of_cols[cols],
                        diagonal=home and rows == cols,
                        own=x == y,
                    ),
                )


def _symmetric_share(rank: int, owner: int, world: int, n: int, m: int) -> tuple[slice, slice]:
    """Which part of a view's products with itself, own rows by an owner's, this process computes.

    The other process has the same products. Of two, the one computes them that has fewer steps to
    go up to the other, from the last to the first again; halfway round, each computes a half.
    """
    ahead = (owner - rank) % world
    if 2 * ahead < world:
        return slice(0, n), slice(0, m)
    if 2 * ahead > world:
        return slice(0, 0), slice(0, 0)
    return (slice(0, n), slice(0, m // 2)) if rank < owner else (slice(n // 2, n), slice(0, m))


def _rule_out(
    logits: Tensor,
    of_rows: Groups | None,
    of_cols: Tensor | None,
    *,
    diagonal: bool,
    own: bool,
) -> Tensor:
    """Mask what is not a negative. `own`: both of one view; `diagonal`: both of the same rows."""
    if (of_rows is None or of_cols is None) and not (own and diagonal):
        return logits
    if of_rows is None or of_cols is None:
        ruled_out = torch.zeros_like(logits, dtype=torch.bool)
    else:
        ruled_out = of_rows[:, None] == of_cols
    if diagonal:
        # A row is not its own rival, but its partner is always in the running.
        same_row = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        ruled_out = ruled_out | same_row if own else ruled_out & ~same_row
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

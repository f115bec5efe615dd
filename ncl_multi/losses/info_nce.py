"""InfoNCE on cosine similarity, exact, without ever keeping an n x n matrix.

Row i of `za` and row i of `zb` are a positive pair; every other row is a negative.
Nothing here knows about models or non-negativity: pass codes from a
`NonNegHead` and InfoNCE becomes NCL, pass signed features and it is the baseline.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ncl_multi.distributed import (
    Exchange,
    GatherExchange,
    RingExchange,
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
from ncl_multi.losses.lengths import lengths_and_shares, with_lengths

Batch = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]
Groups = Int[Tensor, " n"]
ExchangeName = Literal["gather", "ring"]
_EXCHANGES: dict[str, type[Exchange]] = {"gather": GatherExchange, "ring": RingExchange}

# A tile of logits should stay in a core's cache while it is exponentiated: 512 x 512 floats on a
# CPU. A GPU wants larger products and has the memory for them. Up to 256 rows, keeping the logits
# is faster than making them twice; up to 512 where making them takes longer, as rows are wide.
_CPU_TILE, _GPU_TILE, _DENSE, _DENSE_IF_WIDE = 512, 4096, 256, 512

# In float32, exp of a logit up to 60 can be summed over any batch. No cosine is above 1, so this is
# any temperature from 1/60: one exponential is then enough for rows and columns.
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
    """Symmetric InfoNCE: find a row's partner among its rivals.

    `within_view=False` is CLIP (rivals come from the other view); `within_view=True` is
    SimCLR and GRACE (rivals also come from the same view, except the row itself).
    Rows of equal `groups` are never each other's rivals, so two captions of one image, or
    two images of one class, are not pushed apart. A row of zeros, which ReLU can produce,
    has similarity 0 to everything.

    Sums are taken in at least float32, whatever the inputs and autocast say. Logits are
    computed `tile` x `tile` at a time, and again in the backward pass; the result does not depend
    on `tile`. A small batch is computed at once, by plain differentiable operations.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the whole batch, the same on every process, and after DDP's mean so is the
    gradient; each process computes its share. `exchange="ring"` sends pieces of rows round, a
    tile at a time, instead of gathering all of them: more messages, and the least memory.

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
    is_readable = not isinstance(temperature, Tensor) or free_to_read(temperature)
    small = is_readable and bool(temperature * _SAFE_LOGIT >= 1)
    few = _DENSE_IF_WIDE if len(za) <= za.shape[1] else _DENSE
    dense = tile is None and not split and len(za) <= few
    tile = tile or (_CPU_TILE if za.device.type == "cpu" else _GPU_TILE)
    with torch.autocast(za.device.type, enabled=False):
        dtype = sum_dtype(za, zb)
        root = torch.as_tensor(temperature, dtype=dtype, device=za.device).sqrt()
        if dense:
            a, b = (_scaled(z, root, dtype) for z in (za, zb))
            loss = _dense(a, b, within_view, groups)
        else:
            meet = _EXCHANGES[exchange](counts, tile) if split else Exchange(counts)
            if split and groups is not None:
                groups = gather(groups, counts)
            about = [lengths_and_shares(z, dtype, counts if split else None) for z in (za, zb)]
            loss = _Tiled.apply(za, zb, root, about, within_view, groups, tile, small, meet)
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
        """The current temperature."""
        return self.log_temperature.exp().clamp(min=self.min_temperature)

    def forward(self, za: Batch, zb: Batch, groups: Groups | None = None) -> Scalar:
        return info_nce(
            za, zb, temperature=self.temperature, within_view=self.within_view, groups=groups,
            distributed=self.distributed, exchange=self.exchange,
        )  # fmt: skip


def _scaled(z: Batch, root: Tensor, dtype: torch.dtype) -> Batch:
    """Rows such that the product of two is their logit, from the root of the temperature."""
    rows, lengths = with_lengths(z, dtype)
    return rows * (lengths * root).reciprocal()[:, None]


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
    is_readable = not isinstance(temperature, Tensor) or free_to_read(temperature)
    if is_readable and not temperature > 0:
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
    across = _rule_out(a @ b.T, groups, groups, diagonal=True, same_view=False)
    rows, cols = across, across.T
    if within_view:
        same = (_rule_out(z @ z.T, groups, groups, diagonal=True, same_view=True) for z in (a, b))
        rows, cols = (torch.cat(pair, dim=1) for pair in zip((rows, cols), same, strict=True))
    match = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(rows, match) + F.cross_entropy(cols, match)) / 2


class _Scaled:
    """The rows of `_scaled`, computed on use: all of them would be a copy of the batch."""

    def __init__(self, z: Tensor, scale: Tensor):
        self.z, self.scale = z, scale

    def __len__(self) -> int:
        return len(self.z)

    def __getitem__(self, rows: slice) -> Tensor:
        return self.z[rows] * self.scale[rows, None]

    def into(self, room: Tensor, rows: slice) -> Tensor:
        """The rows, computed into existing memory."""
        return torch.mul(self.z[rows], self.scale[rows, None], out=room[: rows.stop - rows.start])


class _Tiled(torch.autograd.Function):
    """The same loss, a tile of logits at a time, twice: for the normalisers, for the gradient.

    Rows of this process are compared with the blocks of the exchange, including its own. With one
    process that is the only block. Views are counted from the end, -2 and -1: without
    `within_view`, only the second one travels.
    """

    @staticmethod
    def forward(ctx, za, zb, root, about, within_view, groups, tile, small, exchange):
        lengths, shares = zip(*about, strict=True)
        scales = [(length * root).reciprocal() for length in lengths]
        local = [_Scaled(z, scale) for z, scale in zip((za, zb), scales, strict=True)]
        lse = scales[0].new_full((2, exchange.rows), float("-inf"))
        for owner, part, block in exchange.blocks(local if within_view else local[1:]):
            places = exchange.own, exchange.span(owner, part)
            for meeting in _tiles(local, block, groups, exchange, owner, part, tile, within_view):
                x, y, rows, cols = meeting[:4]
                by_row, by_col = _both_logsumexps(meeting[-1], small)
                lse_rows, lse_cols = lse[x, places[0]], lse[y, places[1]]
                lse_rows[rows] = lse_rows[rows].logaddexp(by_row)
                if x != y or owner != exchange.rank or rows != cols:
                    lse_cols[cols] = lse_cols[cols].logaddexp(by_col)
        matches = sum(
            ((local[0][rows] * local[1][rows]).sum() for rows in _slices(len(za), tile)),
            scales[0].new_zeros(()),
        )
        if len(exchange.counts) > 1:
            lse, matches = all_reduce_logsumexp(lse), all_reduce_sum(matches)
        ctx.save_for_backward(za, zb, root, *lengths, *shares, *scales, lse, groups)
        ctx.options = within_view, tile, small, exchange
        return (lse.sum() / 2 - matches) / exchange.rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        za, zb, root, *about, lse, groups = ctx.saved_tensors
        lengths, shares, scales = about[:2], about[2:4], about[4:]
        within_view, tile, small, exchange = ctx.options
        with torch.autocast(za.device.type, enabled=False):
            local = [_Scaled(z, scale) for z, scale in zip((za, zb), scales, strict=True)]
            # The positives' pull, in units of grad / 2n like everything below.
            grads = [torch.empty_like(z, dtype=lse.dtype) for z in (za, zb)]
            for rows in _slices(len(za), tile):
                for gradient, other in zip(grads, reversed(local), strict=True):
                    gradient[rows] = other[rows].mul_(-2)
            travelling = slice(0 if within_view else 1, 2)
            for owner, part, block, block_grads in exchange.blocks_with_gradients(
                local[travelling], grads[travelling]
            ):
                places = exchange.own, exchange.span(owner, part)
                for x, y, rows, cols, of_rows, of_cols, logits in _tiles(
                    local, block, groups, exchange, owner, part, tile, within_view
                ):
                    lse_rows, lse_cols = lse[x, places[0]][rows], lse[y, places[1]][cols]
                    push = _both_softmaxes(logits, lse_rows, lse_cols, small)
                    grads[x][rows].addmm_(push, of_cols)
                    if x != y or owner != exchange.rank or rows != cols:
                        block_grads[y][cols].addmm_(push.T, of_rows)
            if len(exchange.counts) > 1:
                # The loss is the same value on every process: sum the gradients of all of them.
                grad = all_reduce_sum(grad)
            unit = grad / (2 * exchange.rows)
            along = lse.new_zeros(())
            for z, gradient, length, share, scale in zip(
                (za, zb), grads, lengths, shares, scales, strict=True
            ):
                for rows in _slices(len(z), tile):
                    along += _to_rows(
                        gradient[rows], z[rows], length[rows], share[rows] * unit, scale[rows]
                    )
        of_root = (-along * unit / root).to(root.dtype)
        of_z = (g.to(z.dtype) for g, z in zip(grads, (za, zb), strict=True))
        return *of_z, of_root, *[None] * 6


def _to_rows(gradient: Batch, z: Batch, length: Tensor, share: Tensor, scale: Tensor) -> Scalar:
    """Turn the gradient of scaled rows into that of the rows, in place.

    Scaling divides by a row's length, so nothing is left along the row. Returns the sum of the
    scaled rows times their gradient, of which a temperature's is made.
    """
    along = (gradient * z).sum(dim=1) * scale
    gradient.mul_(scale[:, None]).sub_(z * (along / length / length)[:, None])
    gradient.mul_(share[:, None])
    return along.sum()


def _slices(n: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, n)) for start in range(0, n, tile))


def _tiles(
    local: Sequence[_Scaled],
    block: Sequence[Any],
    groups: Groups | None,
    exchange: Exchange,
    owner: int,
    share: slice,
    tile: int,
    within_view: bool,
) -> Iterator[tuple[int, int, slice, slice, Tensor, Tensor, Tensor]]:
    """Logits of local rows against a part of an owner's, by tile.

    Which views, which rows and columns of the two, these rows and columns themselves, and the
    logits, which may be overwritten. Everything is made in the same memory, tile after tile: fresh
    pages cost as much as an exponential.
    """
    n, m = len(local[-1]), share.stop - share.start
    home = owner == exchange.rank
    of_rows, of_cols = (
        None if groups is None else groups[span]
        for span in (exchange.own, exchange.span(owner, share))
    )
    meetings = [(-2, -1, slice(0, n), slice(0, m))]
    if within_view:
        counts = exchange.counts
        rows, cols = _symmetric_share(exchange.rank, owner, len(counts), n, counts[owner])
        cols = slice(max(cols.start - share.start, 0), min(cols.stop, share.stop) - share.start)
        meetings += [(view, view, rows, cols) for view in (-2, -1)]
    empty, width = local[-1].scale.new_empty, local[-1].z.shape[1]
    room = empty(min(tile, n) * min(tile, m))
    room_of_rows, room_of_cols = empty(min(tile, n), width), empty(min(tile, m), width)
    for x, y, all_rows, all_cols in meetings:
        upper = home and x == y
        for i in range(all_rows.start, all_rows.stop, tile):
            rows = slice(i, min(i + tile, all_rows.stop))
            these = local[x].into(room_of_rows, rows)
            for j in range(i if upper else all_cols.start, all_cols.stop, tile):
                cols = slice(j, min(j + tile, all_cols.stop))
                those = block[y].into(room_of_cols, cols) if home else block[y][cols]
                shape = rows.stop - i, cols.stop - j
                logits = torch.mm(these, those.T, out=room[: shape[0] * shape[1]].view(shape))
                logits = _rule_out(
                    logits,
                    None if of_rows is None else of_rows[rows],
                    None if of_cols is None else of_cols[cols],
                    diagonal=home and rows == cols,
                    same_view=x == y,
                )
                yield x, y, rows, cols, these, those, logits


def _symmetric_share(rank: int, owner: int, world: int, n: int, m: int) -> tuple[slice, slice]:
    """The part of a view's products with itself, local rows by an owner's, for this process.

    Both processes have the same products. They are computed by the one with fewer steps up to the
    other, around the ring; if both have the same number of steps, each computes a half.
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
    same_view: bool,
) -> Tensor:
    """Mask all but negatives. `same_view`: of one view; `diagonal`: rows and columns are equal."""
    if (of_rows is None or of_cols is None) and not (same_view and diagonal):
        return logits
    if of_rows is None or of_cols is None:
        ruled_out = torch.zeros_like(logits, dtype=torch.bool)
    else:
        ruled_out = of_rows[:, None] == of_cols
    if diagonal:
        # A row is not its own rival, but its partner is always a candidate.
        same_row = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        ruled_out = ruled_out | same_row if same_view else ruled_out & ~same_row
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

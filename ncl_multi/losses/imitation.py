"""Imitation of one pair of views by another: which rows are near, and how near."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.distributed import (
    all_reduce_logsumexp,
    all_reduce_sum,
    exchange_counts,
    gather,
    rank,
    world_size,
)
from ncl_multi.losses.checks import check_finite, check_together, check_views, sum_dtype
from ncl_multi.losses.info_nce import info_nce
from ncl_multi.losses.lengths import with_lengths

Scalar = Float[Tensor, ""]
Views = tuple[Tensor, Tensor]


def imitation(
    student: Views,
    teacher: Views,
    temperature: float | Scalar,
    *,
    most: int = 2048,
    distributed: bool = False,
) -> Scalar:
    """The divergence of a student's similarities between two views from a teacher's.

    The Kullback-Leibler divergence of the softmax of cosines, the mean over rows, in both
    directions. The two views may differ in length. No gradient goes to the teacher. Keeps all
    logits of the first `most` rows, which are enough to learn from in a larger batch.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the first `most` rows of the whole batch, the same on every process, and so
    is the gradient after DDP's mean; each process keeps the logits of its share.
    """
    split = distributed and world_size() > 1
    if split:
        counts = _counts(student, teacher, temperature=temperature, most=most)
        student, teacher = (_first_of_all(views, counts, most) for views in (student, teacher))
    else:
        _check(student, teacher)
    student, teacher = ((za[:most], zb[:most]) for za, zb in (student, teacher))
    with torch.no_grad():
        target = _logits(*teacher, temperature, split)
    return _divergence(_logits(*student, temperature, split), target, split)


def imitation_and_contrast(
    student: Views,
    teacher: Views,
    temperature: float | Scalar,
    *,
    groups: Int[Tensor, " n"] | None = None,
    most: int = 2048,
    distributed: bool = False,
) -> tuple[Scalar, Scalar]:
    """`imitation` and the student's `info_nce`, from the same logits for up to `most` rows in all.

    The contrast of a larger batch is computed in tiles.
    """
    split = distributed and world_size() > 1
    check = partial(_check_pairs, student, teacher, groups, 1 if split else 2)
    if split:
        options = {"temperature": temperature, "most": most, "groups": groups is not None}
        counts = _counts(student, teacher, check, **options)
    else:
        check()
        counts = [len(student[0])], [len(student[1])]
    if sum(counts[0]) > most:
        divergence = imitation(student, teacher, temperature, most=most, distributed=distributed)
        return divergence, info_nce(
            *student, temperature=temperature, groups=groups, distributed=distributed
        )
    if split:
        student, teacher = (_first_of_all(views, counts, most) for views in (student, teacher))
        groups = None if groups is None else gather(groups, counts[0])
    with torch.no_grad():
        target = _logits(*teacher, temperature, split)
    share = _logits(*student, temperature, split)
    return _divergence(share, target, split), _contrast(share, groups, split)


def _check(student: Views, teacher: Views) -> None:
    lengths = [[len(z) for z in views] for views in (student, teacher)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"student and teacher must be views of the same rows; "
            f"got {lengths[0]} and {lengths[1]} rows"
        )


def _check_pairs(student: Views, teacher: Views, groups: Tensor | None, least_rows: int) -> None:
    _check(student, teacher)
    check_views(*student, least_rows)
    if groups is not None and groups.shape != student[0].shape[:1]:
        raise ValueError(
            f"groups must have one entry per row, shape ({len(student[0])},); "
            f"got {tuple(groups.shape)}"
        )


def _counts(
    student: Views, teacher: Views, check: Callable[[], None] | None = None, **options: Any
) -> tuple[list[int], list[int]]:
    """Rows of each process in the first and in the second view, after all checks passed."""
    check = check or partial(_check, student, teacher)
    of_a = check_together(check, *student, *teacher, **options)
    return of_a, exchange_counts(None, len(student[1]), student[1].device)


def _first_of_all(views: Views, counts: tuple[list[int], list[int]], most: int) -> Views:
    """The first rows of the whole batch, in both views."""
    za, zb = (
        gather(z[: first[rank()]], first)
        for z, first in zip(views, (_first(c, most) for c in counts), strict=True)
    )
    return za, zb


def _first(counts: list[int], most: int) -> list[int]:
    """How many of the first `most` rows each process has."""
    ends = [min(sum(counts[: process + 1]), most) for process in range(len(counts))]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class _Share(NamedTuple):
    """Logits of the `rows`, among `of_all`, whose loss this process computes, for all columns."""

    logits: Tensor
    rows: slice
    of_all: int


def _logits(za: Tensor, zb: Tensor, temperature: float | Scalar, split: bool) -> _Share:
    """Cosines over the temperature. The product is divided, not the rows, which are larger."""
    with torch.autocast(za.device.type, enabled=False):
        sides = [with_lengths(z, sum_dtype(za, zb)) for z in (za, zb)]
        rows = slice(0, len(za))
        if split:
            shares = torch.arange(len(za)).tensor_split(world_size())
            start = sum(map(len, shares[: rank()]))
            rows = slice(start, start + len(shares[rank()]))
        of_all, (zb, lengths_b) = len(za), sides[1]
        za, lengths_a = (tensor[rows] for tensor in sides[0])
        logits = za @ zb.T / torch.outer(lengths_a, lengths_b) / temperature
        return _Share(logits, rows, of_all)


def _divergence(student: _Share, teacher: _Share, split: bool) -> Scalar:
    """Kullback-Leibler of the softmax over each row and over each column, the mean of both."""
    both = (
        F.kl_div(log_q, log_p, log_target=True, reduction="sum") / count
        for log_q, log_p, count in zip(
            _log_softmaxes(student.logits, split),
            _log_softmaxes(teacher.logits, split),
            (student.of_all, student.logits.shape[1]),
            strict=True,
        )
    )
    loss = sum(both, student.logits.new_zeros(())) / 2
    return check_finite(all_reduce_sum(loss) if split else loss)


def _log_softmaxes(logits: Tensor, split: bool) -> tuple[Tensor, Tensor]:
    """Logarithms of the softmax over each row and over each column."""
    return logits.log_softmax(1), logits - _by_column(logits, split)


def _by_column(logits: Tensor, split: bool) -> Tensor:
    return all_reduce_logsumexp(logits.logsumexp(0)) if split else logits.logsumexp(0)


def _contrast(share: _Share, groups: Tensor | None, split: bool) -> Scalar:
    """`info_nce` in both directions; row i and column i are partners."""
    logits, rows = share.logits, share.rows
    row_numbers = torch.arange(len(logits), device=logits.device)
    partners = row_numbers, row_numbers + rows.start
    matches = logits[partners]
    if groups is not None:
        ruled_out = groups[rows, None] == groups
        ruled_out[partners] = False
        # Not minus infinity: a column may have no rival in this share, and then no gradient.
        logits = logits.masked_fill(ruled_out, torch.finfo(logits.dtype).min / 2)
    # Every process knows all columns: it adds those of its own rows.
    normalisers = logits.logsumexp(1) + _by_column(logits, split)[rows]
    loss = (normalisers / 2 - matches).sum() / share.of_all
    return check_finite(all_reduce_sum(loss) if split else loss)

"""What one pair of views can teach another: which rows are near, and how near."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.distributed import (
    agree,
    all_reduce_logsumexp,
    all_reduce_sum,
    gather,
    rank,
    world_size,
)
from ncl_multi.losses.checks import check_finite, check_together, sum_dtype
from ncl_multi.losses.lengths import with_lengths

Scalar = Float[Tensor, ""]


def imitation(
    pupil: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    temperature: float | Scalar,
    *,
    most: int = 2048,
    distributed: bool = False,
) -> Scalar:
    """How far one pair of views is from another in what its rows take for their partners.

    The Kullback-Leibler divergence of the softmax of cosines, the mean over rows, of both ways
    round. The two sides may differ in length. No gradient goes to the teacher. Keeps all logits of
    the first `most` rows, which are enough to learn from in a larger batch.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the first `most` rows of the whole batch, the same on every process, and
    after DDP's mean so is the gradient; each process keeps the logits of its share.
    """
    split = distributed and world_size() > 1
    check = partial(_check, pupil, teacher)
    if split:
        views = (*pupil, *teacher)
        of_a = check_together(check, *views, temperature=temperature, most=most)
        of_b = agree(None, len(pupil[1]), pupil[1].device)
        pupil, teacher = (
            (_first_of_all(za, of_a, most), _first_of_all(zb, of_b, most))
            for za, zb in (pupil, teacher)
        )
    else:
        check()
    with torch.no_grad():
        wanted = _log_softmaxes(*teacher, temperature, most, split)
    given = _log_softmaxes(*pupil, temperature, most, split)
    both = (
        F.kl_div(log_q, log_p, log_target=True, reduction="sum") / min(len(z), most)
        for log_q, log_p, z in zip(given, wanted, pupil, strict=True)
    )
    loss = sum(both, given[0].new_zeros(())) / 2
    return check_finite(all_reduce_sum(loss) if split else loss)


def _check(pupil: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> None:
    lengths = [[len(z) for z in views] for views in (pupil, teacher)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"pupil and teacher must be views of the same rows; "
            f"got {lengths[0]} and {lengths[1]} rows"
        )


def _first_of_all(z: Tensor, counts: list[int], most: int) -> Tensor:
    """The first rows of the whole batch."""
    ends = [min(sum(counts[: process + 1]), most) for process in range(len(counts))]
    first = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return gather(z[: first[rank()]], first)


def _log_softmaxes(
    za: Tensor, zb: Tensor, temperature: float | Scalar, most: int, split: bool
) -> tuple[Tensor, Tensor]:
    """Logarithms of the softmax of cosines over each row and each column, of a share of the rows.

    The product is divided, not the rows, which are much larger.
    """
    with torch.autocast(za.device.type, enabled=False):
        sides = [with_lengths(z[:most], sum_dtype(za, zb)) for z in (za, zb)]
        if split:
            sides[0] = [part.tensor_split(world_size())[rank()] for part in sides[0]]
        (za, lengths_a), (zb, lengths_b) = sides
        logits = za @ zb.T / torch.outer(lengths_a, lengths_b) / temperature
        by_column = logits.logsumexp(0)
        if split:
            by_column = all_reduce_logsumexp(by_column)
        return logits.log_softmax(1), logits - by_column

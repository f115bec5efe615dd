"""Checks of the inputs of losses. Only `check_together` synchronises with a GPU, once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ncl_multi.distributed import exchange_counts


def check_views(za: Tensor, zb: Tensor, least_rows: int = 2) -> None:
    """Two aligned batches of at least `least_rows` rows."""
    if za.ndim != 2 or za.shape != zb.shape:
        raise ValueError(
            f"za and zb must be two views of the same rows, both of shape (n, d); "
            f"got {tuple(za.shape)} and {tuple(zb.shape)}"
        )
    if len(za) < least_rows or za.shape[1] == 0:
        number = "two rows" if least_rows == 2 else "one row in each process"
        raise ValueError(
            f"a contrastive loss needs at least {number} and one dimension; "
            f"got {tuple(za.shape)}. Use drop_last=True in the loader"
        )


def check_together(check: Callable[[], None], *views: Tensor, **options: Any) -> list[int]:
    """Rows of each process, if `check` passes on all and they pass the same options.

    An error on one process is raised on all of them.
    """
    error = None
    try:
        check()
    except ValueError as wrong:
        error = str(wrong)
    same = {
        "width": [z.shape[-1] if z.ndim else 0 for z in views],
        "dtype": [str(z.dtype).removeprefix("torch.") for z in views],
        **{name: o.item() if isinstance(o, Tensor) else o for name, o in options.items()},
    }
    counts = exchange_counts(error, len(views[0]) if views[0].ndim else 0, views[0].device, **same)
    if sum(counts) < 2:
        raise ValueError(f"a contrastive loss needs at least two rows in all; got {sum(counts)}")
    return counts


def check_finite(loss: Tensor) -> Tensor:
    """Refuse a loss that is not finite, if the check is free; otherwise `Health` checks it."""
    if free_to_read(loss) and not loss.isfinite():
        raise ValueError(
            f"the loss is {loss.item()}: the input contains NaN or infinity. Lower the learning "
            f"rate, clip gradients, or look for bad rows with z.isfinite().all(dim=1)"
        )
    return loss


def free_to_read(x: Tensor) -> bool:
    """Whether values can be read without a wait: on a CPU, outside of a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def sum_dtype(*views: Tensor) -> torch.dtype:
    """The widest type among them, at least float32."""
    return torch.float64 if any(z.dtype == torch.float64 for z in views) else torch.float32


def at_least_float32(z: Tensor) -> Tensor:
    """Half precision overflows in the sums: exp(1 / 0.07) is past fp16's largest number."""
    return z if z.dtype == torch.float64 else z.float()

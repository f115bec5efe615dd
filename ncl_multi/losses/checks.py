"""What every loss asks of its input. No check here makes a GPU wait."""

import torch
from torch import Tensor


def check_views(za: Tensor, zb: Tensor) -> None:
    """Two aligned batches of at least two rows."""
    if za.ndim != 2 or za.shape != zb.shape:
        raise ValueError(
            f"za and zb must be two views of the same rows, both of shape (n, d); "
            f"got {tuple(za.shape)} and {tuple(zb.shape)}"
        )
    if len(za) < 2 or za.shape[1] == 0:
        raise ValueError(
            f"a contrastive loss needs at least two rows and one dimension; got {tuple(za.shape)}. "
            f"Use drop_last=True in the loader"
        )


def check_finite(loss: Tensor) -> Tensor:
    """Refuse a loss that is not a number, where looking costs nothing; elsewhere `Health` looks."""
    if free_to_read(loss) and not loss.isfinite():
        raise ValueError(
            f"the loss is {loss.item()}: the input holds NaN or infinity. Lower the learning rate, "
            f"clip gradients, or look for bad rows with z.isfinite().all(dim=1)"
        )
    return loss


def free_to_read(x: Tensor) -> bool:
    """Whether looking at the values stalls nothing: not a GPU, not a traced graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def at_least_float32(z: Tensor) -> Tensor:
    """Half precision overflows in the sums: exp(1 / 0.07) is past fp16's largest number."""
    return z if z.dtype == torch.float64 else z.float()

"""How much of the encoder's features a linear map can rebuild from codes."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from ncl_multi.distributed import all_reduce_sum, world_size
from ncl_multi.losses.checks import check_finite, check_together
from ncl_multi.losses.lengths import cosines


def reconstruction_loss(
    rebuilt: Float[Tensor, "n h"], h: Float[Tensor, "n h"], *, distributed: bool = False
) -> Float[Tensor, ""]:
    """One minus the mean cosine between centred features and rebuilt ones.

    No gradient goes to the features: the codes follow them, not the other way round.

    With `distributed=True` each process passes its own rows, and all of them call this together.
    The loss is that of the whole batch, the same on every process, and after DDP's mean so is the
    gradient. Only the sum of the features is exchanged, and the loss.

    Example:
        >>> import torch
        >>> h = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        >>> round(reconstruction_loss(h - h.mean(dim=0), h).item(), 6)
        0.0
    """
    h, check, counts = h.detach(), partial(_check, rebuilt, h), None
    if distributed and world_size() > 1:
        counts = check_together(check, rebuilt, h)
    else:
        check()
    together = all_reduce_sum if counts else _alone
    rows = sum(counts) if counts else len(h)
    centred = h - together(h.sum(dim=0)) / rows
    return check_finite(1 - together(cosines(rebuilt, centred, counts).sum()) / rows)


def _alone(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


def _check(rebuilt: Tensor, h: Tensor) -> None:
    if h.ndim != 2 or rebuilt.shape != h.shape or len(h) == 0:
        raise ValueError(
            f"rebuilt and h must both be (n, width), with at least one row; "
            f"got {tuple(rebuilt.shape)} and {tuple(h.shape)}"
        )

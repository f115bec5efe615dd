"""How well the cosines of codes follow a given similarity."""

from functools import partial

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.distributed import gather, world_size
from ncl_multi.losses.checks import check_finite, check_together
from ncl_multi.losses.lengths import cosines, damped

# The gradient grows with one over the spread of the cosines; this bounds it.
_NO_SPREAD = 0.01


def correlation_loss(
    za: Float[Tensor, "n d"],
    zb: Float[Tensor, "n d"],
    similarity: Float[Tensor, " n"],
    *,
    distributed: bool = False,
) -> Float[Tensor, ""]:
    """One minus the correlation, over pairs, of the codes' cosine and a given similarity.

    The similarity is the encoder's cosine, which any text has, or human scores. 0 is perfect
    agreement; pairs without spread have a loss of 1.

    With `distributed=True` each process passes its own pairs, and all of them call this together.
    The loss is that of all pairs, the same on every process, and after DDP's mean so is the
    gradient. Only the cosines are gathered.

    Example:
        >>> import torch
        >>> z = torch.eye(3)
        >>> round(correlation_loss(z, z[[0, 2, 1]], torch.tensor([5.0, 1.0, 1.0])).item(), 6)
        0.0
    """
    check, counts = partial(_check, za, zb, similarity), None
    if distributed and world_size() > 1:
        counts = check_together(check, za, zb)
    else:
        check()
    cosine = cosines(za, zb, counts)
    similarity = similarity.detach().to(cosine.dtype)
    if counts:
        cosine, similarity = gather(cosine, counts), gather(similarity, counts)
    cosine, similarity = cosine - cosine.mean(), similarity - similarity.mean()
    spread = cosine.detach().square().mean().sqrt()
    cosine = damped(cosine, (spread / _NO_SPREAD).clamp(max=1))
    return check_finite(1 - F.cosine_similarity(cosine, similarity, dim=0))


def _check(za: Tensor, zb: Tensor, similarity: Tensor) -> None:
    if za.ndim != 2 or za.shape != zb.shape or similarity.shape != za.shape[:1]:
        raise ValueError(
            f"za and zb must be (n, d) and similarity (n,); "
            f"got {tuple(za.shape)}, {tuple(zb.shape)} and {tuple(similarity.shape)}"
        )

"""How well the cosines of codes follow a given similarity."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def correlation_loss(
    za: Float[Tensor, "n d"], zb: Float[Tensor, "n d"], similarity: Float[Tensor, " n"]
) -> Float[Tensor, ""]:
    """One minus the correlation, over pairs, of the codes' cosine and a given similarity.

    That may be the encoder's cosine, for which any text will do, or human scores. 0 is perfect
    agreement; pairs without spread have a loss of 1.

    Example:
        >>> import torch
        >>> z = torch.eye(3)
        >>> round(correlation_loss(z, z[[0, 2, 1]], torch.tensor([5.0, 1.0, 1.0])).item(), 6)
        0.0
    """
    cosine, similarity = F.cosine_similarity(za, zb), similarity.detach()
    cosine, similarity = cosine - cosine.mean(), similarity - similarity.mean()
    return 1 - F.cosine_similarity(cosine, similarity, dim=0)

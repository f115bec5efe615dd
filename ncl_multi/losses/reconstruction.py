"""How much of the encoder's features a linear map can rebuild from codes."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def reconstruction_loss(
    rebuilt: Float[Tensor, "n h"], h: Float[Tensor, "n h"]
) -> Float[Tensor, ""]:
    """One minus the mean cosine between centred features and what was rebuilt of them.

    No gradient goes to the features: the codes follow them, not the other way round.

    Example:
        >>> import torch
        >>> h = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        >>> round(reconstruction_loss(h - h.mean(dim=0), h).item(), 6)
        0.0
    """
    centred = h.detach() - h.detach().mean(dim=0)
    return 1 - F.cosine_similarity(rebuilt, centred).mean()

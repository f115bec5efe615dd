"""Objectives for images: SimCLR without labels, cross entropy with labels."""

from typing import Any

import torch
from torch import Tensor, nn

from ncl_multi.adapters.vision.config import Loss
from ncl_multi.adapters.vision.views import Views
from ncl_multi.head import HeadOptions, NonNegHead
from ncl_multi.losses import info_nce, normalize_rows, spectral

_PROJECTED = 128
"""Width of the signed projector's output, as SimCLR's."""


class SimCLR(nn.Module):
    """Two random views of each image are a positive pair; all other images are negatives.

    Args:
        model: Gives codes of images in [0, 1].
        views: Makes a random view of every image of a batch.
        loss: `spectral` is on codes of squared length 2 / temperature.
        temperature: Divides the cosines.
        signed: Weight of the same contrast of the encoder's features through a signed projector.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module,
        views: Views,
        *,
        loss: Loss = "info_nce",
        temperature: float = 0.2,
        signed: float = 0.0,
    ):
        super().__init__()
        self.model, self.views, self.loss, self.temperature = model, views, loss, temperature
        self.signed = signed
        if signed:
            head: NonNegHead = self.model.head
            options = HeadOptions(_PROJECTED, head.hidden_dim, "none")
            self.projector = options.build(head.in_dim)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of images, or of a pair of images and labels, and the codes of both views."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        x = self.views(torch.cat([images, images]))
        if not self.signed:
            z = self.model(x)
            return self._contrast(z), z
        h, z = self.model(x, features=True)
        return self._contrast(z) + self.signed * self._contrast(self.projector(h)), z

    def _contrast(self, z: Tensor) -> Tensor:
        za, zb = z.chunk(2)
        if self.loss == "spectral":
            length = (2 / self.temperature) ** 0.5
            za, zb = (length * normalize_rows(view, distributed=True) for view in (za, zb))
            return spectral(za, zb, distributed=True)
        return info_nce(za, zb, temperature=self.temperature, within_view=True, distributed=True)


class Supervised(nn.Module):
    """Cross entropy of the labels, on one random view of each image.

    Args:
        model: A `NonNegClassifier`; a signed head makes this plain cross entropy.
        views: Makes a random view of every image of a batch.
    """

    model: Any

    def __init__(self, model: nn.Module, views: Views):
        super().__init__()
        self.model, self.views = model, views

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of images and labels, and the codes it was computed from."""
        images, y = batch
        z = self.model(self.views(images))
        return self.model.classifier(z, y), z

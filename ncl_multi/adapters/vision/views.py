"""Random views of a batch of pictures, on the batch's device; each picture gets its own.

Cropping, scaling, mirroring and blurring are linear along each axis, and colour changes are linear
across channels. So a view is three small matrix products per picture: rows, columns, colours.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Pictures = Float[Tensor, "n 3 height width"]

# ITU-R 601, as PIL, torchvision and kornia weigh colours.
_LUMA = (0.299, 0.587, 0.114)
# Rows: luma, and the two axes (I and Q) of the plane in which hue is an angle.
_YIQ = (_LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@dataclass(frozen=True)
class Views:
    """SimCLR's augmentation: `Views(size)(images)` gives one random view of each picture.

    Takes uint8 pictures of one or three channels, gives floats in [0, 1] with three. `scale` is the
    share of the picture that a crop keeps; brightness, contrast and saturation change by a factor
    in 1 - `jitter` .. 1 + `jitter`. Unlike PIL's, hue turns in the YIQ plane, which keeps the
    brightness, and values are clamped once, at the end.
    """

    size: int
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mirror: float = 0.5
    jitter: float = 0.4
    hue: float = 0.1
    jitter_share: float = 0.8
    grey_share: float = 0.2
    blur_share: float = 0.0

    def __call__(self, images: Tensor) -> Pictures:
        # Under autocast the weights of pixels would be rounded to bf16.
        with torch.autocast(images.device.type, enabled=False):
            return self._view(images)

    def _view(self, images: Tensor) -> Pictures:
        x = images.expand(-1, 3, -1, -1).float() / 255
        top, left, height, width = self._boxes(x)
        rows = resampling(top, height, x.shape[2], self.size)
        columns = resampling(left, width, x.shape[3], self.size)
        mirrored = _chosen(x, self.mirror)[:, None, None]
        columns = torch.where(mirrored, columns.flip(1), columns)
        if self.blur_share:
            # SimCLR: a deviation from 0.1 to 2 pixels of a picture of 224.
            deviation = _uniform(x, 0.1, 2.0) * self.size / 224
            blur = _gaussian(deviation * _chosen(x, self.blur_share), self.size)
            rows, columns = blur @ rows, blur @ columns
        x = rows[:, None] @ x @ columns[:, None].mT
        return self._recolour(x).clamp_(0, 1)

    def _boxes(self, x: Pictures) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height, width: of ten random boxes the first that fits, else the picture."""
        n, tries = len(x), 10
        tall, wide = x.shape[2:]
        area = torch.empty(n, tries, device=x.device).uniform_(*self.scale) * tall * wide
        low, high = (math.log(side) for side in self.ratio)
        ratio = torch.empty(n, tries, device=x.device).uniform_(low, high).exp()
        width, height = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (width >= 1) & (width <= wide) & (height >= 1) & (height <= tall)
        first, any_fits = fits.int().argmax(1, keepdim=True), fits.any(1)
        width = torch.where(any_fits, width.gather(1, first)[:, 0], wide)
        height = torch.where(any_fits, height.gather(1, first)[:, 0], tall)
        top = (torch.rand_like(height) * (tall - height + 1)).floor()
        left = (torch.rand_like(width) * (wide - width + 1)).floor()
        return top, left, height, width

    def _recolour(self, x: Pictures) -> Pictures:
        changed = _chosen(x, self.jitter_share)
        strength = (1 - self.jitter, 1 + self.jitter)
        brightness, contrast, saturation = (
            torch.where(changed, _uniform(x, *strength), 1.0) for _ in range(3)
        )
        turn = torch.where(changed, _uniform(x, -self.hue, self.hue), 0.0)
        saturation = torch.where(_chosen(x, self.grey_share), 0.0, saturation)
        return recolour(x, brightness, contrast, saturation, turn)


def resampling(
    start: Float[Tensor, " n"], length: Float[Tensor, " n"], old: int, new: int
) -> Float[Tensor, "n new old"]:
    """Weights that crop `old` pixels and scale them to `new`, bilinear, antialiased.

    Example:
        >>> resampling(torch.tensor([2.0]), torch.tensor([2.0]), 4, 1)
        tensor([[[0.0000, 0.0000, 0.5000, 0.5000]]])
    """
    pixel = torch.arange(old, device=start.device) + 0.5
    step = (length / new)[:, None, None]
    centre = start[:, None, None] + (torch.arange(new, device=start.device)[:, None] + 0.5) * step
    weight = (1 - (pixel - centre).abs() / step.clamp(min=1)).clamp(min=0)
    end = start + length
    weight = weight * ((pixel > start[:, None]) & (pixel < end[:, None]))[:, None]
    return weight / weight.sum(2, keepdim=True)


def recolour(
    x: Pictures,
    brightness: Float[Tensor, " n"],
    contrast: Float[Tensor, " n"],
    saturation: Float[Tensor, " n"],
    turn: Float[Tensor, " n"],
) -> Pictures:
    """Brightness, then contrast (about the mean grey), saturation and hue, one factor per picture.

    A factor of 1 changes nothing, a saturation of 0 is grey, `turn` is a share of the full circle.
    """
    luma = x.new_tensor(_LUMA)
    matrix = (contrast * brightness)[:, None, None] * _saturate_and_turn(saturation, turn)
    grey = (brightness * (1 - contrast) * (x.mean((2, 3)) @ luma))[:, None, None]
    return (matrix @ x.flatten(2) + grey).view_as(x)


def _saturate_and_turn(
    saturation: Float[Tensor, " n"], turn: Float[Tensor, " n"]
) -> Float[Tensor, "n 3 3"]:
    angle = 2 * math.pi * turn
    to_yiq = saturation.new_tensor(_YIQ)
    change = saturation.new_zeros(len(saturation), 3, 3)
    change[:, 0, 0] = 1
    change[:, 1, 1] = change[:, 2, 2] = saturation * angle.cos()
    change[:, 1, 2] = saturation * angle.sin()
    change[:, 2, 1] = -change[:, 1, 2]
    return torch.linalg.inv(to_yiq) @ change @ to_yiq


def _gaussian(deviation: Float[Tensor, " n"], size: int) -> Float[Tensor, "n size size"]:
    """Weights that blur; a deviation of 0 leaves the picture as it is."""
    pixel = torch.arange(size, device=deviation.device)
    distance = (pixel[:, None] - pixel).square()
    weight = (-distance / (2 * deviation.square().clamp(min=1e-4))[:, None, None]).exp()
    return weight / weight.sum(2, keepdim=True)


def _uniform(x: Tensor, low: float, high: float) -> Float[Tensor, " n"]:
    return torch.empty(len(x), device=x.device).uniform_(low, high)


def _chosen(x: Tensor, share: float) -> Tensor:
    return torch.rand(len(x), device=x.device) < share

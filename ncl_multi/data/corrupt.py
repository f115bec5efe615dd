"""Corrupted pictures and labels, to test the robustness of features."""

import io
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.optional import needs

Corruption = Literal["noise", "blur", "contrast", "jpeg"]
CORRUPTIONS: tuple[Corruption, ...] = ("noise", "blur", "contrast", "jpeg")

# Five severities each, from hardly visible to hard to recognise.
_NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)
_BLUR = (0.4, 0.6, 0.7, 0.8, 1.0)
_CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
_JPEG = (80, 65, 58, 50, 40)


def corrupt(images: Tensor, kind: Corruption, severity: int = 3, *, seed: int = 0) -> Tensor:
    """The same uint8 pictures with noise, blur, less contrast or JPEG's losses.

    Args:
        images: uint8 (n, channels, height, width).
        kind: The corruption.
        severity: From 1 to 5.
        seed: Seed of the noise.

    Example:
        >>> grey = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
        >>> bool((corrupt(grey, "contrast", 5) == 100).all())
        True
    """
    if kind not in CORRUPTIONS or severity not in range(1, 6):
        raise ValueError(
            f"kind must be one of {', '.join(CORRUPTIONS)} and severity 1 to 5; got {kind!r}, "
            f"{severity}"
        )
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"pictures must be uint8 (n, channels, height, width); got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    if kind == "jpeg":
        return _jpeg(images, _JPEG[severity - 1])
    x = images.float() / 255
    if kind == "noise":
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        x = x + noise * _NOISE[severity - 1]
    elif kind == "blur":
        x = _blur(x, _BLUR[severity - 1])
    else:
        mean = x.mean((2, 3), keepdim=True)
        x = mean + (x - mean) * _CONTRAST[severity - 1]
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def wrong_labels(y: Tensor, share: float, *, seed: int = 0) -> Tensor:
    """Labels of which this share, at random, is replaced by another class.

    Example:
        >>> (wrong_labels(torch.arange(10), 0.2) != torch.arange(10)).sum()
        tensor(2)
    """
    if not 0 <= share < 1:
        raise ValueError(f"label noise is a share from 0 to below 1; got {share}")
    generator = torch.Generator().manual_seed(seed)
    classes, index = y.unique(return_inverse=True)
    wrong = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    if len(classes) > 1:
        turn = torch.randint(1, len(classes), (len(wrong),), generator=generator)
        index[wrong] = (index[wrong] + turn) % len(classes)
    return classes[index]


def _blur(x: Tensor, deviation: float) -> Tensor:
    """A Gaussian over seven pixels each way, edges repeated."""
    offset = torch.arange(-3, 4, device=x.device)
    weight = (-offset.square() / (2 * deviation**2)).exp()
    weight = weight / weight.sum()
    flat = F.pad(x.flatten(0, 1)[:, None], (3, 3, 3, 3), mode="replicate")
    flat = F.conv2d(F.conv2d(flat, weight.view(1, 1, 1, 7)), weight.view(1, 1, 7, 1))
    return flat.view_as(x)


def _jpeg(images: Tensor, quality: int) -> Tensor:
    with needs("ncl-multi[train]"):
        from PIL import Image
    worse = []
    for picture in images.cpu():
        # PIL keeps channels last, and none at all for a grey picture.
        pixels = picture[0] if len(picture) == 1 else picture.permute(1, 2, 0)
        held = io.BytesIO()
        Image.fromarray(pixels.contiguous().numpy()).save(held, "JPEG", quality=quality)
        back = torch.from_numpy(np.array(Image.open(held)))
        worse.append(back.view(*picture.shape[1:], -1).permute(2, 0, 1))
    return torch.stack(worse).to(images.device)

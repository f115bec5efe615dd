"""White shapes on black, drawn from five known factors: a generator similar to dSprites.

It has the factors of dSprites (3 shapes, 6 scales, 40 orientations, 32 x 32 positions) and none of
its pixels: the published file is another set, and figures on this one are not comparable to it.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ncl_multi.data.pictures import ImageSet

FACTORS = {"shape": 3, "scale": 6, "orientation": 40, "x": 32, "y": 32}
SHAPES = ["square", "ellipse", "heart"]
_AT_ONCE = 2048


def sprites(count: int = 10_000, *, seed: int = 0, size: int = 64) -> tuple[ImageSet, Tensor]:
    """Random sprites, labelled by shape, and all their factors.

    Example:
        >>> pictures, factors = sprites(4, size=32)
        >>> pictures.images.shape, factors.shape
        (torch.Size([4, 1, 32, 32]), torch.Size([4, 5]))
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(n, (count,), generator=generator) for n in FACTORS.values()]
    factors = torch.stack(columns, dim=1)
    images = torch.cat([draw(rows, size) for rows in factors.split(_AT_ONCE)])
    return ImageSet(images, factors[:, 0], SHAPES, "sprites", f"seed {seed}"), factors


def draw(factors: Int[Tensor, "n 5"], size: int = 64) -> Tensor:
    """The pictures of these factors, uint8 (n, 1, size, size)."""
    sizes = list(FACTORS.values())
    if factors.ndim != 2 or factors.shape[1] != len(sizes):
        raise ValueError(f"factors must be (n, {len(sizes)}); got {tuple(factors.shape)}")
    if ((factors < 0) | (factors >= torch.tensor(sizes, device=factors.device))).any():
        raise ValueError(f"factors must lie below {FACTORS}")
    shape, scale, orientation, x, y = factors.T[..., None, None]
    pixel = (torch.arange(size, device=factors.device) + 0.5) / size
    # Half the side of the largest sprite's square is an eighth of the picture.
    radius = (0.5 + 0.1 * scale) / 8
    right = pixel[None, None, :] - (0.2 + 0.6 * x / 31)
    down = pixel[None, :, None] - (0.2 + 0.6 * y / 31)
    # Shapes of two- or fourfold symmetry look alike after a half or quarter turn, as in dSprites.
    angle = 2 * math.pi * orientation / 40
    u = (right * angle.cos() + down * angle.sin()) / radius
    v = (down * angle.cos() - right * angle.sin()) / radius
    inside = torch.where(
        shape == 0, _square(u, v), torch.where(shape == 1, _ellipse(u, v), _heart(u, v))
    )
    return (inside * 255).to(torch.uint8)[:, None]


def _square(u: Tensor, v: Tensor) -> Float[Tensor, "n height width"]:
    return (torch.maximum(u.abs(), v.abs()) <= 1).float()


def _ellipse(u: Tensor, v: Tensor) -> Float[Tensor, "n height width"]:
    return (u.square() / 1.7 + v.square() * 1.7 <= 1.27).float()


def _heart(u: Tensor, v: Tensor) -> Float[Tensor, "n height width"]:
    across, up = u.square(), -v * 1.05
    return ((across + up.square() - 1).pow(3) <= across * up.pow(3)).float()

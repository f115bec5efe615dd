"""How fast are two views of a batch of pictures made, compared with kornia and torchvision?

Usage:
    python evals/speed/views.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from measure import Cost, apart, cost

from ncl_multi.log import show_messages
from ncl_multi.report import table, write_json


def views(
    pictures: int = 512, size: int = 32, repeats: int = 5, out: Path = Path("runs/speed/views.json")
) -> None:
    """SimCLR's augmentation of a batch at once, against kornia's and torchvision's one by one.

    Args:
        pictures: Pictures in the batch.
        size: Side of the pictures in pixels.
        repeats: Batches, of which the fastest is reported.
        out: File for the figures.
    """
    rows = {}
    for name in _AUGMENTATIONS:
        took = apart(_views_cost, name, pictures, size, repeats).seconds
        rows[name] = {"ms": took * 1e3, "pictures/s": pictures / took}
    slowest = rows["torchvision, PIL"]["ms"]
    for row in rows.values():
        row["times PIL"] = slowest / row["ms"]
    table(f"A view of each of {pictures} pictures, {size}x{size}", rows)
    write_json(out, rows)


def _views_cost(name: str, pictures: int, size: int, repeats: int) -> Cost:
    x = torch.randint(0, 256, (pictures, 3, size, size), dtype=torch.uint8)
    augment = _AUGMENTATIONS[name](size)
    return cost(lambda: augment(x), repeats)


def _our_views(size: int) -> Callable[[Any], Any]:
    from ncl_multi.adapters.vision.views import Views

    return Views(size)


def _kornia_views(size: int) -> Callable[[Any], Any]:
    from kornia import augmentation as k

    augment = k.AugmentationSequential(
        k.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        k.RandomHorizontalFlip(),
        k.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        k.RandomGrayscale(p=0.2),
    )
    return lambda x: augment(x.float() / 255)


def _pil_views(size: int) -> Callable[[Any], Any]:
    from torchvision.transforms import v2

    augment = v2.Compose(
        [
            v2.ToPILImage(),
            v2.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return lambda x: torch.stack([augment(picture) for picture in x])


_AUGMENTATIONS: dict[str, Callable[[int], Callable[[Any], Any]]] = {
    "ours": _our_views,
    "kornia": _kornia_views,
    "torchvision, PIL": _pil_views,
}


if __name__ == "__main__":
    show_messages()
    tyro.cli(views)

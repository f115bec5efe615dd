"""Labelled pictures from any source."""

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

log = logging.getLogger(__name__)


Split = Literal["train", "test"]


@runtime_checkable
class Pictures(Protocol):
    """Pictures of one size: a uint8 tensor (n, channels, height, width), or files decoded
    on demand. Both are indexed with a list of row numbers.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Tensor: ...


@dataclass(frozen=True)
class ImageSet:
    """Pictures with labels. Feeds a `DataLoader` whole batches, so no picture is copied twice.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        >>> ImageSet(x, torch.tensor([1, 0]), ["cat", "dog"]).first(1).y
        tensor([1])
    """

    images: Pictures
    y: Tensor
    classes: list[str]
    name: str = ""
    split: str = ""

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images[[row]][0], self.y[row]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """A whole batch; use `collate_fn=whole` to take it as it is."""
        return self.images[rows], self.y[rows]

    def first(self, count: int | None) -> "ImageSet":
        """The first rows; all of them for None. Sets are in an order without meaning."""
        if count is None or count >= len(self):
            return self
        rows = list(range(count))
        return ImageSet(self.images[rows], self.y[:count], self.classes, self.name, self.split)


def thumbnails(images: ImageSet, rows: Sequence[int] | None = None) -> list[bytes]:
    """Every image, or those of these rows, as PNG, at most 64 pixels wide."""
    from PIL import Image

    def as_png(pixels: Tensor) -> bytes:
        array = pixels.permute(1, 2, 0).numpy()
        return thumbnail(Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array), "PNG")

    rows = range(len(images)) if rows is None else rows
    return [as_png(images.images[[row]][0]) for row in rows]


def thumbnail(image: Any, form: Literal["PNG", "JPEG"], side: int = 64) -> bytes:
    """A small copy of a PIL image, as the bytes of a file."""
    image = image.copy()
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, form, **({"quality": 80} if form == "JPEG" else {}))
    return file.getvalue()


def whole(batch: Any) -> Any:
    """`collate_fn` of a set that gives whole batches."""
    return batch


def images(name: str, split: Split = "train", *, size: int | None = None) -> ImageSet:
    """A set of pictures by name: `cifar10`, `fashion_mnist`, `digits`, `hf:<name>` or a folder.

    A folder has one folder per class, or these in `train/` and `test/` (or `val/`). Without that
    division every tenth picture is for testing. `size` is the side to which pictures of folders and
    of the hub are cut and scaled; the three named sets have their own.
    """
    from ncl_multi.data import cifar10, digits, fashion_mnist
    from ncl_multi.data.folders import folder, hub

    named: dict[str, Callable[[Split], ImageSet]] = {
        "cifar10": cifar10,
        "digits": digits,
        "fashion_mnist": fashion_mnist,
    }
    if name in named:
        return named[name](split)
    if name.startswith("hf:"):
        return hub(name.removeprefix("hf:"), split, size=size or 32)
    if Path(name).is_dir():
        return folder(Path(name), split, size=size or 32)
    what = "is a file" if Path(name).exists() else "does not exist"
    raise FileNotFoundError(
        f"{name} {what}: expected {', '.join(named)}, hf:<name>, or a folder with one folder of "
        f"pictures per class"
    )


def leave_out(source: str, names: Sequence[str], total: int) -> None:
    """Log which pictures cannot be read and are left out; raise if none can be read."""
    few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    if len(names) == total:
        raise ValueError(f"none of the {total} pictures of {source} can be read: {few}")
    if names:
        log.warning(
            f"left out {len(names)} of {total} pictures of {source} that cannot be read: {few}"
        )


def known_split(split: str, known: Sequence[str] = ("train", "test")) -> str:
    """The split, or an error that names the known ones."""
    if split not in known:
        raise ValueError(f"split must be one of {', '.join(known)}; got {split!r}")
    return split

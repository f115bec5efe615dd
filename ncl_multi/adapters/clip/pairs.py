"""Images and captions, and which belong together; images are decoded on demand."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from ncl_multi.data.folders import Image, on_white
from ncl_multi.files import read_picture


class DamagedImageError(ValueError):
    """An image that does not decode."""


class TarMember(NamedTuple):
    """Position of an image in a tar file."""

    tar: Path
    offset: int
    size: int


class HubCell(NamedTuple):
    """Position of an image in a table of the hub."""

    table: Any
    column: str
    row: int


Source = Path | bytes | TarMember | HubCell
"""Where an image is; it is decoded each time it is used."""


@dataclass(frozen=True)
class Pairs:
    """Images, captions, and links between them: rows of (image, caption).

    No two captions are the same text, so one that several images have is one caption with several
    links. `groups` are images of the same thing, which are never each other's negatives; `y` are
    classes, called `classes`.
    """

    name: str
    split: str
    images: Sequence[Source]
    image_names: list[str]
    captions: list[str]
    links: Int[Tensor, "pairs 2"]
    groups: Int[Tensor, " images"] | None = None
    y: Int[Tensor, " images"] | None = None
    classes: list[str] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def open(self, row: int) -> Image.Image:
        """One image in RGB, on white if transparent; `DamagedImageError` if it does not decode."""
        try:
            return _decode(self.images[row])
        except (OSError, ValueError) as error:
            raise DamagedImageError(f"{self.image_names[row]}: {error}") from error

    def relevant(self) -> csr_array:
        """Which caption is right for which image, images x captions."""
        rows, columns = self.links.T.numpy()
        shape = (len(self), len(self.captions))
        return csr_array(coo_array(([1.0] * len(rows), (rows, columns)), shape=shape))

    def joined_captions(self) -> list[str]:
        """The captions of each image, as one text."""
        by_image: list[list[str]] = [[] for _ in range(len(self))]
        for image, caption in self.links.tolist():
            by_image[image].append(self.captions[caption])
        return [" / ".join(captions) for captions in by_image]

    def draw(self, rows: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """A random caption of each image, and groups of rows that are not each other's negatives.

        Where the data names no groups, rows that drew the same caption make one.
        """
        counts = torch.bincount(self.links[:, 0], minlength=len(self))
        first = counts.cumsum(0) - counts
        drawn = first[rows] + (torch.rand(len(rows)) * counts[rows]).long()
        caption = self.links[drawn, 1]
        return caption, caption if self.groups is None else self.groups[rows]

    def hold_out(self, count: int) -> tuple["Pairs", "Pairs"]:
        """All but the last `count` images, and the last `count`."""
        if not 0 < count < len(self):
            raise ValueError(
                f"can hold out 1 to {len(self) - 1} of {len(self)} images; got {count}"
            )
        train_count = len(self) - count
        held = replace(self.keep(range(train_count, len(self))), split="validation")
        return self.keep(range(train_count)), held

    def at_most(self, count: int) -> "Pairs":
        """At most `count` images, evenly spaced."""
        count = min(count, len(self))
        return self.keep(torch.linspace(0, len(self) - 1, count).long().unique().tolist())

    def keep(self, rows: Sequence[int]) -> "Pairs":
        """These images and their captions only."""
        rows = list(rows)
        if rows == list(range(len(self))):
            return self
        image = torch.full((len(self),), -1)
        image[rows] = torch.arange(len(rows))
        links = self.links[image[self.links[:, 0]] >= 0]
        used, caption = links[:, 1].unique(return_inverse=True)
        links = torch.stack([image[links[:, 0]], caption], dim=1)
        return replace(
            self,
            images=[self.images[row] for row in rows],
            image_names=[self.image_names[row] for row in rows],
            captions=[self.captions[row] for row in used.tolist()],
            links=links[links[:, 0].argsort(stable=True)],
            groups=None if self.groups is None else self.groups[rows],
            y=None if self.y is None else self.y[rows],
        )

    def fingerprint(self) -> str:
        """A hash of the images' names and content, and of the captions."""
        listing = json.dumps([self.name, self.split, self.image_names, self.captions])
        digest = hashlib.sha256(listing.encode())
        for source in self.images:
            digest.update(_identity(source))
        return digest.hexdigest()


def pairs_of(
    name: str,
    split: str,
    images: Sequence[Source],
    image_names: Sequence[str],
    captions: Sequence[Sequence[str]],
    **more: Any,
) -> Pairs:
    """`Pairs` from the list of captions of each image."""
    if not images:
        raise ValueError(f"{name} does not contain an image with a caption")
    number: dict[str, int] = {}
    links = [
        (row, number.setdefault(caption, len(number)))
        for row, texts in enumerate(captions)
        for caption in dict.fromkeys(texts)
    ]
    return Pairs(
        name, split, images, list(image_names), list(number), torch.tensor(links), **more
    )  # fmt: skip


def as_pairs(data: Any) -> Pairs:
    """`Pairs` as they are, or made of a list of (image, caption or captions)."""
    if isinstance(data, Pairs):
        return data
    if isinstance(data, str | bytes) or not isinstance(data, Sequence):
        raise ValueError(
            f"fit takes Pairs or a list of (image, caption); got {type(data).__name__}. "
            f"read_pairs reads a folder"
        )
    images: list[Source] = []
    captions: list[list[str]] = []
    for row, pair in enumerate(data):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"row {row} must be an (image, caption) pair; got {str(pair)[:60]}")
        image, caption = pair
        several = list(caption) if isinstance(caption, Sequence) else []
        texts = [caption] if isinstance(caption, str) else several
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"row {row} must have a caption; got {str(caption)[:60]!r}")
        if isinstance(image, Image.Image):
            file = io.BytesIO()
            image.save(file, "PNG")
            image = file.getvalue()
        if not isinstance(image, str | Path | bytes):
            raise ValueError(
                f"row {row} must have a PIL image, a file or bytes; got {type(image).__name__}"
            )
        images.append(Path(image) if isinstance(image, str) else image)
        captions.append(texts)
    names = [str(image) if isinstance(image, Path) else f"image {n}" for n, image in
             enumerate(images)]  # fmt: skip
    return pairs_of("pairs", "train", images, names, captions)


def _identity(source: Source) -> bytes:
    """Bytes that differ where the picture does."""
    if isinstance(source, HubCell):
        return f"{source.table._fingerprint}/{source.column}/{source.row}".encode()
    if isinstance(source, TarMember):
        with source.tar.open("rb") as file:
            file.seek(source.offset)
            return hashlib.sha256(file.read(source.size)).digest()
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
    except OSError:
        return b"unreadable"
    return hashlib.sha256(content).digest()


def _decode(source: Source) -> Image.Image:
    if isinstance(source, TarMember):
        with source.tar.open("rb") as file:
            file.seek(source.offset)
            source = file.read(source.size)
    elif isinstance(source, HubCell):
        cell = source.table[source.row][source.column]
        source = cell["bytes"] if cell["bytes"] is not None else Path(cell["path"])
    return on_white(read_picture(source))

"""Fashion-MNIST: 70,000 grey pictures of clothes, 28x28 pixels, ten classes."""

import gzip
import io
import logging
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from ncl_multi.data.fetch import PINNED_FILES, fetch, pinned, user_data, verify
from ncl_multi.data.pictures import ImageSet, Split, known_split

log = logging.getLogger(__name__)

PACKAGE = pinned("fashion_mnist")
CLASSES = [
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"
]  # fmt: skip
_SHA = PINNED_FILES["fashion_mnist"]
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def fashion_mnist(split: Split = "train") -> ImageSet:
    """60,000 or 10,000 pictures, from NCL_DATA/fashion-mnist, Debian's package, or its archive."""
    known_split(split)
    start = {"train": "train", "test": "t10k"}[split]
    pictures, labels = (f"{name}.gz" for name in _SHA if name.startswith(start))
    content = _read([pictures, labels])
    x = _numbers(content[pictures], header=16).view(-1, 1, 28, 28)
    return ImageSet(x, _numbers(content[labels], header=8).long(), CLASSES, "fashion_mnist", split)


def _read(names: list[str]) -> dict[str, bytes]:
    root = user_data("fashion-mnist") or _DEBIAN
    if all((root / name).exists() for name in names):
        for name in names:
            verify(root / name, f"sha256:{_SHA[Path(name).stem]}")
        log.info(f"fashion_mnist from {root}")
        return {name: (root / name).read_bytes() for name in names}
    with tarfile.open(fileobj=io.BytesIO(_payload(fetch(PACKAGE)))) as archive:
        members = {
            Path(info.name).name: archive.extractfile(info) for info in archive if info.isfile()
        }
        return {name: member.read() for name in names if (member := members.get(name))}


def _payload(deb: Path) -> bytes:
    """`data.tar.*` of a Debian archive, which is an `ar` file: a header of 60 bytes a member."""
    content, at = deb.read_bytes(), 8
    while at + 60 <= len(content):
        name, size = content[at : at + 16].decode().strip(), int(content[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return content[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError(f"{deb} does not contain data.tar; remove it to fetch it again")


def _numbers(packed: bytes, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress(packed)[header:]), dtype=torch.uint8)

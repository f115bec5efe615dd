"""Flickr8k: photographs with five captions each. It is in no package: set NCL_DATA."""

import csv
import io
from dataclasses import dataclass

from ncl_multi.data.fetch import user_files
from ncl_multi.data.members import tar_files
from ncl_multi.data.pictures import known_split
from ncl_multi.files import read_bytes

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
    needed = ("captions.csv", "images_112.tar", f"split_{split}.txt")
    table, photographs, names_file = user_files("Flickr8k", *(f"flickr8k/{n}" for n in needed))
    names = read_bytes(names_file, _MOST_BYTES).decode().split()
    captions: dict[str, list[str]] = {name: [] for name in names}
    rows = csv.DictReader(io.StringIO(read_bytes(table, _MOST_BYTES).decode(), newline=""))
    if not {"image", "caption"} <= set(rows.fieldnames or ()):
        raise ValueError(f"{table} must start with image,caption; got {rows.fieldnames}")
    for row in rows:
        if row["image"] in captions:
            captions[row["image"]].append((row["caption"] or "").strip())
    jpeg = dict(tar_files(photographs, captions.__contains__))
    lacking = [name for name in names if name not in jpeg or not captions[name]]
    if lacking:
        raise ValueError(
            f"{table.parent} lacks the photograph or the captions of {len(lacking)} names in the "
            f"{split} list, such as {lacking[0]}"
        )
    return CaptionedPhotos(
        names, [captions[name] for name in names], [jpeg[name] for name in names]
    )

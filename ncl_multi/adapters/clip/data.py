"""Readers of captioned images: emoji, Flickr8k, a captions file, webdataset tars, the hub."""

import logging
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ncl_multi.adapters.clip.pairs import HubCell, Pairs, Source, TarMember, pairs_of
from ncl_multi.data.members import MOST_MEMBER, check_plain
from ncl_multi.data.tables import read_table
from ncl_multi.files import parse_json
from ncl_multi.optional import needs

log = logging.getLogger(__name__)

_IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_CAPTIONS = ("captions.csv", "captions.txt")
_COLUMNS = ("caption", "captions", "text", "sentence", "sentences")
_TEST_SPLITS = ("validation", "val", "dev", "test")
_HELD_OUT_VENDOR = "Twtr"
_MOST_CAPTION = 2**20

Read = tuple[str, list[Source], list[str], list[list[str]]]
"""Name of the data, images, their names, and the captions of each."""


def read_pairs(data: str) -> dict[str, Pairs]:
    """Splits of a data set by name: `train`, and the test splits.

    - `emoji`: `unseen` is a fifth of the emoji, `style` all emoji of one vendor;
    - `flickr8k`: `dev`; read from the folder NCL_DATA names;
    - `hf:<name>`: the hub's validation or test split as `test`, or every tenth image;
    - a folder with `captions.csv` (`image,caption`, one line per caption) and the images next to
      it or in `images/`, or with webdataset tars (`1.jpg`, `1.txt`): every tenth image as `test`.
    """
    if data == "emoji":
        return _emoji()
    if data == "flickr8k":
        return _flickr8k()
    if data.startswith("hf:"):
        return _hub(data)
    path = Path(data)
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        if tars:
            return _every_tenth(*_tars(data, tars))
        named = [path / name for name in _CAPTIONS if (path / name).is_file()]
        if not named:
            raise ValueError(f"{path} has neither captions.csv (image,caption) nor *.tar files")
        return _every_tenth(*_captions_file(data, named[0]))
    if path.suffix in (".csv", ".txt") and path.is_file():
        return _every_tenth(*_captions_file(data, path))
    what = "is a file of another kind" if path.exists() else "does not exist"
    raise FileNotFoundError(
        f"{data} {what}: expected emoji, flickr8k, hf:<name>, a folder of images with captions.csv "
        f"(image,caption), or a folder of webdataset tars"
    )


def _emoji() -> dict[str, Pairs]:
    from ncl_multi import data
    from ncl_multi.data.emojis import VENDORS

    emoji = data.emoji()
    order = torch.randperm(len(emoji), generator=torch.Generator().manual_seed(0))
    unseen, seen = order[: len(emoji) // 5].sort().values, order[len(emoji) // 5 :].sort().values
    drawn = [vendor for vendor in VENDORS if vendor != _HELD_OUT_VENDOR]

    def split(name: str, vendors: Sequence[str], rows: Tensor) -> Pairs:
        cells = [(vendor, row) for vendor in vendors for row in rows.tolist()]
        number = torch.tensor([row for _, row in cells])
        captions = [
            [emoji.labels[row], f"{emoji.labels[row]}, {', '.join(emoji.tags[row])}"]
            if emoji.tags[row] and name == "train"
            else [emoji.labels[row]]
            for _, row in cells
        ]
        return pairs_of(
            "emoji", name,
            [emoji.png[vendor][row] for vendor, row in cells],
            [f"{emoji.labels[row]} ({vendor})" for vendor, row in cells],
            captions,
            groups=number, y=emoji.subgroup[number], classes=emoji.subgroups,
        )  # fmt: skip

    return {
        "train": split("train", drawn, seen),
        "unseen": split("unseen", drawn, unseen),
        "style": split("style", [_HELD_OUT_VENDOR], seen),
    }


def _flickr8k() -> dict[str, Pairs]:
    from ncl_multi import data

    sets = {split: data.flickr8k(split) for split in ("train", "dev")}
    return {
        split: pairs_of("flickr8k", split, photos.jpeg, photos.names, photos.captions)
        for split, photos in sets.items()
    }


def _every_tenth(
    name: str, images: list[Source], names: list[str], captions: list[list[str]]
) -> dict[str, Pairs]:
    everything = pairs_of(name, "train", images, names, captions)
    test = [row for row in range(len(images)) if row % 10 == 9]
    if not test:
        raise ValueError(
            f"{name} has {len(images)} images; at least 10 are needed to hold out a tenth"
        )
    train = [row for row in range(len(images)) if row % 10 != 9]
    return {"train": everything.keep(train), "test": replace(everything.keep(test), split="test")}


def _hub(data: str) -> dict[str, Pairs]:
    with needs("ncl-multi[clip]"):
        from datasets import Image as Pictures
        from datasets import load_dataset
    tables = load_dataset(data.removeprefix("hf:"))

    def split(name: str) -> Read:
        features = tables[name].features
        images = [column for column, kind in features.items() if isinstance(kind, Pictures)]
        texts = [column for column in _COLUMNS if column in features]
        if not images or not texts:
            raise ValueError(
                f"{data} must have an image column and one called {', '.join(_COLUMNS[:-1])} or "
                f"{_COLUMNS[-1]}; got {', '.join(features)}"
            )
        # Cells stay encoded, so that a damaged one does not stop the reading of the table.
        table = tables[name].cast_column(images[0], Pictures(decode=False))
        caption_cells = table[texts[0]][:]
        captions = [[cell] if isinstance(cell, str) else list(cell) for cell in caption_cells]
        names = [f"{name} row {row}" for row in range(len(table))]
        _check_captions(data, zip(names, captions, strict=True))
        cells: list[Source] = [HubCell(table, images[0], row) for row in range(len(table))]
        return data, cells, names, captions

    train = "train" if "train" in tables else next(iter(tables))
    test = [name for name in _TEST_SPLITS if name in tables and name != train]
    if not test:
        return _every_tenth(*split(train))
    read = {"train": split(train), "test": split(test[0])}
    return {name: pairs_of(got[0], name, *got[1:]) for name, got in read.items()}


def _captions_file(data: str, path: Path) -> Read:
    table = read_table(path, columns=("image", "caption"))
    log.info(table.describe())
    captions: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for line, (name, caption) in zip(table.numbers, table.rows, strict=True):
        captions.setdefault(name, []).append(caption)
        lines.setdefault(name, line)
    roots = [path.parent, path.parent / "images", path.parent / "Images"]
    outside = [name for name in captions if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ValueError(
            f"{path} names {len(outside)} images outside its folder: "
            f"{_few_names([f'{name} (line {lines[name]})' for name in outside])}. Move them into it"
        )
    paths = {
        name: next((root / name for root in roots if (root / name).is_file()), None)
        for name in captions
    }
    missing = [f"{name} (line {lines[name]})" for name, where in paths.items() if where is None]
    if missing:
        raise ValueError(
            f"{path} names {len(missing)} images that are neither next to it nor in images/: "
            f"{_few_names(missing)}"
        )
    return data, [where for where in paths.values() if where], list(captions), [*captions.values()]


def _tars(data: str, tars: Sequence[Path]) -> Read:
    images: dict[str, Source] = {}
    captions: dict[str, list[str]] = {}
    for path in tars:
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    if member.isdir():
                        continue
                    folder, _, base = member.name.rpartition("/")
                    stem, _, kind = base.partition(".")
                    key = f"{path.name}/{folder}/{stem}" if folder else f"{path.name}/{stem}"
                    if f".{kind.lower()}" in _IMAGES:
                        check_plain(path, member, MOST_MEMBER)
                        images[key] = TarMember(path, member.offset_data, member.size)
                    elif kind in ("txt", "json"):
                        check_plain(path, member, _MOST_CAPTION)
                        text = tar.extractfile(member).read().decode()  # type: ignore[union-attr]
                        captions[key] = [_caption(text, kind, key)]
        except tarfile.ReadError as error:
            raise ValueError(
                f"{path} is not a plain tar file, or was cut short: {error}. Compressed tars "
                f"cannot be read out of order: unpack them with gunzip"
            ) from error
    odd = sorted(images.keys() ^ captions.keys())
    if odd:
        raise ValueError(
            f"{data}: {len(odd)} entries have an image without a caption (.txt, or .json with "
            f'"caption") or the other way round: {_few_names(odd)}'
        )
    _check_captions(data, captions.items())
    return data, list(images.values()), list(images), [captions[key] for key in images]


def _caption(text: str, kind: str, key: str) -> str:
    if kind == "txt":
        return text.strip()
    try:
        return str(parse_json(text, f"{key}.json")["caption"]).strip()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{key}.json must be an object with "caption"; got {text[:80]!r}'
        ) from error


def _check_captions(data: str, captions: Iterable[tuple[str, Sequence[str]]]) -> None:
    empty = [
        name for name, texts in captions if not texts or not all(text.strip() for text in texts)
    ]
    if empty:
        raise ValueError(
            f"{data} has {len(empty)} empty captions: {_few_names(empty)}. Fill or drop them"
        )


def _few_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

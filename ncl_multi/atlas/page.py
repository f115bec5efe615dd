"""The atlas: one self-contained page on what every dimension of a run means.

Usage:
    python -m ncl_multi.atlas runs/clip_ncl
    python -m ncl_multi.atlas runs/clip_ncl runs/clip_signed
"""

import base64
import gzip
import hashlib
import html
import io
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.atlas.tables import FITS, NEAREST, NONE, REASONS, SHOWN, TOP, readings, tables
from ncl_multi.codes.features import Features, spread
from ncl_multi.codes.names import name_sides
from ncl_multi.files import atomic, read_picture
from ncl_multi.optional import needs

with needs("ncl-multi[train]"):
    from tqdm.auto import tqdm

MOST_ITEMS = 10_000
LARGEST = 14_500_000
"""Most bytes of a page; pictures that do not fit are left out, first those on no card."""

_SPLITS = ("all", "test", "validation", "val", "dev")


@dataclass(frozen=True)
class _Space:
    """One set of codes of the items: the run's own, or its twin's."""

    title: str
    sides: list[Features]
    names: list[str]

    @property
    def z(self) -> Tensor:
        """Unit codes of all sides, concatenated."""
        whole = torch.cat([side.dense().detach().float().cpu() for side in self.sides])
        return F.normalize(whole, dim=1)


def write_atlas(run: Path, twin: Path | None = None) -> Path:
    """Write `<run>/atlas.html` from the features in `<run>/features`, and its twin's.

    Dimensions are ordered by how readable they are: the mean of purity@10, if items have classes,
    and of the share of the strongest items that fit the name. Only codes of the head are shown.
    Files that differ in `about["side"]` are shown together, as CLIP's images and texts; of several
    splits, the file of all of them or else the test split. If there are more than 10,000 items,
    10,000 evenly spaced ones are shown.

    Args:
        run: Folder of a run.
        twin: Folder of a run on the same items to show next to it; `<run>/twin` if that exists.
    """
    run = Path(run)
    chosen = head_features(run / "features")
    limit = MOST_ITEMS // len(chosen)
    rows_by_name = {name: spread(len(features), limit) for name, features in chosen.items()}
    sides = [features.take(rows_by_name[name]) for name, features in chosen.items()]
    spaces = [_space(_title(sides[0]), sides, sides)]
    folder = (run / "twin" if twin is None else Path(twin)) / "features"
    twins = [folder / f"{name}.safetensors" for name in chosen]
    if twin is not None or all(path.exists() for path in twins):
        twin_sides = [Features.load(path) for path in twins]
        for path, other, side in zip(twins, twin_sides, chosen.values(), strict=True):
            if len(other) != len(side):
                raise ValueError(
                    f"{path} must contain the items of this run, {len(side)}; got {len(other)}"
                )
            if None not in (other.items, side.items) and other.items != side.items:
                raise ValueError(f"{path} must contain the items of this run; got other items")
        taken = [
            other.take(rows) for other, rows in zip(twin_sides, rows_by_name.values(), strict=True)
        ]
        spaces.append(_space("Twin", taken, sides))
    page = _page(run.resolve().name, sides, spaces, sum(map(len, chosen.values())))
    with atomic(run / "atlas.html") as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return run / "atlas.html"


def head_features(folder: Path) -> dict[str, Features]:
    """Codes of each side of a run, by file name; those of all splits if there is such a file."""
    sides: dict[Any, tuple[str, Features]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        features = Features.load(path)
        if features.about.get("output") == "encoder" or len(features) == 0:
            continue
        side = features.about.get("side")
        if side not in sides or _rank(features) < _rank(sides[side][1]):
            sides[side] = (path.stem, features)
    if not sides:
        raise FileNotFoundError(
            f"no features of a head in {folder}; a recipe writes them at the end of a run"
        )
    widths = {name: features.dims for name, features in sides.values()}
    if len(set(widths.values())) > 1:
        raise ValueError(f"sides shown together must have the same width; got {widths}")
    if max(widths.values()) >= NONE:
        raise ValueError(f"a page has at most {NONE - 1} dimensions; got {widths}: shorten first")
    return dict(sides.values())


def _rank(features: Features) -> int:
    split = str(features.about.get("split", ""))
    return _SPLITS.index(split) if split in _SPLITS else len(_SPLITS)


def _title(features: Features) -> str:
    signed = features.about.get("activation") in ("none", "gelu", "leaky_relu")
    return "Signed" if signed else "NCL"


def _space(title: str, codes: Sequence[Features], items: Sequence[Features]) -> _Space:
    sides = [
        replace(side, z=encoded.z, about=encoded.about)
        for side, encoded in zip(items, codes, strict=True)
    ]
    return _Space(title, sides, name_sides(sides))


def _page(title: str, sides: Sequence[Features], spaces: Sequence[_Space], total: int) -> str:
    labels, classes = _labels(sides)
    side_of = np.repeat(np.arange(len(sides)), [len(side) for side in sides])
    arrays: dict[str, np.ndarray] = {"side": side_of.astype("u1")}
    if classes:
        arrays["labels"] = labels
    per_side = NEAREST if len(sides) == 1 else 4
    facts, shown_names = [], []
    for number, space in enumerate(spaces):
        table_arrays, fact = tables(space.z, side_of, labels if classes else None, per_side)
        read, more, names = readings(space.sides, space.names)
        arrays |= {f"{number}.{name}": array for name, array in (table_arrays | read).items()}
        facts.append(more + fact)
        shown_names.append(names)
    items = [text for side in sides for text in _texts(side)]
    about: dict[str, Any] = {
        "about": _describe(sides[0].about, len(items), total),
        "sides": [str(side.about.get("side") or "") for side in sides],
        "classes": classes or None,
        "items": items,
        "top": TOP,
        "shown": SHOWN,
        "nearest": per_side * len(sides),
        "reasons": REASONS,
        "fits": FITS,
        "spaces": [
            {"title": space.title, "names": names, "facts": fact, "drawings": _drawings(space)}
            for space, names, fact in zip(spaces, shown_names, facts, strict=True)
        ],
    }
    room = LARGEST - len(_packed(about, arrays))
    order = _by_need([arrays[f"{number}.topItems"] for number in range(len(spaces))], len(items))
    pictures = _pictures([(side, row) for side in sides for row in range(len(side))], order, room)
    arrays["ends"] = np.cumsum([0, *map(len, pictures)]).astype("u4")
    return _fill(f"Atlas of {title}", _packed(about, arrays), "".join(pictures))


def _drawings(space: _Space) -> list[str]:
    """The subgraph of each dimension, where the run is of a graph: SVG, nodes numbered by rank."""
    return [_svg(drawing) for drawing in space.sides[0].about.get("drawings") or ()]


def _svg(drawing: dict[str, list[Any]]) -> str:
    """Only numbers are inserted, so an untrusted file cannot inject markup."""
    # A margin for the circles around positions of 0 to 100.
    places = [(int(x) + 10, int(y) + 10) for x, y in zip(drawing["x"], drawing["y"], strict=True)]
    if not places:
        return ""
    lines = [(*places[int(a)], *places[int(b)]) for a, b in drawing["links"]]
    parts = [f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" stroke="#999"/>' for a, b, c, d in lines]
    for rank, ((x, y), label) in enumerate(zip(places, drawing["classes"], strict=True), start=1):
        # Steps of the golden angle keep the colours of any number of classes apart.
        fill = "#999" if int(label) < 0 else f"hsl({int(label) * 137.5 % 360:.0f},60%,42%)"
        parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{fill}"/>')
        parts.append(f'<text x="{x}" y="{y + 2.5}" fill="#fff">{rank}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 120" font-size="7" '
        f'font-family="sans-serif" text-anchor="middle">{"".join(parts)}</svg>'
    )


def _labels(sides: Sequence[Features]) -> tuple[np.ndarray, list[str]]:
    """The class number of each item, and the names of the classes."""
    per_side = [
        side.y.long().numpy()
        if side.y is not None and side.y.ndim == 1 and not side.y.is_floating_point()
        else np.full(len(side), NONE)
        for side in sides
    ]
    labels = np.concatenate(per_side)
    labels = np.where((labels < 0) | (labels >= NONE), NONE, labels).astype("u2")
    labelled = labels[labels != NONE]
    if not len(labelled):
        return labels, []
    class_names = next((side.about["classes"] for side in sides if side.about.get("classes")), ())
    names = [str(name) for name in class_names]
    return labels, names + [f"class {n}" for n in range(len(names), int(labelled.max()) + 1)]


def _texts(features: Features) -> list[str]:
    """The text of each item, with its split if the page shows several."""
    texts = [str(text) for text in features.items or [""] * len(features)]
    kind = features.about.get("side") or "item"
    texts = [text if text.strip() else f"{kind} {row}" for row, text in enumerate(texts)]
    if not features.about.get("splits"):
        return texts
    return [f"{text} ({split})" for text, split in zip(texts, features.split_of(), strict=True)]


def _describe(about: dict[str, Any], count: int, total: int) -> str:
    facts = [f"{key} {about[key]}" for key in ("model", "data", "split", "seed") if key in about]
    return " · ".join([*facts, f"{count:,} items" + (f" of {total:,}" if count < total else "")])


def _by_need(tops: Sequence[np.ndarray], count: int) -> list[int]:
    """Items in the order in which their pictures are needed: the first of every card first."""
    ranked = np.concatenate([column for top in tops for column in top.T[:, None]], axis=0)
    ranked = np.concatenate([*(ranked[n::TOP].ravel() for n in range(TOP)), np.arange(count)])
    items, first = np.unique(ranked, return_index=True)
    return [int(item) for item in items[np.argsort(first)] if item != NONE]


def _pictures(items: Sequence[tuple[Features, int]], order: Sequence[int], room: int) -> list[str]:
    """Each item's picture in base64, scaled so that all fit; empty if there is no room."""
    with_picture = [n for n in order if items[n][0].thumbnails is not None]
    pictures = [""] * len(items)
    if not with_picture:
        return pictures

    def shrink(item: int, size: int) -> str:
        features, row = items[item]
        return _shrink((features.thumbnails or ())[row], size)

    sample = with_picture[:: max(1, len(with_picture) // 40)]
    for size in (112, 80, 64, 48, 40):
        mean = sum(len(shrink(item, size)) for item in sample) / len(sample)
        if mean * len(with_picture) <= room:
            break
    for item in tqdm(with_picture, desc="pictures", leave=False, disable=len(with_picture) < 500):
        picture = shrink(item, size)
        if len(picture) > room:
            break
        pictures[item], room = picture, room - len(picture)
    return pictures


def _shrink(encoded: bytes, size: int) -> str:
    try:
        image = read_picture(encoded)
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except ValueError:
        return ""
    image.thumbnail((size, size))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=60, method=4)
    return base64.b64encode(buffer.getvalue()).decode()


def _packed(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """A JSON header followed by the arrays, compressed, in base64."""
    layout: dict[str, list[Any]] = {}
    body = b""
    for name, array in arrays.items():
        layout[name] = [array.dtype.str[1:], len(body), array.size]
        content = array.astype(array.dtype.newbyteorder("<")).tobytes()
        body += content + bytes(-len(content) % 4)
    header = json.dumps(about | {"arrays": layout, "start": 0}).encode()
    start = len(header) + 4 + 12
    start += -start % 4
    header = json.dumps(about | {"arrays": layout, "start": start}).encode()
    content = struct.pack("<I", len(header)) + header
    return base64.b64encode(
        gzip.compress(content + bytes(start - len(content)) + body, mtime=0)
    ).decode()


def _fill(title: str, data: str, pictures: str) -> str:
    template = (files("ncl_multi.atlas") / "page.html").read_text(encoding="utf-8")

    def allowed(tag: str) -> str:
        inline = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digest = hashlib.sha256(inline[1].encode() if inline else b"").digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    policy = (
        f"default-src 'none'; img-src data:; style-src {allowed('style')}; "
        f"script-src {allowed('script')}; base-uri 'none'; form-action 'none'"
    )
    places = {
        "__TITLE__": html.escape(title),
        "__CSP__": policy,
        "__DATA__": data,
        "__PICTURES__": pictures,
    }
    return re.sub("|".join(places), lambda place: places[place[0]], template)

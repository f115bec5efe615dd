"""What do single dimensions show? Ten of NCL and ten of its twin, with their strongest pictures.

The dimensions are drawn at random from the readable ones, with one seed for both models, and shown
in the order of their purity: a random sample, not the best ones.

Usage:
    python evals/dimensions.py runs/vision_ncl --out docs/dimensions.png
    python evals/dimensions.py runs/claims/small
"""

import io
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages
from ncl_multi.metrics import readable_dims
from ncl_multi.metrics.codes import strongest_rows, unit_rows
from ncl_multi.report import print_json, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 10
"""Dimensions of a model, and pictures of a dimension."""


@dataclass(frozen=True)
class Config:
    """Dimensions of NCL and of its twin with their strongest pictures."""

    run: tyro.conf.Positional[Path]
    """A run folder of `recipes/vision_ncl.py` with a twin, or of `evals/claims.py`."""
    out: Path = Path("dimensions.png")
    """File for the picture."""
    seed: int = 0
    """Seed of the sample."""


def sample(features: Features, seed: int) -> list[tuple[int, np.ndarray, str]]:
    """Dimensions, the purest first: number, strongest rows, the commonest class and its count."""
    if features.thumbnails is None or features.items is None:
        raise ValueError("the features have no pictures; give the run folder of a vision recipe")
    readable = np.flatnonzero(readable_dims(features.z))
    chosen = np.random.default_rng(seed).permutation(readable)[:SHOWN]
    strongest = strongest_rows(unit_rows(features.z), SHOWN)
    rows = []
    for dim in chosen.tolist():
        strong_rows = strongest[dim][strongest[dim] >= 0]
        ((name, count),) = Counter(features.items[row] for row in strong_rows).most_common(1)
        rows.append((count, dim, strong_rows, f"{count} of {len(strong_rows)} {name}"))
    rows.sort(key=lambda row: (-row[0], row[1]))
    return [(dim, strong_rows, label) for _, dim, strong_rows, label in rows]


def show(axes: "Axes", title: str, features: Features, seed: int) -> list[str]:
    """Draw one model's dimensions, one per line; return their labels."""
    from PIL import Image

    assert features.thumbnails is not None
    labels = []
    for line, (_, rows, words) in enumerate(sample(features, seed)):
        for column, row in enumerate(rows.tolist()):
            picture = Image.open(io.BytesIO(features.thumbnails[row])).convert("RGB")
            extent = (column + 0.03, column + 0.97, line + 0.97, line + 0.03)
            axes.imshow(np.array(picture), extent=extent, interpolation="bicubic")
        axes.text(SHOWN + 0.15, line + 0.5, words, va="center", fontsize=9)
        labels.append(words)
    axes.set(xlim=(0, SHOWN + 3.6), ylim=(SHOWN, 0), aspect="equal")
    axes.set_title(title, loc="left", fontsize=12)
    axes.axis("off")
    return labels


def features_of(run: Path, model: str) -> Features:
    """Test features of `ncl` or of `twin`, with their pictures."""
    folders = {"ncl": ("features", "features/relu_0"), "twin": ("twin/features", "features/none_0")}
    files = [run / folder / "test_head.safetensors" for folder in folders[model]]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        raise FileNotFoundError(
            f"{files[0]} does not exist: train both with recipes/vision_ncl.py, or {files[1]} with "
            f"evals/claims.py --only contrastive"
        )
    features = Features.load(path)
    if features.thumbnails is not None or "data" not in features.about:
        return features
    from ncl_multi import data
    from ncl_multi.data.pictures import thumbnails

    test = data.images(features.about["data"], "test").first(len(features))
    items = [test.classes[label] for label in test.y.tolist()]
    return replace(features, items=items, thumbnails=thumbnails(test))


def main(cfg: Config) -> None:
    from matplotlib.figure import Figure

    models = {"Non-negative": "ncl", "Signed twin": "twin"}
    figure = Figure(figsize=(13.6, 5.4), layout="constrained")
    row: dict[str, Any] = {"run": str(cfg.run), "seed": cfg.seed}
    for axes, (title, model) in zip(figure.subplots(1, 2), models.items(), strict=True):
        row[title] = show(axes, title, features_of(cfg.run, model), cfg.seed)
    save_figure(figure, cfg.out, dpi=100)
    print_json(row | {"out": str(cfg.out)})


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

"""Does NCL find the classes behind the data? The theory made visible, where the truth is known.

Items are drawn from overlapping classes; two items of one class are a pair. The best non-negative
features are then P(class | x) / sqrt(P(class)), in any order (NCL, theorem 5), while signed ones
are as good after any rotation. Both are trained with the same loss, from the same start, and
compared with scikit-learn's NMF on the exact co-occurrence matrix.

Usage:
    python evals/identify.py
    python evals/identify.py --classes 12 --out runs/identify12
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ncl_multi.log import show_messages
from ncl_multi.metrics.posterior import World, learn_features, match_columns
from ncl_multi.report import print_json, save_figure, table


@dataclass(frozen=True)
class Config:
    """Recovery of known classes by NCL, its signed twin and NMF."""

    classes: int = 8
    """Latent classes, of unequal size."""
    items: int = 200
    """Different items x; each has its own class and a small chance under others."""
    overlap: float = 0.1
    """Share of a class's draws that fall on items of other classes."""
    steps: int = 1500
    """Steps of training."""
    batch_size: int = 2048
    """Pairs per step."""
    seed: int = 0
    """Seed of the world, the pairs and the weights."""
    out: Path = Path("runs/identify")
    """Folder for the picture and the figures."""


def factorise(world: World, cfg: Config) -> np.ndarray:
    """NMF of the exact matrix, in the units of the features: it is symmetric, so W is H'."""
    from sklearn.decomposition import NMF

    nmf = NMF(cfg.classes, init="nndsvda", max_iter=5000, tol=1e-8, random_state=cfg.seed)
    weights = nmf.fit_transform(world.cooccurrence)
    balanced = np.sqrt(weights * np.maximum(nmf.components_.T, 0))
    return balanced / np.sqrt(world.joint.sum(axis=1, keepdims=True))


def rotated_fit(learnt: np.ndarray, truth: np.ndarray) -> float:
    """Correlation after the best linear map: what the twin knows in its rotated axes."""
    fitted = learnt @ np.linalg.lstsq(learnt, truth, rcond=None)[0]
    between = [np.corrcoef(fitted[:, j], truth[:, j])[0, 1] for j in range(truth.shape[1])]
    return float(np.mean(between))


def draw(panels: dict[str, np.ndarray], path: Path) -> None:
    """One image per method, items sorted by their true class."""
    from matplotlib.figure import Figure

    first = next(iter(panels.values()))
    order = np.argsort(first.argmax(axis=1), kind="stable")
    limit = np.abs(first).max()
    figure = Figure(figsize=(3 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, z) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            z[order], aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
        )
        axis.set(title=name, xlabel="dimension")
    axes[0].set_ylabel("items, by their likeliest class")
    figure.colorbar(image, ax=axes, shrink=0.8)
    save_figure(figure, path)


def evaluate(cfg: Config) -> dict[str, dict[str, Any]]:
    """One row per method; also draws the picture."""
    world = World.draw(cfg.items, cfg.classes, cfg.overlap, cfg.seed)
    truth = world.features
    plan: dict[str, Any] = {"steps": cfg.steps, "batch_size": cfg.batch_size, "seed": cfg.seed}
    features = {
        "NCL": learn_features(world, signed=False, **plan),
        "signed twin": learn_features(world, signed=True, **plan),
        "NMF, exact matrix": factorise(world, cfg),
    }
    rows, panels = {}, {"truth": truth}
    for name, z in features.items():
        panels[name], correlation = match_columns(z, truth)
        rows[name] = {
            "correlation": correlation,
            "after the best linear map": rotated_fit(z, truth),
            "zeros": float((np.abs(z) < 1e-5).mean()),
        }
    draw(panels, cfg.out / "identify.png")
    return rows


def main(cfg: Config) -> None:
    rows = evaluate(cfg)
    table("Correlation with P(class | x) / sqrt(P(class)), best order and signs", rows)
    settings = {"seed": cfg.seed, "classes": cfg.classes, "items": cfg.items, "steps": cfg.steps}
    print_json(settings | rows, cfg.out / "identify.json")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

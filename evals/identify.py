"""Does NCL find the classes behind the data? The theory made visible, where the truth is known.

Items are drawn from overlapping classes; two items of one class are a pair. The best non-negative
features are then P(class | x) / sqrt(P(class)), in any order (NCL, theorem 5), while signed ones
are as good after any rotation. Both are trained with the same loss, from the same start; beside
them stands scikit-learn's NMF on the exact co-occurrence matrix.

Usage:
    python evals/identify.py
    python evals/identify.py --classes 12 --out runs/identify12
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro


@dataclass(frozen=True)
class Config:
    """Recovery of known classes by NCL, its signed twin and NMF."""

    classes: int = 8
    """Latent classes, of unequal size."""
    items: int = 200
    """Different items x; each has a class of its own and some chance under others."""
    overlap: float = 0.1
    """Share of a class's draws that fall on items of other classes."""
    steps: int = 1500
    """Steps of training."""
    batch_size: int = 2048
    """Pairs a step."""
    seed: int = 0
    """Seed of the world, the pairs and the weights."""
    out: Path = Path("runs/identify")
    """Folder for the picture and the figures."""


@dataclass(frozen=True)
class World:
    """A joint distribution of items and classes."""

    joint: np.ndarray
    """P(x, class), items by classes."""

    @property
    def features(self) -> np.ndarray:
        """P(class | x) / sqrt(P(class)), what NCL should find."""
        by_item = self.joint / self.joint.sum(axis=1, keepdims=True)
        return by_item / np.sqrt(self.joint.sum(axis=0))

    @property
    def cooccurrence(self) -> np.ndarray:
        """P(x, x+) / sqrt(P(x) P(x+)), exactly."""
        p_class, p_item = self.joint.sum(axis=0), self.joint.sum(axis=1)
        pairs = (self.joint / p_class) @ self.joint.T
        return pairs / np.sqrt(np.outer(p_item, p_item))


def world_of(cfg: Config) -> World:
    """Classes of unequal size; part of each one's draws fall on other classes' items."""
    rng = np.random.default_rng(cfg.seed)
    p_class = rng.dirichlet(np.full(cfg.classes, 20.0))
    own = np.arange(cfg.items) % cfg.classes
    inside = rng.dirichlet(np.full(cfg.items, 5.0), cfg.classes).T
    inside *= own[:, None] == np.arange(cfg.classes)
    outside = rng.dirichlet(np.full(cfg.items, 0.3), cfg.classes).T
    shares = (1 - cfg.overlap) * inside / inside.sum(axis=0) + cfg.overlap * outside
    return World(shares / shares.sum(axis=0) * p_class)


def train(world: World, cfg: Config, *, signed: bool) -> np.ndarray:
    """Features of every item after training on drawn pairs; one free vector an item."""
    import torch
    from tqdm import trange

    from ncl_multi import spectral

    torch.manual_seed(cfg.seed)
    joint = torch.from_numpy(world.joint)
    p_class, given_class = joint.sum(dim=0), (joint / joint.sum(dim=0)).T
    z = torch.rand(cfg.items, cfg.classes, requires_grad=True)
    optimizer = torch.optim.Adam([z])
    for step in trange(cfg.steps, desc="twin" if signed else "NCL", disable=None):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / cfg.steps)
        drawn = torch.multinomial(p_class, cfg.batch_size, replacement=True)
        counts = torch.bincount(drawn, minlength=cfg.classes).tolist()
        pairs = torch.cat(
            [
                torch.multinomial(shares, 2 * count, replacement=True).view(count, 2)
                for shares, count in zip(given_class, counts, strict=True)
                if count
            ]
        )
        loss = spectral(z[pairs[:, 0]], z[pairs[:, 1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not signed:
            # A free entry shares its weight with no other item, so where ReLU is at zero nothing
            # could bring it back; clamping is the same constraint without that dead end.
            z.data.clamp_(min=0)
    return z.detach().numpy()


def factorise(world: World, cfg: Config) -> np.ndarray:
    """NMF of the exact matrix, in the units of the features: it is symmetric, so W is H'."""
    from sklearn.decomposition import NMF

    nmf = NMF(cfg.classes, init="nndsvda", max_iter=5000, tol=1e-8, random_state=cfg.seed)
    left = nmf.fit_transform(world.cooccurrence)
    balanced = np.sqrt(left * np.maximum(nmf.components_.T, 0))
    return balanced / np.sqrt(world.joint.sum(axis=1, keepdims=True))


def match(found: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, float]:
    """Columns in the order that fits best, and the mean correlation in that order."""
    from scipy.optimize import linear_sum_assignment

    between = np.corrcoef(found.T, truth.T)[: found.shape[1], found.shape[1] :]
    rows, columns = linear_sum_assignment(-np.nan_to_num(between))
    order = rows[np.argsort(columns)]
    return found[:, order], float(np.nan_to_num(between)[rows, columns].mean())


def rotated_fit(found: np.ndarray, truth: np.ndarray) -> float:
    """Correlation after the best linear map: what the twin knows, in axes of its own."""
    fitted = found @ np.linalg.lstsq(found, truth, rcond=None)[0]
    between = [np.corrcoef(fitted[:, j], truth[:, j])[0, 1] for j in range(truth.shape[1])]
    return float(np.mean(between))


def draw(panels: dict[str, np.ndarray], path: Path) -> None:
    """One image a method, items sorted by their true class."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(panels.values()))
    order = np.argsort(first.argmax(axis=1), kind="stable")
    limit = np.abs(first).max()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3 * len(panels), 5), sharey=True)
    for axis, (name, z) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            z[order], aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
        )
        axis.set_title(name)
        axis.set_xlabel("dimension")
    axes[0].set_ylabel("items, by their likeliest class")
    figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def evaluate(cfg: Config) -> dict[str, dict[str, Any]]:
    """One row a method; the picture is drawn on the way."""
    world = world_of(cfg)
    truth = world.features
    found = {
        "NCL": train(world, cfg, signed=False),
        "signed twin": train(world, cfg, signed=True),
        "NMF, exact matrix": factorise(world, cfg),
    }
    rows, panels = {}, {"truth": truth}
    for name, z in found.items():
        panels[name], correlation = match(z, truth)
        rows[name] = {
            "correlation": correlation,
            "after the best linear map": rotated_fit(z, truth),
            "zeros": float((np.abs(z) < 1e-5).mean()),
        }
    cfg.out.mkdir(parents=True, exist_ok=True)
    draw(panels, cfg.out / "identify.png")
    return rows


def main(cfg: Config) -> None:
    from ncl_multi.report import table, write_json

    rows = evaluate(cfg)
    table("Correlation with P(class | x) / sqrt(P(class)), best permutation", rows)
    settings = {"seed": cfg.seed, "classes": cfg.classes, "items": cfg.items, "steps": cfg.steps}
    write_json(cfg.out / "identify.json", settings | rows)
    print(json.dumps(settings | rows))


if __name__ == "__main__":
    main(tyro.cli(Config))

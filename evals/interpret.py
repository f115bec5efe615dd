"""Can the features be read? Sparsity, what dimensions fire for, how they overlap.

Usage:
    python evals/interpret.py runs/vision_ncl/features/test_head.safetensors
    python evals/interpret.py ncl.safetensors twin.safetensors --out runs/interpret
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages
from ncl_multi.metrics import interpretability
from ncl_multi.metrics.codes import active_counts, check_labels, rows_active, unit_rows
from ncl_multi.report import print_rows, save_figure


@dataclass(frozen=True)
class Config:
    """Sparsity, class consistency, correlation and effective rank of Features files."""

    features: tyro.conf.Positional[tuple[Path, ...]]
    """Files written by a recipe; one row of the table for each."""
    out: Path = Path("runs/interpret")
    """Folder for `interpret.json` and the histograms, `interpret.png`."""
    labels: bool = True
    """`--no-labels` leaves out the measures that need classes."""


def evaluate(features: Features, *, labels: bool = True) -> dict[str, Any]:
    """Return one row of the report, with where it came from."""
    if labels and (features.y is None or features.y.ndim != 1):
        raise ValueError(
            "class consistency needs one label per row; this feature file has none. "
            "Leave it out with --no-labels"
        )
    row = interpretability(features.z, features.y if labels else None)
    return features.provenance | {"rows": len(features), "dims": features.dims} | row


def draw(path: Path, files: dict[str, Features], *, labels: bool = True) -> None:
    """Histograms: active dimensions per row; how often and how purely a dimension fires."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if labels else 8, 4), layout="constrained")
    axes = figure.subplots(1, 3 if labels else 2)
    for name, features in files.items():
        z = unit_rows(features.z)
        y = check_labels(features.y, z) if labels and features.y is not None else None
        counts = active_counts(z, y)
        fired = counts.sum(axis=0)
        panels = [rows_active(z) / z.shape[1], fired / z.shape[0]]
        if labels:
            panels.append((counts.max(axis=0) / np.maximum(fired, 1))[fired > 0])
        for axis, values in zip(axes, panels, strict=True):
            # Counts span decades when one of the files is dense: all its mass in the last bar.
            axis.hist(values, bins=40, range=(0, 1), alpha=0.6, label=name, log=True)
    titles = [("share of dimensions active", "rows"), ("share of rows it is active for", "dims")]
    titles += [("largest class share (consistency)", "alive dims")] if labels else []
    for axis, (what, of) in zip(axes, titles, strict=True):
        axis.set(xlabel=what, ylabel=f"number of {of}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    save_figure(figure, path)


def main(cfg: Config) -> None:
    files = {str(path): Features.load(path) for path in cfg.features}
    if not files:
        raise ValueError("give at least one Features file")
    rows = {name: evaluate(features, labels=cfg.labels) for name, features in files.items()}
    measures = [
        "sparsity", "active_dims", "alive", "class_consistency", "class_entropy",
        "correlation", "effective_rank",
    ]  # fmt: skip
    print_rows("Can it be read?", rows, measures, cfg.out / "interpret.json")
    draw(cfg.out / "interpret.png", files, labels=cfg.labels)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

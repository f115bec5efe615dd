"""Can the features be read? Sparsity, what dimensions fire for, how they overlap.

Usage:
    python evals/interpret.py runs/vision_ncl/features/test_head.safetensors
    python evals/interpret.py ncl.safetensors twin.safetensors --out runs/interpret
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages


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
    from ncl_multi.metrics import interpretability

    if labels and (features.y is None or features.y.ndim != 1):
        raise ValueError(
            "class consistency needs one label per row; this feature file has none. "
            "Leave it out with --no-labels"
        )
    about = {name: value for name, value in features.about.items() if name != "classes"}
    row = interpretability(features.z, features.y if labels else None)
    return about | {"rows": len(features), "dims": features.dims} | row


def draw(path: Path, files: dict[str, Features], *, labels: bool = True) -> None:
    """Histograms: active dimensions per row; how often and how purely a dimension fires."""
    import numpy as np
    from matplotlib.figure import Figure

    from ncl_multi.files import atomic
    from ncl_multi.metrics.codes import active_counts, check_labels, rows_active, unit_rows

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
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format="png")


def main(cfg: Config) -> None:
    from ncl_multi.report import table, write_json

    files = {str(path): Features.load(path) for path in cfg.features}
    if not files:
        raise ValueError("give at least one Features file")
    rows = {name: evaluate(features, labels=cfg.labels) for name, features in files.items()}
    measures = [
        "sparsity", "active_dims", "alive", "class_consistency", "class_entropy",
        "correlation", "effective_rank",
    ]  # fmt: skip
    table_rows = {name: {m: row[m] for m in measures if m in row} for name, row in rows.items()}
    table("Can it be read?", table_rows)
    for row in rows.values():
        print(json.dumps(row, default=str))
    draw(cfg.out / "interpret.png", files, labels=cfg.labels)
    write_json(cfg.out / "interpret.json", rows)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

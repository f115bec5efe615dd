"""Is a dimension one thing? Purity, intruder, distinct and names, with chance and the twin.

Usage:
    python evals/readable.py runs/clip_ncl/features/style_image_head.safetensors
    python evals/readable.py test.safetensors --judge other_encoder.safetensors
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages
from ncl_multi.metrics import readable_features, sparsity
from ncl_multi.report import print_rows


@dataclass(frozen=True)
class Config:
    """Purity@10, intruder, distinct and fit of names of Features files."""

    features: tyro.conf.Positional[tuple[Path, ...]]
    """Files of rows the model was not trained on, one row of the table for each."""
    judge: Path | None = None
    """Features file of the same items from an encoder the model never saw: finds intruders."""
    twin: bool = True
    """Also measure the twin's file of the same name, if the run has one."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(features: Features, judge: Features | None = None) -> dict[str, Any]:
    """Return one row of the report: provenance, figures, and measures that were left out."""
    if judge is not None and len(judge) != len(features):
        raise ValueError(
            f"the judge must contain the same items: expected {len(features)}, got {len(judge)}"
        )
    row = {"rows": len(features), "dims": features.dims, "active": 1 - sparsity(features.z)}
    figures, left_out = readable_features(
        features,
        embeddings=None if judge is None else judge.dense(),
        names=features.about.get("names"),
    )
    return features.provenance | row | figures | {"left_out": left_out}


def with_twins(paths: tuple[Path, ...]) -> list[Path]:
    """The files, each followed by its twin's: the one of the same name in `<run>/twin/features`."""
    twins = [path.parent.parent / "twin" / path.parent.name / path.name for path in paths]
    pairs = zip(paths, twins, strict=True)
    return [file for path, twin in pairs for file in (path, twin) if file is path or twin.exists()]


def main(cfg: Config) -> None:
    if not cfg.features:
        raise ValueError("give at least one Features file")
    paths = with_twins(cfg.features) if cfg.twin else list(cfg.features)
    judge = None if cfg.judge is None else Features.load(cfg.judge)
    rows = {str(path): evaluate(Features.load(path), judge) for path in paths}
    measures = [
        "rows", "dims", "active", "readable_dims", "purity_at_10", "chance", "cluster_purity",
        "intruder_labels", "intruder_embeddings", "distinct", "class_consistency",
        "named", "names_once", "name_fit", "name_chance",
    ]  # fmt: skip
    title = "Is a dimension one thing? (an intruder is found by chance in 0.167)"
    print_rows(title, rows, measures, cfg.out)
    reasons = [
        f"no {measure}: {reason}"
        for row in rows.values()
        for measure, reason in row["left_out"].items()
    ]
    for reason in dict.fromkeys(reasons):
        print(f"{reason} ({reasons.count(reason)} of {len(rows)} files)")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

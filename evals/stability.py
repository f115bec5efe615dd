"""Do two runs find the same dimensions? Matched one to one by correlation on the same items.

Usage:
    python evals/stability.py runs/clip-0 runs/clip-1
    python evals/stability.py a/style_image_head.safetensors b/style_image_head.safetensors
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ncl_multi.codes.features import Features
from ncl_multi.files import read_json
from ncl_multi.log import show_messages
from ncl_multi.metrics import matched_dims, readable_dims
from ncl_multi.report import print_json, table


@dataclass(frozen=True)
class Config:
    """Stability of dimensions over two runs that differ in their seed, and of their baselines."""

    first: tyro.conf.Positional[Path]
    """A run folder, or one Features file of it."""
    second: tyro.conf.Positional[Path]
    """The other run folder, or its Features file of the same items."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(first_path: Path, second_path: Path) -> dict[str, Any]:
    """Return one row of the report: the mean correlation of the matches and how it spreads."""
    first, second = Features.load(first_path), Features.load(second_path)
    if first.items is not None and second.items is not None and first.items != second.items:
        raise ValueError("the two files contain different items; stability needs the same rows")
    _, _, correlations = matched_dims(first.z, second.z)
    return {
        "rows": len(first),
        "readable_dims_first": int(readable_dims(first.z).sum()),
        "readable_dims_second": int(readable_dims(second.z).sum()),
        "stability": float(correlations.mean()),
        "median": float(np.median(correlations)),
        "above_.8": float((correlations > 0.8).mean()),
        "seeds": [seed_of(first, first_path), seed_of(second, second_path)],
    }


def seed_of(features: Features, path: Path) -> int | None:
    """The seed that features were made with: they say it, or the config of their run does."""
    config = path.parent.parent / "config.json"
    if "seed" in features.about or not config.exists():
        return features.about.get("seed")
    return read_json(config).get("seed")


def pairs(first: Path, second: Path) -> dict[str, tuple[Path, Path]]:
    """Files of the same name in both runs: those of their heads, then of their twins."""
    if first.is_file() or second.is_file():
        return {first.stem: (first, second)}
    files = {}
    for model in ("", "twin", "plain"):
        for path in sorted((first / model / "features").glob("*.safetensors")):
            other = second / path.relative_to(first)
            if other.exists() and Features.load(path).about.get("output") != "encoder":
                files[f"{model}: {path.stem}" if model else path.stem] = (path, other)
    if not files:
        raise FileNotFoundError(
            f"no features of a head that both {first} and {second} have; give run folders with "
            "the same file in features/, or two Features files"
        )
    return files


def main(cfg: Config) -> None:
    rows = {name: evaluate(*files) for name, files in pairs(cfg.first, cfg.second).items()}
    table(f"Do {cfg.first} and {cfg.second} find the same dimensions?", rows)
    whole = {"first": str(cfg.first), "second": str(cfg.second), "files": rows}
    print_json(whole, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

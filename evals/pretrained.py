"""What do the heads that come with the package score? Measured on the packed weights.

Usage:
    python evals/pretrained.py
    python evals/pretrained.py minilm-384
    python evals/pretrained.py --train minilm
    python evals/pretrained.py --train clip
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro

from ncl_multi.log import show_messages

RECIPES = {
    "minilm": ("minilm", "float16", ["sentence_ncl.py"]),
    "clip": ("efficientnet-lite0+minilm", "int8", ["clip_ncl.py", "--no-twin"]),
}
"""The base encoder of each head, the precision it is packed in, the recipe that trains it."""


@dataclass(frozen=True)
class Config:
    """Figures of the heads that come with the package."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Heads to measure; none for all."""
    train: Literal["minilm", "clip"] | None = None
    """Train this head with the recipe's defaults, measure it and put it in the package."""
    runs: Path = Path("runs/pretrained")
    """Folder for the training runs."""
    to: Path | None = None
    """Folder for a trained head; None for the package."""


def measure(model: Any) -> dict[str, float]:
    """Spearman on STS-B test at k entries, or R@10 on emoji that were not trained on."""
    return _sentences(model) if model.kind == "sentence" else _emoji(model)


def train(key: str, runs: Path, to: Path) -> str:
    """Train a head and write it with the figures of its packed weights; return its name."""
    import ncl_multi as ncl
    from ncl_multi.pretrained_heads import export_head, load_head

    base, precision, (recipe, *options) = RECIPES[key]
    script = Path(__file__).parents[1] / "recipes" / recipe
    run = runs / key
    subprocess.run([sys.executable, str(script), *options, "--out", str(run)], check=True)
    model = ncl.load(run)
    about: dict[str, Any] = {"base": base, "precision": precision}
    about["command"] = f"python evals/pretrained.py --train {key}"
    name = f"{key}-{model.dims}"
    with TemporaryDirectory() as folder:
        figures = measure(load_head(export_head(model, Path(folder) / name, **about)))
    export_head(model, to / name, figures=figures, **about)
    return name


def main(cfg: Config) -> None:
    from ncl_multi.pretrained_heads import SHIPPED, load_head, pretrained_names
    from ncl_multi.report import table

    folder = cfg.to or SHIPPED
    names = cfg.names or tuple(pretrained_names())
    if cfg.train is not None:
        names = (train(cfg.train, cfg.runs, folder),)
    for name in names:
        model = load_head(folder / name)
        figures = measure(model)
        table(name, {"measured": figures, "card": model.figures})
        print(json.dumps({"name": name} | figures))


def _sentences(model: Any) -> dict[str, float]:
    from functools import partial

    from ncl_multi.adapters.sentence.corpus import cached_features
    from ncl_multi.adapters.sentence.report import TextBenchmarks, whole_codes

    embed = partial(cached_features, model, precision="fp32")
    judged = TextBenchmarks.of(embed, pairs=["stsb_test"], collections=[])
    code = whole_codes(model)
    return {
        f"STS-B test Spearman, {k} entries": round(judged.row(code, k)["test"]["stsb_spearman"], 4)
        for k in (64, 32, 16, 8)
    }


def _emoji(model: Any) -> dict[str, float]:
    from ncl_multi.adapters.clip.config import ClipConfig
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.clip.report import both_ways, codes

    figures: dict[str, Any] = {}
    for split, pairs in read_pairs("emoji").items():
        if split != "train":
            features = model.tower_features(pairs, ClipConfig())
            row = both_ways(*codes(model.heads, features), pairs.relevant())
            figures |= {f"emoji {split} {m}": round(v, 4) for m, v in row.items()}
    return figures


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

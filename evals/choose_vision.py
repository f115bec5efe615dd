"""Which settings should the vision recipe have? Compared on held-out training pictures.

Models train on the first 40,000 pictures of the train split. Probes learn from the first 10,000,
and are measured, as is all else, on its last 10,000, which no model trains on; the test split is
not read.

Usage:
    python evals/choose_vision.py
    python evals/choose_vision.py --change lr=0.004 view_scale=1.0 --seeds 0 1 2
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import tyro
from choosing import Comparison

from ncl_multi.log import show_messages

DEFAULTS: dict[str, Any] = {
    "images": 40_000, "steps": 400, "density": 0.02, "signed": 1.0, "view_scale": 0.75,
    "precision": "auto",
}  # fmt: skip
"""Of the recipe, where they are not the library's, but for the pictures that are held out."""
COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"signed": 0.0},
    {"density": 0.04},
    {"density": 0.01},
    {"images": 10_000},
    {"view_scale": 1.0},
    {"lr": 4e-3},
    {"temperature": 0.1},
    {"hidden_dim": None},
    {"dims": 256},
    {"steps": 800},
)
"""Changes to the defaults, one at a time."""
HELD_OUT = 10_000


@dataclass(frozen=True)
class Config(Comparison):
    """Settings of the vision recipe compared on held-out training pictures."""

    models: tuple[Literal["ncl", "twin"], ...] = ("ncl", "twin")
    """Models to train."""


def figures(change: dict[str, Any], kind: str, seed: int) -> dict[str, float]:
    """Train one model with a change to the defaults; measure held-out pictures."""
    import time

    import ncl_multi as ncl
    from ncl_multi import data
    from ncl_multi.metrics import class_consistency, linear_probe, purity, sparsity

    options = DEFAULTS | change
    pictures = data.cifar10("train")
    train, held = pictures.first(options.pop("images")), pictures.images[-HELD_OUT:]
    of_model = ("dims", "hidden_dim", "density", "k", "activation", "batch_norm")
    model_options = {name: options.pop(name) for name in of_model if name in options}
    model = ncl.NonNegVision("resnet-small", seed=seed, **model_options)
    model = model.signed_twin() if kind == "twin" else model
    start = time.process_time()
    model.fit(train, seed=seed, **options)
    seconds = time.process_time() - start
    labelled, y = pictures.first(10_000), pictures.y[-HELD_OUT:]
    z = model.encode(held, dense=True)
    return {
        "cpu_seconds": seconds,
        "probe_encoder": linear_probe(model.embed(labelled), labelled.y, model.embed(held), y),
        "purity_at_10": purity(z, y),
        "class_consistency": class_consistency(z, y),
        "sparsity": sparsity(z),
    }


def main(cfg: Config) -> None:
    cfg.show(
        {"model": kind, "change": change} | cfg.means(partial(figures, change, kind))
        for change in cfg.changes(COMPARED)
        for kind in cfg.models
    )


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

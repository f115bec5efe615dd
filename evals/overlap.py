"""Do dimensions show overlapping classes, where an item belongs to several at once?

The paper leaves overlapping classes open. A sprite has a shape, a size, an orientation and a
place; a photograph of an oak is one of a tree, too. Each way to label the items is a kind of
class. A dimension shows a kind if the share of one class among its ten strongest items is at least
half-way from chance to all of them; it may show one kind, several together, or none.

Usage:
    python evals/overlap.py runs/vision_ncl/features/test_head.safetensors
    python evals/overlap.py test.safetensors --coarse groups.json

Files whose labels are a table, one column per factor, are written by `python evals/claims.py --only
sprites`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages
from ncl_multi.metrics import chance_purity, dimension_purity
from ncl_multi.report import print_rows

COARSE: dict[str, dict[str, list[str]]] = {
    "cifar10": {
        "animal": ["bird", "cat", "deer", "dog", "frog", "horse"],
        "vehicle": ["airplane", "automobile", "ship", "truck"],
    },
    "cifar100": {
        "aquatic mammals": ["beaver", "dolphin", "otter", "seal", "whale"],
        "fish": ["aquarium_fish", "flatfish", "ray", "shark", "trout"],
        "flowers": ["orchid", "poppy", "rose", "sunflower", "tulip"],
        "food containers": ["bottle", "bowl", "can", "cup", "plate"],
        "fruit and vegetables": ["apple", "mushroom", "orange", "pear", "sweet_pepper"],
        "electrical devices": ["clock", "keyboard", "lamp", "telephone", "television"],
        "furniture": ["bed", "chair", "couch", "table", "wardrobe"],
        "insects": ["bee", "beetle", "butterfly", "caterpillar", "cockroach"],
        "large carnivores": ["bear", "leopard", "lion", "tiger", "wolf"],
        "large outdoor things": ["bridge", "castle", "house", "road", "skyscraper"],
        "large outdoor scenes": ["cloud", "forest", "mountain", "plain", "sea"],
        "large herbivores": ["camel", "cattle", "chimpanzee", "elephant", "kangaroo"],
        "medium-sized mammals": ["fox", "porcupine", "possum", "raccoon", "skunk"],
        "invertebrates": ["crab", "lobster", "snail", "spider", "worm"],
        "people": ["baby", "boy", "girl", "man", "woman"],
        "reptiles": ["crocodile", "dinosaur", "lizard", "snake", "turtle"],
        "small mammals": ["hamster", "mouse", "rabbit", "shrew", "squirrel"],
        "trees": ["maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"],
        "vehicles 1": ["bicycle", "bus", "motorcycle", "pickup_truck", "train"],
        "vehicles 2": ["lawn_mower", "rocket", "streetcar", "tank", "tractor"],
    },
}
"""Groups of classes, of the data sets whose groups are known."""
_BINS = 8
"""A factor with more values is cut into so many ranges."""


@dataclass(frozen=True)
class Config:
    """Which kinds of classes do dimensions show, where items belong to several at once?"""

    features: tyro.conf.Positional[tuple[Path, ...]]
    """Files of items the model was not trained on, one row of the table for each."""
    coarse: Path | None = None
    """JSON file with the classes of each group, `{"animal": ["cat", "dog"], ...}`. The groups of
    CIFAR-10 and CIFAR-100 are known without it."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def kinds(features: Features, coarse: Mapping[str, list[str]] | None = None) -> dict[str, Tensor]:
    """The labels of the items in each way they are labelled."""
    y, about = features.y, features.about
    if y is None:
        raise ValueError("the features have no labels")
    if y.ndim == 2:
        names = about.get("factors") or [f"factor {column}" for column in range(y.shape[1])]
        return {name: _ranges(column) for name, column in zip(names, y.T, strict=True)}
    classes = list(about.get("classes") or [])
    groups = coarse or next(
        (known for known in COARSE.values() if sorted(classes) == sorted(chain(*known.values()))),
        None,
    )
    if groups is None:
        raise ValueError(
            "the groups of these classes are not known: give a JSON file, --coarse groups.json"
        )
    group_of = {name: group for group, members in enumerate(groups.values()) for name in members}
    missing = [name for name in classes if name not in group_of]
    if missing or not classes:
        raise ValueError(f"every class needs a group; without one: {', '.join(missing) or 'all'}")
    return {"class": y, "group": torch.tensor([group_of[name] for name in classes])[y]}


def overlap(z: Any, labels: Mapping[str, Tensor]) -> dict[str, float]:
    """purity@10, chance, and the share of dimensions that show a kind; how many kinds they show.

    Example:
        >>> z = torch.eye(4).repeat_interleave(20, dim=0)
        >>> corners = torch.arange(4).repeat_interleave(20)
        >>> found = overlap(z, {"left": corners % 2, "top": corners // 2})
        >>> found["left, shown by"], found["several kinds"]
        (1.0, 1.0)
    """
    row: dict[str, float] = {}
    shown = []
    for kind, y in labels.items():
        by_dimension, chance = dimension_purity(z, y), chance_purity(y)
        readable = ~np.isnan(by_dimension)
        shows = by_dimension[readable] >= (1 + chance) / 2
        row |= {
            f"{kind}, purity@10": float(by_dimension[readable].mean()),
            f"{kind}, chance": chance,
            f"{kind}, shown by": float(shows.mean()),
        }
        shown.append(shows)
    count = np.sum(shown, axis=0)
    row |= {"one kind": float((count == 1).mean()), "several kinds": float((count > 1).mean())}
    return row | {"no kind": float((count == 0).mean())}


def _ranges(values: Tensor) -> Tensor:
    """Values of a factor, in ranges of equal width if there are many."""
    count = int(values.max()) + 1
    return values if count <= _BINS else values * _BINS // count


def main(cfg: Config) -> None:
    coarse = None if cfg.coarse is None else json.loads(cfg.coarse.read_text())
    rows: dict[str, dict[str, Any]] = {}
    for path in cfg.features:
        features = Features.load(path)
        figures = overlap(features.z, kinds(features, coarse))
        rows[str(path)] = features.provenance | {"rows": len(features)} | figures
    measures = dict.fromkeys(name for row in rows.values() for name in row if ", " in name)
    print_rows(
        "Which kinds of classes do dimensions show?", rows,
        [*measures, "one kind", "several kinds", "no kind"], cfg.out,
    )  # fmt: skip


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

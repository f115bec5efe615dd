"""Which settings should graphs have? Changes to the rule compared on validation nodes.

Of each graph a tenth of the nodes trains the classifier and another tenth is measured, then the
other way round; the 80 % that the recipe reports are never read. Purity is that of these two
tenths, which is less than that of all nodes: it looks far down a dimension's list. Top 10 is the
share of pairs with one label among the measured nodes in the first ten of all. Distinct needs no
labels and is that of all.

Usage:
    python evals/choose_graph.py
    python evals/choose_graph.py --graphs cora --seeds 0 1 2
    python evals/choose_graph.py --graphs cora --change half_hop=0.5
"""

from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import tyro
from choosing import Comparison

from ncl_multi.log import show_messages

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"dims": 64},
    {"dims": 256},
    {"width": 512},
    {"lr": 0.002},
    {"head_start": 0.5},
    {"loss": "info_nce"},
    {"reconstruction": 0.0},
    {"steps": 200},
    {"adaptive": True},
    {"half_hop": 0.5},
)
"""Changes to the rule, one at a time."""


@dataclass(frozen=True)
class Config(Comparison):
    """Changes to the rule for graphs compared on validation nodes."""

    graphs: tuple[str, ...] = ("cora", "Amazon:Photo")
    """As `recipes/graph_ncl.py --data` takes them."""


def validation_figures(data: Any, change: dict[str, Any], seed: int) -> dict[str, float]:
    """Train with a change to the rule; measure without reading the labels of test nodes."""
    import torch

    import ncl_multi as ncl
    from ncl_multi.metrics import distinct, purity
    from ncl_multi.metrics.nodes import (
        Split,
        agreement,
        node_accuracy,
        random_split,
        strongest_group,
    )

    of_model = ("dims", "width", "k", "density", "activation", "encoder")
    model_options = {name: change[name] for name in change if name in of_model}
    training_options = {name: change[name] for name in change if name not in model_options}
    model = ncl.NonNegGraph(seed=seed, **model_options).fit(data, seed=seed, **training_options)
    train, other, _ = random_split(data.y, seed)
    # The classifier is tested on the validation nodes: it sees no other label.
    ways = [Split(train, other, other), Split(other, train, train)]
    rows = torch.cat([train, other])
    labels = torch.full_like(data.y, -1).index_copy(0, rows, data.y[rows])
    z = model.encode(data)

    def accuracy(codes: Any) -> float:
        return mean(node_accuracy(codes, data.y, way)["validation"] for way in ways)

    return {
        "encoder_accuracy": accuracy(model.embed(data)),
        "head_accuracy": accuracy(z),
        "purity@10": purity(z[rows.numpy()], data.y[rows]),
        "top 10": alike(z, labels),
        "distinct": distinct(z),
        "community_nmi": agreement(strongest_group(z), labels)["nmi"],
    }


def alike(z: Any, labels: Any) -> float:
    """Share of pairs with one label in the first ten nodes of all dimensions; -1 is not read."""
    from itertools import combinations

    from ncl_multi.metrics.codes import strongest_rows, unit_rows

    pairs = [
        first == second
        for rows in strongest_rows(unit_rows(z), 10)
        for first, second in combinations(labels[rows[rows >= 0]].tolist(), 2)
        if first >= 0 <= second
    ]
    return mean(pairs)


def main(cfg: Config) -> None:
    from ncl_multi.adapters.graph.data import load_graph, prepare

    cfg.show(
        {"graph": graph, "change": change} | cfg.means(partial(validation_figures, data, change))
        for graph in cfg.graphs
        for data in [prepare(load_graph(graph))]
        for change in cfg.changes(COMPARED)
    )


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

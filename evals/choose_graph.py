"""Which settings should graphs have? Changes to the rule compared on validation nodes.

Of each graph a tenth of the nodes trains the classifier and another tenth is measured, then the
other way round; the 80 % that the recipe reports are never read. Purity is that of these two
tenths, which is less than that of all nodes; distinct needs no labels and is that of all.

Usage:
    python evals/choose_graph.py
    python evals/choose_graph.py --graphs cora --seeds 0 1 2
    python evals/choose_graph.py --graphs cora --change half_hop=0.5
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tyro

from ncl_multi.log import show_messages

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"dims": 256},
    {"width": 256},
    {"start": 0.5},
    {"loss": "info_nce"},
    {"reconstruction": 0.0},
    {"steps": 200},
    {"adaptive": True},
    {"half_hop": 0.5},
)
"""Changes to the rule, one at a time."""


@dataclass(frozen=True)
class Config:
    """Changes to the rule for graphs compared on validation nodes."""

    graphs: tuple[str, ...] = ("cora", "Amazon:Photo")
    """As `recipes/graph_ncl.py --data` takes them."""
    change: tuple[str, ...] = ()
    """Compare only this, names and values in JSON (`half_hop=0.5`); none compares `COMPARED`."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of training and split; figures are means."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def compare(
    graph: str, data: Any, change: dict[str, Any], seeds: tuple[int, ...]
) -> dict[str, Any]:
    """One row of the table: figures of the validation nodes, mean over seeds."""
    rows = [validation_figures(data, change, seed) for seed in seeds]
    figures = {name: round(mean(row[name] for row in rows), 4) for name in rows[0]}
    return {"graph": graph, "change": change} | figures


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
        "distinct": distinct(z),
        "community_nmi": agreement(strongest_group(z), labels)["nmi"],
    }


def main(cfg: Config) -> None:
    from ncl_multi.adapters.graph.data import load_graph, prepare
    from ncl_multi.report import write_json
    from ncl_multi.training.config import read_changes

    requested = read_changes(cfg.change)
    rows = []
    for graph in cfg.graphs:
        data = prepare(load_graph(graph))
        for change in (requested,) if requested else COMPARED:
            rows.append(compare(graph, data, change, cfg.seeds))
            print(json.dumps(rows[-1]), flush=True)
            if cfg.out is not None:
                write_json(cfg.out, rows)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

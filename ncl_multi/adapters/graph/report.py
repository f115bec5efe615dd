"""The report of a graph run: features, figures, a table."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ncl_multi.adapters.graph.data import Nodes
from ncl_multi.adapters.graph.drawing import drawings
from ncl_multi.adapters.graph.links import HiddenLinks
from ncl_multi.adapters.graph.model import NonNegGraph
from ncl_multi.codes.features import Features
from ncl_multi.codes.names import MIXED, name_dimensions
from ncl_multi.metrics import activity_figures, readable_features
from ncl_multi.metrics.codes import Codes, strongest_rows, unit_rows
from ncl_multi.metrics.nodes import (
    Split,
    agreement,
    communities,
    k_means,
    link_prediction,
    node_accuracy,
    random_split,
    strongest_dimension,
    strongest_group,
)
from ncl_multi.report import table, write_json

log = logging.getLogger(__name__)

SHOWN = (
    "encoder_accuracy", "head_accuracy", "active_dims", "purity_at_10", "distinct",
    "class_consistency", "name_fit", "nmi", "community_nmi", "group_nmi", "k_means_nmi", "link_auc",
)  # fmt: skip


def write_report(
    models: Mapping[str, NonNegGraph],
    data: Any,
    nodes: Nodes,
    out: Path,
    *,
    data_name: str,
    seed: int,
    hidden: HiddenLinks | None = None,
) -> dict[str, Any]:
    """Measure every model, print the table, and write features and figures to `out`.

    What belongs to a model other than `ncl` is written to a folder of its name. With `hidden` links
    it also predicts them, from the graph without them.
    """
    figures = {}
    for name, model in models.items():
        folder = out if name == "ncl" else out / name
        h, z = model.embed(data), model.encode(data)
        about = {
            "model": model.name, "data": data_name, "split": "all", "seed": seed,
            "activation": model.head.activation, "normalised": True, "classes": nodes.classes,
        }  # fmt: skip
        display = {
            "names": node_names(z, data.y, nodes),
            "drawings": drawings(z, data.edge_index, data.y),
        }
        for output, codes, more in (("encoder", h, {}), ("head", z, display)):
            features = Features(codes, data.y, nodes.items, about | {"output": output} | more)
            features.save(folder / "features" / f"all_{output}.safetensors")
        row = measure(data, h, z, seed=seed) | readable_features(features).figures
        if hidden is not None:
            thin = hidden.graph
            row |= link_prediction(model.encode(thin), hidden.linked, hidden.others)
            encoder = link_prediction(model.embed(thin), hidden.linked, hidden.others)
            row |= {f"encoder_{measure}": value for measure, value in encoder.items()}
        figures[name] = {"all": row}
        model.figures = {measure: round(value, 4) for measure, value in row.items()}
        model.save_pretrained(folder / "model")
    if data.y is None:
        log.warning("the graph has no labels: accuracy, purity and agreement are left out")
    write_json(out / "metrics.json", figures)
    rows = {
        name: {m: by_split["all"][m] for m in SHOWN if m in by_split["all"]}
        for name, by_split in figures.items()
    }
    table(f"{data_name}, seed {seed}", rows)
    return figures


def measure(data: Any, h: Tensor, z: Codes, *, seed: int) -> dict[str, float]:
    """Accuracy of encoder and head, readability of the codes, and how they cluster the nodes.

    Accuracy is on test nodes: of a random split, and of the public one if the graph has it.
    """
    y = data.y
    if y is None or len(y[y >= 0].unique()) < 2:
        return activity_figures(z)
    labelled = (y >= 0).nonzero()[:, 0]
    split, classes = random_split(y, seed), len(y[labelled].unique())
    row = {}
    if len(y[split.train].unique()) > 1:
        row["encoder_accuracy"] = node_accuracy(h, y, split)["test"]
        row["head_accuracy"] = node_accuracy(z, y, split)["test"]
    else:
        log.warning("a tenth of the labelled nodes has one label: accuracy is left out")
    if all(mask in data for mask in ("train_mask", "val_mask", "test_mask")):
        public = Split(*(data[m].nonzero()[:, 0] for m in ("train_mask", "val_mask", "test_mask")))
        row["encoder_accuracy_public_split"] = node_accuracy(h, y, public)["test"]
        row["head_accuracy_public_split"] = node_accuracy(z, y, public)["test"]
    rows = z[labelled if isinstance(z, Tensor) else labelled.numpy()]
    row |= activity_figures(rows, y[labelled])
    row |= agreement(strongest_dimension(z), y)
    row["communities"] = len(np.unique(communities(z)))
    for name, clusters in (
        ("community", strongest_group(z)),
        ("group", strongest_group(z, classes)),
        ("k_means", k_means(z, classes, seed)),
    ):
        row |= {f"{name}_{m}": v for m, v in agreement(clusters, y).items() if m != "clusters"}
    return row


def node_names(z: Codes, y: Tensor | None, nodes: Nodes) -> list[str]:
    """Names of dimensions from the nodes' words, else classes, else the two most typical nodes.

    Several dimensions may show parts of one class: these are told apart by their most typical node
    that no other name has.
    """
    typical = strongest_rows(unit_rows(z))
    if nodes.words is None and nodes.classes is None:
        rows = [[nodes.items[row] for row in strongest[:2] if row >= 0] for strongest in typical]
        return [f"like {', '.join(items)}" if items else "" for items in rows]
    names = name_dimensions(Features(z, y, nodes.words, {"classes": nodes.classes}))
    if nodes.words is not None:
        return names
    often = {name for name, count in Counter(names).items() if count > 1} - {"", MIXED}
    taken: set[int] = set()
    for dim, strongest in enumerate(typical.tolist()):
        if names[dim] in often:
            row = next((row for row in strongest if row not in taken), strongest[0])
            taken.add(row)
            names[dim] = f"{names[dim]}: node {row}"
    return names

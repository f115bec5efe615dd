"""Non-negative graph contrastive learning beside its signed twin, GRACE.

Usage:
    python recipes/graph_ncl.py --help
    python recipes/graph_ncl.py --data citeseer
    python recipes/graph_ncl.py --data Amazon:Photo --loss spectral --batch-size None
    python recipes/graph_ncl.py --data graph.pt --model sage --neighbors 10 10
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ncl_multi.training.fit import TrainConfig

# GRACE's settings (arXiv 2006.04131), but for fewer negatives and steps: it takes all nodes, and
# 200, 200 and 1500 steps; and PubMed at a rate of 0.001 on the whole graph.
PRESETS: dict[str, dict[str, Any]] = {
    "cora": {
        "lr": 5e-4, "hidden": 128, "encoder_activation": "relu", "temperature": 0.4,
        "drop_edges": (0.2, 0.4), "drop_features": (0.3, 0.4), "steps": 200,
    },
    "citeseer": {
        "lr": 1e-3, "hidden": 256, "encoder_activation": "prelu", "temperature": 0.9,
        "drop_edges": (0.2, 0.0), "drop_features": (0.3, 0.2), "steps": 100,
    },
    "pubmed": {
        "lr": 2e-3, "hidden": 256, "encoder_activation": "relu", "temperature": 0.7,
        "drop_edges": (0.4, 0.1), "drop_features": (0.0, 0.2), "steps": 600,
        "neighbors": (10, 10),
    },
}  # fmt: skip
SHOWN = ("encoder acc", "head acc", "sparsity", "alive", "class_consistency", "nmi", "ari")


@dataclass(frozen=True)
class Config(TrainConfig):
    """Non-negative graph contrastive learning. What is None takes GRACE's setting for the data."""

    out: Path = Path("runs/graph_ncl")
    data: str = "cora"
    """`cora`, `citeseer`, `pubmed`; a PyG dataset, `KarateClub` or `Amazon:Photo`; or a file."""
    model: Literal["gcn", "gat", "sage", "gin"] = "gcn"
    """Encoder, two layers."""
    hidden: int | None = None
    """Width of the encoder's output; its first layer is twice as wide."""
    encoder_activation: str | None = None
    """Activation after both layers of the encoder, any name PyG knows."""
    dims: int = 4096
    """Number of non-negative features."""
    loss: Literal["info_nce", "spectral"] = "info_nce"
    """`spectral` costs time linear in the nodes, so that all may be negatives of all."""
    activation: str = "relu"
    """What makes the features non-negative; `none` trains the signed twin alone."""
    density: float | None = None
    """Share of nodes each dimension fires for; None, without `k`: .016, but at least 130 nodes."""
    k: int | None = None
    """Keep only the k largest features of a node."""
    signed: float = 3.0
    """Weight of the same contrast of a signed head, from which the encoder learns as well."""
    reconstruction: float = 3.0
    """Weight of rebuilding the encoder's features from the codes, linearly."""
    temperature: float | None = None
    """Of `info_nce`; lower looks harder at the closest rivals."""
    drop_edges: tuple[float, float] | None = None
    """Share of edges that each view goes without."""
    drop_features: tuple[float, float] | None = None
    """Share of feature columns that each view goes without."""
    adaptive: bool = False
    """Drop the less important edges and features more often, as GCA does."""
    neighbors: tuple[int, ...] | None = None
    """Encode sampled neighbourhoods, this many neighbours a hop; no number for the whole graph."""
    batch_size: int | None = 256
    """Nodes a step and process that are each other's negatives; None for all nodes."""
    steps: int | None = None
    """Number of steps, instead of `epochs`."""
    epochs: int | None = None
    """Passes over the nodes."""
    lr: float | None = None
    """Learning rate."""
    weight_decay: float = 1e-5
    """Pull of the weights towards zero."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "constant"] = "constant"
    """What the learning rate does after the warm-up."""
    twin: bool = True
    """Also train the signed twin, in `<out>/twin`, and compare."""


def main(cfg: Config) -> dict[str, dict[str, Any]]:
    from ncl_multi.adapters.graph.data import describe, load_graph, prepare
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.report import table, write_json
    from ncl_multi.training.fit import twin_of

    source = load_graph(cfg.data)
    data = prepare(source)
    items, classes = describe(cfg.data, data, source)
    cfg = complete(cfg, data.num_nodes)
    rows = {"twin" if cfg.activation == "none" else "ncl": run(cfg, data, items, classes)}
    if cfg.twin and cfg.activation != "none":
        rows["twin"] = run(twin_of(cfg), data, items, classes)
    if data.y is None:
        print("the graph has no labels: accuracy, class consistency and agreement are left out")
    shown = {name: {m: row[m] for m in SHOWN if m in row} for name, row in rows.items()}
    table(f"{cfg.data}, seed {cfg.seed}", shown)
    write_json(cfg.out / "metrics.json", rows)
    print(f"page of dimensions: {write_atlas(cfg.out)}")
    return rows


def complete(cfg: Config, nodes: int) -> Config:
    """The config with everything filled in that was left to the data."""
    preset = PRESETS.get(cfg.data.lower(), PRESETS["cora"])
    open_fields = {name: value for name, value in preset.items() if getattr(cfg, name) is None}
    if cfg.epochs is not None:
        open_fields.pop("steps", None)
    if cfg.density is None and cfg.k is None and cfg.activation in ("relu", "rep_relu"):
        # A dimension that fires for fewer nodes has next to none with a label to be judged by.
        open_fields["density"] = min(0.5, max(0.016, 130 / nodes))
    batch_size = min(cfg.batch_size or nodes, nodes)
    return dataclasses.replace(cfg, epochs=cfg.epochs or 1, batch_size=batch_size, **open_fields)


def run(cfg: Config, data: Any, items: list[str], classes: list[str] | None) -> dict[str, Any]:
    """Train once, write the run folder, return its line of the table."""
    from copy import copy

    import torch
    from torch.utils.data import DataLoader

    from ncl_multi import Features, fit, gather, info_nce, spectral
    from ncl_multi.adapters.graph.model import GraphCL, Learner, lost
    from ncl_multi.adapters.graph.sampling import neighbor_loader
    from ncl_multi.adapters.graph.views import Adaptive, view
    from ncl_multi.report import write_json

    torch.manual_seed(cfg.seed)
    model = GraphCL(
        data.num_features, cfg.dims, encoder=cfg.model, hidden_dim=cfg.hidden,
        encoder_activation=cfg.encoder_activation, activation=cfg.activation,
        density=cfg.density, k=cfg.k,
    )  # fmt: skip
    around = neighbor_loader(data, cfg.neighbors) if cfg.neighbors else None
    kept: dict[torch.device, Any] = {}

    def graph_of(nodes):
        """Features, edges, GCA's factors and where the nodes of the batch are."""
        if around is not None:
            part = around(nodes.cpu()).to(nodes.device)
            by_degree = Adaptive.by_degree(part.x, part.edge_index) if cfg.adaptive else None
            return part.x, part.edge_index, by_degree, torch.arange(len(nodes), device=nodes.device)
        if nodes.device not in kept:
            here = copy(data).to(nodes.device)
            by_degree = Adaptive.by_degree(here.x, here.edge_index) if cfg.adaptive else None
            kept[nodes.device] = model.features(here), here.edge_index, by_degree
        return *kept[nodes.device], nodes

    def contrast(za, zb):
        if cfg.loss == "spectral":
            return spectral(za, zb)
        return info_nce(za, zb, temperature=cfg.temperature, within_view=True)

    def step(learner, nodes):
        x, edge_index, by_degree, rows = graph_of(nodes)
        views = [
            view(x, edge_index, edges=edges, features=features, adaptive=by_degree)
            for edges, features in zip(cfg.drop_edges, cfg.drop_features, strict=True)
        ]
        codes, signed, rebuilt = learner(*views, rows=rows)
        loss = contrast(*map(gather, codes))
        if signed:
            loss = loss + cfg.signed * contrast(*map(gather, signed))
        for pair in rebuilt:
            loss = loss + cfg.reconstruction / 2 * lost(*map(gather, pair))
        return loss, codes[0]

    loader = DataLoader(torch.arange(data.num_nodes), cfg.batch_size, shuffle=True, drop_last=True)
    adam = lambda weights: torch.optim.Adam(weights, cfg.lr, weight_decay=cfg.weight_decay)  # noqa: E731
    # The twin is signed and forgets nothing.
    helped = cfg.activation != "none"
    learner = Learner(
        model, signed=helped and cfg.signed > 0, rebuild=helped and cfg.reconstruction > 0
    )
    fit(learner, step, loader, cfg, optimizer=adam)
    model.save_pretrained(cfg.out / "model")
    about = {
        "model": cfg.model, "data": cfg.data, "split": "all", "seed": cfg.seed,
        "activation": cfg.activation, "normalised": True, "classes": classes,
    }  # fmt: skip
    h, z = (model.encode(data, output=output, dense=True) for output in ("encoder", "head"))
    for output, codes in (("encoder", h), ("head", z)):
        features = Features(codes.cpu(), y=data.y, items=items, about=about | {"output": output})
        features.save(cfg.out / "features" / f"{output}.safetensors")
    row = scores(cfg, data, h.cpu(), z.cpu())
    write_json(cfg.out / "metrics.json", row)
    return row


def scores(cfg: Config, data: Any, h: Any, z: Any) -> dict[str, Any]:
    """Accuracy of encoder and head on random and public splits; what the head's codes are like."""
    from ncl_multi.metrics import readability
    from ncl_multi.metrics.nodes import (
        agreement,
        k_means,
        node_accuracy,
        random_split,
        strongest_dimension,
    )

    y = data.y
    if y is None or not (y >= 0).any():
        return readability(z)
    split = random_split(y, cfg.seed)
    row: dict[str, Any] = {
        "encoder acc": node_accuracy(h, y, *split),
        "head acc": node_accuracy(z, y, *split),
    }
    if "train_mask" in data and "test_mask" in data:
        public = data.train_mask.nonzero()[:, 0], data.test_mask.nonzero()[:, 0]
        row["encoder acc, public split"] = node_accuracy(h, y, *public)
        row["head acc, public split"] = node_accuracy(z, y, *public)
    row |= readability(z[y >= 0], y[y >= 0])
    signed = cfg.activation == "none"
    clusters = k_means(z, len(y[y >= 0].unique()), cfg.seed) if signed else strongest_dimension(z)
    return row | agreement(clusters, y)


if __name__ == "__main__":
    main(tyro.cli(Config))

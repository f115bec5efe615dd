"""Non-negative graph contrastive learning compared with its signed twin.

Usage:
    python recipes/graph_ncl.py --help
    python recipes/graph_ncl.py --data citeseer
    python recipes/graph_ncl.py --data Amazon:Photo --half-hop 0.5
    python recipes/graph_ncl.py --data graph.pt --model sage --neighbors 10 10
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from ncl_multi.adapters.graph.config import GraphConfig
from ncl_multi.head import Activation
from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config(GraphConfig):
    """Non-negative graph contrastive learning. Settings that are None are set from the graph."""

    out: Path = Path("runs/graph_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "cora"
    """`cora`, `citeseer`, `pubmed`; a PyG dataset, `KarateClub` or `Amazon:Photo`; or a file."""
    model: Literal["gcn", "gat", "sage", "gin"] = "gcn"
    """Encoder, two layers."""
    width: int | None = None
    """Width of the encoder."""
    encoder_activation: str = "prelu"
    """Activation between the layers of the encoder, any name PyG knows."""
    dims: int | None = None
    """Number of non-negative dimensions."""
    activation: Activation = "relu"
    """What makes the codes non-negative; `none` trains only the signed twin."""
    density: float | None = None
    """Share of nodes each dimension fires for, instead of `k`."""
    k: int | None = None
    """Active entries of a node, on average."""
    hidden_links: float = 0.05
    """Share of links that training does not see, for the report to predict; 0 to train on all."""
    twin: bool = True
    """Also train the signed twin, in `<out>/twin`, and compare."""
    free: ClassVar[tuple[str, ...]] = (*GraphConfig.free, "twin")


def main(cfg: Config) -> dict[str, Any] | None:
    import ncl_multi as ncl
    from ncl_multi.adapters.graph.data import describe, load_graph, prepare
    from ncl_multi.adapters.graph.links import hide_links
    from ncl_multi.adapters.graph.report import write_report
    from ncl_multi.atlas.page import write_atlas

    source = load_graph(cfg.data)
    data = prepare(source)
    hidden = hide_links(data, cfg.hidden_links, cfg.seed) if cfg.hidden_links else None
    model = ncl.NonNegGraph(
        cfg.dims,
        encoder=cfg.model,
        width=cfg.width,
        encoder_activation=cfg.encoder_activation,
        activation=cfg.activation,
        density=cfg.density,
        k=cfg.k,
        seed=cfg.seed,
    )
    models = {"twin" if cfg.activation == "none" else "ncl": model}
    if cfg.twin and "ncl" in models:
        models["twin"] = model.signed_twin()
    for name, model in models.items():
        model.fit(
            hidden.graph if hidden else data,
            replace(cfg, out=cfg.out / ("" if name == "ncl" else name)),
        )
    if ncl.is_main():
        nodes = describe(cfg.data, data, source)
        figures = write_report(
            models, data, nodes, cfg.out, data_name=cfg.data, seed=cfg.seed, hidden=hidden
        )
        print(f"what each dimension means: {write_atlas(cfg.out)}")
        return figures
    return None


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

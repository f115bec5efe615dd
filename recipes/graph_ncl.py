"""Non-negative graph contrastive learning compared with its signed twin, GRACE.

Usage:
    python recipes/graph_ncl.py --help
    python recipes/graph_ncl.py --data citeseer --preset citeseer
    python recipes/graph_ncl.py --data Amazon:Photo --loss spectral --batch-size None
    python recipes/graph_ncl.py --data graph.pt --model sage --neighbors 10 10
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ncl_multi.adapters.graph.config import GraphConfig
from ncl_multi.head import Activation
from ncl_multi.training.config import command_line

Preset = Literal["cora", "citeseer", "pubmed"]


@dataclass(frozen=True)
class Config(GraphConfig):
    """Non-negative graph contrastive learning."""

    preset: Preset = "cora"
    """GRACE's settings for a graph, with fewer negatives and steps. What follows changes them."""
    out: Path = Path("runs/graph_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "cora"
    """`cora`, `citeseer`, `pubmed`; a PyG dataset, `KarateClub` or `Amazon:Photo`; or a file."""
    model: Literal["gcn", "gat", "sage", "gin"] = "gcn"
    """Encoder, two layers."""
    width: int = 128
    """Width of the encoder's output; its first layer is twice as wide."""
    encoder_activation: str = "relu"
    """Activation after both layers of the encoder, any name PyG knows."""
    dims: int = 4096
    """Number of non-negative dimensions."""
    activation: Activation = "relu"
    """What makes the codes non-negative; `none` trains only the signed twin."""
    density: float | None = None
    """Share of nodes each dimension fires for; None, without `k`: .016, but at least 130 nodes."""
    k: int | None = None
    """Keep only the k largest entries of a node."""
    twin: bool = True
    """Also train the signed twin, in `<out>/twin`, and compare."""
    free: ClassVar[tuple[str, ...]] = (*GraphConfig.free, "twin")


# GRACE (arXiv 2006.04131) takes all nodes as negatives, and 200, 200 and 1500 steps; and PubMed at
# a rate of 0.001 on the whole graph.
PRESETS = {
    "cora": Config(),
    "citeseer": Config(
        preset="citeseer", lr=1e-3, width=256, encoder_activation="prelu", temperature=0.9,
        drop_edges=(0.2, 0.0), drop_features=(0.3, 0.2), steps=100,
    ),
    "pubmed": Config(
        preset="pubmed", lr=2e-3, width=256, temperature=0.7, drop_edges=(0.4, 0.1),
        drop_features=(0.0, 0.2), steps=600, neighbors=(10, 10),
    ),
}  # fmt: skip


def main(cfg: Config) -> dict[str, Any] | None:
    import ncl_multi as ncl
    from ncl_multi.adapters.graph.data import describe, load_graph, prepare
    from ncl_multi.adapters.graph.report import write_report
    from ncl_multi.atlas.page import write_atlas

    source = load_graph(cfg.data)
    data = prepare(source)
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
    for name, own in models.items():
        own.fit(data, replace(cfg, out=cfg.out / ("" if name == "ncl" else name)))
    if ncl.is_main():
        items, classes = describe(cfg.data, data, source)
        figures = write_report(
            models, data, items, classes, cfg.out, data_name=cfg.data, seed=cfg.seed
        )
        print(f"what each dimension means: {write_atlas(cfg.out)}")
        return figures
    return None


if __name__ == "__main__":
    main(command_line(PRESETS))

"""How much time and memory does a step of GRACE take, compared with PyGCL?

Usage:
    python evals/speed/graph.py
"""

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tyro
from measure import Cost, apart, cost, need

from ncl_multi.log import show_messages


def graph(
    graphs: tuple[str, ...] = ("cora", "citeseer", "pubmed"),
    nodes: tuple[int, ...] = (5_000, 20_000, 200_000),
    dense_up_to: int = 6_000,
    tiles_up_to: int = 20_000,
    repeats: int = 3,
    out: Path = Path("runs/speed/graph.json"),
) -> None:
    """A step of GRACE on all nodes, from views to gradients, against PyGCL's, by number of nodes.

    Args:
        graphs: Real graphs as the recipe takes them, at GRACE's widths.
        nodes: Sizes of generated graphs, ten edges and 64 features per node, 128 dimensions.
        dense_up_to: Largest graph for PyGCL and the dense loss, 0 to leave them out; PubMed's
            19,717 nodes would take over 40 GB.
        tiles_up_to: Largest graph for the tiled loss, whose time is quadratic in the nodes.
        repeats: Steps, of which the fastest is reported; one if a step takes long.
        out: File for the figures.
    """
    if dense_up_to:
        need("GCL")
    from tqdm import tqdm

    from ncl_multi.adapters.graph.data import load_graph
    from ncl_multi.report import table, write_json

    size = {name: int(load_graph(name).num_nodes) for name in graphs} | {str(n): n for n in nodes}
    limit = {"spectral": max(size.values()), "tiles": tiles_up_to}
    cases = [
        (name, loss)
        for name in (*graphs, *map(str, nodes))
        for loss in _GRAPH_LOSSES
        if size[name] <= limit.get(loss, dense_up_to) and (loss != "dense" or name not in graphs)
    ]
    rows = {}
    for name, loss in tqdm(cases, desc="graph", disable=None):
        few = 1 if size[name] > dense_up_to and loss != "spectral" else repeats
        step, cpu, value = apart(_graph_cost, name, loss, few)
        rows[f"{name} {loss}"] = {
            "s": step.seconds, "CPU s": cpu, "extra MB": step.extra_mb, "loss": value,
        }  # fmt: skip
        if loss == "PyGCL":
            rows[f"{name} tiles"]["of PyGCL"] = rows[f"{name} tiles"]["s"] / step.seconds
        write_json(out, rows)
    table("One step, all nodes negatives of all", rows)


def _graph_cost(name: str, loss: str, repeats: int) -> tuple[Cost, float, float]:
    """The cost of a step, its time on the processor, which other work changes little, the loss."""
    import torch

    from ncl_multi.adapters.graph.data import load_graph, prepare
    from ncl_multi.adapters.graph.model import NonNegGraph
    from ncl_multi.adapters.graph.views import view

    torch.manual_seed(0)
    data = _generated(int(name)) if name.isdigit() else load_graph(name)
    width = {"citeseer": 256, "pubmed": 256}.get(name, 128)
    model = NonNegGraph(width, in_dim=data.num_features, width=width, activation="none")
    whole, compare = model.view_of(prepare(data)), _GRAPH_LOSSES[loss]()
    values, cpu = [], []

    def step() -> None:
        start = time.process_time()
        torch.manual_seed(0)
        model.zero_grad()
        views = [view(*whole, edges=p, features=p) for p in (0.2, 0.4)]
        value = compare(*model(*views))
        value.backward()
        values.append(value.item())
        cpu.append(time.process_time() - start)

    return cost(step, repeats), min(cpu), values[0]


def _generated(nodes: int) -> Any:
    import torch
    from torch_geometric.data import Data

    edges = torch.randint(nodes, (2, 5 * nodes))
    return Data(x=torch.rand(nodes, 64), edge_index=torch.cat([edges, edges.flip(0)], dim=1))


def _tiles() -> Callable[..., Any]:
    from ncl_multi import info_nce

    return lambda za, zb: info_nce(za, zb, temperature=0.4, within_view=True)


def _one_tile() -> Callable[..., Any]:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    def loss(za, zb):
        z = normalize(torch.cat([za, zb]), dim=1)
        diagonal = torch.eye(len(z), dtype=torch.bool)
        partner = torch.arange(len(z)).roll(len(za))
        return cross_entropy((z @ z.T / 0.4).masked_fill(diagonal, float("-inf")), partner)

    return loss


def _pygcl() -> Callable[..., Any]:
    """PyGCL's GRACE, imported without `GCL/__init__.py`, which needs compiled packages."""
    from types import ModuleType

    package: Any = ModuleType("GCL")
    scatter: Any = ModuleType("torch_scatter")
    spec = find_spec("GCL")
    assert spec is not None
    package.__path__, scatter.scatter = list(spec.submodule_search_locations or ()), None
    sys.modules |= {"GCL": package, "torch_scatter": scatter}
    from GCL.losses import InfoNCE
    from GCL.models import DualBranchContrast

    return DualBranchContrast(InfoNCE(tau=0.4), mode="L2L", intraview_negs=True)


def _spectral() -> Callable[..., Any]:
    from ncl_multi import spectral

    return spectral


_GRAPH_LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "tiles": _tiles,
    "PyGCL": _pygcl,
    "dense": _one_tile,
    "spectral": _spectral,
}


if __name__ == "__main__":
    show_messages()
    tyro.cli(graph)

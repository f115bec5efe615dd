"""Graphs from anywhere, checked and made ready: PyG's datasets by name, files and objects."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.data import planetoid
from ncl_multi.data.fetch import cache, say, user_data
from ncl_multi.data.networks import KINDS, as_data, read_graph
from ncl_multi.files import DAMAGE, read_torch

try:
    from torch_geometric import datasets
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage
    from torch_geometric.utils import (
        is_undirected,
        remove_self_loops,
        to_torch_csr_tensor,
        to_undirected,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs torch-geometric: pip install 'ncl-multi[graph]'") from error

CLASSES: dict[str, list[str]] = {
    "cora": [
        "Theory",
        "Reinforcement learning",
        "Genetic algorithms",
        "Neural networks",
        "Probabilistic methods",
        "Case based",
        "Rule learning",
    ],
    "citeseer": ["AI", "Machine learning", "Retrieval", "Databases", "Agents", "HCI"],
    "pubmed": ["Experimental diabetes", "Type 1 diabetes", "Type 2 diabetes"],
}
"""What the labels of the Planetoid graphs mean, in order."""

# Rows that sum to one have entries so small that a few steps of the optimiser on the encoder's
# biases drown them.
_ROW_SUM = 20.0
_MOSTLY_ZERO = 0.03
_PARTS_OF_DATA = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]


def load_graph(name: str) -> Data:
    """`cora`, `citeseer`, `pubmed`; a PyG dataset; or a file.

    A PyG dataset is named by its class, and its own name after a colon where it has one:
    `KarateClub`, `Amazon:Photo`. A file is an edge list (csv, tsv, txt), GraphML, an adjacency
    matrix (`scipy.sparse.save_npz`) or a `Data` (`torch.save(data, path)`), which is read with
    `weights_only=True`: it cannot run code.
    """
    if name.lower() in CLASSES:
        return planetoid(name.lower())
    if Path(name).suffix in (".pt", ".pth"):
        return _saved(Path(name))
    if Path(name).suffix.lower() in KINDS or Path(name).exists():
        return read_graph(name)
    kind, _, part = name.partition(":")
    if kind not in datasets.__all__:
        raise ValueError(
            f"data must be cora, citeseer, pubmed, a dataset of torch_geometric.datasets such as "
            f"KarateClub or Amazon:Photo, or a file ({', '.join(KINDS)}, .pt with a saved Data); "
            f"got {name!r}, which is neither such a name nor a file that exists"
        )
    asked = inspect.signature(getattr(datasets, kind)).parameters
    if "name" in asked and asked["name"].default is inspect.Parameter.empty and not part:
        raise ValueError(f"{kind} holds several graphs: say which, as in Amazon:Photo")
    folder = (user_data("pyg") or cache() / "pyg") / name.replace(":", "-")
    options = {"root": str(folder)} if "root" in asked else {}
    dataset = getattr(datasets, kind)(**options, **({"name": part} if part else {}))
    if len(dataset) != 1:
        raise ValueError(f"{name} holds {len(dataset)} graphs; node codes are learnt on one")
    return dataset[0]


def prepare(data: Any, *, directed: bool = False) -> Data:
    """The graph as models take it, or an error that says what is wrong with it.

    A networkx graph and a scipy matrix are taken, too; nodes without features get their degree.

    Self-loops go, since every encoder here adds a node to its own neighbourhood; edges are made to
    run both ways unless `directed`; non-negative features, such as word counts, are scaled to one
    sum a row. A node without edges is a graph of its own; edge weights are not used. Doing it twice
    changes nothing.
    """
    if not isinstance(data, Data) or (data.x is None and data.edge_index is not None):
        data = as_data(data)
    check(data)
    edge_index, _ = remove_self_loops(data.edge_index)
    if not directed and not is_undirected(edge_index, num_nodes=data.num_nodes):
        say("directed edges are made to run both ways")
        edge_index = to_undirected(edge_index, num_nodes=data.num_nodes)
    ready = Data(x=data.x.float(), edge_index=edge_index, y=_labels(data))
    if ready.x.min() >= 0:
        ready.x = _ROW_SUM * F.normalize(ready.x, p=1.0, dim=1)
    for mask in ("train_mask", "val_mask", "test_mask"):
        # Datasets that come with several public splits keep them as columns: the first is taken.
        if mask in data and data[mask] is not None:
            ready[mask] = data[mask] if data[mask].ndim == 1 else data[mask][:, 0]
    return ready


def check(data: Any) -> None:
    """Refuse a graph on which training would fail or mean nothing."""
    x, edge_index = getattr(data, "x", None), getattr(data, "edge_index", None)
    if not isinstance(data, Data) or not isinstance(edge_index, Tensor):
        raise ValueError(
            f"a graph is a torch_geometric.data.Data with x (nodes, features) and edge_index "
            f"(2, edges); got {data if isinstance(data, Data) else type(data).__name__}"
        )
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"nodes need features, x of shape (nodes, features); got "
            f"{tuple(x.shape) if isinstance(x, Tensor) else x}. "
            f"torch_geometric.transforms.Constant or LocalDegreeProfile make some"
        )
    if len(x) < 2:
        raise ValueError(f"the graph is empty: at least two nodes are needed; got {len(x)}")
    bad = (~x.isfinite()).any(dim=1).nonzero()[:, 0]
    if len(bad):
        raise ValueError(
            f"features of {len(bad)} nodes hold NaN or infinity, the first is node {bad[0]}; "
            f"fill them in or leave the nodes out"
        )
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"edge_index must be int64 of shape (2, edges); got {edge_index.dtype} of shape "
            f"{tuple(edge_index.shape)}"
        )
    if edge_index.numel() and not 0 <= edge_index.min() <= edge_index.max() < len(x):
        raise ValueError(
            f"edges must join nodes 0..{len(x) - 1}; got {edge_index.min()}..{edge_index.max()}"
        )
    y = data.y
    if y is None:
        return
    if not isinstance(y, Tensor) or y.ndim == 0 or len(y) != len(x):
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"labels must be a tensor with one per node, {len(x)}; got {got}")
    if y[0].numel() == 1 and y.max() >= len(x):
        raise ValueError(
            f"labels must be class numbers below the number of nodes, {len(x)}; got "
            f"{y.max().item()}. Number the classes from 0"
        )


def lean(x: Tensor) -> Tensor:
    """Features that are nearly all zero, such as words, as sparse rows; others as they are."""
    if x.count_nonzero() > _MOSTLY_ZERO * x.numel():
        return x
    with _no_word_of_beta():
        return x.to_sparse_csr()


def adjacency(edge_index: Tensor, x: Tensor) -> Tensor:
    """Who sends to each node, a row a node, for a product with `x`: PyG wants it transposed."""
    ones = torch.ones(edge_index.shape[1], dtype=x.dtype, device=x.device)
    with _no_word_of_beta():
        return to_torch_csr_tensor(edge_index.flip(0), ones, size=(len(x), len(x)))


@contextmanager
def _no_word_of_beta() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        yield


def describe(name: str, data: Data, source: Data) -> tuple[list[str], list[str] | None]:
    """What a person reads of each node: its text if the graph has one, else label and number."""
    for key in ("text", "raw_text", "raw_texts", "title"):
        texts = source.get(key, None)
        if isinstance(texts, list) and len(texts) == data.num_nodes:
            return [str(text) for text in texts], CLASSES.get(name.lower())
    if data.y is None:
        return [f"node {node}" for node in range(data.num_nodes)], None
    classes = CLASSES.get(name.lower()) or [f"class {c}" for c in range(int(data.y.max()) + 1)]
    labels = ["unlabelled" if label < 0 else classes[label] for label in data.y.tolist()]
    return [f"{label}, node {node}" for node, label in enumerate(labels)], classes


def _saved(path: Path) -> Data:
    try:
        data = read_torch(path, _PARTS_OF_DATA)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}; write one with torch.save(data, path)") from None
    _check_whole(data, path)
    try:
        if isinstance(data, Data):
            data = as_data(data)
        check(data)
    except DAMAGE as error:
        raise ValueError(f"{path}: {error}") from error
    return data


def _check_whole(data: Any, path: Path) -> None:
    """Refuse tensors that claim more numbers than they store, and a Data object in pieces."""
    try:
        parts = data.to_dict().items() if isinstance(data, Data) else ()
    except DAMAGE as error:
        raise ValueError(f"{path} contains a damaged Data object: {error}") from error
    for name, part in parts:
        if isinstance(part, Tensor) and (
            part.layout != torch.strided
            or part.device.type != "cpu"
            or part.numel() * part.element_size() > part.untyped_storage().nbytes()
        ):
            raise ValueError(
                f"{path}: {name} of shape {tuple(part.shape)} is not stored whole; save "
                f"data.{name}.clone()"
            )


def _labels(data: Data) -> Tensor | None:
    """Class labels as integers; -1 where one is missing. None where they are no classes."""
    y = data.y
    if y is None:
        return None
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        say(f"labels of shape {tuple(y.shape)} are not one class a node; going on without")
        return None
    return y.nan_to_num(-1).long() if y.is_floating_point() else y.long()

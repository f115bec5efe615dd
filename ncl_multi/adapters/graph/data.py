"""Graphs from anywhere, checked and made ready: PyG's data sets by name, files and objects."""

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.data import planetoid
from ncl_multi.data.fetch import cache, user_data
from ncl_multi.data.networks import KINDS, as_data, degree_features, read_graph
from ncl_multi.files import DAMAGE, read_torch
from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric import datasets
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage
    from torch_geometric.io import read_npz
    from torch_geometric.utils import (
        coalesce,
        is_undirected,
        to_torch_csr_tensor,
        to_undirected,
    )

log = logging.getLogger(__name__)

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
_PIECE = 1 << 24
"""Features that are looked at together: temporary copies stay small."""
_PARTS_OF_DATA = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]


def load_graph(name: str) -> Data:
    """`cora`, `citeseer`, `pubmed`; a PyG dataset; or a file.

    A PyG dataset is named by its class, and its own name after a colon where it has one:
    `KarateClub`, `Amazon:Photo`; NCL_DATA/graphs/amazon_photo.npz is taken first. A file is an edge
    list (csv, tsv, txt), GraphML, an adjacency matrix (`scipy.sparse.save_npz`) or a `Data`
    (`torch.save(data, path)`), which is read with `weights_only=True`: it cannot run code.
    """
    if name.lower() in CLASSES:
        return planetoid(name.lower())
    if Path(name).suffix in (".pt", ".pth"):
        return _saved(Path(name))
    if Path(name).suffix.lower() in KINDS or Path(name).exists():
        return read_graph(name)
    kind, _, graph = name.partition(":")
    if kind not in datasets.__all__:
        raise ValueError(
            f"data must be cora, citeseer, pubmed, a dataset of torch_geometric.datasets such as "
            f"KarateClub or Amazon:Photo, or a file ({', '.join(KINDS)}, .pt with a saved Data); "
            f"got {name!r}, which is neither such a name nor a file that exists"
        )
    parameters = inspect.signature(getattr(datasets, kind)).parameters
    if "name" in parameters and parameters["name"].default is inspect.Parameter.empty and not graph:
        raise ValueError(f"{kind} contains several graphs: name one, as in Amazon:Photo")
    user_folder = user_data("graphs")
    if user_folder and (user_folder / f"{kind}_{graph}.npz".lower()).exists():
        log.info(f"{name} from {user_folder}")
        return read_npz(str(user_folder / f"{kind}_{graph}.npz".lower()), to_undirected=True)
    folder = (user_data("pyg") or cache() / "pyg") / name.replace(":", "-")
    options = {"root": str(folder)} if "root" in parameters else {}
    dataset = getattr(datasets, kind)(**options, **({"name": graph} if graph else {}))
    if len(dataset) != 1:
        raise ValueError(f"{name} contains {len(dataset)} graphs; node codes are learnt on one")
    return dataset[0]


def prepare(data: Any, *, directed: bool = False) -> Data:
    """The graph as models take it, or an error that says what is wrong with it.

    A networkx graph or a scipy matrix is accepted, too. If all features are missing or zero, they
    are made from the degrees.

    Self-loops are removed, since every encoder here adds a node to its own neighbourhood. Duplicate
    edges are merged: weights (`edge_weight`) are added, features (`edge_attr`) averaged. Edges are
    made to run both ways unless `directed`. Features are not copied, so they may be mapped from a
    file (`torch.from_file`); sparse ones are made dense. Calling it twice changes nothing.
    """
    if isinstance(data, HeteroData):
        raise ValueError(
            "a graph with several kinds of nodes or edges (HeteroData) is not supported: call "
            "data.to_homogeneous() if all nodes have the same features"
        )
    if not isinstance(data, Data) or (data.x is None and data.edge_index is not None):
        data = as_data(data)
    data = _with_dense_features(data)
    check(data)
    nodes = len(data.x)
    ready = Data(x=data.x, edge_index=data.edge_index, y=_labels(data))
    edge_index, values = _edges(data, directed)
    ready.update({"edge_index": edge_index, **values})
    largest, smallest = _extremes(data.x)
    if largest == smallest == 0:
        log.warning("the features of all nodes are zero: those of their degree are used")
        ready.x, smallest = degree_features(edge_index, nodes), 0.0
    ready.counts = smallest >= 0
    for mask in ("train_mask", "val_mask", "test_mask"):
        # Datasets that come with several public splits keep them as columns: the first is taken.
        if mask in data and data[mask] is not None:
            ready[mask] = data[mask] if data[mask].ndim == 1 else data[mask][:, 0]
    return ready


def encoder_input(data: Data, *, sparse: bool = False) -> Tensor:
    """Features of a prepared graph or a part of it: non-negative ones with equal row sums.

    Features that are nearly all zero, such as words, become sparse rows if `sparse`.
    """
    x = data.x.float()
    if sparse and x.count_nonzero() <= _MOSTLY_ZERO * x.numel():
        with _no_word_of_beta():
            x = x.to_sparse_csr()
    if not data.counts:
        return x
    if x.layout != torch.sparse_csr:
        return _ROW_SUM * F.normalize(x, p=1.0, dim=1)
    scale = _ROW_SUM / data.x.sum(dim=1).clamp_min(1e-12).to(x.dtype)
    values = x.values() * scale.repeat_interleave(x.crow_indices().diff())
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )


def _with_dense_features(data: Data) -> Data:
    """The graph itself, or a shallow copy with dense features if they are a sparse tensor."""
    x = data.x
    if not isinstance(x, Tensor) or x.layout == torch.strided:
        return data
    data = copy(data)
    data.x = x.to_dense()
    return data


def _edges(data: Data, directed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Edges without loops and duplicates, both ways unless directed; their weights and features."""
    edge_index, nodes = data.edge_index, len(data.x)
    values = _edge_values(data)
    loops = edge_index[0] == edge_index[1]
    if loops.any():
        edge_index = edge_index[:, ~loops]
        values = {name: value[~loops] for name, value in values.items()}
    merged = coalesce(edge_index, num_nodes=nodes)
    double = edge_index.shape[1] - merged.shape[1]
    if double:
        log.warning(f"{double} edges occur more than once: each is used once")
    names = list(values)
    how = ["sum" if name == "edge_weight" else "mean" for name in names]
    merged_values = {
        name: coalesce(edge_index, values[name], num_nodes=nodes, reduce=reduce)[1]
        for name, reduce in zip(names, how, strict=True)
    }
    if directed or is_undirected(merged, num_nodes=nodes):
        return merged, merged_values
    log.info("directed edges are made to run both ways")
    if not merged_values:
        return to_undirected(merged, num_nodes=nodes), {}
    both = {
        name: to_undirected(merged, value, num_nodes=nodes, reduce="mean")
        for name, value in merged_values.items()
    }
    return next(iter(both.values()))[0], {name: value for name, (_, value) in both.items()}


def _edge_values(data: Data) -> dict[str, Tensor]:
    """Weights and features of the edges; features of one column are weights."""
    weight, features = data.get("edge_weight", None), data.get("edge_attr", None)
    values = {}
    for name, tensor in (("edge_weight", weight), ("edge_attr", features)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or len(tensor) != data.edge_index.shape[1]:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{name} must be a tensor with one row per edge, {data.edge_index.shape[1]}; "
                f"got {got}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{name} contains NaN or infinity")
        values[name] = tensor.float()
    narrow = values.get("edge_attr")
    if narrow is not None and narrow.ndim == 1:
        narrow = values["edge_attr"] = narrow[:, None]
    if narrow is not None and narrow.shape[1] == 1 and "edge_weight" not in values:
        values["edge_weight"] = narrow[:, 0]
    if "edge_weight" in values and (values["edge_weight"] < 0).any():
        raise ValueError("edge_weight must not be negative")
    return values


def _extremes(x: Tensor) -> tuple[float, float]:
    """Largest and smallest feature, in pieces: features may be mapped from a file."""
    pieces = [piece.aminmax() for piece in _pieces(x)]
    return max(float(p.max) for p in pieces), min(float(p.min) for p in pieces)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(max(1, _PIECE // x.shape[1]))


def check(data: Any) -> None:
    """Refuse a graph on which training would fail or be meaningless."""
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
            f"torch_geometric.transforms.Constant or LocalDegreeProfile make features"
        )
    if len(x) < 2:
        raise ValueError(f"a graph needs at least two nodes; got {len(x)}")
    bad = torch.cat([(~rows.isfinite()).any(dim=1) for rows in _pieces(x)]).nonzero()[:, 0]
    if len(bad):
        raise ValueError(
            f"features of {len(bad)} nodes contain NaN or infinity, first node {bad[0]}; "
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


def adjacency(
    edge_index: Tensor, x: Tensor, weight: Tensor | None = None, targets: Tensor | None = None
) -> Tensor:
    """The transposed adjacency matrix, one row per receiving node, for a product with `x`.

    With `targets` only these receive, and edges number them in their order.
    """
    if weight is None:
        weight = torch.ones(edge_index.shape[1], dtype=x.dtype, device=x.device)
    with _no_word_of_beta():
        return to_torch_csr_tensor(
            edge_index.flip(0), weight.to(x), size=(len(x if targets is None else targets), len(x))
        )


@contextmanager
def _no_word_of_beta() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        yield


class Nodes(NamedTuple):
    """A text for each node, the names of the classes, and words to name dimensions."""

    items: list[str]
    classes: list[str] | None
    words: list[str] | None


def describe(name: str, data: Data, source: Data) -> Nodes:
    """Texts of the nodes if the graph has them, else their label, number and named features.

    `source.feature_names`, one for each column of `x`, are the words of the nodes that have them.
    """
    nodes, y = int(data.num_nodes), data.y
    classes = CLASSES.get(name.lower())
    if y is not None and (y >= 0).any():
        classes = classes or [f"class {c}" for c in range(int(y.max()) + 1)]
    for key in ("text", "raw_text", "raw_texts", "title"):
        texts = source.get(key, None)
        if isinstance(texts, list) and len(texts) == nodes:
            return Nodes([str(text) for text in texts], classes, [str(text) for text in texts])
    items = [f"node {node}" for node in range(nodes)]
    if y is not None and classes is not None:
        labels = ["unlabelled" if label < 0 else classes[label] for label in y.tolist()]
        items = [f"{label}, {item}" for label, item in zip(labels, items, strict=True)]
    words = _feature_words(data.x, source.get("feature_names", None))
    if words is not None:
        items = [
            f"{item}: {terms}" if terms else item for item, terms in zip(items, words, strict=True)
        ]
    return Nodes(items, classes, words)


def _feature_words(x: Tensor, names: Any, most: int = 12) -> list[str] | None:
    """The named features that a node has more of than most nodes, the most typical first."""
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != x.shape[1]:
        got = len(names) if isinstance(names, list) else type(names).__name__
        raise ValueError(f"feature_names must be a list of {x.shape[1]} names; got {got}")
    usual, spread = x.float().mean(dim=0), x.float().std(dim=0).clamp_min(1e-9)
    words = []
    for row in _pieces(x):
        more = (row.float() - usual) / spread * (row != 0)
        best = more.topk(min(most, len(names)), dim=1)
        words += [
            ", ".join(
                str(names[column]) for column, size in zip(columns, sizes, strict=True) if size > 0
            )
            for columns, sizes in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    return words


def _saved(path: Path) -> Data:
    try:
        data = read_torch(path, _PARTS_OF_DATA)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}; write one with torch.save(data, path)") from None
    try:
        if isinstance(data, Data):
            data = as_data(data)
        check(data)
    except DAMAGE as error:
        raise ValueError(f"{path}: {error}") from error
    return data


def _labels(data: Data) -> Tensor | None:
    """Class labels as integers; -1 where one is missing. None where they are not classes."""
    y = data.y
    if y is None:
        return None
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        log.warning(
            f"labels of shape {tuple(y.shape)} are not one class per node, so they are not used"
        )
        return None
    return y.nan_to_num(-1).long() if y.is_floating_point() else y.long()

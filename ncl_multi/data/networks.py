"""Graphs from anywhere: edge lists, GraphML, adjacency matrices and networkx become PyG `Data`."""

import logging
import re
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_array, issparse, load_npz
from torch import Tensor

from ncl_multi.data.cells import decode, delimited
from ncl_multi.files import DAMAGE, check_zip
from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric.data import Data
    from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

log = logging.getLogger(__name__)

EDGE_LISTS = (".csv", ".tsv", ".txt", ".edges", ".edgelist")
KINDS = (*EDGE_LISTS, ".graphml", ".npz")
"""Endings of the files that are read."""

_ENDS = (
    ("source", "target"), ("src", "dst"), ("from", "to"), ("u", "v"), ("node1", "node2"),
    ("node_1", "node_2"), ("id1", "id2"), ("id_1", "id_2"), ("start", "end"), ("head", "tail"),
    ("citing", "cited"),
)  # fmt: skip
_NAMES = ("text", "title", "name", "label")
_USED = {"x", "y", *_NAMES}
# Types of GraphML; all others are texts.
_CONVERT: dict[str, Callable[[str], Any]] = {
    "int": int, "long": int, "float": float, "double": float,
    "boolean": lambda text: text.strip().lower() == "true",
}  # fmt: skip
_LEAST = 10
_DEGREES = 24
_MOST_NODES = 2**31
_WITHOUT_EDGES = 2**17
"""Most nodes without edges, beyond twice the edges: features are made for each node."""


def read_graph(path: str | Path) -> Data:
    r"""Read an edge list, GraphML, or an adjacency matrix written by `scipy.sparse.save_npz`.

    An edge list has one edge per line, split by commas, semicolons, tabs, bars or spaces, with or
    without a header line; lines that start with # or % are comments. Its edges run one way, as
    they are written. Names of nodes are kept as `text`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "friends.csv"
        >>> _ = path.write_text("source,target\n" + "".join(f"p{i},p{i + 1}\n" for i in range(9)))
        >>> data = read_graph(path)
        >>> data.num_nodes, data.num_edges, data.text[0]
        (10, 9, 'p0')
    """
    path = Path(path)
    kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; graphs are files that end in {kinds}")
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"files of graphs must end in {kinds}; got {path}")
    reader = {".graphml": _graphml, ".npz": _adjacency_file}.get(kind, _edge_list)
    graph = reader(path)
    try:
        data = as_data(graph)
    except DAMAGE as error:
        raise ValueError(f"{path}: {error}") from error
    if data.num_nodes < _LEAST:
        raise ValueError(f"{path} has {data.num_nodes} nodes; at least {_LEAST} are needed")
    return data


def as_data(graph: Any) -> Data:
    """A PyG `Data`, networkx graph or square scipy matrix as `Data` with features.

    Duplicate edges are merged and nodes without features get degree features; both are logged. The
    `x` and `y` of networkx nodes are used as features and labels, and `text`, `title`, `name` or
    `label` as their names. Weights of edges are not used.

    Example:
        >>> data = as_data(coo_array(([1, 1], ([0, 1], [1, 2])), shape=(3, 3)))
        >>> data.edge_index.tolist(), data.x.shape
        ([[0, 1], [1, 2]], torch.Size([3, 48]))
    """
    if isinstance(graph, Data):
        data = copy(graph)
    elif issparse(graph):
        data = _from_adjacency(graph)
    elif hasattr(graph, "is_multigraph") and hasattr(graph, "nodes"):
        data = _from_networkx(graph)
    else:
        raise ValueError(
            f"a graph is a torch_geometric.data.Data, a networkx graph or a scipy sparse matrix; "
            f"got {type(graph).__name__}"
        )
    edges = data.edge_index
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64 or edges.ndim != 2:
        return data
    nodes = _count_nodes(data)
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < _MOST_NODES:
        raise ValueError(
            f"nodes must be numbers below {_MOST_NODES}; got {int(edges.min())} to "
            f"{int(edges.max())}"
        )
    if data.x is None and nodes > 2 * data.num_edges + _WITHOUT_EDGES:
        raise ValueError(
            f"the graph has {nodes} nodes and only {data.num_edges} edges: leave out nodes without "
            f"edges, or number the others from 0"
        )
    data = _without_double_edges(data)
    if data.x is None:
        log.info(f"the {nodes} nodes have no features: those of their degree are used")
        data.x = degree_features(data.edge_index, nodes)
    return data


def degree_features(edge_index: Int[Tensor, "2 e"], nodes: int) -> Float[Tensor, "n d"]:
    """Features of nodes that have none: their degree, and the degrees of their neighbours.

    Degrees are put into 24 bins, two for each doubling: the first half of a row marks the bin of
    the node, the second the share of its neighbours in each bin. Direction, loops and double edges
    do not count.

    Example:
        >>> degree_features(torch.tensor([[0, 0], [1, 2]]), 3).nonzero()[:, 1].tolist()
        [3, 26, 2, 27, 2, 27]
    """
    edges, _ = remove_self_loops(edge_index)
    source, target = to_undirected(edges, num_nodes=nodes)
    degree = torch.bincount(target, minlength=nodes)
    bins = (2 * (1 + degree).double().log2()).floor().long().clamp(max=_DEGREES - 1)
    x = torch.zeros(nodes, 2 * _DEGREES)
    x.scatter_(1, bins[:, None], 1)
    # Added one by one: a table of a row per edge would be much larger than the graph.
    place = target * (2 * _DEGREES) + _DEGREES + bins[source]
    x.view(-1).scatter_add_(0, place, torch.ones(1).expand(len(place)))
    x[:, _DEGREES:] /= degree.clamp_min(1)[:, None]
    return x


def _without_double_edges(data: Data) -> Data:
    merged = coalesce(data.edge_index, num_nodes=_count_nodes(data))
    double = data.num_edges - merged.shape[1]
    if double:
        log.warning(f"{double} edges occur more than once: each is used once")
        for weights in ("edge_attr", "edge_weight"):
            if weights in data:
                del data[weights]
        data.edge_index = merged
    return data


def _count_nodes(data: Data) -> int:
    """Number of nodes of a graph; PyG warns when it guesses, so the guess is made here."""
    counts = [len(t) for t in (data.x, data.y) if isinstance(t, Tensor)]
    if isinstance(data.get("num_nodes"), int):
        counts.append(data["num_nodes"])
    seen = int(data.edge_index.max()) + 1 if data.edge_index.numel() else 0
    return max(seen, *counts[:1]) if counts else seen


def _edge_list(path: Path) -> Data:
    text, notices = decode(path)
    for notice in notices:
        log.info(f"{path}: {notice}")
    # Comments become empty lines, so that line numbers stay right.
    text = re.sub(r"(?m)^[ \t]*[#%].*$", "", text)
    rows = _rows(text, str(path))
    if not rows:
        raise ValueError(f"{path} has no edges: expected two nodes per line, such as source,target")
    columns, rows, weights = _ends(rows, path)
    pairs = []
    for line, row in rows:
        pair = [row[column].strip() for column in columns]
        if not all(pair):
            raise ValueError(f"line {line} of {path} lacks one end of the edge; got {row}")
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} has a header line but no edges")
    names = list(dict.fromkeys(node for pair in pairs for node in pair))
    if all(map(_is_number, names)):
        names.sort(key=int)
    place = {name: number for number, name in enumerate(names)}
    edge_index = torch.tensor([[place[node] for node in pair] for pair in pairs]).T.contiguous()
    ignored = " (weights are not used)" if weights else ""
    log.info(f"{path}: {len(pairs)} edges, {len(names)} nodes; first edge {pairs[0]}{ignored}")
    texts = [f"node {name}" if _is_number(name) else name for name in names]
    return Data(edge_index=edge_index, num_nodes=len(names), text=texts)


def _rows(text: str, source: str) -> list[tuple[int, list[str]]]:
    """Cells of each line, split by a delimiter or by spaces."""
    first = text.strip().split("\n", 1)[0]
    if re.search(r"[,;|\t]", first):
        return delimited(text, source)
    lines = ((number, line.split()) for number, line in enumerate(text.split("\n"), 1))
    rows = [(number, cells) for number, cells in lines if cells]
    for number, cells in rows:
        if len(cells) != len(rows[0][1]):
            raise ValueError(
                f"{source}: line {number} has {len(cells)} cells where the first line has "
                f"{len(rows[0][1])}"
            )
    return rows


def _ends(
    rows: list[tuple[int, list[str]]], path: Path
) -> tuple[tuple[int, int], list[tuple[int, list[str]]], bool]:
    """Columns of the two ends, the rows without the header, and whether there are weights."""
    first, data_rows = rows[0][1], rows[1:]
    names = [re.sub(r"[\s\-]+", "_", cell.strip().lower()) for cell in first]
    for ends in _ENDS:
        if all(names.count(end) == 1 for end in ends):
            return (names.index(ends[0]), names.index(ends[1])), data_rows, len(first) > 2
    advice = "Name the columns source and target in the first line"
    weighted = len(first) == 3 and all(_is_float(row[2]) for _, row in data_rows)
    if len(first) != 2 and not weighted:
        raise ValueError(
            f"{path} must have two columns, the ends of each edge, and perhaps weights; got "
            f"{first}. {advice}"
        )
    if all(map(_is_number, first[:2])):
        return (0, 1), rows, weighted
    nodes = {cell for _, row in data_rows for cell in row[:2]}
    if data_rows and all(map(_is_number, nodes)):
        return (0, 1), data_rows, weighted
    if nodes.isdisjoint(first[:2]):
        raise ValueError(f"is the first line of {path} an edge? Got {first}. {advice}")
    return (0, 1), rows, weighted


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\s*-?[0-9]+\s*", cell) is not None


def _is_float(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _graphml(path: Path) -> Data:
    try:
        return _GraphML().read(path)
    except (*DAMAGE, expat.ExpatError) as error:
        raise ValueError(f"{path} is not a whole GraphML file: {error}") from error


class _GraphML:
    """A GraphML file, read as a stream: a tree of it takes a hundred times its size."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._ends = array("q")
        self._values: dict[str, dict[int, Any]] = {}
        self._directed: bool | None = None
        self._keys: dict[str | None, tuple[str, str]] = {}
        # The nodes that are open, one inside the other; -1 is an edge.
        self._open: list[int] = []
        self._key: tuple[str, str] | None = None
        self._text: list[str] = []

    def read(self, path: Path) -> Data:
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._doctype
        with path.open("rb") as file:
            parser.ParseFile(file)
        if self._directed is None:
            raise ValueError("it contains no graph")
        edge_index = torch.from_numpy(np.array(self._ends, np.int64)).view(-1, 2).T.contiguous()
        return _from_parts(list(self._place), edge_index, self._directed, self._values)

    def _start(self, name: str, about: dict[str, str]) -> None:
        name = name.rpartition(" ")[2]
        if name == "key":
            called = about.get("attr.name", about.get("yfiles.type", ""))
            self._keys[about.get("id")] = (called, about.get("attr.type", "string"))
        elif name == "graph":
            if self._directed is not None and not self._open:
                raise ValueError("it contains more than one graph")
            self._directed = about.get("edgedefault") == "directed"
        elif name == "node":
            self._open.append(self._node(about["id"]))
        elif name == "edge":
            self._ends.extend((self._node(about["source"]), self._node(about["target"])))
            self._open.append(-1)
            if about.get("directed", str(self._directed)).lower() != str(self._directed).lower():
                raise ValueError("some of its edges are directed, and some are not")
        elif name == "hyperedge":
            raise ValueError("it has hyperedges, which join more than two nodes")
        elif name == "data" and self._open:
            self._key = self._keys[about.get("key")]
        elif name == "NodeLabel" and self._open:  # As yEd writes it, inside the data of a node.
            self._key, self._text = ("label", "string"), []

    def _end(self, name: str) -> None:
        name = name.rpartition(" ")[2]
        if name in ("node", "edge"):
            self._open.pop()
        elif name in ("data", "NodeLabel") and self._key and self._open:
            (called, kind), text = self._key, "".join(self._text)
            if self._open[-1] < 0:
                called = "weight" if called == "weight" else ""
            if called:
                value = _CONVERT.get(kind, str)(text) if called in _USED else True
                self._values.setdefault(called, {})[self._open[-1]] = value
            self._key, self._text = None, []

    def _characters(self, text: str) -> None:
        if self._key and self._key[0] in _USED:
            self._text.append(text)

    def _doctype(self, *given: Any) -> None:
        raise ValueError("it declares a type of its own (DOCTYPE)")

    def _node(self, name: str) -> int:
        return self._place.setdefault(name, len(self._place))


def _adjacency_file(path: Path) -> Any:
    try:
        check_zip(path)
        with path.open("rb") as file:
            matrix = load_npz(file)
        if matrix.format not in ("coo", "csc", "csr"):
            raise ValueError(f"its format is {matrix.format}; expected coo, csc or csr")
        if matrix.format != "coo":
            # scipy checks only the ends, and could write outside of its arrays.
            matrix.check_format(full_check=True)
        return matrix
    except DAMAGE as error:
        raise ValueError(
            f"{path} is not an adjacency matrix; write one with scipy.sparse.save_npz ({error})"
        ) from error


def _from_adjacency(matrix: Any) -> Data:
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"an adjacency matrix must be square; got {matrix.shape}")
    entries = coo_array(matrix)
    if entries.data.dtype.kind in "fc" and not np.isfinite(entries.data).all():
        row = int(entries.row[~np.isfinite(entries.data)].min())
        raise ValueError(f"an adjacency matrix must be finite; row {row} contains NaN or infinity")
    entries.eliminate_zeros()
    if (entries.data != 1).any():
        log.warning("weights of edges are not used")
    edge_index = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    return Data(edge_index=edge_index, num_nodes=matrix.shape[0])


def _from_networkx(graph: Any) -> Data:
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    pairs = [(place[a], place[b]) for a, b in graph.edges()]
    edge_index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()
    values: dict[str, dict[int, Any]] = {}
    if any("weight" in about for *_, about in graph.edges(data=True)):
        values["weight"] = {-1: True}
    for number, node in enumerate(nodes):
        for key, value in graph.nodes[node].items():
            if value is not None:
                values.setdefault(str(key), {})[number] = value
    return _from_parts(nodes, edge_index, graph.is_directed(), values)


def _from_parts(
    nodes: Sequence[Any],
    edge_index: Tensor,
    directed: bool,
    values: dict[str, dict[int, Any]],
) -> Data:
    """A graph whose nodes have these values, by attribute and place; edges have the place -1."""
    if values.get("weight", {}).pop(-1, None):
        log.warning("weights of edges are not used")
    data = Data(edge_index=edge_index, num_nodes=len(nodes), text=_names(nodes, values))
    if not directed:
        # Merged first, so that only duplicates of a multigraph are counted, not the way back.
        data = _without_double_edges(data)
        data.edge_index = to_undirected(data.edge_index, num_nodes=len(nodes))
    unused = sorted(key for key, of_nodes in values.items() if of_nodes and key not in _USED)
    if unused:
        log.warning(f"not used of the nodes: {', '.join(unused)}")
    for key in ("x", "y"):
        of_nodes = values.get(key, {})
        if not of_nodes:
            continue
        lacking = [node for number, node in enumerate(nodes) if number not in of_nodes]
        if lacking:
            raise ValueError(
                f"{len(lacking)} nodes have no {key} but others do, first {lacking[0]!r}"
            )
        ordered = [of_nodes[number] for number in range(len(nodes))]
        data[key] = _features(ordered) if key == "x" else _classes(ordered)
    return data


def _names(nodes: Sequence[Any], values: dict[str, dict[int, Any]]) -> list[str]:
    """A text for each node: the first name attribute that every node has, or its key."""
    for key in _NAMES:
        texts = values.get(key, {})
        if nodes and len(texts) == len(nodes):
            named = [texts[number] for number in range(len(nodes))]
            if all(isinstance(text, str) and text.strip() for text in named):
                return named
    return [f"node {node}" if _is_number(str(node)) else str(node) for node in nodes]


def _features(values: Sequence[Any]) -> Tensor:
    try:
        return torch.from_numpy(np.array([np.atleast_1d(v) for v in values]).astype(np.float32))
    except (ValueError, TypeError) as error:
        raise ValueError(f"x of nodes must be numbers, as many for each node: {error}") from error


def _classes(values: Sequence[Any]) -> Tensor:
    """Labels as they are if they are whole numbers, else numbered in alphabetical order."""
    if all(isinstance(value, (int, np.integer)) for value in values):
        return torch.tensor([int(value) for value in values])
    names = sorted({str(value) for value in values})
    log.info(f"labels {', '.join(names[:5])}{', ...' * (len(names) > 5)} are numbered from 0")
    number = {name: place for place, name in enumerate(names)}
    return torch.tensor([number[str(value)] for value in values])

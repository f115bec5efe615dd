"""How fast and how lean? Time and peak extra memory, each case in its own process.

Usage:
    python evals/speed.py losses
    python evals/speed.py losses --rivals-up-to 32768   # the dense losses need 17 GB there
    python evals/speed.py graph
    python evals/speed.py search
    python evals/speed.py views
    python evals/speed.py stream
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import tyro


def need(*modules: str) -> None:
    """End with what to install if one of those that ours stands beside is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        sys.exit(f"needs {', '.join(missing)}: pip install -e '.[bench]'")


class Cost(NamedTuple):
    """What a call costs: the fastest of several, and the most memory beyond what it was given."""

    seconds: float
    extra_mb: float


def losses(
    sizes: tuple[tuple[int, int], ...] = ((256, 512), (2048, 512), (8192, 512), (32768, 256)),
    linear_sizes: tuple[tuple[int, int], ...] = ((32768, 512), (65536, 512)),
    rivals_up_to: int = 16384,
    repeats: int = 3,
    out: Path = Path("runs/speed/losses.json"),
) -> None:
    """Forward and backward of every loss beside open_clip's, lightly's and a plain dense one.

    Args:
        sizes: Rows and dimensions of the two views.
        linear_sizes: The same for `spectral`, which has no n x n matrix to make.
        rivals_up_to: Side of the largest matrix the others may keep: n, or 2n for lightly's.
        repeats: Calls of which the fastest counts.
        out: File for the figures.
    """
    need("open_clip", "lightly")
    from tqdm import tqdm

    from ncl_multi.report import table, write_json

    cases = [
        (name, n, d)
        for n, d in sizes
        for name in _LOSSES
        if name != "spectral"
        and (name.startswith("ours") or n * (1 + name.startswith("lightly")) <= rivals_up_to)
    ]
    cases += [("spectral", n, d) for n, d in linear_sizes]
    rows, bare = {}, {}
    for name, n, d in tqdm(cases, desc="losses", disable=None):
        if (n, d) not in bare:
            bare[n, d] = apart(_bare, n, d, name == "spectral", repeats).seconds
        cost = apart(_loss_cost, name, n, d, repeats)
        rows[f"n={n} d={d} {name}"] = {
            "ms": cost.seconds * 1e3,
            "products": cost.seconds / bare[n, d],
            "extra MB": cost.extra_mb,
        }
    table("One n x n x d product is the unit; for spectral, two Gram products d x d x n", rows)
    write_json(out, rows)


def graph(
    graphs: tuple[str, ...] = ("cora", "citeseer", "pubmed"),
    nodes: tuple[int, ...] = (5_000, 20_000, 200_000),
    dense_up_to: int = 6_000,
    tiles_up_to: int = 20_000,
    repeats: int = 3,
    out: Path = Path("runs/speed/graph.json"),
) -> None:
    """A step of GRACE on all nodes, views to gradients, beside PyGCL's; growth with the nodes.

    Args:
        graphs: Real graphs, at GRACE's widths.
        nodes: Sizes of generated graphs, ten edges and 64 features a node, 128 dimensions.
        dense_up_to: Most nodes for PyGCL and the dense loss; PubMed's 19,717 would take over 40 GB.
        tiles_up_to: Most nodes for the loss in tiles, whose time grows with their square.
        repeats: Steps of which the fastest counts; one where a step takes long.
        out: File for the figures.
    """
    need("GCL")
    from tqdm import tqdm

    from ncl_multi.report import table, write_json

    size = {"cora": 2_708, "citeseer": 3_327, "pubmed": 19_717} | {str(n): n for n in nodes}
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
        step, value = apart(_graph_cost, name, loss, few)
        rows[f"{name} {loss}"] = {"s": step.seconds, "extra MB": step.extra_mb, "loss": value}
        if loss == "PyGCL":
            rows[f"{name} tiles"]["of PyGCL"] = rows[f"{name} tiles"]["s"] / step.seconds
        write_json(out, rows)
    table("One step, all nodes negatives of all", rows)


def search(
    codes: int = 200_000,
    dims: int = 4096,
    active: int = 32,
    queries: int = 200,
    out: Path = Path("runs/speed/search.json"),
) -> None:
    """Exact top 10 of sparse codes, one query at a time in one thread, beside dense flat search.

    Once with dimensions that fire equally often, as the density dial makes them, and once with
    the first firing a hundred times as often as the last. Recall is against brute force in double
    precision.

    Args:
        codes: Items in the index.
        dims: Width of the sparse codes.
        active: Dimensions that fire for an item.
        queries: Searches, of which the median counts.
        out: File for the figures.
    """
    need("faiss", "seismic")
    from tqdm import tqdm

    from ncl_multi.report import table, write_json

    cases = [(name, skew) for skew in (1.0, 100.0) for name in _INDEXES]
    rows: dict[str, dict[str, float]] = {}
    for name, skew in tqdm([("faiss flat, 384 dense", 1.0), *cases], desc="search", disable=None):
        label = name if name.startswith("faiss") else f"{name}, {'skewed' if skew > 1 else 'even'}"
        rows[label] = apart(_search_cost, name, codes, dims, active, queries, skew)
        rows[label]["times faster"] = rows["faiss flat, 384 dense"]["ms"] / rows[label]["ms"]
        write_json(out, rows)
    table(f"Top 10 of {codes:,} codes, {active} of {dims:,} dimensions active, one thread", rows)


def views(
    pictures: int = 512, size: int = 32, repeats: int = 5, out: Path = Path("runs/speed/views.json")
) -> None:
    """SimCLR's augmentation of a batch at once, beside kornia's and torchvision's one by one.

    Args:
        pictures: Pictures in the batch.
        size: Their side.
        repeats: Batches of which the fastest counts.
        out: File for the figures.
    """
    from ncl_multi.report import table, write_json

    rows = {}
    for name in _AUGMENTATIONS:
        took = apart(_views_cost, name, pictures, size, repeats).seconds
        rows[name] = {"ms": took * 1e3, "pictures/s": pictures / took}
    slowest = rows["torchvision, PIL"]["ms"]
    for row in rows.values():
        row["times PIL"] = slowest / row["ms"]
    table(f"A view of each of {pictures} pictures, {size}x{size}", rows)
    write_json(out, rows)


def stream(
    texts: int = 1_000_000,
    dims: int = 4096,
    k: int = 32,
    out: Path = Path("runs/speed/stream.json"),
) -> None:
    """Memory and speed of encoding a stream of short texts with a static encoder and a fresh head.

    Args:
        texts: How many to encode, each drawn from words of STS-B.
        dims: Width of the codes.
        k: Entries kept of a row.
        out: File for the figures.
    """
    from ncl_multi.report import table, write_json

    row = apart(_stream_cost, texts, dims, k)
    table(f"{texts:,} texts through a static encoder", {"ours": row})
    write_json(out, row)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file in a new process, so that no case inherits another's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def cost(call: Callable[[], object], repeats: int, kept_mb: float = 0.0) -> Cost:
    """Measure a call; `kept_mb` is the part of its memory that is its result."""
    before = _resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The kernel forgets the peak so far.
    call()
    extra = _resident_mb("VmHWM") - before - kept_mb
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Cost(min(times), extra)


def _resident_mb(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def _loss_cost(name: str, n: int, d: int, repeats: int) -> Cost:
    import torch

    loss = _LOSSES[name]()
    views = [torch.randn(n, d, requires_grad=True) for _ in range(2)]
    warm = [torch.randn(300, d, requires_grad=True) for _ in range(2)]
    loss(*warm).backward()

    def call() -> None:
        for view in views:
            view.grad = None
        loss(*views).backward()

    return cost(call, repeats, kept_mb=2 * n * d * 4 / 2**20)


def _bare(n: int, d: int, gram: bool, repeats: int) -> Cost:
    import torch

    a, b = torch.randn(n, d), torch.randn(n, d)
    if gram:
        return cost(lambda: (a.T @ a, b.T @ b), repeats)
    # Into memory that is already there: page faults are not arithmetic.
    product = torch.zeros(n, n)
    return cost(lambda: torch.mm(a, b.T, out=product), repeats)


def _ours(**options: Any) -> Callable[..., Any]:
    from ncl_multi import info_nce

    return lambda za, zb: info_nce(za, zb, temperature=0.07, **options)


def _open_clip() -> Callable[..., Any]:
    import torch
    from open_clip.loss import ClipLoss
    from torch.nn.functional import normalize

    loss, scale = ClipLoss(), torch.tensor(1 / 0.07)
    return lambda za, zb: loss(normalize(za, dim=1), normalize(zb, dim=1), scale)


def _lightly() -> Callable[..., Any]:
    from lightly.loss import NTXentLoss

    return NTXentLoss(temperature=0.07)


def _dense() -> Callable[..., Any]:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    def loss(za, zb):
        logits = normalize(za, dim=1) @ normalize(zb, dim=1).T / 0.07
        match = torch.arange(len(za))
        return (cross_entropy(logits, match) + cross_entropy(logits.T, match)) / 2

    return loss


def _spectral() -> Callable[..., Any]:
    from ncl_multi import spectral

    return spectral


def _graph_cost(name: str, loss: str, repeats: int) -> tuple[Cost, float]:
    import torch

    from ncl_multi.adapters.graph.data import load_graph, prepare
    from ncl_multi.adapters.graph.model import GraphCL
    from ncl_multi.adapters.graph.views import view

    torch.manual_seed(0)
    data = _generated(int(name)) if name.isdigit() else prepare(load_graph(name))
    width = {"citeseer": 256, "pubmed": 256}.get(name, 128)
    model = GraphCL(data.num_features, width, hidden_dim=width, activation="none")
    x, compare = model.features(data), _GRAPH_LOSSES[loss]()
    values = []

    def step() -> None:
        torch.manual_seed(0)
        model.zero_grad()
        views = [view(x, data.edge_index, edges=p, features=p) for p in (0.2, 0.4)]
        value = compare(*model(*views))
        value.backward()
        values.append(value.item())

    return cost(step, repeats), values[0]


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
        own = torch.eye(len(z), dtype=torch.bool)
        partner = torch.arange(len(z)).roll(len(za))
        return cross_entropy((z @ z.T / 0.4).masked_fill(own, float("-inf")), partner)

    return loss


def _pygcl() -> Callable[..., Any]:
    """PyGCL's GRACE. Its own package file asks for compiled parts which this loss does not use."""
    from types import ModuleType

    package, scatter = ModuleType("GCL"), ModuleType("torch_scatter")
    found = find_spec("GCL")
    assert found is not None
    package.__path__, scatter.scatter = list(found.submodule_search_locations or ()), None
    sys.modules |= {"GCL": package, "torch_scatter": scatter}
    from GCL.losses import InfoNCE
    from GCL.models import DualBranchContrast

    return DualBranchContrast(InfoNCE(tau=0.4), mode="L2L", intraview_negs=True)


def _views_cost(name: str, pictures: int, size: int, repeats: int) -> Cost:
    import torch

    x = torch.randint(0, 256, (pictures, 3, size, size), dtype=torch.uint8)
    augment = _AUGMENTATIONS[name](size)
    return cost(lambda: augment(x), repeats)


def _our_views(size: int) -> Callable[[Any], Any]:
    from ncl_multi.adapters.vision.views import Views

    return Views(size)


def _kornia_views(size: int) -> Callable[[Any], Any]:
    from kornia import augmentation as k

    augment = k.AugmentationSequential(
        k.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        k.RandomHorizontalFlip(),
        k.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        k.RandomGrayscale(p=0.2),
    )
    return lambda x: augment(x.float() / 255)


def _pil_views(size: int) -> Callable[[Any], Any]:
    import torch
    from torchvision.transforms import v2

    augment = v2.Compose(
        [
            v2.ToPILImage(),
            v2.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return lambda x: torch.stack([augment(picture) for picture in x])


def _stream_cost(texts: int, dims: int, k: int) -> dict[str, float]:
    import random

    import torch
    from safetensors.torch import load_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer

    from ncl_multi import data, wrap

    weights, tokenizer = data.wordllama()
    (table,) = load_file(weights).values()
    static = StaticEmbedding(
        Tokenizer.from_file(str(tokenizer)), embedding_weights=table.float().numpy()
    )
    torch.manual_seed(0)
    model = wrap(SentenceTransformer(modules=[static], device="cpu"), dims)
    words = " ".join(data.stsb("train")[0]).split()
    draw = random.Random(0)  # noqa: S311
    drawn = (" ".join(draw.choices(words, k=8)) for _ in range(texts))
    # The first texts load what is loaded once.
    model.encode(words[:5000], k=k)
    rows, before, start = 0, _resident_mb("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    for codes in model.stream(drawn, k=k):
        rows += codes.shape[0]
    took = time.perf_counter() - start
    extra = _resident_mb("VmHWM") - before
    return {"texts": rows, "extra MB": extra, "texts/s": rows / took}


def _search_cost(
    name: str, codes: int, dims: int, active: int, queries: int, skew: float
) -> dict[str, float]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    if name.startswith("faiss"):
        find, megabytes = _flat(codes)
        asked = list(np.random.default_rng(1).standard_normal((queries, 1, 384), np.float32))
    else:
        z = _random_codes(codes, dims, active, skew, seed=0)
        rows = _random_codes(queries, dims, active, skew, seed=1)
        find, megabytes = _INDEXES[name](z)
        asked = [rows[[row]] for row in range(queries)]
    find(asked[0])
    times, found = [], []
    for query in asked:
        start = time.perf_counter()
        found.append(find(query))
        times.append(time.perf_counter() - start)
    result = {"ms": 1e3 * float(np.median(times)), "index MB": megabytes}
    if not name.startswith("faiss"):
        hits = 0
        for query, ids in zip(asked, found, strict=True):
            scores = (z @ query.T.astype(np.float64)).toarray().ravel()
            tenth = np.partition(scores, -10)[-10]
            hits += int((scores[np.unique(ids)] >= tenth - 1e-6).sum())
        result["recall"] = hits / (10 * queries)
    return result


def _random_codes(n: int, dims: int, active: int, skew: float, seed: int) -> Any:
    """Unit rows; how often a dimension fires falls geometrically from the first to the last."""
    import numpy as np
    from scipy.sparse import csr_array

    generator = np.random.default_rng(seed)
    weight = np.geomspace(skew, 1, dims).astype(np.float32)
    columns = []
    for start in range(0, n, 4096):
        # The smallest of exponential waits are a draw without repeats, weighted by the rates.
        waits = generator.standard_exponential((min(4096, n - start), dims), np.float32) / weight
        columns.append(np.sort(np.argpartition(waits, active, axis=1)[:, :active], axis=1))
    values = generator.random((n, active), np.float32) + np.float32(0.05)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    ends = np.arange(0, n * active + 1, active)
    return csr_array((values.ravel(), np.concatenate(columns).ravel(), ends), shape=(n, dims))


def _flat(codes: int) -> tuple[Callable[[Any], Any], float]:
    import faiss
    import numpy as np

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(384)
    index.add(np.random.default_rng(0).standard_normal((codes, 384), np.float32))
    return lambda query: index.search(query, 10)[1], codes * 384 * 4 / 1e6


def _inverted(z: Any) -> tuple[Callable[[Any], Any], float]:
    from ncl_multi import SparseIndex

    index = SparseIndex(z.shape[1])
    index.add(range(z.shape[0]), z)
    return lambda query: index.search(query, 10, threads=1)[0][0], index.nbytes / 1e6


def _scipy_product(z: Any) -> tuple[Callable[[Any], Any], float]:
    import numpy as np

    lists = z.T.tocsr()

    def find(query: Any) -> Any:
        scores = query @ lists
        return scores.indices[np.argpartition(-scores.data, 10)[:10]]

    return find, (lists.data.nbytes + lists.indices.nbytes + lists.indptr.nbytes) / 1e6


def _seismic(z: Any) -> tuple[Callable[[Any], Any], float]:
    """Approximate, with its own default build."""
    import tempfile

    import numpy as np
    import seismic

    data = seismic.SeismicDataset()
    parts = (z.indices.astype(np.int64), z.data.astype(np.float32), z.indptr.astype(np.int64))
    data.add_documents_by_id([str(row) for row in range(z.shape[0])], *parts)
    index = seismic.SeismicIndex.build_from_dataset(data, num_threads=2)
    letters = seismic.get_seismic_string()
    with tempfile.TemporaryDirectory() as folder:
        index.save(f"{folder}/index")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())

    def find(query: Any) -> Any:
        words = query.indices.astype(letters)
        hits = index.search("", words, query.data, k=10, query_cut=len(words), heap_factor=0.9)
        return np.array([int(hit[2]) for hit in hits])

    return find, size / 1e6


_AUGMENTATIONS: dict[str, Callable[[int], Callable[[Any], Any]]] = {
    "ours": _our_views,
    "kornia": _kornia_views,
    "torchvision, PIL": _pil_views,
}
_INDEXES: dict[str, Callable[[Any], tuple[Callable[[Any], Any], float]]] = {
    "ours": _inverted,
    "scipy product": _scipy_product,
    "Seismic": _seismic,
}
_GRAPH_LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "tiles": _tiles,
    "PyGCL": _pygcl,
    "dense": _one_tile,
    "spectral": _spectral,
}
_LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "ours": _ours,
    "open_clip ClipLoss": _open_clip,
    "dense": _dense,
    "ours within_view": lambda: _ours(within_view=True),
    "lightly NTXentLoss": _lightly,
    "spectral": _spectral,
}

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"losses": losses, "graph": graph, "search": search, "views": views, "stream": stream}
    )

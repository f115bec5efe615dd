from pathlib import Path

import ncl_multi as ncl

texts = Path("reviews.txt").read_text().splitlines()  # or a list of pairs, or of triplets
model = ncl.wrap("sentence-transformers/all-MiniLM-L6-v2", dims=672, k=32)
model.fit(texts, out="runs/reviews")  # without out: in memory, nothing is written

model = ncl.load("runs/reviews")
codes = model.encode(texts)  # scipy.sparse.csr_array, unit rows
names = ncl.name_dimensions(model.features(texts))
print(ncl.explain(codes[[0]], codes[[1]], names))  # the cosine of two texts, by dimension

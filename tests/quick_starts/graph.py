import ncl_multi as ncl
from ncl_multi.adapters.graph.data import load_graph

data = load_graph("edges.csv")  # or "cora", or any torch_geometric.data.Data
model = ncl.NonNegGraph().fit(data, out="runs/graph")

model = ncl.load("runs/graph")
codes = model.encode(data)  # one row per node
print(ncl.explain(codes[[0]], codes[[1]]))

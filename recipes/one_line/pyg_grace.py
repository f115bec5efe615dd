"""PyG: GRACE on the karate club, non-negative by one line."""

import torch
from torch import nn
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN
from torch_geometric.utils import dropout_edge, mask_feature

from ncl_multi import NonNegHead, info_nce

torch.manual_seed(0)
graph = KarateClub()[0]
encoder = GCN(graph.num_features, 64, num_layers=2)
head = NonNegHead(64, 64, density=0.2)  # <- the line: it was an MLP projector
optimizer = torch.optim.Adam(nn.ModuleList([encoder, head]).parameters(), lr=1e-3)


def view():
    """The graph with a share of edges and features dropped."""
    edges, _ = dropout_edge(graph.edge_index, p=0.2)
    x, _ = mask_feature(graph.x, p=0.3)
    return head(encoder(x, edges))


for _ in range(100):
    loss = info_nce(view(), view(), temperature=0.4, within_view=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

z = head.eval()(encoder(graph.x, graph.edge_index))
print(f"loss {loss.item():.2f}, active {(z > 0).float().mean():.1%}")

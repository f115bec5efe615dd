"""Links to predict: edges hidden from training, and pairs of nodes without an edge."""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric.data import Data


class HiddenLinks(NamedTuple):
    """The graph without the hidden links, the hidden links, and as many unlinked pairs."""

    graph: Any
    linked: Tensor
    others: Tensor


def hide_links(data: Data, share: float, seed: int = 0) -> HiddenLinks:
    """Take a share of the links out of a prepared graph, in both directions.

    Example:
        >>> ring = torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
        >>> both = torch.cat([ring, ring.flip(0)], dim=1)
        >>> hidden = hide_links(Data(x=torch.ones(9, 1), edge_index=both), 0.34)
        >>> hidden.linked.shape, hidden.graph.num_edges
        (torch.Size([2, 3]), 12)
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of links to hide must lie in (0, 1); got {share}")
    draw = torch.Generator().manual_seed(seed)
    nodes, edge_index = len(data.x), data.edge_index
    ends = edge_index.sort(dim=0).values
    number = ends[0] * nodes + ends[1]
    links = number.unique()
    count = max(1, round(share * len(links)))
    hidden = links[torch.randperm(len(links), generator=draw)[:count]]
    visible = ~torch.isin(number, hidden)
    graph = copy(data)  # Not the features, which may be large.
    graph.edge_index = edge_index[:, visible]
    for values in ("edge_weight", "edge_attr"):
        if values in data:
            graph[values] = data[values][visible]
    drawn = torch.randint(nodes, (2, 3 * count + 20), generator=draw).sort(dim=0).values
    apart = ~torch.isin(drawn[0] * nodes + drawn[1], links) & (drawn[0] != drawn[1])
    linked = torch.stack([hidden // nodes, hidden % nodes])
    return HiddenLinks(graph, linked, drawn[:, apart][:, :count])

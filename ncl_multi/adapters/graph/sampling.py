"""Mini-batches of a graph that does not fit in memory: nodes with sampled neighbours.

The loader is PyG's own `NeighborLoader`. It needs pyg-lib or torch-sparse, compiled packages that
are not everywhere; where they are missing, the sampler below does the same in plain torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric import typing as installed
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput


def neighbor_loader(data: Data, neighbors: Sequence[int]) -> NeighborLoader:
    """Called with node numbers it returns their sampled neighbourhood, these nodes first.

    `neighbors` are how many a node gets in each hop, -1 for all. Sampling in the training step
    rather than in the loader keeps it a function of the seed and the step.
    """
    for hop in neighbors:
        if hop < 1 and hop != -1:
            raise ValueError(f"neighbours per hop must be at least 1, or -1 for all; got {hop}")
    compiled = installed.WITH_PYG_LIB or installed.WITH_TORCH_SPARSE
    sampler = None if compiled else TorchSampler(data, neighbors)
    return NeighborLoader(data, list(neighbors), neighbor_sampler=sampler)


class TorchSampler(BaseSampler):
    """Neighbours drawn without repetition, hop by hop, in plain torch."""

    def __init__(self, data: Data, neighbors: Sequence[int]):
        self.neighbors = list(neighbors)
        source, target = data.edge_index.cpu()
        self.order = target.argsort(stable=True)
        self.source, self.target = source[self.order], target[self.order]
        count = torch.bincount(target, minlength=int(data.num_nodes))
        self.count, self.first = count, count.cumsum(0) - count

    @property
    def edge_permutation(self) -> Tensor:
        return self.order

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        frontier, nodes_by_hop, visited = index.node, [index.node], index.node
        edges: list[Tensor] = []
        for most in self.neighbors:
            edges.append(self._edges_into(frontier, most))
            sources = self.source[edges[-1]].unique()
            frontier = sources[~torch.isin(sources, visited)]
            nodes_by_hop.append(frontier)
            visited = torch.cat(nodes_by_hop)
        edge = torch.cat(edges)
        place = torch.full((len(self.count),), -1)
        place[visited] = torch.arange(len(visited))
        return SamplerOutput(
            node=visited,
            row=place[self.source[edge]],
            col=place[self.target[edge]],
            edge=edge,
            num_sampled_nodes=[len(nodes) for nodes in nodes_by_hop],
            num_sampled_edges=[len(hop) for hop in edges],
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        raise NotImplementedError("links are sampled by pyg-lib only: install it from pyg.org")

    def _edges_into(self, nodes: Tensor, most: int) -> Tensor:
        """Numbers, in the order of targets, of at most `most` edges into each node."""
        count = self.count[nodes]
        owner = torch.repeat_interleave(torch.arange(len(nodes)), count)
        rank = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
        edges = self.first[nodes][owner] + rank
        if most == -1 or not len(edges):
            return edges
        # Shuffle, then bring each node's edges together again: its first ones are a fair draw.
        shuffled = torch.randperm(len(edges))
        shuffled = shuffled[owner[shuffled].argsort(stable=True)]
        return edges[shuffled[rank < most]]

"""Encoding layer by layer: all nodes of a layer, a block at a time, before the next layer.

Every node is encoded once per layer with all of its neighbours, so the result is that of the whole
graph at once. In memory are the edges, one layer's output and the neighbourhood of a block.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

Rows = Float[Tensor, "nodes h"]
Layer = Callable[[Tensor, Tensor, Tensor | None], Rows]
"""A layer's output for all nodes of a small graph: features, edges, weights or features of edges"""


@torch.inference_mode()
def layer_by_layer(
    layers: Sequence[Layer],
    features: Callable[[Int[Tensor, " n"]], Tensor],
    edge_index: Int[Tensor, "2 edges"],
    edge_attr: Tensor | None,
    nodes: int,
    block: int,
) -> Iterator[Rows]:
    """The last layer's output for all nodes in their order, a block of nodes at a time.

    Args:
        layers: The layers, in order.
        features: The first layer's input for the nodes with these numbers.
        edge_index: Edges, from first to second row.
        edge_attr: Weights or features of the edges.
        nodes: Number of nodes.
        block: Nodes whose output is computed together.

    Example:
        >>> ring = torch.stack([torch.arange(4), (torch.arange(4) + 1) % 4])
        >>> add = lambda x, edges, _: x.index_add(0, edges[1], x[edges[0]])
        >>> x = torch.eye(4)
        >>> torch.cat(list(layer_by_layer([add], lambda rows: x[rows], ring, None, 4, block=3)))
        tensor([[1., 0., 0., 1.],
                [1., 1., 0., 0.],
                [0., 1., 1., 0.],
                [0., 0., 1., 1.]])
    """
    order = edge_index[1].argsort(stable=True)
    source = edge_index[0][order]
    values = None if edge_attr is None else edge_attr[order]
    degree = torch.bincount(edge_index[1], minlength=nodes)
    end = degree.cumsum(0)
    for number, layer in enumerate(layers):
        output = None
        for targets in torch.arange(nodes).split(block):
            first, last = int(targets[0]), int(targets[-1])
            span = slice(int(end[first] - degree[first]), int(end[last]))
            # Numbers of the nodes around the block, and where they are among these.
            around, place = torch.cat([targets, source[span]]).unique(return_inverse=True)
            here, there = place[: len(targets)], place[len(targets) :]
            edges = torch.stack([there, here.repeat_interleave(degree[targets])])
            h = layer(features(around), edges, None if values is None else values[span])[here]
            if number == len(layers) - 1:
                yield h
                continue
            if output is None:
                output = h.new_empty((nodes, h.shape[1]))
            output[targets] = h
        if output is not None:
            features = output.__getitem__


def edges_into(
    targets: Int[Tensor, " n"],
    edge_index: Int[Tensor, "2 edges"],
    values: Tensor | None,
    nodes: int,
) -> tuple[Int[Tensor, "2 some"], Tensor | None]:
    """The edges into these nodes, and their values; a target is numbered by its place.

    Example:
        >>> ring = torch.stack([torch.arange(4), (torch.arange(4) + 1) % 4])
        >>> edges_into(torch.tensor([3, 1]), ring, None, nodes=4)[0]
        tensor([[0, 2],
                [1, 0]])
    """
    place = torch.full((nodes,), -1, device=targets.device)
    place[targets] = torch.arange(len(targets), device=targets.device)
    target = place[edge_index[1]]
    arrives = target >= 0
    edges = torch.stack([edge_index[0][arrives], target[arrives]])
    return edges, None if values is None else values[arrives]


def and_sources(
    targets: Int[Tensor, " n"], edges: Int[Tensor, "2 some"], nodes: int
) -> tuple[Int[Tensor, " m"], Int[Tensor, "2 some"]]:
    """The targets, then all other sources of these edges; the edges, sources numbered by place.

    Example:
        >>> and_sources(torch.tensor([3, 1]), torch.tensor([[0, 2], [1, 0]]), nodes=4)
        (tensor([3, 1, 0, 2]), tensor([[2, 3],
                [1, 0]]))
    """
    other = torch.zeros(nodes, dtype=torch.bool, device=targets.device)
    other[edges[0]] = True
    other[targets] = False
    around = torch.cat([targets, other.nonzero()[:, 0]])
    place = torch.empty(nodes, dtype=torch.int64, device=targets.device)
    place[around] = torch.arange(len(around), device=targets.device)
    return around, torch.stack([place[edges[0]], edges[1]])

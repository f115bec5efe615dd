"""Random views of a graph: edges and features dropped at random, slow nodes added."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric.utils import degree

Edges = Int[Tensor, "2 edges"]
EdgeValues = Float[Tensor, " edges"] | Float[Tensor, "edges values"]

_MOST = 0.7
"""Largest drop probability of GCA, unless the requested share is larger."""


@dataclass(frozen=True)
class Adaptive:
    """GCA: the less important an edge or a feature, the more often it is dropped.

    Factors on the requested share of drops, 1 on average.
    """

    edges: Float[Tensor, " edges"]
    features: Float[Tensor, " features"]

    @classmethod
    def by_degree(cls, x: Tensor, edge_index: Edges) -> "Adaptive":
        """Importance of an edge is its ends' mean degree, of a feature its nodes' degrees.

        Logarithms of both, as in the paper (arXiv 2010.14945), so that hubs do not dominate.
        """
        degrees = degree(edge_index[1], len(x), dtype=torch.float32)
        ends = degrees[edge_index].mean(dim=0)
        return cls(_factors(ends), _factors(x.abs().T @ degrees))


class View(NamedTuple):
    """A graph as encoders take it: features, dense or CSR; edges; weights or features of edges."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor | None = None


def view(
    x: Tensor,
    edge_index: Edges,
    edge_attr: EdgeValues | None = None,
    *,
    edges: float,
    features: float,
    adaptive: Adaptive | None = None,
    half_hop: float = 0.0,
) -> View:
    """The graph without a share `edges` of its edges and `features` of its feature columns.

    The same columns are dropped for all nodes, as in GRACE. `x` may be sparse (CSR). `half_hop` is
    the share of nodes whose neighbours reach them later; see `with_slow_nodes`.
    """
    shares = {"edges to drop": edges, "features to drop": features, "nodes to slow": half_hop}
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"the share of {name} must lie in [0, 1); got {share}")
    factors = adaptive or Adaptive(
        torch.ones(edge_index.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)
    )
    kept_edges = _keep_mask(factors.edges, edges)
    x, edge_index = _columns(x, _keep_mask(factors.features, features)), edge_index[:, kept_edges]
    edge_attr = None if edge_attr is None else edge_attr[kept_edges]
    if half_hop:
        if edge_attr is not None:
            raise ValueError("half_hop has no weights for its new edges; this graph has weights")
        return with_slow_nodes(x, edge_index, half_hop)
    return View(x, edge_index, edge_attr)


def with_slow_nodes(x: Tensor, edge_index: Edges, share: float) -> View:
    """Half-Hop (PMC10559225): messages to a share of the nodes take a step longer.

    Each edge into such a node passes through a new node halfway, which has the mean features of
    both ends and also hears from the target. New nodes come after the real ones.
    """
    slowed = torch.rand(x.shape[0], device=x.device)[edge_index[1]] < share
    source, target = edge_index[:, slowed]
    slow = x.shape[0] + torch.arange(len(source), device=x.device)
    new = [torch.stack(ends) for ends in ((source, slow), (slow, target), (target, slow))]
    if x.layout == torch.sparse_csr:
        x = _with_mean_rows(x, source, target)
    else:
        x = torch.cat([x, (x[source] + x[target]) / 2])
    return View(x, torch.cat([edge_index[:, ~slowed], *new], dim=1))


def _factors(weight: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """(largest - s) / (largest - mean), s = log weight; what never occurs counts as rarest."""
    occurs = weight > 0
    if not occurs.any():
        return torch.ones_like(weight)
    log = weight.clamp(min=float(weight[occurs].min())).log()
    spread = log.max() - log.mean()
    if spread < 1e-6:
        return torch.ones_like(weight)
    return (log.max() - log) / spread


def _keep_mask(factor: Float[Tensor, " n"], share: float) -> Tensor:
    return torch.rand_like(factor) >= (factor * share).clamp(max=max(_MOST, share))


def _columns(x: Tensor, mask: Tensor) -> Tensor:
    """The features with all other columns set to zero."""
    if x.layout != torch.sparse_csr:
        return x * mask
    columns = x.col_indices()
    values = x.values() * mask[columns]
    return torch.sparse_csr_tensor(
        x.crow_indices(), columns, values, x.shape, check_invariants=False
    )


def _with_mean_rows(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Sparse rows, then the means of two rows each: a product with a matrix of ones and halves."""
    nodes, new = x.shape[0], len(source)
    real_nodes = torch.arange(nodes, device=x.device)
    columns = torch.cat([real_nodes, torch.stack([source, target], dim=1).flatten()])
    ends = torch.cat([real_nodes, nodes + 2 * torch.arange(new + 1, device=x.device)])
    halves = torch.cat(
        [torch.ones_like(real_nodes, dtype=x.dtype), x.values().new_full((2 * new,), 0.5)]
    )
    mix = torch.sparse_csr_tensor(
        ends, columns, halves, (nodes + new, nodes), check_invariants=False
    )
    return mix @ x

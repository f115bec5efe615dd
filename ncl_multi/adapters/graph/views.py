"""Two random views of a graph: some edges and some features gone, at random or the lesser ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    from torch_geometric.utils import degree, dropout_edge, mask_feature
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs torch-geometric: pip install 'ncl-multi[graph]'") from error

Edges = Int[Tensor, "2 edges"]

_MOST = 0.7
"""GCA drops nothing more often than this, however unimportant."""


@dataclass(frozen=True)
class Adaptive:
    """GCA's dropping: the less important an edge or a feature, the more often it goes.

    Factors on the asked share of drops, equal to 1 on average.
    """

    edges: Float[Tensor, " edges"]
    features: Float[Tensor, " features"]

    @classmethod
    def by_degree(cls, x: Tensor, edge_index: Edges) -> "Adaptive":
        """An edge matters by its ends' mean degree, a feature by the degrees of its nodes.

        Logarithms of both, as in the paper (arXiv 2010.14945), so that hubs do not rule alone.
        """
        degrees = degree(edge_index[1], len(x), dtype=torch.float32)
        ends = degrees[edge_index].mean(dim=0)
        return cls(_factors(ends), _factors(x.abs().T @ degrees))


def view(
    x: Tensor,
    edge_index: Edges,
    *,
    edges: float,
    features: float,
    adaptive: Adaptive | None = None,
) -> tuple[Tensor, Int[Tensor, "2 kept"]]:
    """The graph without a share `edges` of its edges and `features` of its feature columns.

    The same columns go for all nodes, as in GRACE. `x` may be sparse (CSR).
    """
    for name, share in (("edges", edges), ("features", features)):
        if not 0 <= share < 1:
            raise ValueError(f"the share of {name} to drop must lie in [0, 1); got {share}")
    if adaptive is not None:
        edge_index = edge_index[:, _kept(adaptive.edges, edges)]
        return _columns(x, _kept(adaptive.features, features)), edge_index
    if x.layout == torch.sparse_csr:
        x = _columns(x, torch.rand(x.shape[1], device=x.device) >= features)
    else:
        x, _ = mask_feature(x, p=features)
    return x, dropout_edge(edge_index, p=edges)[0]


def _factors(weight: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """(largest - s) / (largest - mean), s = log weight; what never occurs counts as the rarest."""
    occurs = weight > 0
    if not occurs.any():
        return torch.ones_like(weight)
    log = weight.clamp(min=float(weight[occurs].min())).log()
    spread = log.max() - log.mean()
    if spread < 1e-6:
        return torch.ones_like(weight)
    return (log.max() - log) / spread


def _kept(factor: Float[Tensor, " n"], share: float) -> Tensor:
    return torch.rand_like(factor) >= (factor * share).clamp(max=_MOST)


def _columns(x: Tensor, kept: Tensor) -> Tensor:
    """The features with all other columns set to zero."""
    if x.layout != torch.sparse_csr:
        return x * kept
    columns = x.col_indices()
    values = x.values() * kept[columns]
    return torch.sparse_csr_tensor(
        x.crow_indices(), columns, values, x.shape, check_invariants=False
    )

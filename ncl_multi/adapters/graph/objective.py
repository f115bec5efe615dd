"""What a graph is trained with: GRACE's contrast of two views, and two helpers of sparse codes."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.adapters.graph.config import GraphConfig
from ncl_multi.adapters.graph.sampling import neighbor_loader
from ncl_multi.adapters.graph.views import Adaptive, view
from ncl_multi.distributed import gather
from ncl_multi.head import NonNegHead
from ncl_multi.losses import info_nce, reconstruction_loss, spectral

View = tuple[Tensor, Tensor]
"""Features of the nodes, dense or CSR, and the edges."""


class GraphObjective(nn.Module):
    """Two views of the graph, each without some edges and features; a node's codes are a pair.

    Sparse codes alone teach an encoder less than signed ones do, and forget some of what it knows.
    So a signed head contrasts the same nodes, for the encoder's sake, and a linear map rebuilds the
    encoder's features from the codes, for the head's. The signed twin needs neither.

    Args:
        model: A `NonNegGraph`.
        data: The graph, as `prepare` returns it.
        config: Views, loss and weights.
    """

    model: Any

    def __init__(self, model: nn.Module, data: Any, config: GraphConfig):
        super().__init__()
        self.model, self.config = model, config
        self.data: Any = data
        self.around = neighbor_loader(data, list(config.neighbors)) if config.neighbors else None
        head: NonNegHead = self.model.head
        helped = head.activation != "none"
        self.signed = self.rebuild = None
        if helped and config.signed:
            self.signed = NonNegHead(head.in_dim, head.out_dim, activation="none")
        if helped and config.reconstruction:
            self.rebuild = nn.Linear(head.out_dim, head.in_dim)
        self._whole: dict[torch.device, Any] = {}

    def forward(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of these nodes, and their codes in the first view."""
        config = self.config
        x, edge_index, by_degree, rows = self._graph_around(nodes)
        views = [
            view(x, edge_index, edges=edges, features=features, adaptive=by_degree)
            for edges, features in zip(config.drop_edges, config.drop_features, strict=True)
        ]
        embedded = self.model.represent(*views, rows=rows)
        codes = [self.model.head(h) for h in embedded]
        loss = self._contrast(codes)
        if self.signed is not None:
            loss = loss + config.signed * self._contrast([self.signed(h) for h in embedded])
        if self.rebuild is not None:
            for z, h in zip(codes, embedded, strict=True):
                rebuilt = self.rebuild(F.normalize(z, dim=1))
                lost = reconstruction_loss(gather(rebuilt), gather(h))
                loss = loss + config.reconstruction / 2 * lost
        return loss, codes[0]

    def _contrast(self, codes: list[Tensor]) -> Tensor:
        za, zb = map(gather, codes)
        if self.config.loss == "spectral":
            return spectral(za, zb)
        return info_nce(za, zb, temperature=self.config.temperature, within_view=True)

    def _graph_around(self, nodes: Tensor) -> tuple[Tensor, Tensor, Adaptive | None, Tensor]:
        """Features, edges, GCA's factors and where the nodes of the batch are."""
        if self.around is not None:
            part = self.around(nodes.cpu()).to(nodes.device)
            own = torch.arange(len(nodes), device=nodes.device)
            return part.x, part.edge_index, self._by_degree(part), own
        if nodes.device not in self._whole:
            here = copy(self.data).to(nodes.device)
            self._whole[nodes.device] = (
                self.model.inputs(here), here.edge_index, self._by_degree(here),
            )  # fmt: skip
        return *self._whole[nodes.device], nodes

    def _by_degree(self, data: Any) -> Adaptive | None:
        return Adaptive.by_degree(data.x, data.edge_index) if self.config.adaptive else None

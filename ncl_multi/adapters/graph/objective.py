"""The graph objective: a signed contrast trains the encoder, a non-negative one the codes."""

from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.adapters.graph.config import GraphConfig
from ncl_multi.adapters.graph.sampling import neighbor_loader
from ncl_multi.adapters.graph.views import Adaptive, View, view
from ncl_multi.distributed import gather
from ncl_multi.head import NonNegHead, k_means
from ncl_multi.losses import info_nce, reconstruction_loss, spectral

_CLUSTERED = 20_000
"""Largest number of nodes that are clustered to start the head."""
_SETTLED, _PASSES = 5_000, 30
"""Nodes that `settle` uses, and the number of passes over them."""
_LENGTH, _CODE_LENGTH = 1.0, 5.0
"""Squared length of the rows that `spectral` contrasts, features and codes: what negatives weigh.
On standardised features it is close to CCA-SSG's loss (arXiv 2106.12484)."""


class GraphObjective(nn.Module):
    """Two views of the graph with dropped edges and features; the codes of a node are a pair.

    The encoder learns from the contrast of its own features, which are signed. After a share
    `config.head_start` of the steps the head starts on clusters of these features. From then on
    its non-negative codes are contrasted by the same loss, and a linear map rebuilds the features
    from them. No gradient goes from the codes to the encoder: sparse codes teach it less than
    signed features do.

    Args:
        model: A `NonNegGraph`.
        data: The graph, as `prepare` returns it.
        config: Views, losses and weights, as `GraphConfig.for_graph` returns it.
    """

    model: Any
    started: Tensor

    def __init__(self, model: nn.Module, data: Any, config: GraphConfig):
        super().__init__()
        self.model, self.config = model, config
        self.data: Any = data
        self.around = neighbor_loader(data, list(config.neighbors)) if config.neighbors else None
        head: NonNegHead = self.model.head
        self.rebuild = nn.Linear(head.out_dim, head.in_dim)
        self.reading = config.head_start == 0
        # Saved with the weights, so that a resumed run does not start the head again.
        self.register_buffer("started", torch.tensor(False))
        self._whole: dict[torch.device, Any] = {}

    def anneal(self, progress: float) -> None:
        """Start the head after its share of the steps; `fit` calls this before every step."""
        self.reading = progress >= self.config.head_start
        if self.reading and not self.started:
            self.start_head()

    @torch.no_grad()
    def start_head(self) -> None:
        """Let the dimensions start on cores of clusters of the encoder's features."""
        self.model.eval()
        h = self._features(_CLUSTERED)
        self.model.train()
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            self.model.head.start_at(cluster_cores(h - h.mean(dim=0), self.model.head.out_dim))
        self.started.fill_(True)

    @torch.no_grad()
    def settle(self) -> None:
        """Fit the head's statistics, thresholds and energy to the graph, after training on views.

        A view lacks features and edges, so more dimensions would fire for whole nodes.
        """
        model = self.model.train()
        for running in (model.standardise, model.head.norm, model.head.centre):
            if running is not None:
                running.batches.zero_()
        h = self._features(_SETTLED)
        for _ in range(_PASSES):
            model.head(h)
        model.eval()
        model.fit_energy(h)

    def forward(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of these nodes, and their codes in the first view."""
        config = self.config
        graph, by_degree, rows = self._graph_around(nodes)
        views = [
            view(
                *graph,
                edges=edges,
                features=features,
                adaptive=by_degree,
                half_hop=config.half_hop,
            )
            for edges, features in zip(config.drop_edges, config.drop_features, strict=True)
        ]
        embedded = self.model.represent(*views, rows=rows)
        loss = self._contrast(embedded, _LENGTH)
        if not self.reading:
            with torch.no_grad():
                codes = self.model.head(embedded[0])
            # DDP wants every parameter to take part in every step.
            idle = [*self.model.head.parameters(), *self.rebuild.parameters()]
            return loss + sum(0 * weight.sum() for weight in idle), codes
        codes = [self.model.head(h.detach()) for h in embedded]
        loss = loss + self._contrast(codes, _CODE_LENGTH)
        if config.reconstruction:
            for z, h in zip(codes, embedded, strict=True):
                rebuilt = self.rebuild(F.normalize(z, dim=1))
                rebuild_loss = reconstruction_loss(gather(rebuilt), gather(h))
                loss = loss + config.reconstruction / 2 * rebuild_loss
        return loss, codes[0]

    def _contrast(self, views: list[Tensor], length: float) -> Tensor:
        """All rows of all processes are negatives."""
        if self.config.loss == "spectral":
            return _spectral(views, length)
        temperature = self.config.temperature
        return info_nce(*views, temperature=temperature, within_view=True, distributed=True)

    def _features(self, most: int) -> Tensor:
        """The encoder's features of at most `most` nodes of the whole graph.

        Every process draws the same nodes.
        """
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            nodes = torch.randperm(len(self.data.x))[:most].to(self.started.device)
            batches = [nodes] if self.around is None else nodes.split(self.config.batch_size)
            embedded = []
            for batch in batches:
                graph, _, rows = self._graph_around(batch)
                embedded += self.model.represent(graph, rows=rows)
        return torch.cat(embedded)

    def _graph_around(self, nodes: Tensor) -> tuple[View, Adaptive | None, Tensor]:
        """The graph or a sample of it, GCA's factors, and where the nodes of the batch are."""
        if self.around is not None:
            sample = self.around(nodes.cpu()).to(nodes.device)
            positions = torch.arange(len(nodes), device=nodes.device)
            return self.model.view_of(sample), self._by_degree(sample), positions
        if nodes.device not in self._whole:
            on_device = copy(self.data).to(nodes.device)
            self._whole[nodes.device] = self.model.view_of(on_device), self._by_degree(on_device)
        return *self._whole[nodes.device], nodes

    def _by_degree(self, data: Any) -> Adaptive | None:
        return Adaptive.by_degree(data.x, data.edge_index) if self.config.adaptive else None


def _spectral(views: list[Tensor], length: float) -> Tensor:
    """`spectral` of rows of one squared length, divided by it."""
    za, zb = (length**0.5 * F.normalize(z, dim=1) for z in views)
    return spectral(za, zb, distributed=True) / length


def cluster_cores(h: Float[Tensor, "n h"], clusters: int) -> Float[Tensor, "m h"]:
    """The dense core of each cluster: the mean of the rows nearest to its centre.

    k-means also places centres on outliers, where the cluster is a mixture of unrelated rows. The
    core is the mean of half as many rows as an average cluster has, at least five.
    """
    centres = k_means(h, clusters)
    size = min(len(h), max(5, len(h) // (2 * clusters)))
    nearest = (h @ F.normalize(centres, dim=1).T).topk(size, dim=0).indices
    return h[nearest].mean(dim=0)

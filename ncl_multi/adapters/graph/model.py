"""Non-negative graph contrastive learning: GRACE with codes that can be read.

Example:
    model = NonNegGraph().fit(data)
    model.encode(data)  # scipy.sparse.csr_array, one unit row per node
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ncl_multi.adapters.graph.config import GraphConfig, Settings, active, fits_whole, rule
from ncl_multi.adapters.graph.data import adjacency, encoder_input, prepare
from ncl_multi.adapters.graph.even import EvenTopK, fit_energy
from ncl_multi.adapters.graph.layers import Layer, and_sources, edges_into, layer_by_layer
from ncl_multi.adapters.graph.objective import GraphObjective
from ncl_multi.adapters.graph.views import View
from ncl_multi.head import Activation, HeadOptions
from ncl_multi.model import SparseModel, check_fits
from ncl_multi.norm import SharedNorm
from ncl_multi.optional import needs

with needs("ncl-multi[graph]"):
    from torch_geometric.data import Data
    from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

log = logging.getLogger(__name__)

ENCODERS: dict[str, type[nn.Module]] = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE, "gin": GIN}
_TAKE_SPARSE = ("gcn", "gat")
"""Encoders that begin with a linear layer; the others sum over neighbours first."""
_ONE_PRODUCT = ("gcn", "sage", "gin")
"""Encoders whose sum over neighbours is a product with the adjacency matrix."""
_EDGE_VALUES = {"gcn": "edge_weight", "gat": "edge_attr"}
"""Edge attribute that an encoder uses."""


_DIMS, _WIDTH = 256, 128
"""Defaults of a model that has not seen a graph yet."""
_BLOCK = 16_384
"""Nodes of a layer that are encoded together where the whole graph is too large."""


class NonNegGraph(
    SparseModel,
    library_name="ncl_multi",
    tags=["graph", "non-negative-contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """A graph encoder with a non-negative head, trained by contrasting two views of the graph.

    `fit` and `encode` take a PyG `Data`, a networkx graph or a square scipy matrix; there is one
    code per node. New nodes can be encoded, too: pass a graph that contains them. A large graph, or
    any with `batch_size`, is encoded layer by layer in blocks of nodes, with the same result; an
    encoder of your own takes the whole graph. Settings that are None are set by
    `ncl_multi.adapters.graph.config.rule` when it is fitted.

    Args:
        dims: Number of non-negative dimensions.
        in_dim: Features of a node; None takes those of the graph it is fitted on.
        encoder: `gcn`, `gat`, `sage` or `gin`, two layers; or a module of your own, called as
            `encoder(x, edge_index)`, with `edge_weight` or `edge_attr` if its forward has such an
            argument and the graph has them. `load` must then be given such a module again.
        width: Width of both layers, and of the encoder's output.
        encoder_activation: Any name PyG knows, such as `relu` or `prelu`; between the layers.
        edge_dim: Features of an edge that `gat` takes; None takes those of the graph.
        activation: See `NonNegHead`; `none` is the signed twin.
        density: See `NonNegHead`.
        k: Entries of a node on average: `encode` keeps more of a node whose entries are small, see
            `ncl_multi.adapters.graph.even`. In training every node keeps k.
        directed: Leave edges as they are, rather than making them run both ways.
        seed: Seed of the initial weights.

    Example:
        >>> x, edges = torch.rand(5, 8), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> model = NonNegGraph(dims=16, in_dim=8, width=4)
        >>> model.embed(Data(x=x, edge_index=edges)).shape
        torch.Size([5, 4])
    """

    kind = "graph"
    energy: Tensor
    energy_dims: Tensor
    example = "model.encode(data)  # a torch_geometric.data.Data"
    config_type = GraphConfig
    load_options = ("encoder",)

    def __init__(
        self,
        dims: int | None = None,
        *,
        in_dim: int | None = None,
        encoder: str | nn.Module = "gcn",
        width: int | None = None,
        encoder_activation: str = "prelu",
        edge_dim: int | None = None,
        activation: Activation = "relu",
        batch_norm: bool = True,
        hidden_dim: int | None = None,
        density: float | None = None,
        k: int | None = None,
        directed: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        if isinstance(encoder, str) and encoder not in ENCODERS:
            raise ValueError(
                f"encoder must be one of {', '.join(ENCODERS)}, or a module; got {encoder!r}"
            )
        sizes = {"dims": dims, "in_dim": in_dim, "width": width, "edge_dim": edge_dim}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        self.in_dim, self.directed, self.seed, self.width = in_dim, directed, seed, width
        self.edge_dim = edge_dim
        self.name = encoder if isinstance(encoder, str) else None
        self.encoder_activation = encoder_activation
        self.takes_sparse = self.name in _TAKE_SPARSE
        self.one_product = self.name in _ONE_PRODUCT
        self.edge_values = _EDGE_VALUES.get(self.name or "")
        if isinstance(encoder, nn.Module):
            taken = inspect.signature(encoder.forward).parameters
            self.edge_values = next((v for v in ("edge_weight", "edge_attr") if v in taken), None)
        head = HeadOptions(dims or _DIMS, hidden_dim, activation, batch_norm, density, k)
        head.build(1)  # Checks the options before there is a graph.
        self._options, self._dims = head, dims
        self.encoder: Any = None if self.name else encoder
        if in_dim is not None:
            self._make(in_dim)

    def forward(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> tuple[Float[Tensor, "n d"], ...]:
        """Codes of every view, of all nodes or of those numbered in `rows`.

        All views in one call, since DDP counts calls. Each is normalised by itself.
        """
        return tuple(map(self.head, self.represent(*views, rows=rows)))

    @torch.no_grad()
    def fit_energy(self, h: Float[Tensor, "n h"]) -> None:
        """Fit the sum of squares that each code has to these features, for k entries on average."""
        if self.head.k is None:
            return
        whole = self.head.fold()[:-1](h)
        self.energy.fill_(fit_energy(whole, self.head.k))
        self.energy_dims.fill_(self.head.out_dim)

    def represent(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> list[Float[Tensor, "n h"]]:
        """The encoder's output for every view, before the head: standardised unit rows."""
        return [self._unit(self._encode(*view, rows=rows)) for view in views]

    def view_of(self, data: Data) -> View:
        """The whole graph as input of this encoder: features are sparse if that is faster."""
        edge_attr = data.get(self.edge_values, None) if self.edge_values else None
        return View(encoder_input(data, sparse=self.takes_sparse), data.edge_index, edge_attr)

    @property
    def dims(self) -> int:
        return self._options.dims if self.in_dim is None else super().dims

    def options(self) -> dict[str, Any]:
        self._check_made()
        return {
            "in_dim": self.in_dim, "encoder": self.name, "width": self.width,
            "encoder_activation": self.encoder_activation, "directed": self.directed,
            "edge_dim": self.edge_dim,
        } | asdict(self.head.options)  # fmt: skip

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **load_options: Any) -> "NonNegGraph":
        encoder = load_options.get("encoder")
        if options["encoder"] is None and encoder is None:
            raise ValueError(
                "it was trained with an encoder of your own: pass encoder=<such a module>"
            )
        options = options | {"encoder": encoder or options["encoder"]}
        check_fits(lambda: cls(**options), folder / "model.safetensors")
        return cls(**options)

    def _make(self, in_dim: int) -> None:
        """Build what depends on the graph's features."""
        self.width = self.width or _WIDTH
        layer_options: dict[str | None, dict[str, Any]] = {
            "gat": {"edge_dim": self.edge_dim}, "gcn": {"normalize": False},
        }  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            if self.name:
                self.encoder = ENCODERS[self.name](
                    in_dim,
                    self.width,
                    2,
                    self.width,
                    act=self.encoder_activation,
                    **layer_options.get(self.name, {}),
                )
            self.standardise = SharedNorm(self.width)
            self.head = self._options.build(self.width)
        self.register_buffer("energy", torch.zeros(()))
        self.register_buffer("energy_dims", torch.zeros((), dtype=torch.int64))
        self.in_dim = in_dim

    def _check_made(self) -> None:
        if self.in_dim is None:
            raise ValueError(
                "this graph model has not seen a graph: call fit(data), or give in_dim"
            )

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        from ncl_multi.training import fit as loop

        data = prepare(data, directed=self.directed)
        nodes, edges = len(data.x), data.num_edges
        config = config.for_graph(nodes, edges).for_rows(nodes, "nodes")
        if self.in_dim is None:
            self._follow(rule(nodes, edges), data)
        self._check_fits(data)
        rows: Any = torch.arange(nodes)
        loader = DataLoader(rows, config.batch_size, shuffle=True, drop_last=True)
        objective = GraphObjective(self, data, config)
        loop.fit(
            objective,
            loader,
            config,
            optimizer=lambda weights: torch.optim.Adam(
                weights, config.lr, weight_decay=config.weight_decay
            ),
            fingerprint=_fingerprint(data),
        )
        objective.settle()
        return {"data": "graph", "nodes": nodes, "edges": edges}

    def _follow(self, settings: Settings, data: Data) -> None:
        """Build the model; settings that were not given are set by the rule for this graph."""
        head = replace(self._options, dims=self._dims or settings.dims)
        if head.density is None and head.k is None and head.activation in ("relu", "rep_relu"):
            head = replace(head, k=active(head.dims))
        self._options, self.width = head, self.width or settings.width
        if self.name == "gat" and self.edge_dim is None and "edge_attr" in data:
            self.edge_dim = data.edge_attr.shape[1]
        self._make(data.num_features)

    def _check_fits(self, data: Data) -> None:
        """Refuse another number of features; warn of edge attributes that are not used."""
        if data.num_features != self.in_dim:
            raise ValueError(
                f"this model takes {self.in_dim} features per node; got {data.num_features}"
            )
        edge_dim = data.edge_attr.shape[1] if "edge_attr" in data else None
        if self.edge_dim is not None and edge_dim != self.edge_dim:
            raise ValueError(f"this model takes {self.edge_dim} features per edge; got {edge_dim}")
        for values in ("edge_weight", "edge_attr"):
            if values in data and values != self.edge_values:
                taken = " or ".join(name for name, v in _EDGE_VALUES.items() if v == values)
                log.warning(f"{values} is not used: encoder {taken} would take it")

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        self._check_made()
        data = prepare(items, directed=self.directed)
        self._check_fits(data)
        nodes = len(data.x)
        with torch.inference_mode():
            if not self.name or (batch_size is None and fits_whole(nodes, data.num_edges)):
                yield self._unit(self._encode(*self.view_of(data.to(self.device))))
                return
            data = data.cpu()
            edge_attr = data.get(self.edge_values, None) if self.edge_values else None
            edges = self._weighed(data.edge_index, edge_attr, nodes)
            blocks = layer_by_layer(
                self._layers(),
                lambda rows: encoder_input(
                    Data(x=data.x[rows], counts=data.counts), sparse=self.takes_sparse
                ),
                *edges,
                nodes,
                batch_size or _BLOCK,
            )
            for h in blocks:
                yield self._unit(h.to(self.device))

    def _head(self, items: Any) -> nn.Module:
        self._check_made()
        served = self.head.fold()
        # The energy of a head that was shortened is that of more dimensions.
        if self.head.k is not None and self.energy_dims == self.head.out_dim:
            served[-1] = EvenTopK(self.head.k, float(self.energy))
        return served

    def _became_signed(self) -> None:
        self._options = self._options.signed()

    def _unit(self, h: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
        """Unit rows: clusters of them are clusters of directions, which a linear head can read."""
        return F.normalize(self.standardise(h), dim=1)

    def _encode(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        *,
        rows: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "n h"]:
        """The encoder's output for all nodes, or for those numbered in `rows`."""
        # Once for both layers.
        edge_index, edge_attr = self._weighed(edge_index, edge_attr, x.shape[0])
        if rows is None:
            return self._propagate(self.encoder, x, edge_index, edge_attr)
        if self.one_product and edge_index.device.type == "cpu" and 2 * len(rows) < x.shape[0]:
            return self._encode_rows(rows, x, edge_index, edge_attr)
        return self._propagate(self.encoder, x, edge_index, edge_attr)[rows]

    def _encode_rows(
        self, rows: Int[Tensor, " n"], x: Tensor, edge_index: Tensor, edge_attr: Tensor | None
    ) -> Float[Tensor, "n h"]:
        """Both layers, the first only for nodes that the second needs.

        Of a sampled neighbourhood most nodes are two hops away, where the first layer's output is
        not needed. This makes a step 3.5 times as fast.
        """
        nodes = x.shape[0]
        into_rows, values = edges_into(rows, edge_index, edge_attr, nodes)
        near, into_rows = and_sources(rows, into_rows, nodes)
        into_near, first_values = edges_into(near, edge_index, edge_attr, nodes)
        first, last = self.encoder.convs
        h = self.encoder.act(self._propagate(first, x, into_near, first_values, near))
        places = torch.arange(len(rows), device=rows.device)
        return self._propagate(last, h, into_rows, values, places)

    def _weighed(
        self, edge_index: Tensor, edge_attr: Tensor | None, nodes: int
    ) -> tuple[Tensor, Tensor | None]:
        """Edges as the layers take them: GCN weighs them by degrees, and adds self-loops."""
        if self.name != "gcn":
            return edge_index, edge_attr
        return gcn_norm(edge_index, edge_attr, nodes, dtype=self.standardise.mean.dtype)

    def _propagate(
        self,
        layers: Any,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None,
        targets: Int[Tensor, " n"] | None = None,
    ) -> Float[Tensor, "n h"]:
        """The output of the encoder or of one of its layers, for edges that are weighed.

        With `targets`, rows of `x`, only these receive: edges number them in their order.
        """
        if self.one_product and edge_index.device.type == "cpu":
            # Half the time and memory of PyG's messages, one per edge. Not measured on a GPU.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                matrix = adjacency(edge_index, x, edge_attr, targets)
                # SAGE and GIN treat a node apart from its neighbours; GCN has self-loops instead.
                pair = targets is not None and self.name != "gcn"
                return layers((x, x[targets]) if pair else x, matrix)
        values = {} if edge_attr is None else {str(self.edge_values): edge_attr}
        return layers(x, edge_index, **values)

    def _layers(self) -> list[Layer]:
        """Both layers of an encoder of `ENCODERS`, on this model's device."""
        first, last = self.encoder.convs

        def layer(conv: nn.Module, after: Callable[[Tensor], Tensor]) -> Layer:
            def output(x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
                edge_attr = None if edge_attr is None else edge_attr.to(self.device)
                h = self._propagate(conv, x.to(self.device), edge_index.to(self.device), edge_attr)
                return after(h).cpu()

            return output

        return [layer(first, self.encoder.act), layer(last, nn.Identity())]


def _fingerprint(data: Data) -> str:
    digest = hashlib.sha256(str((tuple(data.x.shape), data.num_edges)).encode())
    for tensor in (data.x, data.edge_index):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]

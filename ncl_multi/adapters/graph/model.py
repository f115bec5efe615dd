"""Non-negative graph contrastive learning: GRACE with codes that can be read.

Example:
    model = NonNegGraph(dims=256).fit(data)
    model.encode(data)  # scipy.sparse.csr_array, one unit row per node
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ncl_multi.adapters.graph.config import GraphConfig
from ncl_multi.adapters.graph.data import adjacency, lean, prepare
from ncl_multi.adapters.graph.objective import GraphObjective, View
from ncl_multi.adapters.graph.sampling import neighbor_loader
from ncl_multi.head import Activation, HeadOptions
from ncl_multi.model import SparseModel, check_fits

try:
    from torch_geometric.data import Data
    from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs torch-geometric: pip install 'ncl-multi[graph]'") from error

ENCODERS: dict[str, type[nn.Module]] = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE, "gin": GIN}
_TAKE_SPARSE = ("gcn", "gat")
"""Those that begin with a linear layer; the others sum over neighbours first."""
_ONE_PRODUCT = ("gcn", "sage", "gin")
"""Those whose sum over neighbours is a product with the adjacency matrix: no weights of edges."""


class NonNegGraph(
    SparseModel,
    library_name="ncl_multi",
    tags=["graph", "non-negative-contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """A graph encoder with a non-negative head, trained as GRACE is.

    `fit` and `encode` take a PyG `Data` object; a code is a row per node.

    Args:
        dims: Number of non-negative dimensions.
        in_dim: Features of a node; None takes those of the graph it is fitted on.
        encoder: `gcn`, `gat`, `sage` or `gin`, two layers of widths 2 * width and width; or a
            module of your own, called as `encoder(x, edge_index)`. `load` must then be given such
            a module again.
        width: Width of the encoder's output.
        encoder_activation: Any name PyG knows, such as `relu` or `prelu`; after both layers.
        activation: See `NonNegHead`; `none` is the signed twin, GRACE.
        density: See `NonNegHead`. None, without `k`: .016, but at least 130 nodes of the graph it
            is fitted on.
        k: See `NonNegHead`.
        directed: Leave edges as they are, rather than making them run both ways.
        seed: Of the weights it starts with.

    Example:
        >>> x, edges = torch.rand(5, 8), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> model = NonNegGraph(dims=16, in_dim=8, width=4)
        >>> model.embed(Data(x=x, edge_index=edges)).shape
        torch.Size([5, 4])
    """

    kind = "graph"
    example = "model.encode(data)  # a torch_geometric.data.Data"
    config_type = GraphConfig
    load_options = ("encoder",)

    def __init__(
        self,
        dims: int = 256,
        *,
        in_dim: int | None = None,
        encoder: str | nn.Module = "gcn",
        width: int = 128,
        encoder_activation: str = "relu",
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
        for name, size in {"in_dim": in_dim, "width": width}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        self.in_dim, self.directed, self.seed, self.width = in_dim, directed, seed, width
        self.name = encoder if isinstance(encoder, str) else None
        self.encoder_activation = encoder_activation
        self.takes_sparse = self.name in _TAKE_SPARSE
        self.one_product = self.name in _ONE_PRODUCT
        self._options = HeadOptions(dims, hidden_dim, activation, batch_norm, density, k)
        self._options.build(1)  # Refuses what does not fit together, before a graph is there.
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

    def represent(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> list[Float[Tensor, "n h"]]:
        """What the encoder gives for every view, before the head."""
        encoded = [self._encode(*view) for view in views]
        return encoded if rows is None else [h[rows] for h in encoded]

    def inputs(self, data: Data) -> Tensor:
        """The nodes' features, sparse where that is faster for this encoder."""
        return lean(data.x) if self.takes_sparse else data.x

    @property
    def dims(self) -> int:
        return self._options.dims if self.in_dim is None else super().dims

    def options(self) -> dict[str, Any]:
        self._check_made()
        return {
            "in_dim": self.in_dim, "encoder": self.name, "width": self.width,
            "encoder_activation": self.encoder_activation, "directed": self.directed,
        } | asdict(self.head.options)  # fmt: skip

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **given: Any) -> "NonNegGraph":
        encoder = given.get("encoder")
        if options["encoder"] is None and encoder is None:
            raise ValueError(
                "it was trained with an encoder of your own: pass encoder=<such a module>"
            )
        options = options | {"encoder": encoder or options["encoder"]}
        check_fits(lambda: cls(**options), folder / "model.safetensors")
        return cls(**options)

    def _make(self, in_dim: int) -> None:
        """Build what depends on the graph's features."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            if self.name:
                self.encoder = ENCODERS[self.name](
                    in_dim, 2 * self.width, 2, self.width, act=self.encoder_activation
                )
            self.head = self._options.build(self.width)
        self.in_dim = in_dim

    def _check_made(self) -> None:
        if self.in_dim is None:
            raise ValueError(
                "this graph model has not seen a graph: call fit(data), or give in_dim"
            )

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        from ncl_multi.training import fit as loop

        data = prepare(data, directed=self.directed)
        nodes, head = len(data.x), self._options
        config = config.for_rows(nodes, "nodes")
        if self.in_dim is None:
            if head.density is None and head.k is None and head.activation in ("relu", "rep_relu"):
                # A dimension that fires for fewer nodes has next to none with a label.
                head = replace(head, density=min(0.5, max(0.016, 130 / nodes)))
            self._options = head
            self._make(data.num_features)
        elif data.num_features != self.in_dim:
            raise ValueError(
                f"this model takes {self.in_dim} features per node; got {data.num_features}"
            )
        rows: Any = torch.arange(nodes)
        loader = DataLoader(rows, config.batch_size, shuffle=True, drop_last=True)
        loop.fit(
            GraphObjective(self, data, config),
            loader,
            config,
            optimizer=lambda weights: torch.optim.Adam(
                weights, config.lr, weight_decay=config.weight_decay
            ),
            fingerprint=_fingerprint(data),
        )
        return {"data": "graph", "nodes": nodes, "edges": data.num_edges}

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        self._check_made()
        data = prepare(items, directed=self.directed)
        if data.num_features != self.in_dim:
            raise ValueError(
                f"this model takes {self.in_dim} features per node; got {data.num_features}"
            )
        with torch.inference_mode():
            if batch_size is None:
                yield self._encode(
                    self.inputs(data).to(self.device), data.edge_index.to(self.device)
                )
                return
            # One hop beyond the two layers: GCN weighs a neighbour by all of its edges.
            around = neighbor_loader(data, [-1, -1, -1])
            for nodes in torch.arange(len(data.x)).split(batch_size):
                batch = around(nodes)
                h = self._encode(batch.x.to(self.device), batch.edge_index.to(self.device))
                yield h[: batch.batch_size]

    def _head(self, items: Any) -> nn.Module:
        self._check_made()
        return self.head.fold()

    def _became_signed(self) -> None:
        self._options = self._options.signed()

    def _encode(self, x: Tensor, edge_index: Tensor) -> Float[Tensor, "nodes h"]:
        if self.one_product and edge_index.device.type == "cpu":
            # Half the time and memory of PyG's messages, one per edge. Not measured on a GPU.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                h = self.encoder(x, adjacency(edge_index, x))
        else:
            h = self.encoder(x, edge_index)
        return h if self.name is None else self.encoder.act(h)


def _fingerprint(data: Data) -> str:
    digest = hashlib.sha256(str((tuple(data.x.shape), data.num_edges)).encode())
    for part in (data.x, data.edge_index):
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]

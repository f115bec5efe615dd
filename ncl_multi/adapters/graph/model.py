"""Non-negative graph contrastive learning: GRACE with codes that can be read.

Example:
    model = GraphCL(data.num_features, dims=512, density=0.05)
    model.encode(data)  # scipy.sparse.csr_array, a unit row a node
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.adapters.graph.data import adjacency, lean, prepare
from ncl_multi.adapters.graph.sampling import neighbor_loader
from ncl_multi.codes.features import to_csr
from ncl_multi.head import SIGNED, Activation, NonNegHead

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin
    from torch_geometric.data import Data
    from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("needs torch-geometric: pip install 'ncl-multi[graph]'") from error

View = tuple[Tensor, Tensor]
"""Features of the nodes, dense or CSR, and the edges."""

ENCODERS: dict[str, type[nn.Module]] = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE, "gin": GIN}
_TAKE_SPARSE = ("gcn", "gat")
"""Those that begin with a linear layer; the others sum over neighbours first."""
_ONE_PRODUCT = ("gcn", "sage", "gin")
"""Those whose sum over neighbours is a product with the adjacency matrix: no weights of edges."""


class GraphCL(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="ncl-multi",
    tags=["graph", "contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """A graph encoder with a non-negative head.

    Args:
        in_dim: Features of a node.
        dims: Number of non-negative dimensions.
        encoder: `gcn`, `gat`, `sage` or `gin`, two layers of widths 2 * hidden_dim and hidden_dim;
            or a module of your own, called as `encoder(x, edge_index)`. `from_pretrained` must then
            be given such a module again.
        hidden_dim: Width of the encoder's output.
        encoder_activation: Any name PyG knows, such as `relu` or `prelu`; after both layers.
        activation: See `NonNegHead`; `none` is the signed twin, GRACE.
        density: See `NonNegHead`.
        k: See `NonNegHead`.
        directed: Leave edges as they are, rather than making them run both ways.

    Example:
        >>> x, edges = torch.rand(5, 8), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> codes = GraphCL(8, dims=16, hidden_dim=4).encode(Data(x=x, edge_index=edges))
        >>> codes.shape, bool(codes.min() >= 0)
        ((5, 16), True)
    """

    def __init__(
        self,
        in_dim: int,
        dims: int = 512,
        *,
        encoder: str | nn.Module = "gcn",
        hidden_dim: int = 256,
        encoder_activation: str = "relu",
        activation: Activation = "relu",
        density: float | None = None,
        k: int | None = None,
        directed: bool = False,
    ):
        super().__init__()
        if isinstance(encoder, str) and encoder not in ENCODERS:
            raise ValueError(
                f"encoder must be one of {', '.join(ENCODERS)}, or a module; got {encoder!r}"
            )
        for name, size in {"in_dim": in_dim, "hidden_dim": hidden_dim}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        self.in_dim, self.directed = in_dim, directed
        kind = encoder if isinstance(encoder, str) else None
        self.own = kind is None
        self.takes_sparse, self.one_product = kind in _TAKE_SPARSE, kind in _ONE_PRODUCT
        self.encoder: Any = encoder
        if isinstance(encoder, str):
            self.encoder = ENCODERS[encoder](
                in_dim, 2 * hidden_dim, 2, hidden_dim, act=encoder_activation
            )
        self.head = NonNegHead(hidden_dim, dims, activation=activation, density=density, k=k)

    def forward(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> tuple[Float[Tensor, "n d"], ...]:
        """Codes of every view, of all nodes or of those numbered in `rows`.

        All views in one call, since DDP counts calls. Each is normalised by itself.
        """
        return tuple(map(self.head, self.embed(*views, rows=rows)))

    def embed(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> list[Float[Tensor, "n h"]]:
        """What the encoder gives for every view, before the head."""
        encoded = [self._encode(*view) for view in views]
        return encoded if rows is None else [h[rows] for h in encoded]

    @torch.no_grad()
    def encode(
        self,
        data: Data,
        *,
        output: Literal["head", "encoder"] = "head",
        dense: bool = False,
        batch_size: int | None = None,
    ) -> Any:
        """Unit rows, one a node, as `scipy.sparse.csr_array`, or as a tensor if `dense`.

        `output="encoder"` gives what comes before the head: signed or dense, best for a
        classifier. `batch_size` nodes at a time, each with its whole neighbourhood, give the same
        for a graph that does not fit (encoders of your own: up to two layers).
        """
        if output not in ("head", "encoder"):
            raise ValueError(f"output must be head or encoder; got {output!r}")
        data = prepare(data, directed=self.directed)
        if data.num_features != self.in_dim:
            raise ValueError(
                f"this model takes {self.in_dim} features a node; got {data.num_features}"
            )
        training, device = self.training, self.head.out.weight.device
        self.eval()
        try:
            if batch_size is None:
                h = self._encode(self.features(data).to(device), data.edge_index.to(device))
            else:
                # One hop beyond the two layers: GCN weighs a neighbour by all of its edges.
                around = neighbor_loader(data, [-1, -1, -1])
                nodes = torch.arange(len(data.x)).split(batch_size)
                h = torch.cat([self._of_batch(around(some), device) for some in nodes])
            z = self.head(h) if output == "head" else h
        finally:
            self.train(training)
        return F.normalize(z.float(), dim=1) if dense else to_csr(z)

    def features(self, data: Data) -> Tensor:
        """The nodes' features, sparse where that is faster for this encoder."""
        return lean(data.x) if self.takes_sparse else data.x

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that goes with the weights."""
        kind = "Signed" if self.head.activation in SIGNED else "Non-negative"
        return ModelCard(
            f"---\n{self._hub_mixin_info.model_card_data.to_yaml()}\n---\n\n"
            f"# {kind} graph codes\n\n{self.in_dim} features a node in, {self.head.out_dim} "
            f"dimensions out ({self.head.extra_repr()}).\n\n"
            "```python\nfrom ncl_multi.adapters.graph.model import GraphCL\n\n"
            'model = GraphCL.from_pretrained("<this repository>")\n'
            "codes = model.encode(data)  # a PyG Data object in, scipy.sparse.csr_array out\n```\n"
        )

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "GraphCL":
        try:
            return super()._from_pretrained(model_id=model_id, **options | {"strict": True})
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {model_id} do not fit: {error}. A model trained with an encoder "
                f"of your own needs from_pretrained(..., encoder=<that module>)"
            ) from error

    def _encode(self, x: Tensor, edge_index: Tensor) -> Float[Tensor, "nodes h"]:
        if self.one_product and edge_index.device.type == "cpu":
            # Half the time and memory of PyG's messages, one an edge. Not measured on a GPU.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                h = self.encoder(x, adjacency(edge_index, x))
        else:
            h = self.encoder(x, edge_index)
        return h if self.own else self.encoder.act(h)

    def _of_batch(self, batch: Data, device: torch.device) -> Tensor:
        h = self._encode(batch.x.to(device), batch.edge_index.to(device))
        return h[: batch.batch_size]


class Learner(nn.Module):
    """What is trained: a model, and two parts that help it to learn and are gone afterwards.

    Sparse codes alone teach an encoder less than signed ones do, and forget some of what it knows.
    So a signed head contrasts the same nodes, for the encoder's sake, and a linear map rebuilds the
    encoder's features from the codes, for the head's.

    Args:
        model: Gives the codes.
        signed: With a signed head.
        rebuild: With a map from codes to features.
    """

    def __init__(self, model: GraphCL, *, signed: bool = False, rebuild: bool = False):
        super().__init__()
        width, dims = model.head.in_dim, model.head.out_dim
        self.model = model
        self.signed = NonNegHead(width, dims, activation="none") if signed else None
        self.rebuild = nn.Linear(dims, width) if rebuild else None

    def forward(
        self, *views: View, rows: Int[Tensor, " n"] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[tuple[Tensor, Tensor], ...]]:
        """Codes; signed codes, or none; rebuilt and true features, or none: of every view."""
        embedded = self.model.embed(*views, rows=rows)
        codes = tuple(map(self.model.head, embedded))
        signed = () if self.signed is None else tuple(map(self.signed, embedded))
        rebuilt: tuple[Tensor, ...] = ()
        if self.rebuild is not None:
            rebuilt = tuple(self.rebuild(F.normalize(z, dim=1)) for z in codes)
        return codes, signed, tuple(zip(rebuilt, embedded, strict=False))


def lost(rebuilt: Float[Tensor, "n h"], h: Float[Tensor, "n h"]) -> Float[Tensor, ""]:
    """One minus the mean cosine of features, less their mean, and what was rebuilt of them.

    No gradient goes to the features: the codes are to follow them, not the other way round.

    Example:
        >>> h = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        >>> round(lost(h - h.mean(dim=0), h).item(), 6)
        0.0
    """
    wanted = h.detach() - h.detach().mean(dim=0)
    return 1 - F.cosine_similarity(rebuilt, wanted).mean()

"""Sentences: the objective, and the sparse autoencoder it is compared with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.head import top_ks
from ncl_multi.losses import info_nce, spectral

Codes = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]
Loss = Literal["info_nce", "spectral"]


def at_each_k(z: Codes, ks: Sequence[int] | None) -> list[Tensor]:
    """The same codes cut to each number of entries; whole if there is nothing to cut to."""
    return top_ks(z, ks) if ks else [z]


def contrast(
    columns: Sequence[Tensor],
    *,
    loss: Loss = "info_nce",
    temperature: float,
    groups: Int[Tensor, " m"] | None = None,
) -> Scalar:
    """The contrastive loss of anchors, positives and, if there are any, hard negatives.

    A hard negative is one more item of the batch whose partner is itself: a rival of every anchor,
    its own included. `groups` say which positives, then negatives, are the same text: `info_nce`
    does not push an anchor away from what is its own positive, too.
    """
    anchors, positives, *negatives = columns
    za, zb = torch.cat([anchors, *negatives]), torch.cat([positives, *negatives])
    if loss == "spectral":
        # Lengths of top-k codes say how many entries were kept, not how common a sentence is.
        return spectral(F.normalize(za, dim=1), F.normalize(zb, dim=1))
    return info_nce(za, zb, temperature=temperature, groups=groups)


def agree(za: Codes, zb: Codes, wanted: Float[Tensor, " n"]) -> Scalar:
    """One minus the correlation, over pairs, of the codes' cosine and a similarity that is wanted.

    That may be the encoder's cosine, for which any text will do, or what people say. 0 is perfect
    agreement; pairs without spread have none.

    Example:
        >>> z = torch.eye(3)
        >>> round(agree(z, z[[0, 2, 1]], torch.tensor([5.0, 1.0, 1.0])).item(), 6)
        0.0
    """
    got, wanted = F.cosine_similarity(za, zb), wanted.detach()
    got, wanted = got - got.mean(), wanted - wanted.mean()
    return 1 - F.cosine_similarity(got, wanted, dim=0)


class Learner(nn.Module):
    """What is trained: a head, or an encoder with one, and how many entries of a row count.

    Args:
        body: Gives codes.
        ks: Numbers of entries to train for at once.
        start: The run starts with so many times as many, and comes down over its first 70 %.
        rebuild: Also learn to rebuild features from codes.
    """

    def __init__(
        self, body: nn.Module, ks: Sequence[int] | None, start: float = 1.0, rebuild: bool = False
    ):
        super().__init__()
        head: Any = getattr(body, "head", body)
        self.body, self.final, self.start, self.dims = body, ks, start, head.out_dim
        self.ks = ks
        self.rebuild = nn.Linear(head.out_dim, head.in_dim) if rebuild else None

    def forward(self, given: Any) -> tuple[Tensor, nn.Module | None]:
        """Codes of the batch, whole, and the module that rebuilds features from them."""
        return self.body(given), self.rebuild

    def anneal(self, progress: float) -> None:
        """Set the numbers of entries in force at this share of the run."""
        if self.final:
            factor = self.start ** max(0.0, 1 - progress / 0.7)
            self.ks = [min(self.dims, round(k * factor)) for k in self.final]


class NonNegLoss(nn.Module):
    """The objective for sentence-transformers' own trainer, on a model with non-negative output.

    Columns of the dataset are anchor, positive and any number of hard negatives. `model` is kept
    under this name because the trainer puts its distributed copy there.

    Args:
        model: A `SentenceTransformer` or `SparseEncoder` that ends in `Dense(..., nn.ReLU())`.
        ks: Numbers of entries to train for, all at once.
        temperature: Of `info_nce`.
    """

    def __init__(self, model: nn.Module, ks: Sequence[int] | None = None, temperature: float = 0.1):
        super().__init__()
        self.model, self.ks, self.temperature = model, ks, temperature

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None
    ) -> Tensor:
        columns = [self.model(column)["sentence_embedding"] for column in sentence_features]
        if len(columns) < 2:
            raise ValueError(
                f"the dataset needs an anchor and a positive column; got {len(columns)} column"
            )
        cut = zip(*(at_each_k(column, self.ks) for column in columns), strict=True)
        losses = [contrast(at_k, temperature=self.temperature) for at_k in cut]
        return torch.stack(losses).mean()

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says of the training."""
        return {"ks": self.ks, "temperature": self.temperature}


class SparseAutoencoder(nn.Module):
    """CSR as sentence-transformers has it, on cached features: the method to compare with.

    Its `SparseAutoEncoder` and `CSRLoss` as they are. In them the pre-activations are masked in
    place before the pass with 4k entries, so that term adds nothing while no unit is dead.
    """

    def __init__(self, in_dim: int, dims: int, k: int):
        super().__init__()
        try:
            from sentence_transformers.sparse_encoder.losses import CSRLoss
            from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "needs sentence-transformers: pip install 'ncl-multi[sentence]'"
            ) from error
        self.body = SparseAutoEncoder(in_dim, dims, k=k, k_aux=min(512, dims))
        # It asks of a model only what the autoencoder alone has, too.
        self.loss = CSRLoss(cast(Any, self.body))

    def forward(self, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of anchors, positives and negatives, and the anchors' codes."""
        features: list[dict[str, Tensor]] = [{"sentence_embedding": h} for h in columns]
        total = torch.stack(list(self.loss(features).values())).sum()
        return total, features[0]["sentence_embedding"]

    @torch.no_grad()
    def codes(self, h: Float[Tensor, "n width"]) -> Codes:
        """Codes before they are cut: the k largest entries of a row are what it serves."""
        return F.relu(self.body.encode_pre_act(h))

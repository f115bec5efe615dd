"""Sentences: the objective, and the sparse autoencoder it is compared with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.adapters.sentence.config import Loss, SentenceConfig
from ncl_multi.adapters.sentence.corpus import Corpus, Examples
from ncl_multi.distributed import gather
from ncl_multi.head import top_k, top_ks
from ncl_multi.losses import correlation_loss, imitation, info_nce, spectral
from ncl_multi.optional import needs

Codes = Float[Tensor, "n d"]
Scalar = Float[Tensor, ""]

# For cosines of anchors and all positives of a batch; a low one considers the nearest only.
_TEACHER_TEMPERATURE = 0.05


def at_each_k(z: Codes, ks: Sequence[int] | None) -> list[Tensor]:
    """The codes cut to each number of entries; whole codes if `ks` is None."""
    return top_ks(z, ks) if ks else [z]


def contrast(
    columns: Sequence[Tensor],
    *,
    loss: Loss = "info_nce",
    temperature: float,
    groups: Int[Tensor, " m"] | None = None,
) -> Scalar:
    """The contrastive loss of anchors, positives and, if there are any, hard negatives.

    A hard negative is an extra item of the batch whose partner is itself: a rival of every anchor,
    including its own. `groups` mark positives, then negatives, with the same text: `info_nce` does
    not push an anchor away from its own positive.
    """
    anchors, positives, *negatives = columns
    za, zb = torch.cat([anchors, *negatives]), torch.cat([positives, *negatives])
    if loss == "spectral":
        # The length of a top-k code depends on k, not on how common a sentence is.
        return spectral(F.normalize(za, dim=1), F.normalize(zb, dim=1))
    return info_nce(za, zb, temperature=temperature, groups=groups)


class SentenceObjective(nn.Module):
    """The loss of a batch of examples, for several numbers of active dimensions in turn.

    The main term is the contrast of anchors and positives. Optional terms are the correlation of
    the codes' cosines with those of the encoder or with human scores, and rebuilding the features.
    Each batch is cut to one k, a quarter of the cost of all four at once, with the same result.

    Args:
        model: A head, for cached features, or a whole `NonNegEncoder`.
        corpus: Sentences, and which belong together.
        h: The encoder's features of all sentences.
        ks: Numbers of entries to train for; None for whole codes.
        config: Weights of the terms.
    """

    model: Any
    batches: Tensor

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        h: Float[Tensor, "n width"],
        ks: Sequence[int] | None,
        config: SentenceConfig,
    ):
        super().__init__()
        head: Any = getattr(model, "head", model)
        self.model, self.corpus, self.h, self.config = model, corpus, h, config
        self.dims, self.turns, self.factor = head.out_dim, list(ks or ()), 1.0
        self.examples = Examples(h, config)
        self.rebuild = nn.Linear(self.dims, h.shape[1]) if config.reconstruction else None
        # In the checkpoint, so that a resumed run continues with the next turn.
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def anneal(self, progress: float) -> None:
        """Set the numbers of entries for this share of the run."""
        self.factor = self.config.anneal_k ** max(0.0, 1 - progress / 0.7)

    @property
    def k(self) -> int | None:
        """The number of entries that the next batch is cut to."""
        if not self.turns:
            return None
        k = self.turns[int(self.batches) % len(self.turns)]
        return min(self.dims, round(k * self.factor))

    def forward(self, batch: Int[Tensor, "n columns"]) -> tuple[Tensor, Tensor]:
        """The loss of rows of sentences, and their codes."""
        config, device = self.config, batch.device
        columns = self.examples.columns(batch.cpu())
        first, second, scores = self.corpus.draw_pairs(2 * len(batch))
        rows = torch.cat([*columns, first, second])
        sizes = [len(column) for column in (*columns, first, second)]
        h = self.h[rows].to(device)
        z = self.model(self._inputs(rows, h))
        cut = z if self.k is None else top_k(z, self.k)
        self.batches += 1
        parts, loss = _gathered(cut, sizes), z.new_zeros(())
        codes, encoded = parts[: len(columns)], []
        if config.correlation or config.imitation:
            encoded = [gather(rows) for rows in h.split(sizes)[: len(columns)]]
        if config.contrast:
            texts = torch.cat([gather(column.to(device)) for column in columns[1:]])
            loss = loss + config.contrast * contrast(
                codes, loss=config.loss, temperature=config.temperature, groups=texts
            )
        if config.correlation:
            cosines = F.cosine_similarity(*_pairs(encoded))
            loss = loss + config.correlation * correlation_loss(*_pairs(codes), cosines)
        if config.imitation:
            # Short anchors, and whole ones, as of queries, against short positives.
            for anchors in (codes[0], gather(z[: sizes[0]])):
                student, teacher = (anchors, codes[1]), (encoded[0], encoded[1])
                loss = loss + config.imitation * imitation(student, teacher, _TEACHER_TEMPERATURE)
        scores = gather(scores.to(device))
        if config.scores and len(scores):
            left, right = parts[len(columns) :]
            loss = loss + config.scores * correlation_loss(left, right, scores)
        if self.rebuild is not None:
            loss = loss + config.reconstruction * F.mse_loss(self.rebuild(cut), h)
        return loss, z

    def _inputs(self, rows: Tensor, h: Tensor) -> Any:
        if self.config.finetune:
            inputs = self.model.encoder.prepare([self.corpus.sentences[row] for row in rows])
            return {name: tensor.to(h.device) for name, tensor in inputs.items()}
        # Cached features have no dropout of the encoder: drop a share of the features instead.
        return F.dropout(h, self.config.dropout)


def _gathered(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [gather(rows) for rows in x.split(list(sizes))]


def _pairs(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both sides of all pairs whose cosines should be the encoder's.

    Anchors with their positives, with their hard negatives, and with any other anchor.
    """
    anchors, *others = columns
    return torch.cat([anchors] * len(columns)), torch.cat([*others, anchors.roll(1, 0)])


class NonNegLoss(nn.Module):
    """The objective for sentence-transformers' own trainer, on a model with non-negative output.

    Columns of the dataset are anchor, positive and any number of hard negatives. The attribute
    must be called `model`: the trainer puts its distributed copy there.

    Args:
        model: A `SentenceTransformer` or `SparseEncoder` that ends in `Dense(..., nn.ReLU())`.
        ks: Numbers of entries to train for, all at once.
        temperature: Temperature of `info_nce`.
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
        """Settings that the model card lists."""
        return {"ks": self.ks, "temperature": self.temperature}


class SparseAutoencoder(nn.Module):
    """CSR of sentence-transformers on cached features: the baseline.

    Stock `SparseAutoEncoder` and `CSRLoss`. They mask the pre-activations in place before the pass
    with 4k entries, so that term adds nothing while no unit is dead.
    """

    def __init__(self, in_dim: int, dims: int, k: int):
        super().__init__()
        with needs("ncl-multi[sentence]"):
            from sentence_transformers.sparse_encoder.losses import CSRLoss
            from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
        self.body = SparseAutoEncoder(in_dim, dims, k=k, k_aux=min(512, dims))
        # The loss uses only attributes that the autoencoder has, too.
        self.loss = CSRLoss(cast(Any, self.body))

    def forward(self, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of anchors, positives and negatives, and the anchors' codes."""
        features: list[dict[str, Tensor]] = [{"sentence_embedding": h} for h in columns]
        total = torch.stack(list(self.loss(features).values())).sum()
        return total, features[0]["sentence_embedding"]

    @torch.no_grad()
    def codes(self, h: Float[Tensor, "n width"]) -> Codes:
        """Codes before they are cut: the k largest entries of a row are what it serves."""
        return F.relu(self.weights(h))

    @torch.no_grad()
    def weights(self, h: Float[Tensor, "n width"]) -> Float[Tensor, "n d"]:
        """What codes are before ReLU."""
        return self.body.encode_pre_act(h)

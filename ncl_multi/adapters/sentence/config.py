"""How sentence models are trained."""

from dataclasses import dataclass
from typing import Literal

from ncl_multi.training.config import TrainConfig

Loss = Literal["info_nce", "spectral"]


@dataclass(frozen=True)
class SentenceConfig(TrainConfig):
    """How a `NonNegEncoder` is trained on texts."""

    k: tuple[int, ...] | None = None
    """Train for these numbers of active dimensions in turn; the last is what the model serves. None
    takes 8, 16, ... up to the k of the head."""
    anneal_k: float = 1.0
    """Start with this many times as many entries, lowered over the first 70 % of the steps."""
    start: Literal["axes", "clusters", "random"] = "axes"
    """Where dimensions start: axes along which the features are sparse, clusters, or random."""
    loss: Loss = "info_nce"
    """The contrastive loss of pairs."""
    temperature: float = 0.1
    """Temperature of the contrastive losses."""
    contrast: float = 1.0
    """Weight of the contrastive loss of anchors and positives, given or mined."""
    mined: float = 0.5
    """Share of texts without a given positive that are paired with one of their nearest others; the
    rest are paired with a noisy copy of themselves."""
    mined_among: int = 8
    """Mined positives are drawn from this many nearest; the nearer, the likelier."""
    passages: bool | None = None
    """Whether texts are documents, each paired with its own sentences; None detects it."""
    correlation: float = 30.0
    """Weight of the correlation between the cosines of codes and those of the encoder."""
    imitation: float = 10.0
    """Weight of learning from the encoder which positives of a batch are near which anchors, for
    short codes of the anchors and for whole ones, as of queries."""
    scores: float = 0.5
    """Weight of the correlation with human scores, where the corpus has any."""
    reconstruction: float = 0.0
    """Weight of rebuilding the encoder's features from the codes, linearly."""
    dropout: float = 0.05
    """Share of features that is dropped in training; makes the noisy copy, too."""
    finetune: bool = False
    """Train the encoder too; otherwise it is frozen and its features are cached."""
    steps: int | None = 250
    """Stop after this many steps instead of after `epochs`: a head that starts on axes needs
    few steps, and gets worse on other kinds of texts if it is trained for long."""
    batch_size: int = 384
    """Examples per process."""
    lr: float = 3e-4
    ema: float | None = 0.98
    """End with a moving average of the weights, which are noisy with few pairs."""

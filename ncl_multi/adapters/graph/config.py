"""How graph models are trained."""

from dataclasses import dataclass
from typing import Literal

from ncl_multi.training.config import TrainConfig


@dataclass(frozen=True)
class GraphConfig(TrainConfig):
    """How a `NonNegGraph` is trained. The defaults are GRACE's for Cora, with fewer negatives."""

    loss: Literal["info_nce", "spectral"] = "info_nce"
    """`spectral` costs time linear in the nodes, so that all may be negatives of all."""
    signed: float = 3.0
    """Weight of the same contrast of a signed head, from which the encoder learns as well."""
    reconstruction: float = 3.0
    """Weight of rebuilding the encoder's features from the codes, linearly."""
    temperature: float = 0.4
    """Of `info_nce`; lower looks harder at the closest rivals."""
    drop_edges: tuple[float, float] = (0.2, 0.4)
    """Share of edges that each view goes without."""
    drop_features: tuple[float, float] = (0.3, 0.4)
    """Share of feature columns that each view goes without."""
    adaptive: bool = False
    """Drop the less important edges and features more often, as GCA does."""
    neighbors: tuple[int, ...] | None = None
    """Encode sampled neighbourhoods, this many neighbours per hop; None for the whole graph."""
    batch_size: int | None = 256  # type: ignore[assignment]
    """Nodes per step and process that are each other's negatives; None for all nodes."""
    steps: int | None = 200
    """Number of steps; None to count `epochs`."""
    epochs: int = 1
    """Passes over the nodes."""
    lr: float = 5e-4
    """Learning rate."""
    weight_decay: float = 1e-5
    """Pull of the weights towards zero."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "constant"] = "constant"
    """What the learning rate does after the warm-up."""

"""How vision models are trained."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ncl_multi.training.config import TrainConfig

Loss = Literal["info_nce", "spectral"]


@dataclass(frozen=True)
class VisionConfig(TrainConfig):
    """How a `NonNegVision` is trained."""

    loss: Loss = "info_nce"
    """SimCLR's loss, or the spectral one on codes of squared length 2 / temperature."""
    temperature: float = 0.2
    """Divides the cosines."""
    signed: float = 0.0
    """Weight of a contrast of the encoder's features through a signed projector, which is thrown
    away after training: sparse codes by themselves teach the encoder less. 0 for none."""
    view_scale: float = 1.0
    """Side of the training views as a share of the images'. A crop is .6 of an image on average:
    at .75 it shows things as large as whole images do, and a step takes half the time."""
    jitter: float = 0.4
    """Strength of the colour changes."""
    blur_share: float = 0.0
    """Share of views that are blurred."""
    optimizer: Literal["adamw", "lars"] = "adamw"
    """With `lars` the learning rate is for a batch of 256 and grows with the batch."""
    workers: int = 0
    """Processes that decode images of a folder or the hub."""
    free: ClassVar[tuple[str, ...]] = (*TrainConfig.free, "workers")
    epochs: int = 7
    batch_size: int = 256
    lr: float = 2e-3


@dataclass(frozen=True)
class ClassifierConfig(VisionConfig):
    """How a `NonNegClassifier` is trained."""

    epochs: int = 5

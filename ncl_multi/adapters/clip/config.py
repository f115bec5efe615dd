"""How CLIP models are trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ncl_multi.training.config import TrainConfig


@dataclass(frozen=True)
class ClipConfig(TrainConfig):
    """How a `NonNegClip` is trained."""

    start: Literal["clusters", "random"] = "clusters"
    """`clusters`: each dimension starts on a cluster of training pairs (linear, frozen towers)."""
    views: int = 1
    """Crops of each training image that are cached; one of them is drawn each time."""
    finetune: bool = False
    """Train the towers too; otherwise they are frozen and their features cached."""
    cache: Path | None = None
    """Folder for cached features; None for the user's cache folder."""
    workers: int = 0
    """Processes that decode images while the towers train."""
    free: ClassVar[tuple[str, ...]] = (*TrainConfig.free, "cache", "workers")
    epochs: int = 24
    batch_size: int = 512
    lr: float = 3e-3

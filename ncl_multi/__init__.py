"""Non-negative contrastive learning for images, image-text pairs, sentences and graphs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ncl_multi.codes.features import Features
from ncl_multi.distributed import gather, is_main
from ncl_multi.head import HeadOptions, NonNegHead, top_k
from ncl_multi.losses import (
    InfoNCE,
    NonNegCrossEntropy,
    Spectral,
    imitation,
    info_nce,
    nonneg_cross_entropy,
    spectral,
)
from ncl_multi.training.config import TrainConfig
from ncl_multi.training.health import Health, HealthWarning

if TYPE_CHECKING:
    from ncl_multi.adapters.clip.model import NonNegClip
    from ncl_multi.adapters.graph.model import NonNegGraph
    from ncl_multi.adapters.sentence.model import NonNegEncoder, wrap
    from ncl_multi.adapters.vision.model import NonNegVision
    from ncl_multi.coder import SparseCoder
    from ncl_multi.codes.explain import explain, steer, why
    from ncl_multi.codes.names import name_dimensions
    from ncl_multi.codes.search import SparseIndex
    from ncl_multi.codes.shorten import shorten
    from ncl_multi.model import SparseModel, load
    from ncl_multi.pretrained_heads import pretrained
    from ncl_multi.training.fit import StepObjective, fit

__version__ = "0.2.0"

# These need more than torch, so they are imported when they are first asked for.
_LATER = {
    "NonNegClip": "adapters.clip.model",
    "NonNegEncoder": "adapters.sentence.model",
    "NonNegGraph": "adapters.graph.model",
    "NonNegVision": "adapters.vision.model",
    "SparseCoder": "coder",
    "SparseIndex": "codes.search",
    "SparseModel": "model",
    "StepObjective": "training.fit",
    "explain": "codes.explain",
    "fit": "training.fit",
    "load": "model",
    "name_dimensions": "codes.names",
    "pretrained": "pretrained_heads",
    "shorten": "codes.shorten",
    "steer": "codes.explain",
    "why": "codes.explain",
    "wrap": "adapters.sentence.model",
}

__all__ = [
    "Features", "HeadOptions", "Health", "HealthWarning", "InfoNCE", "NonNegClip",
    "NonNegCrossEntropy", "NonNegEncoder", "NonNegGraph", "NonNegHead", "NonNegVision",
    "SparseCoder", "SparseIndex", "SparseModel", "Spectral", "StepObjective", "TrainConfig",
    "explain", "fit", "gather", "imitation", "info_nce", "is_main", "load", "name_dimensions",
    "nonneg_cross_entropy", "pretrained", "shorten", "spectral", "steer", "top_k", "why", "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ncl_multi' has no attribute {name!r}")
    value = getattr(import_module(f"ncl_multi.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

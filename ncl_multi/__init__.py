"""Non-negative contrastive learning for images, image-text pairs, sentences and graphs."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ncl_multi.dist import gather
from ncl_multi.features import Features
from ncl_multi.head import NonNegHead, top_k
from ncl_multi.health import Health, HealthWarning
from ncl_multi.losses import (
    InfoNCE,
    NonNegCrossEntropy,
    Spectral,
    imitation,
    info_nce,
    nonneg_cross_entropy,
    spectral,
)

if TYPE_CHECKING:
    from ncl_multi.train import TrainConfig, fit

__version__ = "0.1.0"

# These need more than torch, so they are imported when they are first asked for.
_LATER = {
    "SparseIndex": "search",
    "TrainConfig": "train",
    "explain": "explain",
    "fit": "train",
    "shorten": "shorten",
    "steer": "explain",
    "why": "explain",
    "wrap": "wrap",
}

__all__ = [
    "Features",
    "Health",
    "HealthWarning",
    "InfoNCE",
    "NonNegCrossEntropy",
    "NonNegHead",
    "Spectral",
    "TrainConfig",
    "fit",
    "gather",
    "imitation",
    "info_nce",
    "nonneg_cross_entropy",
    "spectral",
    "top_k",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"ncl_multi.{_LATER[name]}"), name)
    raise AttributeError(f"module 'ncl_multi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the file `wrap.py` must not hide the function `wrap` it is named after."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _LATER.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

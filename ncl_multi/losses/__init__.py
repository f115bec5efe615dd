"""Contrastive and supervised objectives: pure functions, and thin modules that call them."""

from ncl_multi.losses.correlation import correlation_loss
from ncl_multi.losses.imitation import imitation, imitation_and_contrast
from ncl_multi.losses.info_nce import InfoNCE, info_nce
from ncl_multi.losses.lengths import normalize_rows
from ncl_multi.losses.nonneg_cross_entropy import NonNegCrossEntropy, nonneg_cross_entropy
from ncl_multi.losses.reconstruction import reconstruction_loss
from ncl_multi.losses.spectral import Spectral, spectral

__all__ = [
    "InfoNCE",
    "NonNegCrossEntropy",
    "Spectral",
    "correlation_loss",
    "imitation",
    "imitation_and_contrast",
    "info_nce",
    "nonneg_cross_entropy",
    "normalize_rows",
    "reconstruction_loss",
    "spectral",
]

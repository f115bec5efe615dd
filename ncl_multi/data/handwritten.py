"""scikit-learn's handwritten digits: 1,797 pictures of 8x8 pixels, nothing to download."""

import logging

import torch

from ncl_multi.data.pictures import ImageSet, Split, known_split
from ncl_multi.optional import needs

log = logging.getLogger(__name__)


def digits(split: Split = "train") -> ImageSet:
    """Every fifth digit is for testing; grey levels 0..16 are spread to 0..255."""
    with needs("ncl-multi[train]"):
        from sklearn.datasets import load_digits
    known_split(split)
    log.info("digits from scikit-learn")
    x, y = load_digits(return_X_y=True)
    chosen = (torch.arange(len(y)) % 5 == 4) == (split == "test")
    pictures = (torch.from_numpy(x) * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    names = [str(digit) for digit in range(10)]
    return ImageSet(pictures[chosen], torch.from_numpy(y)[chosen], names, "digits", split)

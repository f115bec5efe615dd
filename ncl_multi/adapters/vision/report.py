"""What a vision run leaves behind: features, figures and thumbnails."""

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ncl_multi.adapters.vision.model import NonNegVision
from ncl_multi.codes.features import Features
from ncl_multi.data.pictures import ImageSet
from ncl_multi.metrics import knn_accuracy, linear_probe, readability

THUMBNAIL = 64


def write_report(
    model: NonNegVision, train: ImageSet, test: ImageSet, out: Path, about: dict[str, Any]
) -> dict[str, float]:
    """Save the features of both splits in `<out>/features` and return the run's figures.

    Neighbours and the probe's training rows come from the train split; every figure is of the test
    split. Sparsity, consistency and correlation are of the head's codes.
    """
    (h_train, z_train), (h, z) = model.embed(train.images), model.embed(test.images)
    saved = [("train", "encoder", train, h_train), ("train", "head", train, z_train)]
    saved += [("test", "encoder", test, h), ("test", "head", test, z)]
    for split, output, images, codes in saved:
        shown = split == "test" and output == "head"
        Features(
            torch.nn.functional.normalize(codes, dim=1),
            images.y,
            items=[images.classes[label] for label in images.y.tolist()] if shown else None,
            thumbnails=thumbnails(images) if shown else None,
            about=about
            | {"split": split, "output": output, "normalised": True, "classes": images.classes},
        ).save(out / "features" / f"{split}_{output}.safetensors")
    row = {}
    for name, codes_train, codes in (("encoder", h_train, h), ("head", z_train, z)):
        row[f"kNN, {name}"] = knn_accuracy(codes_train, train.y, codes, test.y)
        row[f"probe, {name}"] = linear_probe(codes_train, train.y, codes, test.y)
    return row | readability(z, test.y)


def thumbnails(images: ImageSet) -> list[bytes]:
    """Every picture as PNG, at most 64 pixels wide."""
    return [_png(images.images[[row]][0]) for row in range(len(images))]


def _png(pixels: Tensor) -> bytes:
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()

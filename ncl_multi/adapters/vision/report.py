"""The report of a vision run: features, figures, a table."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ncl_multi.adapters.vision.model import NonNegVision
from ncl_multi.adapters.vision.views import Views
from ncl_multi.codes.features import MOST_SHOWN, Features, join, spread
from ncl_multi.codes.names import name_dimensions
from ncl_multi.data.corrupt import CORRUPTIONS, corrupt
from ncl_multi.data.pictures import ImageSet, thumbnails
from ncl_multi.metrics import (
    LinearProbe,
    activity_figures,
    fine_tuned_predictions,
    knn_accuracy,
    linear_probe,
    readable_features,
)
from ncl_multi.report import table, write_json


def write_report(
    models: Mapping[str, NonNegVision], train: ImageSet, test: ImageSet, out: Path
) -> dict[str, Any]:
    """Measure every model, print the table, and write features and figures to `out`.

    What belongs to a model other than `ncl` is written to a folder of its name. Of a network before
    its first step only the encoder is a row of the table, and nothing is written.
    """
    figures = {}
    for name, model in models.items():
        folder = out if name == "ncl" else out / name
        if not model.trained:
            h, test_h = (model.embed(images.images, progress=True) for images in (train, test))
            figures[name] = {"test": _known(h, train.y, test_h, test.y, "encoder")}
            continue
        row = measure(model, train, test, folder)
        figures[name] = {"test": row}
        model.figures = {f"{measure}, test": round(value, 4) for measure, value in row.items()}
        model.save_pretrained(folder / "model")
    write_json(out / "metrics.json", figures)
    measures = dict.fromkeys(m for row in figures.values() for m in row["test"])
    by_measure = {
        m: {name: row["test"][m] for name, row in figures.items() if m in row["test"]}
        for m in measures
    }
    table(f"{train.name}, {len(train)} images, test split", by_measure)
    return figures


def measure(model: NonNegVision, train: ImageSet, test: ImageSet, out: Path) -> dict[str, float]:
    """Save the features of both splits in `<out>/features`; return figures of the test split.

    Features of your own pictures are also saved together, as `all`: at most 10,000, evenly spaced.
    Neighbours, the probe's training rows and the names of dimensions come from the train split.
    Sparsity, readability and correlation are of the head's codes.
    """
    files = {}
    for split, images in (("train", train), ("test", test)):
        for output, codes in both_outputs(model, images).items():
            about = {
                "model": model.name, "data": images.name, "activation": model.head.activation,
                "split": split, "output": output, "normalised": True, "classes": images.classes,
            }  # fmt: skip
            files[split, output] = Features(normalize(codes, dim=1), images.y, about=about)
    names = name_dimensions(files["train", "head"])
    test_features = files["test", "head"] = _with_display(
        files["test", "head"], test, names, len(test)
    )
    for (split, output), features in files.items():
        features.save(out / "features" / f"{split}_{output}.safetensors")
    # The named sets are tensors; pictures of a folder or the hub are read when they are needed.
    if not isinstance(test.images, Tensor):
        train_features = _with_display(files["train", "head"], train, names, MOST_SHOWN)
        everything = join({"train": train_features, "test": test_features})
        everything = everything.take(spread(len(everything), MOST_SHOWN))
        everything.save(out / "features" / "all_head.safetensors")
    row: dict[str, float] = {}
    for output in ("encoder", "head"):
        z_train, z_test = files["train", output].dense(), files["test", output].dense()
        row |= _known(z_train, train.y, z_test, test.y, output)
    read = readable_features(files["test", "head"], names=names).figures
    return row | activity_figures(test_features.z, test.y) | read


def _known(z: Tensor, y: Tensor, test_z: Tensor, test_y: Tensor, output: str) -> dict[str, float]:
    """Accuracy of nearest neighbours and of a linear probe."""
    return {
        f"knn_{output}": knn_accuracy(z, y, test_z, test_y),
        f"probe_{output}": linear_probe(z, y, test_z, test_y),
    }


def _with_display(features: Features, images: ImageSet, names: list[str], most: int) -> Features:
    """Features with classes and thumbnails as items; at most `most` rows."""
    rows = spread(len(images), most)
    return replace(
        features.take(rows),
        items=[images.classes[label] for label in images.y[rows].tolist()],
        thumbnails=thumbnails(images, rows),
        about=features.about | {"names": names},
    )


def both_outputs(model: NonNegVision, images: ImageSet) -> dict[str, Tensor]:
    """Outputs of the encoder and of the head, on the CPU, not normalised."""
    h = model.embed(images.images, progress=True)
    with torch.inference_mode():
        return {"encoder": h, "head": model.head.fold().cpu()(h)}


def fine_tuned_hits(
    model: NonNegVision,
    train: ImageSet,
    test: ImageSet,
    *,
    epochs: int = 10,
    view_scale: float = 1.0,
    bf16: bool = False,
    seed: int = 0,
) -> Tensor:
    """Which test images a copy of the encoder, fine-tuned on labels, classifies correctly."""
    side = max(1, round(view_scale * model.size))
    views = Views(side, scale=(0.5, 1.0), jitter=0.0, hue=0.0, grey_share=0.0)

    def encode(trained: nn.Module, x: Tensor) -> Tensor:
        return cast(NonNegVision, trained).represent(x)

    predicted = fine_tuned_predictions(
        model,
        encode,
        (train.images[:], train.y),
        (test.images[:], test.y),
        augment=views,
        prepare=model.prepare,
        epochs=epochs,
        bf16=bf16,
        seed=seed,
    )
    return predicted == test.y


def corrupted_hits(model: NonNegVision, probe: LinearProbe, test: ImageSet) -> dict[str, Tensor]:
    """Which corrupted test images a probe of the encoder classifies correctly, by corruption."""
    pictures = {kind: corrupt(test.images[:], kind) for kind in CORRUPTIONS}
    guesses = {kind: probe.predict(model.embed(worse)) for kind, worse in pictures.items()}
    return {kind: guess.cpu() == test.y for kind, guess in guesses.items()}

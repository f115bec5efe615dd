"""How well do the features predict the classes, also with noisy labels and on shifted data?

Usage:
    python evals/probe.py train.safetensors test.safetensors
    python evals/probe.py train.safetensors test.safetensors --label-noise 0.2 0.4
    python evals/probe.py train.safetensors test.safetensors --shifted jpeg.safetensors
    python evals/probe.py train.safetensors test.safetensors --fine-tune runs/vision_ncl/model

The file determines whether this is the encoder's or the head's output; it is printed with the row.
Files of corrupted pictures and of other sets are given as `--shifted` and `--transfer`;
`--corrupt` makes the former from a model and its data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import ncl_multi as ncl
from ncl_multi import data
from ncl_multi.codes.features import Features
from ncl_multi.data.corrupt import wrong_labels
from ncl_multi.log import show_messages
from ncl_multi.metrics import LinearProbe, knn_accuracy, linear_probe
from ncl_multi.report import print_json, table


@dataclass(frozen=True)
class Config:
    """kNN and linear probe of Features files, with noisy labels and on shifted data."""

    train: tyro.conf.Positional[Path]
    """Features with labels to learn from."""
    test: tyro.conf.Positional[Path]
    """Features with labels to test on."""
    k: int = 20
    """Neighbours that vote."""
    label_noise: tuple[float, ...] = ()
    """Shares of train labels to replace by other classes at random."""
    shifted: tuple[Path, ...] = ()
    """Features of the test classes under other conditions: judged with the same probe."""
    transfer: tuple[Path, Path] | None = None
    """Train and test features of another set, from the same model: its own probe is fitted."""
    corrupt: Path | None = None
    """A vision model: its encoder is probed on corrupted test pictures of `data`."""
    fine_tune: Path | None = None
    """A vision model to fine-tune, all layers, on `data` and its labels."""
    data: str = "cifar10"
    """Pictures for `corrupt` and `fine_tune`."""
    images: int | None = 10_000
    """Pictures of each split for `corrupt` and `fine_tune`; None for all."""
    epochs: int = 10
    """Passes over the pictures in fine-tuning."""
    seed: int = 0
    """Seed of the noise and of fine-tuning."""
    out: Path | None = None
    """File for the row as JSON; none to print it only."""


def evaluate(train: Features, test: Features, cfg: Config) -> dict[str, float]:
    """Return one row of the report: accuracies on test rows."""
    train_y, test_y = labels(train, cfg.train), labels(test, cfg.test)
    row = {"knn": knn_accuracy(train.z, train_y, test.z, test_y, k=cfg.k)}
    probe = LinearProbe.fit(train.z, train_y)
    row["linear"] = probe.accuracy(test.z, test_y)
    for path in cfg.shifted:
        other = Features.load(path)
        row[f"linear on {path.stem}"] = probe.accuracy(other.z, labels(other, path))
    for share in cfg.label_noise:
        noisy = wrong_labels(train_y, share, seed=cfg.seed)
        row[f"linear, {share:.0%} wrong labels"] = linear_probe(train.z, noisy, test.z, test_y)
    if cfg.transfer is not None:
        both = [(path, Features.load(path)) for path in cfg.transfer]
        sides = [side for path, other in both for side in (other.z, labels(other, path))]
        row[f"linear, {both[1][1].about.get('data', 'transfer')}"] = linear_probe(*sides)
    return row


def with_pictures(model: Path, cfg: Config) -> tuple[Any, Any, Any]:
    """A vision model, and the train and test pictures."""
    train, test = (data.images(cfg.data, split).first(cfg.images) for split in ("train", "test"))
    return ncl.load(model), train, test


def corrupted(model: Any, train: Any, test: Any) -> dict[str, float]:
    """Accuracy of a probe of the encoder on clean pictures, then on worse ones."""
    from ncl_multi.adapters.vision.report import corrupted_hits

    probe = LinearProbe.fit(model.embed(train.images), train.y)
    row = {"clean": probe.accuracy(model.embed(test.images), test.y)}
    hits = corrupted_hits(model, probe, test)
    row |= {kind: float(right.double().mean()) for kind, right in hits.items()}
    return {f"encoder, {kind}": accuracy for kind, accuracy in row.items()}


def labels(features: Features, path: Path) -> Any:
    if features.y is None or features.y.ndim != 1:
        raise ValueError(f"a probe needs one label per row; {path} has none")
    return features.y


def main(cfg: Config) -> None:
    test = Features.load(cfg.test)
    row = evaluate(Features.load(cfg.train), test, cfg)
    if cfg.corrupt is not None:
        row |= corrupted(*with_pictures(cfg.corrupt, cfg))
    if cfg.fine_tune is not None:
        from ncl_multi.adapters.vision.report import fine_tuned_hits

        pictures = with_pictures(cfg.fine_tune, cfg)
        right = fine_tuned_hits(*pictures, epochs=cfg.epochs, seed=cfg.seed)
        row["encoder, fine-tuned"] = float(right.double().mean())
    output = test.about.get("output", "output not stated")
    table(f"Accuracy, {output}: {cfg.test}", {name: {"accuracy": got} for name, got in row.items()})
    whole = test.provenance | {"train": str(cfg.train), "test": str(cfg.test)} | row
    print_json(whole, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

"""Non-negative cross entropy against cross entropy: the paper's Table 4 as one command.

Linear and MLP projectors, each from scratch and from a SimCLR checkpoint; with `--checkpoint` the
one that `recipes/vision_ncl.py` wrote, else one trained here first.

Usage:
    python recipes/supervised_ncl.py
    python recipes/supervised_ncl.py --checkpoint runs/vision_ncl/model
    python recipes/supervised_ncl.py --data <folder> --model resnet18 --size 224 --images None
"""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

import ncl_multi as ncl
from ncl_multi import data
from ncl_multi.adapters.vision.config import ClassifierConfig
from ncl_multi.head import Activation
from ncl_multi.log import show_messages
from ncl_multi.metrics import activity_figures
from ncl_multi.report import table, write_json


@dataclass(frozen=True)
class Config(ClassifierConfig):
    """Non-negative cross entropy against cross entropy."""

    out: Path = Path("runs/supervised_ncl")
    data: str = "cifar10"
    """`cifar10`, `fashion_mnist`, `digits`, `hf:<name>`, or a folder with one folder per class."""
    images: int | None = 10_000
    """Train on the first so many images; None for all."""
    size: int = 32
    """Side of the images in pixels."""
    model: str = "resnet-small"
    """A timm model, `torchvision/<name>`, or `resnet-small`."""
    dims: int = 256
    """Number of non-negative dimensions."""
    hidden_dim: int | None = 512
    """Width of the MLP projector's hidden layer."""
    activation: Activation = "relu"
    """Activation of the non-negative half of the table; the other half uses `none`."""
    checkpoint: Path | None = None
    """The `model` folder of a vision run to start the second column from."""
    pretrain_epochs: int = 5
    """Without a checkpoint: passes of SimCLR before the second column."""
    temperature: float = 0.2
    """Divides the cosines of SimCLR."""


def main(cfg: Config) -> None:
    from ncl_multi.atlas.page import write_atlas

    train = data.images(cfg.data, "train", size=cfg.size).first(cfg.images)
    test = data.images(cfg.data, "test", size=cfg.size).first(cfg.rows_seen)
    activations = {"twin": "none", "ncl": cfg.activation}
    rows: dict[str, dict[str, float]] = {}
    for start, encoder in (("scratch", None), ("ssl", pretrained_encoder(cfg, train))):
        for projector, width in (("", None), ("_mlp", cfg.hidden_dim)):
            for loss, activation in activations.items():
                name = f"{loss}{projector}"
                out = cfg.out / f"{name}_{start}"
                variant = replace(cfg, out=out, activation=activation, hidden_dim=width)
                row = rows.setdefault(name, {})
                row |= train_and_judge(variant, train, test, encoder, start)
    if ncl.is_main():
        write_json(cfg.out / "metrics.json", {name: {"test": row} for name, row in rows.items()})
        table(f"{cfg.data}, {len(train)} images, test split", rows)
        print(f"what each dimension means: {write_atlas(cfg.out / 'ncl_mlp_scratch')}")


def train_and_judge(cfg: Config, train, test, encoder, start: str) -> dict[str, float]:
    """One cell of the table: accuracy, sparsity and class consistency."""
    from ncl_multi.adapters.vision.model import NonNegClassifier

    model = NonNegClassifier(
        cfg.model,
        cfg.dims,
        classes=len(train.classes),
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        size=cfg.size,
        seed=cfg.seed,
    )
    if encoder is not None:
        model.encoder.load_state_dict(encoder)
    model.fit(train, cfg)
    if not ncl.is_main():
        return {}
    features = model.features(test, y=test.y)
    features.about.update(classes=test.classes, data=cfg.data)
    features.save(cfg.out / "features" / "test_head.safetensors")
    z = features.dense()
    figures = activity_figures(z, test.y)
    right = (z @ model.classifier.weight.detach().cpu().T).argmax(1) == test.y
    row = {m: figures[m] for m in ("sparsity", "class_consistency")}
    row = {"accuracy": right.double().mean().item()} | row
    model.figures = {f"{measure}, test": round(value, 4) for measure, value in row.items()}
    model.save_pretrained(cfg.out / "model")
    return {f"{measure}_{start}": value for measure, value in row.items()}


def pretrained_encoder(cfg: Config, train) -> dict:
    """Weights of an encoder trained without labels."""
    if cfg.checkpoint is not None:
        return ncl.load(cfg.checkpoint).encoder.state_dict()
    model = ncl.NonNegVision(
        cfg.model, cfg.dims, hidden_dim=cfg.hidden_dim, density=None, size=cfg.size, seed=cfg.seed
    )
    ssl = replace(cfg, out=cfg.out / "ssl", epochs=cfg.pretrain_epochs)
    return model.fit(train, ssl).cpu().encoder.state_dict()


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

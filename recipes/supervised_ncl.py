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

from ncl_multi.head import Activation
from ncl_multi.training.fit import TrainConfig


@dataclass(frozen=True)
class Config(TrainConfig):
    """Non-negative cross entropy against cross entropy."""

    out: Path = Path("runs/supervised_ncl")
    data: str = "cifar10"
    """`cifar10`, `fashion_mnist`, `digits`, `hf:<name>`, or a folder with one folder a class."""
    images: int | None = 10_000
    """Train on the first so many pictures; None for all."""
    size: int = 32
    """Side of the pictures in pixels."""
    model: str = "resnet-small"
    """A timm model, `torchvision/<name>`, or `resnet-small`."""
    dims: int = 256
    """Number of non-negative dimensions."""
    hidden_dim: int | None = 512
    """Width of the MLP projector's hidden layer."""
    activation: Activation = "relu"
    """Of the non-negative half of the table; the other half has none."""
    checkpoint: Path | None = None
    """The `model` folder of a vision run to start the second column from."""
    pretrain_epochs: int = 5
    """Without a checkpoint: passes of SimCLR before the second column."""
    workers: int = 0
    """Processes that decode pictures of a folder or the hub."""
    epochs: int = 5
    lr: float = 2e-3


def main(cfg: Config) -> None:
    from accelerate import PartialState

    from ncl_multi import data
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.report import table, write_json

    train = data.images(cfg.data, "train", size=cfg.size).first(cfg.images)
    test = data.images(cfg.data, "test", size=cfg.size)
    losses = {"CE": "none", "NCE": cfg.activation}
    rows: dict[str, dict[str, float]] = {}
    for start, encoder in (("scratch", None), ("SSL", pretrained_encoder(cfg, train))):
        for projector, width in (("", None), (" + MLP", cfg.hidden_dim)):
            for loss, activation in losses.items():
                out = cfg.out / f"{loss}{projector}, {start}".replace(" ", "").replace(",", "-")
                variant = replace(cfg, out=out, activation=activation, hidden_dim=width)
                row = rows.setdefault(f"{loss}{projector}", {})
                row |= train_and_judge(variant, train, test, encoder, start)
    if PartialState().is_main_process:
        write_json(cfg.out / "metrics.json", rows)
        table(f"{cfg.data}, {len(train)} pictures, test split", rows)
        print(f"what each dimension means: {write_atlas(cfg.out / 'NCE+MLP-scratch')}")


def train_and_judge(cfg: Config, train, test, encoder, start: str) -> dict[str, float]:
    """One cell of the table: accuracy, and what can be read from the codes."""
    import torch
    from accelerate import PartialState
    from torch.utils.data import DataLoader

    from ncl_multi import Features, fit
    from ncl_multi.adapters.vision.model import NonNegClassifier
    from ncl_multi.adapters.vision.report import thumbnails
    from ncl_multi.adapters.vision.views import Views
    from ncl_multi.data.pictures import whole
    from ncl_multi.metrics import readability

    torch.manual_seed(cfg.seed)
    model = NonNegClassifier(
        cfg.model,
        classes=len(train.classes),
        dims=cfg.dims,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        size=cfg.size,
    )
    if encoder is not None:
        model.encoder.load_state_dict(encoder)
    views = Views(cfg.size, scale=(0.4, 1.0), jitter_share=0.0, grey_share=0.0)

    def step(model, batch):
        images, y = batch
        return model(views(images), y)

    loader = DataLoader(
        train, cfg.batch_size, collate_fn=whole, num_workers=cfg.workers, drop_last=True
    )
    fit(model, step, loader, cfg)
    if not PartialState().is_main_process:
        return {}
    model.save_pretrained(cfg.out / "model")
    z = model.embed(test.images)[1]
    about = {"model": cfg.model, "data": cfg.data, "split": "test", "seed": cfg.seed,
             "activation": cfg.activation, "output": "head", "normalised": False,
             "classes": test.classes}  # fmt: skip
    items = [test.classes[label] for label in test.y.tolist()]
    features = Features(z, test.y, items, about, thumbnails(test))
    features.save(cfg.out / "features" / "test_head.safetensors")
    shown = readability(z, test.y)
    right = (z @ model.classifier.weight.detach().cpu().T).argmax(1) == test.y
    return {
        f"accuracy, {start}": right.double().mean().item(),
        f"sparsity, {start}": shown["sparsity"],
        f"class consistency, {start}": shown["class_consistency"],
    }


def pretrained_encoder(cfg: Config, train) -> dict:
    """Weights of an encoder trained without labels."""
    import torch
    from torch.utils.data import DataLoader

    from ncl_multi import fit, gather, info_nce
    from ncl_multi.adapters.vision.model import NonNegVision
    from ncl_multi.adapters.vision.views import Views
    from ncl_multi.data.pictures import whole

    if cfg.checkpoint is not None:
        return NonNegVision.from_pretrained(cfg.checkpoint).encoder.state_dict()
    torch.manual_seed(cfg.seed)
    model = NonNegVision(cfg.model, dims=cfg.dims, hidden_dim=cfg.hidden_dim, size=cfg.size)
    views = Views(cfg.size)

    def step(model, batch):
        images, _ = batch
        z = model(views(torch.cat([images, images])))
        za, zb = (gather(view) for view in z.chunk(2))
        return info_nce(za, zb, within_view=True), z

    loader = DataLoader(
        train, cfg.batch_size, collate_fn=whole, num_workers=cfg.workers, drop_last=True
    )
    fit(model, step, loader, replace(cfg, out=cfg.out / "SSL", epochs=cfg.pretrain_epochs))
    return model.cpu().encoder.state_dict()


if __name__ == "__main__":
    main(tyro.cli(Config))

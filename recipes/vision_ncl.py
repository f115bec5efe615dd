"""Non-negative SimCLR: sparse, readable features of pictures without labels.

Usage:
    python recipes/vision_ncl.py
    python recipes/vision_ncl.py --preset cifar
    torchrun --nproc-per-node 8 recipes/vision_ncl.py --preset imagenet100 --data <folder>
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from ncl_multi.head import Activation
from ncl_multi.training.fit import TrainConfig

Preset = Literal["quick", "cifar", "imagenet100"]


@dataclass(frozen=True)
class Config(TrainConfig):
    """Non-negative SimCLR: sparse, readable features of pictures without labels."""

    preset: Preset = "quick"
    """Minutes on a CPU, or the paper's settings. What follows changes a preset."""
    out: Path = Path("runs/vision_ncl")
    data: str = "cifar10"
    """`cifar10`, `fashion_mnist`, `digits`, `hf:<name>`, or a folder with one folder a class."""
    images: int | None = 10_000
    """Train on the first so many pictures; None for all."""
    size: int = 32
    """Side of the pictures in pixels."""
    model: str = "resnet-small"
    """A timm model, `torchvision/<name>`, or `resnet-small`."""
    dims: int = 512
    """Number of non-negative dimensions."""
    hidden_dim: int | None = 512
    """Width of the projector's hidden layer; None for a linear head."""
    loss: Literal["info_nce", "spectral"] = "info_nce"
    """SimCLR's loss, or the spectral one on codes of squared length 2 / temperature."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    batch_norm: bool = True
    """Standardise each dimension before the activation; the paper's projector does not."""
    density: float | None = 0.04
    """Share of rows that each dimension fires for; lowered to it over the first 70 % of steps."""
    k: int | None = None
    """Keep the k largest entries of a row."""
    temperature: float = 0.13
    """Divides the cosines."""
    jitter: float = 0.4
    """Strength of the colour changes."""
    blur_share: float = 0.0
    """Share of views that are blurred."""
    optimizer: Literal["adamw", "lars"] = "adamw"
    """With `lars` the learning rate is for a batch of 256 and grows with the batch."""
    workers: int = 0
    """Processes that decode pictures of a folder or the hub."""
    twin: bool = True
    """Also train the signed twin, with the same seed and budget."""
    epochs: int = 7
    batch_size: int = 128
    lr: float = 2e-3


PAPER = Config(
    images=None,
    model="resnet18",
    dims=256,
    hidden_dim=2048,
    temperature=0.2,
    activation="rep_relu",
    batch_norm=False,
    density=None,
    jitter=0.8,
    optimizer="lars",
    epochs=200,
    lr=0.4,
    warmup=0.05,
    batch_size=256,
)


PRESETS = {
    "quick": Config(),
    "cifar": replace(PAPER, preset="cifar"),
    "imagenet100": replace(
        PAPER,
        preset="imagenet100",
        data="hf:clane9/imagenet-100",
        size=224,
        dims=2048,
        hidden_dim=16384,
        activation="relu",
        blur_share=0.5,
        epochs=100,
        lr=0.3,
        warmup=0.1,
        batch_size=128,
        workers=8,
    ),
}


def main(cfg: Config) -> None:
    from accelerate import PartialState

    from ncl_multi import data
    from ncl_multi.adapters.vision.report import write_report
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.report import table, write_json
    from ncl_multi.training.fit import twin_of

    train = data.images(cfg.data, "train", size=cfg.size).first(cfg.images)
    test = data.images(cfg.data, "test", size=cfg.size)
    runs = {"NCL": cfg} | ({"twin": twin_of(cfg)} if cfg.twin else {})
    models = {name: train_model(run, train) for name, run in runs.items()}
    if not PartialState().is_main_process:
        return
    found = {}
    for name, run in runs.items():
        about = {"model": run.model, "data": run.data, "seed": run.seed}
        about |= {"activation": run.activation}
        models[name].save_pretrained(run.out / "model")
        found[name] = write_report(models[name], train, test, run.out, about)
    write_json(cfg.out / "metrics.json", found)
    by_measure = {m: {name: row[m] for name, row in found.items()} for m in found["NCL"]}
    table(f"{cfg.data}, {len(train)} pictures, test split", by_measure)
    print(f"what each dimension means: {write_atlas(cfg.out)}")


def train_model(cfg: Config, train):
    """One run: SimCLR with the head the config asks for."""
    import torch
    from torch.nn.functional import normalize
    from torch.utils.data import DataLoader

    from ncl_multi import fit, gather, info_nce, spectral
    from ncl_multi.adapters.vision.model import NonNegVision, lars
    from ncl_multi.adapters.vision.views import Views
    from ncl_multi.data.pictures import whole

    torch.manual_seed(cfg.seed)
    model = NonNegVision(
        cfg.model,
        dims=cfg.dims,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        batch_norm=cfg.batch_norm,
        density=cfg.density,
        k=cfg.k,
        size=cfg.size,
    )
    views = Views(cfg.size, jitter=cfg.jitter, hue=cfg.jitter / 4, blur_share=cfg.blur_share)

    def step(model, batch):
        images, _ = batch
        z = model(views(torch.cat([images, images])))
        za, zb = (gather(view) for view in z.chunk(2))
        if cfg.loss == "spectral":
            length = (2 / cfg.temperature) ** 0.5
            return spectral(length * normalize(za), length * normalize(zb)), z
        return info_nce(za, zb, temperature=cfg.temperature, within_view=True), z

    loader = DataLoader(
        train, cfg.batch_size, collate_fn=whole, num_workers=cfg.workers, drop_last=True
    )
    use_lars = cfg.optimizer == "lars"
    optimizer = lars(cfg.lr, cfg.weight_decay, cfg.batch_size) if use_lars else None
    return fit(model, step, loader, cfg, optimizer=optimizer)


@dataclass(frozen=True)
class Choice:
    """The preset, read before everything else: it decides the defaults."""

    preset: Preset | None = None


def command_line() -> Config:
    from torch.cuda import is_available

    chosen, _ = tyro.cli(Choice, return_unknown_args=True, add_help=False)
    name = chosen.preset or ("cifar" if is_available() else "quick")
    return tyro.cli(Config, default=PRESETS[name])


if __name__ == "__main__":
    main(command_line())

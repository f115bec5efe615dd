"""Non-negative SimCLR: sparse, readable features of images without labels.

Usage:
    python recipes/vision_ncl.py
    python recipes/vision_ncl.py --preset cifar
    torchrun --nproc-per-node 8 recipes/vision_ncl.py --preset imagenet100 --data <folder>
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from ncl_multi.adapters.vision.config import VisionConfig
from ncl_multi.head import Activation
from ncl_multi.log import show_messages
from ncl_multi.training.config import command_line

Preset = Literal["quick", "cifar", "imagenet100"]


@dataclass(frozen=True)
class Config(VisionConfig):
    """Non-negative SimCLR: sparse, readable features of images without labels."""

    preset: Preset = "quick"
    """Minutes on a CPU, or the paper's settings. Other options change the preset."""
    out: Path = Path("runs/vision_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "cifar10"
    """`cifar10`, `fashion_mnist`, `digits`, `hf:<name>`, or a folder with one folder per class."""
    images: int | None = None
    """Train on the first so many images; None for all."""
    labelled: int | None = 10_000
    """Measure with the labels of the first so many training images; None for all."""
    size: int = 32
    """Side of the images in pixels."""
    model: str = "resnet-small"
    """A timm model, `torchvision/<name>`, or `resnet-small`."""
    dims: int | None = None
    """Number of non-negative dimensions; None for 512, fewer for less than 2,048 images."""
    hidden_dim: int | None = 512
    """Width of the projector's hidden layer; None for a linear head."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    batch_norm: bool = True
    """Standardise each dimension before the activation; the paper's projector does not."""
    density: float | None = 0.02
    """Share of rows that each dimension fires for; lowered to it over the first 70 % of steps."""
    k: int | None = None
    """Keep the k largest entries of a row."""
    signed: float = 1.0
    view_scale: float = 0.75
    steps: int | None = 400
    """Stop after this many steps; `--steps None` trains for `epochs`."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    twin: bool = True
    """Also train the signed twin, with the same seed and budget."""
    free: ClassVar[tuple[str, ...]] = (*VisionConfig.free, "twin", "labelled")


PAPER = Config(
    labelled=None,
    model="resnet18",
    dims=256,
    hidden_dim=2048,
    temperature=0.2,
    activation="rep_relu",
    batch_norm=False,
    density=None,
    signed=0.0,
    view_scale=1.0,
    precision="fp32",
    steps=None,
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
    import ncl_multi as ncl
    from ncl_multi import data
    from ncl_multi.adapters.vision.report import write_report
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.training.config import fitting_sizes

    train = data.images(cfg.data, "train", size=cfg.size).first(cfg.images)
    test = data.images(cfg.data, "test", size=cfg.size)
    dims, k = fitting_sizes(cfg.dims, cfg.k, len(train), "images", most=512)
    model = ncl.NonNegVision(
        cfg.model,
        dims,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        batch_norm=cfg.batch_norm,
        density=cfg.density,
        k=k,
        size=cfg.size,
        seed=cfg.seed,
    )
    # Signed: before training nothing passes the threshold of a sparse head.
    untrained = {"untrained": model.signed_twin()}
    models = {"ncl": model} | ({"twin": model.signed_twin()} if cfg.twin else {})
    for name, model in models.items():
        model.fit(train, replace(cfg, out=cfg.out / ("" if name == "ncl" else name)))
    if ncl.is_main():
        # A short run gets a short report.
        most = cfg.rows_seen
        known = train.first(most).first(cfg.labelled)
        write_report(models | untrained, known, test.first(most), cfg.out)
        print(f"what each dimension means: {write_atlas(cfg.out)}")


if __name__ == "__main__":
    show_messages()
    main(command_line(PRESETS))

"""Non-negative CLIP: image and text in one sparse, readable space.

Usage:
    python recipes/clip_ncl.py
    NCL_DATA=<folder> python recipes/clip_ncl.py --data flickr8k
    python recipes/clip_ncl.py --data <folder> --model ViT-B-32:laion2b_s34b_b79k
    torchrun --nproc-per-node 8 recipes/clip_ncl.py --data <folder> --model ViT-B-32 --finetune
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import tyro

from ncl_multi.adapters.clip.config import ClipConfig
from ncl_multi.head import Activation
from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config(ClipConfig):
    """Non-negative CLIP: image and text in one sparse, readable space."""

    out: Path = Path("runs/clip_ncl")
    """Folder for the checkpoint, the models, the features and the report."""
    data: str = "emoji"
    """`emoji`, `flickr8k` (NCL_DATA), `hf:<name>`, or a folder: captions.csv or webdataset tars."""
    model: str = "efficientnet-lite0+minilm"
    """`<timm>+<Hugging Face text model>`, `ViT-B-32[:tag]`, `hf-hub:<name>`, or `hf:<CLIP>`."""
    image_size: int | None = None
    """Side of the images in pixels; None for the tower's own."""
    # Width and k: the most dimensions, at most 2 % active, that are distinct (.8) on held-out
    # training emoji (evals/choose_clip.py); they are as pure as those of wider codes.
    dims: int | None = None
    """Number of non-negative dimensions; None for 200, fewer for less than 800 images."""
    shared: bool = False
    """One head for both sides."""
    hidden_dim: int | None = None
    """Width of a hidden layer in each head; None for linear heads."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    density: float | None = None
    """Share of rows that each dimension fires for; lowered to it over the first 70 % of steps."""
    k: int | None = 4
    """Keep the k largest entries of a row; trained for this and for whole rows together."""
    spectral: float = 10.0
    """Weight of the spectral loss added to InfoNCE: purer, more stable dimensions. 0: none."""
    contrast: float = 1.0
    """Weight of InfoNCE; 0 trains with the spectral loss only."""
    dropout: float = 0.5
    """Share of the towers' features that is dropped in training."""
    temperature: float = 0.05
    """Where the learnt temperature starts."""
    min_temperature: float = 0.03
    """Floor of the temperature: one over the cap of the logit scale."""
    validation: int = 0
    """Hold out this many training images to choose settings on."""
    shorten: int | None = None
    """Also measure, and save in `<out>/short`, the model with only this many dimensions."""
    twin: bool = True
    """Also train the signed twin, with the same seed, start and budget."""
    compare: bool = False
    """Also train plain contrastive heads: signed, from a random start, InfoNCE only."""
    free: ClassVar[tuple[str, ...]] = (*ClipConfig.free, "twin", "compare", "shorten")


def main(cfg: Config) -> None:
    import ncl_multi as ncl
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.clip.load import load_towers
    from ncl_multi.adapters.clip.report import write_report
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.training.config import fitting_sizes

    splits = read_pairs(cfg.data)
    if cfg.validation:
        train, held = splits["train"].hold_out(cfg.validation)
        splits = {"train": train, "validation": held}
    # Before fewer are taken for a short run, which more steps may extend.
    count = len(splits["train"])
    dims, k = fitting_sizes(cfg.dims, cfg.k, count, "images with captions", most=200)
    if cfg.rows_seen is not None:
        splits = {name: pairs.at_most(cfg.rows_seen) for name, pairs in splits.items()}
    model = ncl.NonNegClip(
        load_towers(cfg.model, image_size=cfg.image_size),
        dims,
        shared=cfg.shared,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        density=cfg.density,
        k=k,
        spectral=cfg.spectral,
        contrast=cfg.contrast,
        dropout=cfg.dropout,
        temperature=cfg.temperature,
        min_temperature=cfg.min_temperature,
        seed=cfg.seed,
    )
    models, configs = {"ncl": model}, {"ncl": cfg}
    if cfg.twin:
        models["twin"] = model.signed_twin()
        configs["twin"] = replace(cfg, out=cfg.out / "twin")
    if cfg.compare:
        models["plain"] = model.signed_twin()
        plain = models["plain"].heads
        plain.spectral, plain.contrast_weight = 0.0, 1.0
        configs["plain"] = replace(
            cfg, out=cfg.out / "plain", start="random", spectral=0.0, contrast=1.0
        )
    for name in models:
        models[name].fit(splits["train"], configs[name])
    if ncl.is_main():
        write_report(models, splits, cfg, keep=cfg.shorten)
        print(f"what each dimension means: {write_atlas(cfg.out)}")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

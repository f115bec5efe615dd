"""Non-negative CLIP: image and text in one sparse, readable space.

Usage:
    python recipes/clip_ncl.py
    NCL_DATA=<folder> python recipes/clip_ncl.py --data flickr8k
    python recipes/clip_ncl.py --data <folder> --model ViT-B-32:laion2b_s34b_b79k
    torchrun --nproc-per-node 8 recipes/clip_ncl.py --data <folder> --model ViT-B-32 --finetune
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ncl_multi.head import Activation
from ncl_multi.training.fit import TrainConfig

SHOWN = (
    "t2i R@1", "t2i R@10", "t2i median rank", "i2t R@1", "i2t R@10", "i2t median rank",
    "zero-shot %", "image active %", "text active %", "alive", "class consistency",
)  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """Non-negative CLIP: image and text in one sparse, readable space."""

    out: Path = Path("runs/clip_ncl")
    data: str = "emoji"
    """`emoji`, `flickr8k` (NCL_DATA), `hf:<name>`, or a folder: captions.csv or webdataset tars."""
    model: str = "efficientnet-lite0+minilm"
    """`<timm>+<Hugging Face text model>`, `ViT-B-32[:tag]`, `hf-hub:<name>`, or `hf:<CLIP>`."""
    image_size: int | None = None
    """Side of the images in pixels; None for the tower's own."""
    dims: int = 1024
    """Number of non-negative dimensions."""
    shared: bool = False
    """One head for both sides."""
    hidden_dim: int | None = None
    """Width of a hidden layer in each head; None for linear heads."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    density: float | None = None
    """Share of rows that each dimension fires for; lowered to it over the first 70 % of steps."""
    k: int | None = 102
    """Keep the k largest entries of a row; trained for this and for whole rows together."""
    dropout: float = 0.5
    """Share of the towers' features that is dropped in training."""
    views: int = 1
    """Crops of each training image that are cached; one of them is drawn each time."""
    temperature: float = 0.05
    """Where the learnt temperature starts."""
    min_temperature: float = 0.03
    """Floor of the temperature: one over the cap of the logit scale."""
    finetune: bool = False
    """Train the towers too; otherwise they are frozen and their features cached."""
    validation: int = 0
    """Hold out this many training images and judge by them: for choosing settings."""
    cache: Path | None = None
    """Folder for cached features; None for the user's cache folder."""
    shorten: int | None = None
    """Also judge, and save in `<out>/short`, the model with only so many dimensions kept."""
    twin: bool = True
    """Also train the signed twin, with the same seed and budget."""
    workers: int = 0
    """Processes that decode images while the towers train."""
    epochs: int = 12
    batch_size: int = 512
    lr: float = 3e-3


def main(cfg: Config) -> None:
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.report import table, write_json
    from ncl_multi.training.fit import twin_of

    splits = read_pairs(cfg.data)
    if cfg.validation:
        rest, held = splits["train"].hold_out(cfg.validation)
        splits = {"train": rest, "validation": held}
    if cfg.rows_seen is not None:
        splits = {name: own.at_most(cfg.rows_seen) for name, own in splits.items()}
    found = {"NCL": train_and_judge(cfg, splits)}
    if cfg.twin:
        found["twin"] = train_and_judge(twin_of(cfg), splits)
    if not all(found.values()):
        return  # one of several processes, and not the first
    write_json(cfg.out / "metrics.json", found)
    for split in found["NCL"]:
        rows = {
            name: {m: own[split][m] for m in SHOWN if m in own[split]}
            for name, own in found.items()
        }
        table(f"{cfg.data}, {split}", rows)
        less = fewer(cfg, found["NCL"][split])
        if less:
            table("NCL with fewer entries or dimensions", less)
    print(f"what each dimension means: {write_atlas(cfg.out)}")


def fewer(cfg: Config, row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Retrieval with the largest k entries of a row, and of the shortened model."""
    rows = {f"{at['k']} largest entries": at for at in row.get("curve", ())}
    if "shortened" in row:
        rows[f"{cfg.shorten} dimensions kept"] = row["shortened"]
    return {
        name: {m: own[m] for m in ("t2i R@1", "t2i R@10", "i2t R@1", "i2t R@10")}
        for name, own in rows.items()
    }


def train_and_judge(cfg: Config, splits: dict[str, Any]) -> dict[str, dict]:
    """Train one model, save it, and return its figures on every split it was not trained on."""
    import torch
    from accelerate import PartialState
    from torch.utils.data import DataLoader

    from ncl_multi import fit, gather
    from ncl_multi.adapters.clip.inputs import PixelPairs, tower_features
    from ncl_multi.adapters.clip.load import load_towers
    from ncl_multi.adapters.clip.model import NonNegClip
    from ncl_multi.adapters.clip.report import write_report
    from ncl_multi.data.fetch import cache

    torch.manual_seed(cfg.seed)
    model = NonNegClip(
        load_towers(cfg.model, image_size=cfg.image_size),
        cfg.dims,
        shared=cfg.shared,
        hidden_dim=cfg.hidden_dim,
        activation=cfg.activation,
        density=cfg.density,
        k=cfg.k,
        dropout=cfg.dropout,
        temperature=cfg.temperature,
        min_temperature=cfg.min_temperature,
    )
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    device = torch.device(cfg.device or best)

    def features(split: str, views: int = 1):
        # Features of towers that are being trained are of no use to another run.
        kept = cfg.out / "cache" if cfg.finetune else cfg.cache or cache() / "clip"
        return tower_features(model.towers, splits[split], kept, views=views, device=device)

    def step(trained, batch):
        image, text, groups = train.draw(batch)
        z_image, z_text, temperature = trained(image, text)
        everyone = gather(z_image), gather(z_text)
        return model.heads.loss(*everyone, temperature, gather(groups)), z_image

    if cfg.finetune:
        train = PixelPairs(splits["train"], model.towers)
    else:
        train = features("train", cfg.views)
        model.heads.centre(train.image[0], train.text)
    loader = DataLoader(train, cfg.batch_size, num_workers=cfg.workers, drop_last=True)
    fit(model if cfg.finetune else model.heads, step, loader, cfg)
    judged = {split: features(split) for split in splits if split != "train"}
    named_by = features("train")
    if not PartialState().is_main_process:
        return {}
    about = {"model": cfg.model, "seed": cfg.seed, "activation": cfg.activation}
    return write_report(model.to(device), judged, named_by, cfg.out, about, keep=cfg.shorten)


if __name__ == "__main__":
    main(tyro.cli(Config))

"""Which heads should CLIP have? Settings of the recipe compared on held-out training emoji.

Of the training emoji a further vendor (`style`) and a further fifth (`unseen`) are held out; the
splits that the recipe reports are never read. Each setting is trained with every seed.

Usage:
    python evals/choose_clip.py
    python evals/choose_clip.py --dims 512 --k 10 --spectral 10
"""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any

import tyro

from ncl_multi.log import show_messages

if TYPE_CHECKING:
    from ncl_multi.adapters.clip.inputs import TowerFeatures
    from ncl_multi.adapters.clip.pairs import Pairs

COMPARED: tuple[dict[str, Any], ...] = (
    {"dims": 1024, "k": 102, "spectral": 0.0, "clusters": False},
    {"dims": 1024, "k": 16, "spectral": 0.0, "clusters": True},
    {"dims": 512, "k": 10, "spectral": 10.0, "clusters": True},
    {"dims": 1024, "k": 16, "spectral": 10.0, "clusters": True},
    {"dims": 1024, "k": 16, "spectral": 30.0, "clusters": True},
)


@dataclass(frozen=True)
class Config:
    """Settings of CLIP's heads compared on held-out training emoji."""

    dims: int | None = None
    """Compare only this width, with `k`, `spectral` and `clusters`; None compares `COMPARED`."""
    k: int = 16
    """Active entries of a row."""
    spectral: float = 10.0
    """Weight of the spectral loss."""
    clusters: bool = True
    """Start on clusters of the pairs."""
    vendor: str = "Goog"
    """The training vendor that is held out."""
    seeds: tuple[int, ...] = (0, 1)
    """At least two, for stability."""
    steps: int = 168
    """Steps of training."""


def hold_out(train: "TowerFeatures", vendor: str) -> dict[str, "TowerFeatures"]:
    """Training features without a vendor and a fifth of the emoji, and those two."""
    import torch

    groups = train.pairs.groups
    if groups is None:
        raise ValueError("holding out a fifth of the emoji needs groups; these pairs have none")
    style = torch.tensor([name.endswith(f"({vendor})") for name in train.pairs.image_names])
    order = torch.randperm(int(groups.max()) + 1, generator=torch.Generator().manual_seed(7))
    unseen = order[groups] < len(order) // 5
    rows = {"train": ~style & ~unseen, "style": style & ~unseen, "unseen": ~style & unseen}
    if any(not own.any() for own in rows.values()):
        raise ValueError(f"no training image is drawn by the vendor {vendor!r}")
    return {split: _keep(train, own.nonzero()[:, 0], split) for split, own in rows.items()}


def _keep(features: "TowerFeatures", rows: Any, split: str) -> "TowerFeatures":
    from ncl_multi.adapters.clip.inputs import TowerFeatures

    pairs = features.pairs.keep(rows.tolist())
    if split != "train":
        pairs = _labels_only(pairs)
    number = {caption: row for row, caption in enumerate(features.pairs.captions)}
    text = features.text[[number[caption] for caption in pairs.captions]]
    return TowerFeatures(pairs, features.image[:, rows], text)


def _labels_only(pairs: "Pairs") -> "Pairs":
    """As in the reported splits: images are searched by their label, not by their tags."""
    import torch

    labels = [name.rpartition(" (")[0] for name in pairs.image_names]
    number = {label: row for row, label in enumerate(dict.fromkeys(labels))}
    links = torch.tensor([(row, number[label]) for row, label in enumerate(labels)])
    return replace(pairs, captions=list(number), links=links)


def train_heads(cfg: Config, setting: dict[str, Any], train: "TowerFeatures", seed: int):
    """The recipe's training, with its other settings."""
    import torch
    from torch.utils.data import DataLoader

    from ncl_multi import TrainConfig, fit
    from ncl_multi.adapters.clip.heads import ClipHeads
    from ncl_multi.adapters.clip.objective import ClipObjective

    torch.manual_seed(seed)
    heads = ClipHeads(
        train.image.shape[2], train.text.shape[1], setting["dims"],
        k=setting["k"], spectral=setting["spectral"],
        dropout=0.5, temperature=0.05, min_temperature=0.03,
    )  # fmt: skip
    heads.centre(train.image[0], train.text)
    if setting["clusters"]:
        heads.start_on_clusters(train.image[0], train.text, train.pairs.links)

    plan = TrainConfig(
        steps=cfg.steps, batch_size=min(512, len(train)), lr=3e-3, seed=seed, device="cpu",
    )  # fmt: skip
    rows: Any = train
    fit(ClipObjective(heads, train), DataLoader(rows, plan.batch_size, drop_last=True), plan)
    return heads.eval()


def compare(cfg: Config, setting: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    """One row of the table: the mean over seeds, and the stability of each seed and the next."""
    from ncl_multi.adapters.clip.report import both_ways, codes
    from ncl_multi.metrics import class_consistency, distinct, purity, stability

    heads = [train_heads(cfg, setting, splits["train"], seed) for seed in cfg.seeds]
    row = dict(setting)
    for split in ("style", "unseen"):
        pairs = splits[split].pairs
        z = [codes(own, splits[split]) for own in heads]
        found = [both_ways(*own, pairs.relevant()) for own in z]
        images = [z_image for z_image, _ in z]
        row |= {
            f"{split}_t2i_r_at_10": mean(own["t2i_r_at_10"] for own in found),
            f"{split}_i2t_r_at_10": mean(own["i2t_r_at_10"] for own in found),
            f"{split}_purity": mean(purity(own, pairs.y) for own in images),
            f"{split}_consistency": mean(class_consistency(own, pairs.y) for own in images),
            f"{split}_distinct": mean(distinct(own) for own in images),
            f"{split}_stability": mean(stability(*two) for two in pairwise(images)),
        }
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}


def main(cfg: Config) -> None:
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.clip.inputs import tower_features
    from ncl_multi.adapters.clip.load import DEMO, load_towers
    from ncl_multi.data.fetch import cache

    if len(cfg.seeds) < 2:
        raise ValueError(f"stability needs at least two seeds; got {cfg.seeds}")
    train = tower_features(load_towers(DEMO), read_pairs("emoji")["train"], cache() / "clip")
    splits = hold_out(train, cfg.vendor)
    asked = {"dims": cfg.dims, "k": cfg.k, "spectral": cfg.spectral, "clusters": cfg.clusters}
    for setting in COMPARED if cfg.dims is None else (asked,):
        print(json.dumps(compare(cfg, setting, splits)), flush=True)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

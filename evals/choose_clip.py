"""Which heads should CLIP have? Changes to the recipe compared on held-out training images.

Of the training emoji a further vendor (`style`) and a further fifth (`unseen`) are held out, of
Flickr8k the last 1,000 training images; the splits that the recipe reports are never read.

Usage:
    python evals/choose_clip.py
    python evals/choose_clip.py --change dims=384 k=7
    NCL_DATA=<folder> python evals/choose_clip.py --data flickr8k --change dims=4096 k=82
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any

import tyro
from choosing import Comparison

from ncl_multi.log import show_messages

if TYPE_CHECKING:
    from ncl_multi.adapters.clip.heads import ClipHeads
    from ncl_multi.adapters.clip.inputs import TowerFeatures
    from ncl_multi.adapters.clip.pairs import Pairs

RECIPE: dict[str, Any] = {
    "image_size": 160, "dims": 200, "k": 4, "start": "clusters", "spectral": 10.0,
    "dropout": 0.5, "temperature": 0.05, "min_temperature": 0.03, "lr": 3e-3, "steps": 336,
}  # fmt: skip
"""The recipe's settings, which a change starts from; `activation` and `contrast` may be changed."""

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"dims": 160, "k": 3},
    {"dims": 256, "k": 5},
    {"dims": 384, "k": 7},
    {"dims": 1024, "k": 16},
    {"steps": 168},
    {"spectral": 5.0},
    {"spectral": 0.0},
    {"start": "random", "spectral": 0.0},
    {"image_size": 192},
)
"""Changes to the recipe, each by itself."""


@dataclass(frozen=True)
class Config(Comparison):
    """Changes to CLIP's heads compared on held-out training images."""

    data: str = "emoji"
    """`emoji` or `flickr8k`."""
    vendor: str = "Goog"
    """The vendor of training emoji that is held out."""
    seeds: tuple[int, ...] = (0, 1)
    """Figures are means; two or more give stability."""


def hold_out_last(train: "TowerFeatures", count: int = 1000) -> dict[str, "TowerFeatures"]:
    """Training features without the last images, and those of the last images."""
    import torch

    rows = torch.arange(len(train))
    training = _keep(train, rows[:-count], "train")
    return {"train": training, "validation": _keep(train, rows[-count:], "validation")}


def hold_out(train: "TowerFeatures", vendor: str) -> dict[str, "TowerFeatures"]:
    """Training features without a vendor and a fifth of the emoji, and these two as splits."""
    import torch

    groups = train.pairs.groups
    if groups is None:
        raise ValueError("holding out a fifth of the emoji needs groups; these pairs have none")
    style = torch.tensor([name.endswith(f"({vendor})") for name in train.pairs.image_names])
    order = torch.randperm(int(groups.max()) + 1, generator=torch.Generator().manual_seed(7))
    unseen = order[groups] < len(order) // 5
    rows = {"train": ~style & ~unseen, "style": style & ~unseen, "unseen": ~style & unseen}
    if any(not mask.any() for mask in rows.values()):
        raise ValueError(f"no training image is drawn by the vendor {vendor!r}")
    return {split: _keep(train, mask.nonzero()[:, 0], split) for split, mask in rows.items()}


def _keep(features: "TowerFeatures", rows: Any, split: str) -> "TowerFeatures":
    from ncl_multi.adapters.clip.inputs import TowerFeatures

    pairs = features.pairs.keep(rows.tolist())
    if split != "train" and pairs.groups is not None:
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


def train_heads(setting: dict[str, Any], train: "TowerFeatures", seed: int) -> "ClipHeads":
    """The recipe's training, with its other settings."""
    import torch
    from torch.utils.data import DataLoader

    from ncl_multi import TrainConfig, fit
    from ncl_multi.adapters.clip.heads import ClipHeads
    from ncl_multi.adapters.clip.objective import ClipObjective

    torch.manual_seed(seed)
    not_of_heads = ("image_size", "dims", "start", "lr", "steps")
    options = {name: value for name, value in setting.items() if name not in not_of_heads}
    widths = train.image.shape[2], train.text.shape[1]
    heads = ClipHeads(*widths, setting["dims"], **options)
    heads.centre(train.image[0], train.text)
    if setting["start"] == "clusters":
        heads.start_on_clusters(train.image[0], train.text, train.pairs.links)

    plan = TrainConfig(
        steps=setting["steps"], batch_size=min(512, len(train)), lr=setting["lr"], seed=seed,
        device="cpu",
    )  # fmt: skip
    rows: Any = train
    fit(ClipObjective(heads, train), DataLoader(rows, plan.batch_size, drop_last=True), plan)
    return heads.eval()


def compare(
    setting: dict[str, Any], splits: dict[str, "TowerFeatures"], seeds: tuple[int, ...]
) -> dict[str, Any]:
    """Figures of the held-out images: means over seeds, and stability of consecutive seeds."""
    from ncl_multi.adapters.clip.report import both_ways, codes, whole_codes
    from ncl_multi.metrics import class_consistency, distinct, purity, stability

    heads = [train_heads(setting, splits["train"], seed) for seed in seeds]
    row: dict[str, float] = {}
    for split in [name for name in splits if name != "train"]:
        pairs = splits[split].pairs
        z = [codes(clip_heads, splits[split]) for clip_heads in heads]
        images = [z_image for z_image, _ in z]
        ways = {
            "": [both_ways(*sides, pairs.relevant()) for sides in z],
            "whole_": [both_ways(*whole_codes(h, splits[split]), pairs.relevant()) for h in heads],
        }
        for rows, by_seed in ways.items():
            for way in ("t2i_r_at_10", "i2t_r_at_10"):
                row[f"{split}_{rows}{way}"] = mean(figures[way] for figures in by_seed)
        if pairs.y is not None:
            y = pairs.y
            row[f"{split}_purity"] = mean(purity(z_image, y) for z_image in images)
            row[f"{split}_consistency"] = mean(class_consistency(z_image, y) for z_image in images)
        row[f"{split}_distinct"] = mean(distinct(z_image) for z_image in images)
        if len(images) > 1:
            row[f"{split}_stability"] = mean(stability(*two) for two in pairwise(images))
    return {name: round(value, 3) for name, value in row.items()}


def rows(cfg: Config) -> Iterator[dict[str, Any]]:
    """One row per change."""
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.clip.inputs import tower_features
    from ncl_multi.adapters.clip.load import DEMO, load_towers
    from ncl_multi.data.fetch import cache

    pairs = read_pairs(cfg.data)["train"]
    for change in cfg.changes(COMPARED):
        setting = RECIPE | change
        towers = load_towers(DEMO, image_size=setting["image_size"])
        train = tower_features(towers, pairs, cache() / "clip")
        emoji = train.pairs.groups is not None
        splits = hold_out(train, cfg.vendor) if emoji else hold_out_last(train)
        yield {"change": change} | compare(setting, splits, cfg.seeds)


if __name__ == "__main__":
    show_messages()
    config = tyro.cli(Config)
    config.show(rows(config))

"""Do two-sided codes of embeddings find as much as `NonNegClip` on the same towers?

Both learn from the same features of Flickr8k's photographs and captions (NCL_DATA), with the same
width and number of entries. Recall within ten, text to image and image to text, in per cent.

Usage:
    python evals/two_sides.py
    python evals/two_sides.py --validation 1000 --change steps=600    # to choose settings
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from choosing import read_changes
from scipy.sparse import csr_array

from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config:
    """`SparseCoder` of two sides compared with `NonNegClip`."""

    dims: int = 1024
    """Width of codes."""
    k: int = 16
    """Entries of a code."""
    seeds: tuple[int, ...] = (0,)
    """One row of figures for each."""
    validation: int = 0
    """Hold out this many training photographs; then `NonNegClip` and the dev set are left out."""
    change: tuple[str, ...] = ()
    """Options of `SparseCoder`, names and values in JSON (`steps=600`)."""
    image_size: int | None = 112
    """Side of the photographs in pixels, as they are stored; None for the tower's own, 224."""
    cache: Path | None = None
    """Folder for the towers' features; None for the user's cache folder."""


def main(cfg: Config) -> None:
    import ncl_multi as ncl
    from ncl_multi.adapters.clip.config import ClipConfig
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.clip.load import DEMO, load_towers
    from ncl_multi.adapters.clip.report import both_ways

    splits = read_pairs("flickr8k")
    names = ("train",) if cfg.validation else ("train", "dev")
    config = ClipConfig(cache=cfg.cache, progress=False)
    towers = load_towers(DEMO, image_size=cfg.image_size)
    clip = ncl.NonNegClip(towers, dims=1)
    data = [_arrays(clip.tower_features(splits[name], config)) for name in names]
    train, held = _hold_out(data[0], cfg.validation) if cfg.validation else data
    right = _relevant(held)
    for seed in cfg.seeds:
        options: dict[str, Any] = {"random_state": seed} | read_changes(cfg.change)
        coder = ncl.SparseCoder(cfg.dims, cfg.k, **options)
        coder.fit(train.images, other=train.texts, positives=train.links)
        rows: dict[str, Any] = {}
        for name, k in {"coder": cfg.k, "coder_whole": cfg.dims}.items():
            z_image = coder.transform(held.images, k=k)
            z_text = coder.transform(held.texts, k=k, other=True)
            rows[name] = both_ways(z_image, z_text, right)
        if not cfg.validation:
            clip = ncl.NonNegClip(towers, dims=cfg.dims, k=cfg.k, seed=seed)
            clip.fit(splits["train"], replace(config, seed=seed))
            with torch.no_grad():
                image = clip.heads.encode_image(torch.from_numpy(held.images))
                text = clip.heads.encode_text(torch.from_numpy(held.texts))
            rows["clip"] = both_ways(image, text, right)
        for name, figures in rows.items():
            found = {way: round(figures[f"{way}_r_at_10"], 1) for way in ("t2i", "i2t")}
            print(json.dumps({"seed": seed, "model": name} | found), flush=True)


class Sides(NamedTuple):
    """Features of photographs and captions, and rows of (photograph, caption)."""

    images: np.ndarray
    texts: np.ndarray
    links: np.ndarray


def _arrays(features: Any) -> Sides:
    image, text = features.image[0].float().numpy(), features.text.float().numpy()
    return Sides(image, text, features.pairs.links.numpy())


def _hold_out(whole: Sides, count: int) -> tuple[Sides, Sides]:
    """All but the last photographs with their captions, and the last."""
    edge = len(whole.images) - count
    parts = []
    for images, mine in ((slice(edge), whole.links[:, 0] < edge),
                         (slice(edge, None), whole.links[:, 0] >= edge)):  # fmt: skip
        links = whole.links[mine]
        used, caption = np.unique(links[:, 1], return_inverse=True)
        image = links[:, 0] - (images.start or 0)
        parts.append(Sides(whole.images[images], whole.texts[used], np.stack([image, caption], 1)))
    return parts[0], parts[1]


def _relevant(sides: Sides) -> csr_array:
    shape = (len(sides.images), len(sides.texts))
    return csr_array((np.ones(len(sides.links)), tuple(sides.links.T)), shape=shape)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

"""What the atlas shows of a set of codes, as arrays of 16 bits."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ncl_multi.training.health import ACTIVE

TOP, SHOWN, NEAREST, REASONS = 12, 16, 6, 4
"""Items a dimension, dimensions an item, neighbours an item, reasons a neighbour."""

NONE, UNIT = 65535, 32767
"""An empty place, and what stands for one."""


def tables(
    z: Tensor, side_of: np.ndarray, labels: np.ndarray | None, per_side: int
) -> tuple[dict[str, np.ndarray], list[tuple[str, str]]]:
    """Everything the page shows of unit codes, and the line of figures on top."""
    side = torch.from_numpy(side_of)
    active = z.abs() > ACTIVE
    fires = active.float().mean(dim=0)
    top = [_best(z.T.masked_fill(side != n, 0), TOP) for n in range(int(side.max()) + 1)]
    found = {
        "fires": fires.numpy().astype("f4"),
        "mean": z.mean(dim=0).numpy().astype("f4"),
        "active": active.sum(dim=1).numpy().astype("u2"),
        "topItems": _places(torch.cat([items for items, _ in top], dim=1)),
        "topValues": _shares(torch.cat([values for _, values in top], dim=1)),
        **_strongest(z, "item", SHOWN),
        **_neighbours(z, side, per_side),
    }
    alive = fires > 0
    facts = [
        ("dimensions", f"{z.shape[1]:,}"),
        ("alive", f"{alive.float().mean():.0%}"),
        ("active an item", f"{active.sum(dim=1).float().mean():.1f}"),
        ("zeros", f"{1 - active.float().mean():.1%}"),
    ]
    counts = torch.zeros(z.shape[1], 3)
    found["classIds"] = np.full((z.shape[1], 3), NONE, "u2")
    if labels is not None:
        known = torch.from_numpy(labels.astype(np.int64))
        rows = known != NONE
        one_hot = F.one_hot(known[rows]).float()
        share = active[rows].float().T @ one_hot
        share /= share.sum(dim=1, keepdim=True).clamp(min=1)
        counts, ids = F.pad(share, (0, max(0, 3 - share.shape[1]))).topk(3, dim=1)
        found["classIds"] = _places(ids.masked_fill(counts == 0, NONE))
        if alive.any():
            facts.append(("class consistency", f"{counts[alive, 0].mean():.2f}"))
    found["classShares"] = _shares(counts)
    return found, facts


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places and values of the largest positive entries of each row."""
    values, places = scores.topk(min(count, scores.shape[1]), dim=1)
    values, places = (F.pad(x, (0, count - x.shape[1])) for x in (values, places))
    return places.masked_fill(values <= 0, NONE), values


def _strongest(parts: Tensor, name: str, count: int) -> dict[str, np.ndarray]:
    """The largest entries of each row by size, as two arrays of 16 bits."""
    count_here = min(count, parts.shape[1])
    dims = parts.abs().topk(count_here, dim=1).indices
    values = parts.gather(1, dims)
    dims, values = (F.pad(x, (0, count - count_here)) for x in (dims, values))
    what = "Values" if name == "item" else "Shares"
    return {
        f"{name}Dims": _places(dims.masked_fill(values.abs() <= ACTIVE**2, NONE)),
        f"{name}{what}": _shares(values),
    }


def _neighbours(z: Tensor, side: Tensor, per_side: int) -> dict[str, np.ndarray]:
    """The nearest items of every item on each side, and the dimensions that brought them there."""
    blocks = []
    rows = torch.arange(len(z))
    for block in tqdm(rows.split(256), desc="nearest items", leave=False, disable=len(z) < 2000):
        similarity = z[block] @ z.T
        similarity[torch.arange(len(block)), block] = 0
        found = [
            _best(similarity.masked_fill(side != n, 0), per_side)
            for n in range(int(side.max()) + 1)
        ]
        near, scores = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        partner = z[near.masked_fill(near == NONE, 0)]
        parts = (z[block, None] * partner).masked_fill((near == NONE)[..., None], 0)
        reasons = _strongest(parts.flatten(0, 1), "reason", REASONS)
        blocks.append({"near": _places(near), "scores": _shares(scores), **reasons})
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _places(numbers: Tensor) -> np.ndarray:
    return numbers.numpy().astype("u2")


def _shares(values: Tensor) -> np.ndarray:
    return (values.clamp(-1, 1) * UNIT).round().numpy().astype("i2")

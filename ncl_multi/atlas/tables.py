"""What the atlas shows of a set of codes, as arrays of 16 bits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ncl_multi.codes.features import Features
from ncl_multi.codes.names import MIXED
from ncl_multi.metrics import (
    NotMeasurableError,
    chance_purity,
    dimension_purity,
    distinct,
    name_fit,
    naming,
    overlaps,
)
from ncl_multi.metrics.codes import Codes, strongest_rows, unit_rows
from ncl_multi.training.health import ACTIVE

TOP, SHOWN, NEAREST, REASONS = 12, 16, 6, 4
"""Items per dimension, dimensions per item, neighbours per item, reasons per neighbour."""

NONE, UNIT = 65535, 32767
"""Marks an empty entry; stands for the value 1."""

FITS, _PURE = 0.3, 0.5
"""A name must fit this share of a dimension's ten strongest items. Otherwise their class is used if
this share of them has it."""

_REPEATS = 0.5
"""Dimensions are near-duplicates if their ten strongest items overlap this much (Jaccard)."""


def tables(
    z: Tensor, side_of: np.ndarray, labels: np.ndarray | None, per_side: int
) -> tuple[dict[str, np.ndarray], list[tuple[str, str]]]:
    """Tables of unit codes that the page shows, and its line of figures."""
    side = torch.from_numpy(side_of)
    active = z.abs() > ACTIVE
    fires = active.float().mean(dim=0)
    top = [_best(z.T.masked_fill(side != n, 0), TOP) for n in range(int(side.max()) + 1)]
    arrays = {
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
        ("active per item", f"{active.sum(dim=1).float().mean():.1f}"),
        ("zeros", f"{1 - active.float().mean():.1%}"),
    ]
    counts = torch.zeros(z.shape[1], 3)
    arrays["classIds"] = np.full((z.shape[1], 3), NONE, "u2")
    if labels is not None:
        class_ids = torch.from_numpy(labels.astype(np.int64))
        rows = class_ids != NONE
        one_hot = F.one_hot(class_ids[rows]).float()
        share = active[rows].float().T @ one_hot
        share /= share.sum(dim=1, keepdim=True).clamp(min=1)
        counts, ids = F.pad(share, (0, max(0, 3 - share.shape[1]))).topk(3, dim=1)
        arrays["classIds"] = _places(ids.masked_fill(counts == 0, NONE))
        if alive.any():
            facts.append(("class consistency", f"{counts[alive, 0].mean():.2f}"))
    arrays["classShares"] = _shares(counts)
    return arrays, facts


def readings(
    sides: Sequence[Features], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[tuple[str, str]], list[str]]:
    """Readability of each dimension, the one it repeats, figures of all dimensions, and names.

    Purity needs a side with labels and the fit of names one with words or labels; measures that
    cannot be computed are NaN. The score that orders the page is the mean of the two, and a
    dimension called "mixed" has a fit of zero. The figures are those of the names as given; a name
    that does not fit is then replaced by the class of the strongest items, if most have one class.
    """
    dims, facts = sides[0].dims, []
    nothing = np.full(dims, np.nan)
    purity, classes, fit = nothing, np.full(dims, NONE, "u2"), nothing
    labelled = next((side for side in map(_labelled, sides) if side is not None), None)
    if labelled is not None and labelled.y is not None:
        try:
            purity, chance = dimension_purity(labelled.z, labelled.y), chance_purity(labelled.y)
            classes = _common_class(labelled.z, labelled.y)
            facts.append(("purity@10", f"{np.nanmean(purity):.2f} (chance {chance:.2f})"))
        except NotMeasurableError:
            pass
    wordy = next((side for side in sides if side.items), labelled)
    try:
        if wordy is not None and any(names):
            fit, figures = name_fit(names, wordy), naming(names, wordy)
            facts.append(("named", f"{figures['named']:.0%}"))
            if "name_fit" in figures:
                facts.append(("name fits", f"{figures['name_fit']:.0%}"))
                facts.append(("names used once", f"{figures['names_once']:.0%}"))
        facts.append(("distinct", f"{distinct(sides[0].z):.2f}"))
    except NotMeasurableError:
        pass
    names = list(names)
    for dim in np.flatnonzero((purity >= _PURE) & ~(fit >= FITS) & (classes != NONE)):
        label = _class_name(labelled, int(classes[dim]))
        names[dim] = label if names[dim] in ("", MIXED) else f"{label}: {names[dim]}"
        fit[dim] = purity[dim]
    mixed = np.array([name == MIXED for name in names])
    both = np.stack([purity, np.where(mixed, 0, fit)])
    measured = ~np.isnan(both)
    score = np.where(measured, both, 0).sum(axis=0) / np.maximum(measured.sum(axis=0), 1)
    arrays = {"purity": purity, "fit": fit, "score": np.where(measured.any(axis=0), score, -1)}
    return (
        {name: values.astype("f4") for name, values in arrays.items()}
        | {
            "commonClass": classes,
            "leader": _leaders(sides[0], score),
        },
        facts,
        names,
    )


def _class_name(labelled: Features | None, label: int) -> str:
    classes = [] if labelled is None else labelled.about.get("classes") or []
    return str(classes[label]) if label < len(classes) else f"class {label}"


def _labelled(side: Features) -> Features | None:
    """The items of a side that have a class label."""
    y = side.y
    if y is None or y.ndim != 1 or y.is_floating_point() or not bool((y >= 0).any()):
        return None
    rows = (y >= 0).nonzero()[:, 0]
    return Features(side.z[rows.numpy()], y[rows].long(), about=side.about)


def _common_class(z: Codes, y: Tensor) -> np.ndarray:
    """The most frequent class among the ten strongest items of each dimension."""
    rows = strongest_rows(unit_rows(z))
    labels = np.where(rows >= 0, y.numpy()[rows], -1)
    votes = (labels[:, :, None] == labels[:, None]).sum(axis=2) * (labels >= 0)
    common = np.take_along_axis(labels, votes.argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.where((common >= 0) & (common < NONE), common, NONE).astype("u2")


def _leaders(side: Features, score: np.ndarray) -> np.ndarray:
    """For each dimension the most readable of its near-duplicates, or itself if it has none."""
    leader = np.arange(side.dims)
    try:
        overlap = overlaps(side.z)
    except NotMeasurableError:
        return leader.astype("u2")
    led = np.zeros(side.dims, bool)
    for dim in np.argsort(-score, kind="stable"):
        if led[dim]:
            continue
        row = slice(*overlap.indptr[dim : dim + 2])
        near = overlap.indices[row][overlap.data[row] >= _REPEATS]
        near = near[~led[near]]
        leader[near], led[near], led[dim] = dim, True, True
    return leader.astype("u2")


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions and values of the largest positive entries of each row."""
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
    """The nearest items of every item on each side, and the dimensions that contribute most."""
    blocks = []
    rows = torch.arange(len(z))
    for block in tqdm(rows.split(256), desc="nearest items", leave=False, disable=len(z) < 2000):
        similarity = z[block] @ z.T
        similarity[torch.arange(len(block)), block] = 0
        by_side = [
            _best(similarity.masked_fill(side != n, 0), per_side)
            for n in range(int(side.max()) + 1)
        ]
        near, scores = (torch.cat(parts, dim=1) for parts in zip(*by_side, strict=True))
        partner = z[near.masked_fill(near == NONE, 0)]
        parts = (z[block, None] * partner).masked_fill((near == NONE)[..., None], 0)
        reasons = _strongest(parts.flatten(0, 1), "reason", REASONS)
        blocks.append({"near": _places(near), "scores": _shares(scores), **reasons})
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _places(numbers: Tensor) -> np.ndarray:
    return numbers.numpy().astype("u2")


def _shares(values: Tensor) -> np.ndarray:
    return (values.clamp(-1, 1) * UNIT).round().numpy().astype("i2")

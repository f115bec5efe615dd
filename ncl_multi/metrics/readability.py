"""Readability of dimensions: what their strongest rows have in common, and their stability.

Measures are means over *readable* dimensions, which fire for at least five rows. Rows are brought
to unit length first. Codes are a tensor or a `scipy.sparse.csr_array`. Of a signed
dimension only the positive end is read, as on the page.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array, csr_array
from torch import Tensor
from torch.nn import functional as F

from ncl_multi.codes.features import Features
from ncl_multi.codes.names import MIXED, belongs, name_dimensions, without_endings
from ncl_multi.metrics.activity import class_consistency
from ncl_multi.metrics.codes import (
    Codes,
    Labels,
    check_labels,
    dense,
    entries,
    firing_rows,
    strongest_rows,
    unit_rows,
)
from ncl_multi.optional import needs
from ncl_multi.training.health import ACTIVE

Judge: TypeAlias = Labels | Float[Tensor, "n e"]
"""How similar two rows are, by their labels or by embeddings the model never saw."""

OtherCodes: TypeAlias = Float[Tensor, "n other"] | csr_array
"""Codes of the same rows in another width."""

_STRONGEST = 10
_ONE_CLASS = "all rows have the same label, so any set of rows is pure"
_FIRES = 5
"""A dimension that fires for fewer rows cannot be read."""


class NotMeasurableError(ValueError):
    """A measure is not defined for these codes or labels; the message explains why."""


class Readable(NamedTuple):
    """Measures of a set of codes, and the reasons why others were left out."""

    figures: dict[str, float]
    left_out: dict[str, str]


def readable(z: Codes, y: Labels | None = None, *, embeddings: Tensor | None = None) -> Readable:
    """Every measure of readable dimensions that applies; for the others, the reason.

    Args:
        z: Codes of rows the model was not trained on.
        y: Labels, for purity and an intruder judged by them.
        embeddings: Vectors of the same rows from another model, as another judge of intruders.

    Example:
        >>> z, y = torch.eye(2).repeat_interleave(10, dim=0), torch.arange(2).repeat_interleave(10)
        >>> got = readable(z, y)
        >>> got.figures["purity_at_10"], got.figures["distinct"], got.left_out
        (1.0, 1.0, {'intruder_embeddings': 'no embeddings of the rows were given as a judge'})
    """

    def labels() -> Labels:
        if y is None:
            raise NotMeasurableError("the rows have no labels")
        return y

    def vectors() -> Tensor:
        if embeddings is None:
            raise NotMeasurableError("no embeddings of the rows were given as a judge")
        return embeddings

    measures: dict[str, Callable[[], float]] = {
        "purity_at_10": lambda: purity(z, labels()),
        "chance": lambda: chance_purity(labels()),
        "cluster_purity": lambda: cluster_purity(z, labels()),
        "intruder_labels": lambda: intruder(z, labels()),
        "intruder_embeddings": lambda: intruder(z, vectors()),
        "distinct": lambda: distinct(z),
    }
    figures = {"readable_dims": float(readable_dims(z).mean())}
    left_out = {}
    for name, measure in measures.items():
        try:
            figures[name] = measure()
        except NotMeasurableError as reason:
            left_out[name] = str(reason)
    return Readable(figures, left_out)


def readable_features(
    features: Features, *, embeddings: Tensor | None = None, names: Sequence[str] | None = None
) -> Readable:
    """`readable`, class consistency and `naming` of items the model was not trained on.

    Items with a negative label, which graphs give to nodes without one, count for the names only.
    Labels that are a table or real numbers are not classes, so nothing is measured by them.

    Args:
        features: Codes of the items, with labels, words, or both.
        embeddings: Vectors of the same items from another model, as a judge of intruders.
        names: Names of the dimensions, made from other items. None makes them from a random half of
            these items and judges them on the other half.

    Example:
        >>> features = Features(torch.eye(2).repeat(20, 1), items=["a dog", "a cat"] * 20)
        >>> readable_features(features).figures["name_fit"]
        1.0
    """
    y, z = features.y, features.z
    if y is not None and (y.ndim != 1 or y.is_floating_point() or not bool((y >= 0).any())):
        y = None
    if y is not None and bool((y < 0).any()):
        labelled = (y >= 0).nonzero()[:, 0]
        y, z = y[labelled], z[labelled.numpy()]
        embeddings = None if embeddings is None else embeddings[labelled]
    figures, left_out = readable(z, y, embeddings=embeddings)
    if y is not None:
        figures["class_consistency"] = class_consistency(z, y)
    try:
        figures |= _naming_by_halves(features) if names is None else naming(names, features)
    except NotMeasurableError as reason:
        left_out["name_fit"] = str(reason)
    return Readable(figures, left_out)


def readable_dims(z: Codes) -> Bool[np.ndarray, " d"]:
    """Which dimensions fire for at least five rows.

    Example:
        >>> readable_dims(torch.tensor([[1.0, 0.0]] * 5)).tolist()
        [True, False]
    """
    return firing_rows(unit_rows(z)) >= _FIRES


def purity(z: Codes, y: Labels) -> float:
    """purity@10: mean over readable dimensions of `dimension_purity`.

    Compare it with `chance_purity`, and with `cluster_purity`, which the same codes can reach.

    Example:
        >>> purity(torch.ones(10, 1), torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 2]))
        0.7
    """
    return float(np.nanmean(dimension_purity(z, y)))


def dimension_purity(z: Codes, y: Labels) -> Float[np.ndarray, " d"]:
    """Largest class share among the 10 rows that fire a dimension most; NaN if not readable.

    A dimension that fewer than 10 rows fire is judged by those.

    Example:
        >>> z = torch.eye(2).repeat_interleave(10, dim=0)
        >>> dimension_purity(z, torch.arange(20) // 5).tolist()
        [0.5, 0.5]
    """
    strongest, dims = _strongest(z, rows=_STRONGEST)
    shares = np.full(z.shape[1], np.nan)
    shares[dims] = _largest_class_share(strongest, _classes(y, z))
    return shares


def chance_purity(y: Labels) -> float:
    """Expected largest class share among 10 rows drawn at random, without replacement.

    Example:
        >>> round(chance_purity(torch.arange(12)), 4)
        0.1
    """
    if len(y) < _STRONGEST:
        raise NotMeasurableError(f"needs at least {_STRONGEST} rows; got {len(y)}")
    sizes = y.unique(return_counts=True)[1].tolist()
    if len(sizes) == 1:
        raise NotMeasurableError(_ONE_CLASS)
    expected = 0.0
    for most in range(_STRONGEST):
        # Coefficient k counts the draws of k rows with at most `most` of any class.
        draws = np.eye(1, _STRONGEST + 1)[0]
        for size in sizes:
            choices = [float(comb(size, taken)) for taken in range(most + 1)]
            draws = np.convolve(draws, choices)[: _STRONGEST + 1]
        expected += 1 - draws[_STRONGEST] / comb(len(y), _STRONGEST)
    return float(expected / _STRONGEST)


def cluster_purity(z: Codes, y: Labels, *, clusters: int = 128, seed: int = 0) -> float:
    """Largest class share among the 10 rows nearest to a k-means centre, mean over centres.

    Fewer centres than `clusters` are fitted where there would be fewer than 10 rows for each.

    Example:
        >>> z = torch.eye(2).repeat_interleave(10, dim=0)
        >>> cluster_purity(z, torch.arange(20) // 10)
        1.0
    """
    with needs("ncl-multi[train]"):
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
    z, classes = unit_rows(z), _classes(y, z)
    if z.shape[0] < _STRONGEST:
        raise NotMeasurableError(f"needs at least {_STRONGEST} rows; got {z.shape[0]}")
    rows = z.cpu().numpy() if isinstance(z, Tensor) else _narrow(z)
    k_means = KMeans(min(clusters, z.shape[0] // _STRONGEST), n_init=1, random_state=seed)
    with warnings.catch_warnings():
        # Fewer different rows than centres: equal centres are dropped below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        centres = np.unique(k_means.fit(rows).cluster_centers_, axis=0)
    distance = (centres**2).sum(axis=1) - 2 * (rows @ centres.T)
    nearest = distance.argsort(axis=0, kind="stable")[:_STRONGEST].T
    return float(_largest_class_share(nearest, classes).mean())


def intruder(z: Codes, judge: Judge, *, trials: int = 10, seed: int = 0) -> float:
    """How often a judge finds the row that does not belong to a dimension; chance is 1/6.

    A trial shows the five rows that fire a dimension most, and one of the five strongest rows of
    another readable dimension, drawn among those that do not fire this one. The judge picks the
    row least like the other five: by cosine of embeddings, or by the number of equal labels. If
    several rows are equally unlike, each is picked with the same chance.

    Args:
        z: Codes of rows the model was not trained on.
        judge: Labels, or embeddings of the rows that the model never saw.
        trials: Intruders drawn for each dimension.
        seed: Seed of the draws.

    Example:
        >>> z = torch.eye(2).repeat_interleave(5, dim=0)
        >>> intruder(z, torch.arange(10) // 5), round(intruder(z, torch.ones(10, 3)), 3)
        (1.0, 0.167)
    """
    if judge.ndim == 1:
        judge = _classes(judge, z)
    elif len(judge) != z.shape[0]:
        raise ValueError(f"expected one embedding per row: {z.shape[0]} rows, got {len(judge)}")
    else:
        judge = F.normalize(judge.double(), dim=1)
    rows, dims = _strongest(z)
    groups = _with_intruders(unit_rows(z), rows[:, :_FIRES], dims, trials, seed)
    hit_rates = []
    for group in torch.from_numpy(groups).split(4096):
        items = judge[group]
        alike = items @ items.mT if judge.ndim == 2 else items[:, :, None] == items[:, None]
        # All rows are equally similar to themselves, so the order of the sums does not change.
        unlike = -alike.double().sum(dim=2)
        picked = (unlike >= unlike.amax(dim=1, keepdim=True) - 1e-9).double()
        hit_rates.append(picked[:, -1] / picked.sum(dim=1))
    return float(torch.cat(hit_rates).mean())


def distinct(z: Codes) -> float:
    """One minus the largest overlap of a dimension's 10 strongest rows with any other's.

    The overlap of two sets of rows is their Jaccard index; the mean is over readable dimensions.

    Example:
        >>> distinct(torch.ones(5, 2)), distinct(torch.eye(2).repeat(5, 1))
        (0.0, 1.0)
    """
    _, dims = _strongest(z)
    return float(1 - overlaps(z).max(axis=1).toarray()[dims].mean())


def overlaps(z: Codes) -> csr_array:
    """Jaccard index of the 10 strongest rows of every two readable dimensions; diagonal zero.

    Example:
        >>> overlaps(torch.ones(5, 2)).toarray().tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    strongest, dims = _strongest(z)
    filled = strongest >= 0
    place = (np.repeat(dims, filled.sum(axis=1)), strongest[filled])
    holds = csr_array((np.ones(len(place[0])), place), shape=(z.shape[1], z.shape[0]))
    both, size = coo_array(holds @ holds.T), holds.sum(axis=1)
    row, column = both.coords
    jaccard = both.data / (size[row] + size[column] - both.data)
    return csr_array((np.where(row == column, 0, jaccard), (row, column)), shape=both.shape)


def stability(za: Codes, zb: OtherCodes) -> float:
    """Do two runs find the same dimensions? Mean correlation of readable ones matched one to one.

    Row i of both is the same item. The matches are those with the largest sum of correlations; if
    one run has fewer readable dimensions, each of them is matched. Signed dimensions have no
    direction of their own, so for them the size of the correlation counts.

    Example:
        >>> z = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
        >>> round(stability(z, z[:, [2, 0, 1]]), 6)
        1.0
    """
    return float(matched_dims(za, zb)[2].mean())


def matched_dims(
    za: Codes, zb: OtherCodes
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Dimensions of one run, those of the other they match, and the correlations; see `stability`.

    Example:
        >>> z = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
        >>> matched_dims(z, z[:, [2, 0, 1]])[1].tolist()
        [1, 2, 0]
    """
    if za.shape[0] != zb.shape[0]:
        raise ValueError(f"expected the same rows in both; got {za.shape[0]} and {zb.shape[0]}")
    rows, dims = zip(*(_centred(z) for z in (za, zb)), strict=True)
    correlations = (rows[0].T @ rows[1]).cpu().numpy()
    if any(bool((dense(unit_rows(z)) < -ACTIVE).any()) for z in (za, zb)):
        correlations = np.abs(correlations)
    first, second = linear_sum_assignment(correlations, maximize=True)
    return dims[0][first], dims[1][second], correlations[first, second]


def name_fit(names: Sequence[str], features: Features) -> Float[np.ndarray, " d"]:
    """Share of a dimension's 10 strongest items that contain its name or are of that class.

    NaN for dimensions that are not readable, and for those without a name or called "mixed".

    Example:
        >>> features = Features(torch.ones(6, 1), items=["a dog"] * 3 + ["a cat"] * 3)
        >>> name_fit(["dog"], features).tolist()
        [0.5]
    """
    if len(names) != features.dims:
        raise ValueError(f"expected one name per dimension: {features.dims}, got {len(names)}")
    fit = np.full(features.dims, np.nan)
    strongest, dims = _strongest(features.z)
    for dim, rows in zip(dims.tolist(), strongest.tolist(), strict=True):
        if names[dim] not in ("", MIXED):
            fit[dim] = np.mean([belongs(names[dim], features, row) for row in rows if row >= 0])
    return fit


def naming(names: Sequence[str], features: Features, *, seed: int = 0) -> dict[str, float]:
    """How good names are, over readable dimensions; best judged on items they were not made from.

    Returns `named`, the share of dimensions with a name other than "mixed"; and of those
    `names_once`, the share whose name no other has, "dogs" and "dog" being one, `name_fit`, the
    mean of that measure, and `name_chance`, what it would be for 10 random items.

    Example:
        >>> features = Features(torch.eye(2).repeat(6, 1), items=["a dog", "a cat"] * 6)
        >>> figures = naming(["dog", "cat"], features)
        >>> figures["named"], figures["names_once"], figures["name_fit"]
        (1.0, 1.0, 1.0)
    """
    if not any(names):
        raise NotMeasurableError("no dimension has a name: items without words and classes")
    fit = name_fit(names, features)
    named = np.flatnonzero(~np.isnan(fit)).tolist()
    figures = {"named": len(named) / int(readable_dims(features.z).sum())}
    if not len(named):
        return figures
    count = Counter(without_endings(names[dim]) for dim in named)
    drawn = np.random.default_rng(seed).integers(0, len(features), (len(named), _STRONGEST))
    pairs = zip(named, drawn.tolist(), strict=True)
    chance = [belongs(names[dim], features, row) for dim, rows in pairs for row in rows]
    return figures | {
        "names_once": float(np.mean([count[without_endings(names[dim])] == 1 for dim in named])),
        "name_fit": float(fit[named].mean()),
        "name_chance": float(np.mean(chance)),
    }


def _strongest(z: Codes, *, rows: int = 1) -> tuple[Int[np.ndarray, "r 10"], Int[np.ndarray, " r"]]:
    """The strongest rows of each readable dimension, and which dimensions these are."""
    z = unit_rows(z)
    if z.shape[0] < rows:
        raise NotMeasurableError(f"needs at least {rows} rows; got {z.shape[0]}")
    dims = np.flatnonzero(firing_rows(z) >= _FIRES)
    if not len(dims):
        raise NotMeasurableError(
            f"no dimension fires for at least {_FIRES} of the {z.shape[0]} rows"
        )
    return strongest_rows(z, _STRONGEST)[dims], dims


def _naming_by_halves(features: Features) -> dict[str, float]:
    """`naming` on one random half of the items, by names made from the other."""
    if len(features) < 2:
        raise NotMeasurableError("one item cannot be halved")
    halves = []
    for rows in np.array_split(np.random.default_rng(0).permutation(len(features)), 2):
        y = None if features.y is None else features.y[rows]
        items = None if features.items is None else [features.items[row] for row in rows]
        halves.append(Features(features.z[rows], y, items, features.about))
    return naming(name_dimensions(halves[0]), halves[1])


def _narrow(z: csr_array) -> csr_array:
    """The same matrix with 32-bit indices, which is all that k-means takes."""
    indices, ends = z.indices.astype(np.int32), z.indptr.astype(np.int32)
    return csr_array((z.data, indices, ends), shape=z.shape)


def _classes(y: Labels, z: Codes) -> Tensor:
    classes = check_labels(y, z)
    if not classes.any():
        raise NotMeasurableError(_ONE_CLASS)
    return classes.cpu()


def _largest_class_share(rows: Int[np.ndarray, "d m"], y: Tensor) -> Float[np.ndarray, " d"]:
    """Of each set of rows, padded with -1."""
    labels = np.where(rows >= 0, y.numpy()[rows], -1)
    same = (labels[:, :, None] == labels[:, None]) & (rows >= 0)[:, None]
    return same.sum(axis=2).max(axis=1, where=rows >= 0, initial=0) / (rows >= 0).sum(axis=1)


def _with_intruders(
    z: Codes, rows: np.ndarray, dims: np.ndarray, trials: int, seed: int
) -> Int[np.ndarray, "t 6"]:
    """Trials: five rows of a dimension and an intruder, for dimensions that have one."""
    if len(dims) < 2:
        raise NotMeasurableError("an intruder needs a second dimension; only one is readable")
    draw = np.random.default_rng(seed)
    # Most rows are silent in a sparse dimension; several attempts find one.
    attempts = 8
    shape = (len(dims), trials, attempts)
    other = (np.arange(len(dims))[:, None, None] + draw.integers(1, len(dims), shape)) % len(dims)
    strange = rows[other, draw.integers(0, rows.shape[1], shape)]
    columns = np.broadcast_to(dims[:, None, None], shape).copy()
    silent = entries(z, strange, columns) <= ACTIVE
    first = silent.argmax(axis=2)[:, :, None]
    strange = np.take_along_axis(strange, first, axis=2)[:, :, 0]
    dim, trial = np.nonzero(silent.any(axis=2))
    if not len(dim):
        raise NotMeasurableError("every strong row of another dimension fires this one too")
    return np.column_stack([rows[dim], strange[dim, trial]])


def _centred(z: Codes) -> tuple[Float[Tensor, "n r"], Int[np.ndarray, " r"]]:
    """Readable dimensions with mean zero and length one, or all zero if constant."""
    dims = np.flatnonzero(readable_dims(z))
    if not len(dims):
        raise NotMeasurableError(
            f"no dimension fires for at least {_FIRES} of the {z.shape[0]} rows"
        )
    columns = dense(unit_rows(z)[:, dims]).double()
    columns = columns - columns.mean(dim=0)
    # Below this a column is constant up to rounding.
    return F.normalize(columns * (columns.norm(dim=0) > 1e-6), dim=0), dims

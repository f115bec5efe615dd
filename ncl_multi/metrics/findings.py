"""Dimensions associated with a label or a number: effects, with corrected p-values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.sparse import csr_array

from ncl_multi.codes.explain import unit_csr

_FIRES = 5
"""A dimension is tested if it fires for at least this many rows, and is silent for as many."""


class Finding(NamedTuple):
    """The association of one dimension with the target.

    `effect` is the mean of the target over rows where the dimension is active minus that over the
    other rows; for a class, the difference of its shares. `p_value` is corrected for all tests
    that were made (Benjamini and Hochberg). `active` is the number of rows that fire the dimension.
    """

    dimension: int
    name: str
    value: Any
    effect: float
    p_value: float
    active: int


def findings(
    z: Any, target: Any, names: Sequence[str] | None = None, *, most_p: float = 0.05
) -> list[Finding]:
    """Dimensions associated with the target, the most significant first.

    A target of floats is a number: the rank-sum test of Mann and Whitney compares rows where a
    dimension is active with the others. Anything else is a label: for each class, Fisher's exact
    test of dimension and class. Only dimensions that are active for at least five rows, and silent
    for five, are tested.

    Args:
        z: Codes.
        target: One label or number per row.
        names: A name for each dimension.
        most_p: Largest corrected p-value that is reported; 1 for all tests.

    Example:
        >>> z = np.eye(2).repeat(10, axis=0)
        >>> best = findings(z, ["dog"] * 10 + ["cat"] * 10, ["barks", "purrs"])[0]
        >>> best.name, best.value, best.effect
        ('barks', 'dog', 1.0)
    """
    fires = unit_csr(z)
    fires = csr_array(fires > 1e-5).astype(np.float64)
    values = np.asarray(target)
    if values.ndim != 1 or len(values) != fires.shape[0]:
        raise ValueError(
            f"expected one target per row, {fires.shape[0]}; got the shape {values.shape}"
        )
    if values.dtype.kind == "O":
        # NaN, a missing text of pandas, is not equal to itself.
        without = [at for at, value in enumerate(values) if value is None or value != value]
        if without:
            raise ValueError(f"every row needs a target; row {without[0]} has none")
    if names is not None and len(names) != fires.shape[1]:
        raise ValueError(f"expected one name per dimension, {fires.shape[1]}; got {len(names)}")
    active = np.asarray(fires.sum(axis=0)).astype(int)
    tested = np.flatnonzero((active >= _FIRES) & (len(values) - active >= _FIRES))
    if not len(tested):
        raise ValueError(
            f"no dimension is active for {_FIRES} rows and silent for {_FIRES}; give more rows"
        )
    columns = csr_array(fires.T)[tested]
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"the target must be finite numbers; row {row} is {values[row]}")
        effect, p_value = _numbers(columns, values.astype(np.float64), active[tested])
        tests = [(dim, None) for dim in tested.tolist()]
    else:
        classes, number = np.unique(values, return_inverse=True)
        if len(classes) < 2:
            raise ValueError("the target has one class only; findings need at least two")
        effect, p_value = _classes(columns, number, len(classes), active[tested])
        tests = [(dim, kind) for dim in tested.tolist() for kind in classes.tolist()]
    corrected = stats.false_discovery_control(p_value)
    # Of two equally strong findings, the positive one comes first.
    order = np.lexsort((-effect, -np.abs(effect), corrected))
    return [
        Finding(
            tests[at][0],
            names[tests[at][0]] if names is not None else "",
            tests[at][1],
            float(effect[at]),
            float(corrected[at]),
            int(active[tests[at][0]]),
        )
        for at in order
        if corrected[at] <= most_p
    ]


def _numbers(
    columns: csr_array, values: np.ndarray, active: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Difference of means, and the p-value of the rank-sum test by its normal limit, with ties."""
    n, silent = len(values), len(values) - active
    ranks = stats.rankdata(values)
    u = columns @ ranks - active * (active + 1) / 2
    ties = np.unique(ranks, return_counts=True)[1].astype(np.float64)
    variance = active * silent / 12 * ((n + 1) - (ties**3 - ties).sum() / (n * (n - 1)))
    # Half a step towards the mean: the continuity correction.
    away = np.maximum(np.abs(u - active * silent / 2) - 0.5, 0)
    score = np.divide(away, np.sqrt(variance), out=np.zeros(len(u)), where=variance > 0)
    total = columns @ values
    effect = total / active - (values.sum() - total) / silent
    return effect, np.minimum(2 * stats.norm.sf(score), 1.0)


def _classes(
    columns: csr_array, number: np.ndarray, count: int, active: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Difference of shares and Fisher's exact p-value, a dimension's classes after each other."""
    n = len(number)
    member = csr_array((np.ones(n), (np.arange(n), number)), shape=(n, count))
    both = (columns @ member).toarray()
    size = np.bincount(number, minlength=count)
    effect = both / active[:, None] - (size - both) / (n - active[:, None])
    draws = stats.hypergeom(n, size[None, :], active[:, None])
    # Twice the smaller tail: both directions count.
    p_value = np.minimum(2 * np.minimum(draws.sf(both - 1), draws.cdf(both)), 1.0)
    return effect.ravel(), p_value.ravel()

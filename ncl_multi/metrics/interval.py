"""Confidence intervals of means over seeds and test items."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

Values = Float[np.ndarray, " seeds"] | Float[np.ndarray, "seeds items"]


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Values, level: float = 0.95) -> Interval:
    """Interval of a mean over seeds, or over seeds and the test items that all of them share.

    For paired differences pass the differences. Other seeds and other test items would both give
    another mean, so the two variances are added (noise of single values is counted twice, which is
    conservative). Student's t has the degrees of freedom of Welch and Satterthwaite; for three
    seeds and no items t is 4.3.

    Example:
        >>> [round(end, 3) for end in mean_interval(np.array([0.1, 0.2, 0.3]))]
        [0.2, -0.048, 0.448]
    """
    table = values[:, None] if values.ndim == 1 else values
    if len(table) < 2:
        raise ValueError(f"an interval needs at least two seeds; got {len(table)}")
    terms = [(table.mean(axis=1).var(ddof=1) / len(table), len(table) - 1)]
    if table.shape[1] > 1:
        terms.append((table.mean(axis=0).var(ddof=1) / table.shape[1], table.shape[1] - 1))
    variance, mean = sum(term for term, _ in terms), float(table.mean())
    if variance == 0:
        return Interval(mean, mean, mean)
    freedom = variance**2 / sum(term**2 / free for term, free in terms)
    half = float(stats.t.ppf((1 + level) / 2, freedom) * variance**0.5)
    return Interval(mean, mean - half, mean + half)

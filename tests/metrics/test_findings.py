"""Findings against scipy's own tests, one dimension at a time."""

import numpy as np
import pytest
from scipy import stats

from ncl_multi.metrics.findings import findings

RNG = np.random.default_rng(0)
Z = np.where(RNG.random((80, 6)) < 0.4, RNG.random((80, 6)), 0)
Z[:, 0] = 1.0


def test_a_number_is_compared_by_the_rank_sum_test():
    target = np.round(RNG.standard_normal(80) + (Z[:, 2] > 0), 1)
    got = {f.dimension: f for f in findings(Z, target, most_p=1.0)}
    assert 0 not in got  # always active: nothing to compare with
    p_values = {}
    for dim in range(1, 6):
        on = Z[:, dim] > 0
        p_values[dim] = stats.mannwhitneyu(target[on], target[~on], method="asymptotic").pvalue
        assert got[dim].effect == pytest.approx(target[on].mean() - target[~on].mean())
        assert got[dim].active == on.sum()
    corrected = stats.false_discovery_control(list(p_values.values()))
    for dim, p_value in zip(p_values, corrected, strict=True):
        assert got[dim].p_value == pytest.approx(p_value, rel=1e-9)


def test_a_label_is_compared_by_the_hypergeometric_tails():
    target = np.where(RNG.random(80) < 0.5, "x", "y")
    got = {(f.dimension, f.value): f for f in findings(Z, target, most_p=1.0)}
    raw = {}
    for dim in range(1, 6):
        on = Z[:, dim] > 0
        for kind in "xy":
            table = [[(on & (target == kind)).sum(), (on & (target != kind)).sum()],
                     [(~on & (target == kind)).sum(), (~on & (target != kind)).sum()]]  # fmt: skip
            tails = [stats.fisher_exact(table, side).pvalue for side in ("less", "greater")]
            raw[dim, kind] = min(1.0, 2 * min(tails))
    corrected = stats.false_discovery_control(list(raw.values()))
    for key, p_value in zip(raw, corrected, strict=True):
        assert got[key].p_value == pytest.approx(p_value, rel=1e-6)


def test_targets_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="one class only"):
        findings(Z, ["a"] * 80)
    with pytest.raises(ValueError, match="one target per row, 80"):
        findings(Z, [1.0, 2.0])
    with pytest.raises(ValueError, match="row 3 is nan"):
        findings(Z, np.where(np.arange(80) == 3, np.nan, 1.0))
    with pytest.raises(ValueError, match="give more rows"):
        findings(Z[:6], np.arange(6.0))
    with pytest.raises(ValueError, match="one name per dimension, 6; got 1"):
        findings(Z, np.arange(80.0), ["a"])

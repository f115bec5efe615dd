"""Purity, intruder, distinct and stability: against loops, on known answers, at their edges."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch.nn import functional as F

from ncl_multi import Features, metrics
from ncl_multi.metrics.codes import strongest_rows, unit_rows
from ncl_multi.metrics.readability import NotMeasurableError, _strongest, _with_intruders

FORMS = [lambda z: z, lambda z: csr_array(z.numpy())]


def random_codes(n=40, d=9, seed=0, *, signed=False):
    """Dimension 3 is dead, dimension 6 fires for four rows, row 7 fires nothing."""
    z = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if not signed:
        z = (z - 0.5).relu()
    z[:, 3] = 0
    z[4:, 6] = z[4:, 6].clamp(max=0)
    z[:4, 6] = 1
    z[7] = 0
    return z


def labels(n=40, classes=4, seed=1):
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def strongest_by_hand(z):
    """The rows of each readable dimension, one entry at a time."""
    z = F.normalize(z, dim=1).tolist()
    rows = {}
    for j in range(len(z[0])):
        fires = sorted((-z[i][j], i) for i in range(len(z)) if z[i][j] > 1e-5)
        if len(fires) >= 5:
            rows[j] = [i for _, i in fires[:10]]
    return rows


def largest_share(y, rows):
    seen = [int(y[i]) for i in rows]
    return max(map(seen.count, seen)) / len(seen)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_purity_and_distinct_are_their_definitions(form, signed):
    z, y = random_codes(signed=signed), labels()
    rows = strongest_by_hand(z)
    assert len(rows) == 7
    shares = metrics.dimension_purity(form(z), y)
    assert np.flatnonzero(~np.isnan(shares)).tolist() == list(rows)
    by_hand = [largest_share(y, own) for own in rows.values()]
    assert shares[list(rows)] == pytest.approx(by_hand, rel=1e-9)
    assert metrics.purity(form(z), y) == pytest.approx(sum(by_hand) / 7, rel=1e-9)

    def overlap(a, b):
        return len(set(rows[a]) & set(rows[b])) / len(set(rows[a]) | set(rows[b]))

    most = [max(overlap(a, b) for b in rows if b != a) for a in rows]
    assert metrics.distinct(form(z)) == pytest.approx(1 - sum(most) / 7, rel=1e-9)
    table = metrics.overlaps(form(z)).toarray()
    for a, b in permutations(rows, 2):
        assert table[a, b] == pytest.approx(overlap(a, b), rel=1e-9)
    assert not table[[3, 6]].any()


@pytest.mark.parametrize("form", FORMS)
def test_of_equal_rows_the_first_are_the_strongest(form):
    z = torch.ones(30, 2, dtype=torch.float64)
    z[5] = torch.tensor([1.0, 0.0])
    assert strongest_rows(unit_rows(form(z)), 4).tolist() == [[5, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("sizes", [[3, 9], [1, 2, 10], [4, 4, 4]])
def test_chance_is_the_mean_over_all_draws_of_ten_rows(sizes):
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    draws = [largest_share(y, rows) for rows in combinations(range(len(y)), 10)]
    assert metrics.chance_purity(y) == pytest.approx(sum(draws) / len(draws), rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_clusters_are_as_pure_as_the_rows_nearest_to_their_centres(form):
    generator = torch.Generator().manual_seed(0)
    z = torch.eye(3, dtype=torch.float64).repeat_interleave(12, dim=0)
    z = z + 0.1 * torch.rand(36, 3, generator=generator, dtype=torch.float64)
    pure = torch.arange(36) // 12
    assert metrics.cluster_purity(form(z), pure) == 1
    unit, mixed, by_hand = F.normalize(z, dim=1), labels(36), []
    for cluster in range(3):
        centre = unit[pure == cluster].mean(dim=0)
        nearest = sorted(range(36), key=lambda row, c=centre: float((unit[row] - c).norm()))[:10]
        by_hand.append(largest_share(mixed, nearest))
    got = metrics.cluster_purity(form(z), mixed)
    assert got == pytest.approx(sum(by_hand) / 3, rel=1e-9)


@pytest.mark.parametrize("kind", ["labels", "embeddings"])
@pytest.mark.parametrize("form", FORMS)
def test_the_intruder_is_what_the_judge_finds_least_alike(form, kind):
    z = random_codes()
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    judge = labels() if kind == "labels" else vectors
    rows, dims = _strongest(form(z))
    trials = _with_intruders(unit_rows(form(z)), rows[:, :5], dims, 10, 0)
    by_hand = []
    for shown in trials.tolist():
        total = []
        for a in shown:
            if kind == "labels":
                total.append(sum(int(judge[a] == judge[b]) for b in shown))
            else:
                total.append(
                    sum(float(F.cosine_similarity(vectors[a], vectors[b], 0)) for b in shown)
                )
        least = [n for n in range(6) if total[n] < min(total) + 1e-9]
        by_hand.append((5 in least) / len(least))
    expected = sum(by_hand) / len(by_hand)
    assert 0 < expected < 1
    assert metrics.intruder(form(z), judge) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_an_intruder_is_strong_elsewhere_and_silent_here(form):
    z = random_codes()
    strongest = strongest_by_hand(z)
    rows, dims = _strongest(form(z))
    trials = _with_intruders(unit_rows(form(z)), rows[:, :5], dims, 10, 0)
    assert len(trials) == 70
    firsts = {tuple(rows[:5]): dim for dim, rows in strongest.items()}
    for *shown, intruder in trials.tolist():
        dim = firsts[tuple(shown)]
        assert z[intruder, dim] == 0
        assert any(intruder in rows[:5] for other, rows in strongest.items() if other != dim)


def test_the_order_of_rows_and_dimensions_does_not_matter():
    z, y = random_codes(), labels()
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.randperm(40, generator=generator), torch.randperm(9, generator=generator)
    other = (z * torch.linspace(0.1, 9, 40)[:, None])[rows][:, columns]
    assert metrics.purity(other, y[rows]) == pytest.approx(metrics.purity(z, y), rel=1e-9)
    assert metrics.distinct(other) == pytest.approx(metrics.distinct(z), rel=1e-9)
    assert metrics.chance_purity(y[rows]) == pytest.approx(metrics.chance_purity(y), rel=1e-9)


def test_one_dimension_for_each_class_needs_no_computing():
    z, y = torch.eye(4).repeat(15, 1), torch.arange(4).repeat(15)
    got = metrics.readable(z, y, embeddings=z)
    assert got.left_out == {}
    chance = got.figures.pop("chance")
    assert 0.25 < chance < 0.6
    assert got.figures == pytest.approx(dict.fromkeys(got.figures, 1))


def test_codes_that_ignore_the_labels_are_as_good_as_chance():
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(600, 400, generator=generator) - 1).relu()
    y = torch.randint(6, (600,), generator=generator)
    figures = metrics.readable(z, y).figures
    assert figures["purity_at_10"] == pytest.approx(figures["chance"], abs=0.01)
    assert figures["intruder_labels"] == pytest.approx(1 / 6, abs=0.02)


def stability_by_hand(za, zb, *, signed):
    """Every way to match the readable dimensions; the best sum of correlations."""
    columns = []
    for z in (za, zb):
        z = F.normalize(z, dim=1)
        columns.append([z[:, j].tolist() for j in range(z.shape[1]) if (z[:, j] > 1e-5).sum() >= 5])

    def correlation(a, b):
        mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
        covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
        spread = [math.sqrt(sum((x - m) ** 2 for x in c)) for c, m in ((a, mean_a), (b, mean_b))]
        return covariance / spread[0] / spread[1]

    few, more = sorted(columns, key=len)
    table = [[correlation(a, b) for b in more] for a in few]
    if signed:
        table = [[abs(x) for x in row] for row in table]
    matches = permutations(range(len(more)), len(few))
    return max(sum(table[i][j] for i, j in enumerate(m)) / len(few) for m in matches)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_stability_is_the_best_match_of_all(form, signed):
    za, zb = random_codes(d=7, signed=signed), random_codes(d=9, seed=5, signed=signed)
    expected = stability_by_hand(za, zb, signed=signed)
    assert metrics.stability(form(za), form(zb)) == pytest.approx(expected, rel=1e-9)
    assert metrics.stability(form(zb), form(za)) == pytest.approx(expected, rel=1e-9)


def test_a_run_is_stable_with_itself_in_another_order():
    z = random_codes()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert metrics.stability(z, z[:, order]) == pytest.approx(1, rel=1e-9)
    first, second, correlations = metrics.matched_dims(z, z[:, order])
    assert order[second].tolist() == first.tolist()
    assert correlations == pytest.approx(np.ones(7), rel=1e-9)
    flipped = random_codes(signed=True)
    assert metrics.stability(flipped, -flipped) == pytest.approx(1, rel=1e-9)


def test_a_constant_dimension_correlates_with_nothing():
    z = torch.tensor([[0.6, 0.8], [0.6, -0.8]] * 10)
    assert metrics.stability(z, z) == pytest.approx(0.5)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_apply_says_why(form):
    z = form(torch.eye(2, dtype=torch.float64).repeat(4, 1))
    y = torch.arange(2).repeat(4)
    no_dims = "no dimension fires for at least 5 of the 8 rows"
    no_judge = "no embeddings of the rows were given as a judge"
    got = metrics.readable(z, y)
    assert got.figures == {"readable_dims": 0}
    assert got.left_out == {
        "purity_at_10": "needs at least 10 rows; got 8",
        "chance": "needs at least 10 rows; got 8",
        "cluster_purity": "needs at least 10 rows; got 8",
        "intruder_labels": no_dims,
        "intruder_embeddings": no_judge,
        "distinct": no_dims,
    }
    z = form(torch.eye(2, dtype=torch.float64).repeat(8, 1))
    got = metrics.readable(z)
    assert got.figures == {"readable_dims": 1, "distinct": 1}
    assert got.left_out["purity_at_10"] == "the rows have no labels"
    got = metrics.readable(z, torch.zeros(16, dtype=torch.long), embeddings=torch.rand(16, 3))
    assert "all rows have the same label" in got.left_out["purity_at_10"]
    assert got.left_out.keys() == {"purity_at_10", "chance", "cluster_purity", "intruder_labels"}
    assert "intruder_embeddings" in got.figures


@pytest.mark.parametrize("form", FORMS)
def test_dead_dimensions_lower_their_share_and_no_other_measure(form):
    z, y = random_codes(), torch.arange(40) % 3
    padded = torch.cat([z, z.new_zeros(len(z), z.shape[1])], dim=1)
    alone, got = (metrics.readable(form(codes), y) for codes in (z, padded))
    assert got.left_out == alone.left_out
    share = alone.figures.pop("readable_dims")
    assert got.figures.pop("readable_dims") == share / 2
    assert got.figures == pytest.approx(alone.figures, rel=1e-9)


def test_dimensions_without_an_intruder_are_left_out():
    with pytest.raises(NotMeasurableError, match="only one is readable"):
        metrics.intruder(torch.ones(10, 1), torch.arange(10))
    with pytest.raises(NotMeasurableError, match="every strong row"):
        metrics.intruder(torch.rand(10, 3) + 1, torch.arange(10))


def test_wrong_input_is_an_error_and_not_a_reason(unchecked):
    z = random_codes()
    with pytest.raises(ValueError, match="one embedding per row: 40 rows, got 3"):
        metrics.intruder(z, torch.rand(3, 2))
    with pytest.raises(ValueError, match="the same rows in both; got 40 and 10"):
        metrics.stability(z, random_codes(n=10))
    with pytest.raises(NotMeasurableError, match="no dimension fires"):
        metrics.stability(z, torch.zeros(40, 2))


def test_features_are_measured_by_all_they_bring():
    z, y = torch.eye(4).repeat(15, 1), torch.arange(4).repeat(15)
    y[:8] = -1
    items = [f"a {word}" for word in ("dog", "ship", "frog", "car")] * 15
    got = metrics.readable_features(Features(z, y, items, {"classes": list("abcd")}), embeddings=z)
    assert got.left_out == {}
    assert got.figures["class_consistency"] == got.figures["purity_at_10"] == 1
    assert got.figures["intruder_embeddings"] == 1
    assert (got.figures["named"], got.figures["names_once"], got.figures["name_fit"]) == (1, 1, 1)
    names = ["dog", "dog", "cat", "car"]
    fit = metrics.readable_features(Features(z, items=items), names=names).figures
    assert (fit["names_once"], fit["name_fit"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (Features(torch.eye(2).repeat(10, 1)), "items without words and classes"),
        (Features(torch.eye(2)[:1], items=["dog"]), "one item cannot be halved"),
        (Features(torch.zeros(20, 2), items=["dog"] * 20), "no dimension"),
        (Features(torch.eye(2).repeat(2, 1), items=["dog"] * 4), "no dimension fires for at least"),
    ],
    ids=["nothing to read", "one item", "dead", "few items"],
)
def test_features_without_a_measure_of_names_say_why(features, reason):
    got = metrics.readable_features(features)
    assert reason in got.left_out["name_fit"]
    assert got.left_out["purity_at_10"] == "the rows have no labels"
    assert "name_fit" not in got.figures


@pytest.mark.parametrize("y", [torch.rand(20), torch.zeros(20, 3, dtype=torch.long)])
def test_labels_that_are_no_classes_judge_nothing(y):
    got = metrics.readable_features(Features(torch.eye(2).repeat(10, 1), y))
    assert got.left_out["purity_at_10"] == "the rows have no labels"
    assert "class_consistency" not in got.figures
    one = metrics.readable_features(Features(torch.eye(2).repeat(10, 1), torch.zeros(20).long()))
    assert "all rows have the same label" in one.left_out["purity_at_10"]
    unlabelled = Features(torch.eye(2).repeat(10, 1), torch.full((20,), -1))
    assert metrics.readable_features(unlabelled).figures["distinct"] == 1

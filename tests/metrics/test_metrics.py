"""Every metric against loops or scikit-learn, on answers that need no computing, at its edges."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, mutual_info_score, ndcg_score
from torch.nn import functional as F

from ncl_multi import metrics


@pytest.fixture
def codes():
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(60, 12, generator=generator, dtype=torch.float64) - 0.8).relu()
    z[:, 5] = 0
    z[7] = 0
    return z, torch.randint(4, (60,), generator=generator)


def unit(z):
    return F.normalize(z, dim=1)


# Readability


def readability_by_hand(z, y):
    """Definitions of the design, one entry at a time."""
    z = unit(z).tolist()
    n, d = len(z), len(z[0])
    active = [[abs(z[i][j]) > 1e-5 for j in range(d)] for i in range(n)]
    lives = [j for j in range(d) if any(active[i][j] for i in range(n))]
    shares, entropies = [], []
    for j in lives:
        classes = [int(y[i]) for i in range(n) if active[i][j]]
        share = [classes.count(c) / len(classes) for c in set(classes)]
        shares.append(max(share))
        entropies.append(-sum(p * math.log(p) for p in share))
    cosines = []
    for a in lives:
        for b in lives:
            if a != b:
                dot = sum(z[i][a] * z[i][b] for i in range(n))
                norms = [math.sqrt(sum(z[i][c] ** 2 for i in range(n))) for c in (a, b)]
                cosines.append(abs(dot) / norms[0] / norms[1])
    entries = sum(map(sum, active))
    singular = np.linalg.svd(np.array(z), compute_uv=False)
    p = singular[singular > 1e-12] / singular.sum()
    return {
        "sparsity": 1 - entries / n / d,
        "active_dims": entries / n,
        "alive": len(lives) / d,
        "correlation": sum(cosines) / len(cosines),
        "class_consistency": sum(shares) / len(shares),
        "class_entropy": sum(entropies) / len(entropies),
        "effective_rank": math.exp(-(p * np.log(p)).sum()),
    }


@pytest.mark.parametrize("form", [lambda z: z, lambda z: csr_array(z.numpy())])
def test_readability_is_its_definition(codes, form):
    z, y = codes
    expected = readability_by_hand(z, y)
    assert metrics.interpretability(form(z), y) == pytest.approx(expected, rel=1e-6)
    for name in ("sparsity", "active_dims", "alive", "correlation", "effective_rank"):
        assert getattr(metrics, name)(form(z)) == pytest.approx(expected[name], rel=1e-6)
    for name in ("class_consistency", "class_entropy"):
        assert getattr(metrics, name)(form(z), y) == pytest.approx(expected[name], rel=1e-9)
    short = metrics.activity_figures(form(z), y)
    assert short == pytest.approx({name: expected[name] for name in short}, rel=1e-6)


def test_readability_ignores_the_length_and_order_of_rows_and_dimensions(codes):
    z, y = codes
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randperm(60, generator=generator), torch.randperm(12, generator=generator)
    other = (z * torch.linspace(0.1, 9, 60)[:, None])[rows][:, columns]
    assert metrics.interpretability(other, y[rows]) == pytest.approx(
        metrics.interpretability(z, y), rel=1e-9
    )


def test_one_hot_codes_need_no_computing():
    z, y = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    got = metrics.interpretability(z, y)
    assert got == pytest.approx(
        {
            "sparsity": 0.75,
            "active_dims": 1,
            "alive": 1,
            "correlation": 0,
            "class_consistency": 1,
            "class_entropy": 0,
            "effective_rank": 4,
        }
    )


def test_a_dense_code_has_the_share_of_the_largest_class():
    y = torch.tensor([0, 0, 0, 1, 2])
    z = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert metrics.class_consistency(z, y) == pytest.approx(0.6)


def test_one_class_is_always_consistent(codes):
    z, _ = codes
    y = torch.full((60,), 7)
    assert metrics.class_consistency(z, y) == 1
    assert metrics.class_entropy(z, y) == 0


@pytest.mark.parametrize("form", [lambda z: z, lambda z: csr_array(z.numpy())])
def test_all_zeros_give_zeros_and_not_nan(form):
    got = metrics.interpretability(form(torch.zeros(5, 3)), torch.arange(5))
    assert got.pop("sparsity") == 1
    assert set(got.values()) == {0.0}


def test_an_entry_at_the_tolerance_is_not_active():
    z = torch.tensor([[1.0, 1e-5, 2e-5]], dtype=torch.float64)
    assert metrics.active_dims(z) == 2


def test_a_sparse_product_and_a_dense_one_agree():
    z = torch.randn(50, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few, many = (z - 3).relu(), (z + 1).relu()
    for part in (few, many):
        sparse = csr_array(part.numpy())
        assert metrics.correlation(sparse) == pytest.approx(metrics.correlation(part), rel=1e-9)


def test_low_rank_is_found_among_many_dimensions():
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(300, 2, generator=generator)
    wide = thin @ torch.linalg.qr(torch.randn(200, 2, generator=generator))[0].T
    assert metrics.effective_rank(wide) == pytest.approx(metrics.effective_rank(thin), rel=1e-2)


# Probes


def test_knn_is_a_weighted_vote_by_hand(codes):
    y = codes[1]
    z = torch.randn(60, 12, generator=torch.Generator().manual_seed(2))
    train, test = unit(z[8:40]), unit(z[40:])
    hits = 0
    for row, label in zip(test, y[40:], strict=True):
        scores = (train @ row).tolist()
        near = sorted(range(len(scores)), key=lambda i: -scores[i])[:5]
        votes = dict.fromkeys(range(4), 0.0)
        for i in near:
            votes[int(y[8:40][i])] += math.exp(scores[i] / 0.07)
        hits += max(votes, key=votes.get) == int(label)
    got = metrics.knn_accuracy(z[8:40], y[8:40], z[40:], y[40:], k=5)
    assert got == pytest.approx(hits / 20)


def test_knn_on_zeros_scores_chance_whatever_the_order():
    y = torch.tensor([0, 1, 0, 1])
    z = torch.zeros(4, 3)
    assert metrics.knn_accuracy(z, y, z, y, k=2) == pytest.approx(0.5)


def test_knn_does_not_depend_on_the_order_of_tied_rows():
    train = torch.eye(3).repeat(4, 1)
    y = torch.tensor([0, 1, 2, 0, 1, 1, 2, 2, 2, 0, 0, 1])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    test, test_y = torch.eye(3), torch.tensor([0, 1, 2])
    one = metrics.knn_accuracy(train, y, test, test_y, k=2)
    other = metrics.knn_accuracy(train[order], y[order], test, test_y, k=2)
    assert one == pytest.approx(other)


def test_linear_probe_matches_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (900,), generator=generator)
    centres = torch.randn(3, 20, generator=generator)
    z = centres[y] + 2 * torch.randn(900, 20, generator=generator)
    probe = metrics.LinearProbe.fit(z[:600], y[:600])
    x = (unit(z) * probe.scale).numpy()
    theirs = LogisticRegression(C=1 / (2 * probe.penalty * 600), max_iter=1000, tol=1e-6)
    theirs.fit(x[:600], y[:600])
    same = (torch.from_numpy(theirs.predict(x[600:])) == probe.predict(z[600:])).float().mean()
    assert same > 0.98
    assert metrics.linear_probe(z[:600], y[:600], z[600:], y[600:]) > 0.6


def test_linear_probe_knows_labels_that_are_not_counted_from_zero():
    z, y = torch.eye(3).repeat(10, 1), torch.tensor([5, 40, 7]).repeat(10)
    probe = metrics.LinearProbe.fit(csr_array(z.numpy()), y)
    assert probe.predict(z)[:3].tolist() == [5, 40, 7]


def test_linear_probe_of_one_class_and_of_zeros_is_no_error():
    y = torch.zeros(6, dtype=torch.long)
    assert metrics.linear_probe(torch.zeros(6, 2), y, torch.zeros(6, 2), y) == 1


def test_fine_tuning_leaves_the_model_as_it_was():
    x, y = torch.eye(4).repeat(10, 1), torch.arange(4).repeat(10)
    model = torch.nn.Linear(4, 8)
    before = model.weight.clone()
    got = metrics.fine_tuned_predictions(
        model, lambda m, x: m(x), (x, y), (x, y), epochs=20, batch_size=8, lr=0.05
    )
    assert torch.equal(got, y)
    assert torch.equal(model.weight, before)


def test_fine_tuning_in_bf16_multiplies_in_it_and_keeps_weights_in_fp32():
    x, y = torch.eye(4).repeat(10, 1), torch.arange(4).repeat(10)
    seen = []

    def encode(model, inputs):
        h = model(inputs)
        if model.training:
            seen.append((h.dtype, model.weight.dtype))
        return h

    got = metrics.fine_tuned_predictions(
        torch.nn.Linear(4, 8), encode, (x, y), (x, y), epochs=20, batch_size=8, lr=0.05, bf16=True
    )
    assert torch.equal(got, y)
    assert set(seen) == {(torch.bfloat16, torch.float32)}


# Intervals


def test_the_interval_of_a_few_seeds_is_students():
    values = np.array([0.1, 0.25, 0.4])
    mean, low, high = metrics.mean_interval(values)
    half = 4.302652729911275 * values.std(ddof=1) / 3**0.5
    assert (mean, low, high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    with pytest.raises(ValueError, match="at least two seeds; got 1"):
        metrics.mean_interval(values[:1])


def test_equal_seeds_still_leave_the_uncertainty_of_the_items():
    items = np.array([0.0, 1.0] * 200)
    mean, low, high = metrics.mean_interval(np.stack([items] * 3))
    assert mean == 0.5
    assert high - mean == pytest.approx(mean - low)
    assert high - mean == pytest.approx(1.966 * 0.5 / 399**0.5, rel=1e-3)
    assert metrics.mean_interval(np.ones((3, 4))) == (1, 1, 1)


def test_nineteen_of_twenty_intervals_contain_the_truth():
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        seeds, items = draw.normal(size=(3, 1)), draw.normal(size=(1, 50)) * 3
        values = 0.3 + seeds * 0.5 + items + draw.normal(size=(3, 50))
        _, low, high = metrics.mean_interval(values)
        hits += low <= 0.3 <= high
    assert hits / 400 > 0.93


# Retrieval


def rank_by_hand(order, gains, k):
    """Every figure of one ranking without ties."""
    right = [gains[i] > 0 for i in order]
    places = [place for place, good in enumerate(right, 1) if good]
    gain = sum(gains[i] / math.log2(place + 1) for place, i in enumerate(order[:k], 1))
    best = sorted(gains, reverse=True)[:k]
    return {
        f"hit@{k}": float(any(right[:k])),
        f"recall@{k}": sum(right[:k]) / sum(right),
        f"precision@{k}": sum(right[:k]) / k,
        f"ndcg@{k}": gain / sum(g / math.log2(place + 1) for place, g in enumerate(best, 1)),
        "map": sum((i + 1) / place for i, place in enumerate(places)) / len(places),
        "median_rank": places[0],
    }


def expected_over_orders(scores, gains, k):
    """The mean of every figure over all orders of the items that respect the scores."""
    figures = []
    for order in permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in pairwise(order)):
            figures.append(rank_by_hand(order, gains, k))
    return {name: sum(row[name] for row in figures) / len(figures) for name in figures[0]}


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("items", "gains"),
    [
        ([[1, 0], [1, 0], [0, 1], [0, 1], [0, 1], [1, 1]], [0, 2, 1, 0, 3, 0]),
        ([[0, 1], [0, 1], [0, 0], [0, 1], [1, 1], [2, 1]], [1, 0, 1, 1, 0, 0]),
        ([[0, 1]] * 6, [0, 0, 1, 0, 1, 0]),
        ([[1, 5], [1, 4], [1, 3], [1, 2], [1, 1], [1, 0]], [1, 0, 0, 1, 0, 1]),
    ],
)
def test_ties_give_the_expected_value_over_all_orders(items, gains, k, sparse):
    query, items = torch.tensor([[1.0, 0.0]]), torch.tensor(items, dtype=torch.float)
    scores = (unit(query) @ unit(items).T)[0].mul(1e6).round().tolist()
    if sparse:
        query, items = csr_array(query.numpy()), csr_array(items.numpy())
    got = metrics.retrieval(query, items, csr_array([gains]), ks=(k,))
    assert got.pop("queries") == 1
    assert got == pytest.approx(expected_over_orders(scores, gains, k), rel=1e-9)


def test_retrieval_matches_scikit_learn_without_ties():
    generator = torch.Generator().manual_seed(0)
    queries, items = (torch.randn(n, 8, generator=generator) for n in (5, 40))
    gains = torch.randint(0, 3, (5, 40), generator=generator).numpy()
    scores = (unit(queries) @ unit(items).T).numpy()
    relevant = csr_array(gains)
    assert metrics.ndcg_at_k(queries, items, relevant, k=10) == pytest.approx(
        ndcg_score(gains, scores, k=10)
    )
    by_query = [average_precision_score(g > 0, s) for g, s in zip(gains, scores, strict=True)]
    assert metrics.mean_average_precision(queries, items, relevant) == pytest.approx(
        np.mean(by_query)
    )


def test_groups_and_a_matrix_say_the_same(codes):
    z, y = codes
    matrix = csr_array((y[:20, None] == y[20:]).numpy().astype(float))
    by_group = metrics.retrieval(z[:20], z[20:], (y[:20], y[20:]))
    assert by_group == pytest.approx(metrics.retrieval(z[:20], z[20:], matrix))


def test_sparse_and_dense_codes_rank_alike(codes):
    z, y = codes
    sparse = csr_array(z.numpy())
    assert metrics.retrieval(sparse, None, y) == pytest.approx(metrics.retrieval(z, None, y))


def test_a_search_among_themselves_leaves_the_query_out():
    z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    y = torch.tensor([0, 1, 0, 1])
    assert metrics.retrieval(z, None, y)["precision@1"] == 0
    assert metrics.retrieval(z, None, torch.tensor([0, 0, 1, 1]))["hit@1"] == 1


def test_a_query_of_zeros_scores_chance():
    zeros, items = torch.zeros(1, 3), torch.eye(3).repeat(4, 1)
    groups = (torch.tensor([0]), torch.arange(12))
    found = metrics.retrieval(zeros, items, groups, ks=(3,))
    assert found["hit@3"] == pytest.approx(3 / 12)
    assert found["median_rank"] == pytest.approx(6.5)


def test_queries_without_a_right_item_are_left_out():
    figures = metrics.retrieval(torch.eye(2), torch.eye(2), (torch.tensor([0, 9]), torch.arange(2)))
    assert figures["queries"] == 1
    assert figures["hit@1"] == 1
    with pytest.raises(ValueError, match="no query has a right item"):
        metrics.retrieval(torch.eye(2), torch.eye(2), (torch.tensor([8, 9]), torch.arange(2)))


def test_recall_counts_one_hit_or_the_share_found():
    items, groups = torch.eye(4), (torch.tensor([0]), torch.tensor([0, 0, 1, 1]))
    query = torch.tensor([[3.0, 0.0, 2.0, 1.0]])
    found = metrics.retrieval(query, items, groups, ks=(2,))
    assert (found["hit@2"], found["recall@2"]) == (1, 0.5)


def test_spearman_is_scipys_with_ties():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(5, (2, 50), generator=generator).double()
    assert metrics.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert metrics.spearman(a, torch.ones(50)) == 0


# Disentanglement


@pytest.mark.parametrize("convention", ["fixed", "renormalised"])
@pytest.mark.parametrize("two_views", [False, True])
def test_separability_is_the_rise_of_info_nce(codes, convention, two_views):
    z, _ = codes
    za = z[:30]
    zb = za + 0.1 * z[30:] if two_views else za
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))[:24].view(3, 8)

    def loss(a, b):
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(8))

    expected = torch.zeros(12, dtype=torch.float64)
    for rows in order:
        a, b = unit(za[rows]), unit(zb[rows])
        for j in range(12):
            dropped = [side.clone() for side in (a, b)]
            for side in dropped:
                side[:, j] = 0
            if convention == "renormalised":
                dropped = [unit(side) for side in dropped]
            expected[j] += (loss(*dropped) - loss(a, b)) / len(order)
    got = metrics.separability(
        za, zb if two_views else None, convention=convention, temperature=0.5, batch=8, seed=3
    )
    assert torch.allclose(got.double(), expected, atol=1e-6)
    assert got[5] == 0  # the dead dimension


def test_sepin_averages_the_best_and_leaves_out_what_is_too_wide(codes):
    z, _ = codes
    scores = metrics.separability(z, convention="fixed").sort(descending=True).values
    got = metrics.sepin(z, convention="fixed", ks=(1, 3, 100))
    assert got == pytest.approx(
        {"1": scores[0].item(), "3": scores[:3].mean().item(), "all": scores.mean().item()}
    )
    sparse = metrics.sepin(csr_array(z.numpy()), convention="fixed", ks=(1, 3, 100))
    assert sparse == pytest.approx(got, rel=1e-4)


def test_sepin_of_zeros_is_zero():
    assert metrics.sepin(torch.zeros(8, 3), convention="renormalised", ks=(1,)) == {
        "1": 0,
        "all": 0,
    }


def test_mutual_information_is_scikit_learns(codes):
    z, y = codes
    factors = torch.stack([y, torch.arange(60) % 3], dim=1)
    got = metrics.mutual_information(z, factors)
    for j in range(z.shape[1]):
        column = z[:, j].float()
        width = (column.max() - column.min()).clamp(min=1e-30)
        bins = ((column - column.min()) / width * 20).long().clamp(max=19)
        for f in range(2):
            assert got[j, f] == pytest.approx(mutual_info_score(bins, factors[:, f]), abs=1e-9)


@pytest.fixture
def grid():
    """Two factors of four values, each pair ten times."""
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(10, 1)


def test_factors_as_codes_are_disentangled_and_rotated_ones_are_not(grid):
    turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    straight, rotated = grid.float(), grid.float() @ turn
    assert metrics.mig(straight, grid) == pytest.approx(1)
    assert metrics.sap(straight, grid) == pytest.approx(0.75)
    assert metrics.mig(rotated, grid) < 0.5
    good, bad = (metrics.dci(z, grid, trees=10) for z in (straight, rotated))
    assert good["informativeness"] == 1
    assert good["disentanglement"] > 0.95 > bad["disentanglement"]
    assert good["completeness"] > 0.95 > bad["completeness"]


def test_constant_codes_know_nothing_of_factors(grid):
    flat = torch.ones(len(grid), 3)
    assert metrics.mig(flat, grid) == pytest.approx(0)
    assert metrics.sap(flat, grid) == pytest.approx(0)
    assert metrics.dci(flat, grid, trees=5)["disentanglement"] == pytest.approx(0)


# Bad input


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.sparsity(torch.tensor([[math.nan]])), "NaN or infinity"),
        (lambda: metrics.sparsity(torch.zeros(0, 3)), "at least one row"),
        (lambda: metrics.sparsity(torch.zeros(3)), r"must be \(n, d\)"),
        (
            lambda: metrics.class_consistency(torch.eye(3), torch.arange(2)),
            "one label per row: 3 rows",
        ),
        (
            lambda: metrics.linear_probe(
                torch.eye(3), torch.arange(3), torch.eye(2), torch.arange(2)
            ),
            "equally wide; got 3 and 2",
        ),
        (
            lambda: metrics.knn_accuracy(
                torch.eye(3), torch.arange(2), torch.eye(3), torch.arange(3)
            ),
            "train: expected one label per row",
        ),
        (lambda: metrics.retrieval(torch.eye(3), torch.eye(2)), "equally wide"),
        (lambda: metrics.retrieval(torch.eye(3), torch.eye(3)[:2]), "row i must answer query i"),
        (lambda: metrics.retrieval(torch.eye(3), None), "Give groups or a sparse matrix"),
        (lambda: metrics.retrieval(torch.eye(3), None, csr_array((2, 3))), "queries x items"),
        (
            lambda: metrics.retrieval(torch.eye(3), torch.eye(3), torch.arange(3)),
            "give .query_groups, item_groups",
        ),
        (lambda: metrics.spearman(torch.arange(3), torch.arange(2)), "equal length"),
        (lambda: metrics.sepin(torch.eye(3), convention="other"), "renormalised or fixed"),
        (lambda: metrics.sepin(torch.eye(3), convention="fixed", temperature=0.001), "at least"),
        (lambda: metrics.sepin(torch.eye(3), torch.eye(4), convention="fixed"), "same rows"),
        (lambda: metrics.mig(torch.eye(3), torch.arange(3)), r"\(3, factors\)"),
    ],
)
def test_bad_input_is_said_plainly(call, words):
    with pytest.raises(ValueError, match=words):
        call()

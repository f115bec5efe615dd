"""The head: non-negative and sparse as asked, alive on any input, one linear layer at serving."""

import copy
import math
from statistics import NormalDist

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from ncl_multi import NonNegHead, info_nce, top_k
from ncl_multi.head import SIGNED, joined_clusters, k_means, ward
from ncl_multi.norm import SharedNorm

FORMULAS = {
    "relu": lambda h: h.clamp(min=0),
    "rep_relu": lambda h: h.clamp(min=0),
    "softplus": lambda h: torch.log(1 + torch.exp(h)),
    "sigmoid": lambda h: 1 / (1 + torch.exp(-h)),
    "exp": torch.exp,
    "none": lambda h: h,
    "gelu": lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
    "leaky_relu": lambda h: torch.where(h > 0, h, 0.01 * h),
}
NONNEG = [name for name in FORMULAS if name not in SIGNED]
ANY_INPUT = pytest.mark.parametrize(
    ("mean", "scale"), [(0, 1), (5, 1e-6), (-3, 1e-2), (100, 1), (-20, 1e6)]
)


def batch(n=64, d=16, mean=0.0, scale=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(n, d, generator=generator) + mean) * scale).to(dtype)


def head_of(*args, seed=0, **options):
    torch.manual_seed(seed)
    return NonNegHead(*args, **options)


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("hidden_dim", [None, 8])
def test_the_head_is_its_formula(activation, hidden_dim):
    head = head_of(16, 6, hidden_dim=hidden_dim, activation=activation).double()
    x = batch(dtype=torch.float64)
    h = x
    if hidden_dim:
        h = standard(h @ head.hidden.weight.T).clamp(min=0)
    expected = FORMULAS[activation](standard(h @ head.out.weight.T))
    torch.testing.assert_close(head(x), expected, rtol=1e-9, atol=1e-9)


def standard(h):
    return (h - h.mean(dim=0)) / h.std(dim=0, unbiased=False)


def test_density_subtracts_the_quantile_of_a_normal():
    head = head_of(16, 6, density=0.2).double()
    x = batch(dtype=torch.float64)
    threshold = NormalDist().inv_cdf(0.8)
    expected = (standard(x @ head.out.weight.T) - threshold).clamp(min=0)
    torch.testing.assert_close(head(x), expected, rtol=1e-6, atol=1e-6)


def test_rep_relu_passes_gelus_gradient_through_relus_zeros():
    head = head_of(4, 5, activation="rep_relu", batch_norm=False).double().eval()
    x = batch(8, 4, dtype=torch.float64)
    head(x).sum().backward()
    h = (x @ head.out.weight.T + head.out.bias).detach().requires_grad_()
    F.gelu(h).sum().backward()
    torch.testing.assert_close(head.out.bias.grad, h.grad.sum(dim=0))
    assert (head(x) == 0).any()


@pytest.mark.parametrize("activation", NONNEG)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_never_negative_and_relus_zeros_are_exact(activation, dtype):
    head = head_of(16, 32, activation=activation, hidden_dim=8).to(dtype)
    x = batch(dtype=dtype)
    for z in (head(x), head.eval()(x)):
        assert z.dtype == dtype
        assert (z >= 0).all()
        if "relu" in activation:
            assert 0.2 < (z == 0).float().mean() < 0.8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_statistics_in_float32(dtype):
    head = head_of(16, 64, density=0.1)
    with torch.autocast("cpu", dtype=dtype):
        z = head(batch(256))
    assert z.dtype == dtype
    assert (z >= 0).all()
    assert 0.08 < (z > 0).float().mean() < 0.12
    assert head.norm.mean.dtype == torch.float32


@ANY_INPUT
def test_density_holds_on_any_input(mean, scale):
    head = head_of(128, 2048, density=0.1)
    x = batch(512, 128, mean, scale)
    for z in (head(x), head.eval()(x)):
        assert 0.08 < (z > 0).float().mean() < 0.12
        assert (z > 0).any(dim=0).all()


CLASSES = pytest.mark.parametrize("hidden_dim", [None, 64])


@CLASSES
def test_density_holds_after_training_on_classes(hidden_dim):
    """Classes make dimensions heavy-tailed, and a mean far off makes running means lag."""
    head, x = head_of(32, 256, density=0.1, hidden_dim=hidden_dim), classes(mean=30)
    codes = train(head, x, steps=200)
    for z in (codes, head.eval()(x)):
        assert 0.08 < (z > 0).float().mean() < 0.12
        assert (z > 0).any(dim=0).all()


def classes(mean):
    generator = torch.Generator().manual_seed(1)
    centres = 3 * torch.randn(20, 32, generator=generator)
    return centres.repeat(50, 1) + torch.randn(1000, 32, generator=generator) + mean


def train(head, x, steps):
    """A short run as recipes do it; the codes of the last step."""
    optimizer = torch.optim.AdamW(head.parameters(), 1e-3)
    for step in range(steps):
        head.anneal(step / steps)
        rows = x[torch.randperm(len(x))[:128]]
        z = head(torch.cat([rows, rows]) + 0.3 * torch.randn(256, x.shape[1]))
        optimizer.zero_grad()
        info_nce(*z.chunk(2), within_view=True).backward()
        optimizer.step()
    return z.detach()


def test_anneal_comes_down_from_one_half_geometrically():
    head = head_of(16, 512, density=0.02)
    shares = []
    for progress in (0.0, 0.35, 0.7, 1.0):
        head.anneal(progress)
        shares.append(head.share.item())
    assert shares == pytest.approx([0.5, 0.1, 0.02, 0.02])
    assert 0.01 < (head(batch(400)) > 0).float().mean() < 0.03


def test_a_silent_dimension_is_brought_back():
    head = head_of(16, 8, density=0.1)
    head.own_threshold[3] = 5.0
    assert not (head(batch(256)) > 0).any(dim=0)[3]
    for seed in range(60):
        z = head(batch(256, seed=seed))
    assert 0.05 < (z[:, 3] > 0).float().mean() < 0.2


@ANY_INPUT
def test_without_batch_norm_every_dimension_starts_alive(mean, scale):
    head = head_of(64, 512, batch_norm=False)
    x = batch(256, 64, mean, scale)
    for z in (head(x), head.eval()(x)):
        assert (z > 0).any(dim=0).all()
        assert 0.4 < (z > 0).float().mean() < 0.6


def test_only_a_fresh_head_is_set_by_its_first_batch():
    head, other = head_of(4, 3, batch_norm=False), head_of(4, 3, batch_norm=False, seed=1)
    before = head.state_dict()["out.weight"].clone()
    head(batch(1, 4))
    assert torch.equal(head.out.weight, before)
    other.load_state_dict(head.state_dict())
    other(batch(32, 4))
    assert torch.equal(other.out.weight, before)
    head(batch(32, 4))
    after = head.out.weight.clone()
    head(batch(32, 4, mean=9))
    assert not torch.equal(after, before)
    assert torch.equal(head.out.weight, after)


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("hidden_dim", [None, 8])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_fold_serves_the_same_codes(activation, hidden_dim, batch_norm):
    density = 0.2 if batch_norm and "rel" in activation and "leaky" not in activation else None
    head = head_of(
        16, 24, hidden_dim=hidden_dim, activation=activation, batch_norm=batch_norm,
        density=density, k=5,
    )  # fmt: skip
    for seed in range(3):
        head(batch(mean=1, scale=2, seed=seed))
    head.eval()
    x = batch(mean=1, scale=2)
    folded = head.fold()
    assert {type(m).__name__ for m in folded} <= {"Linear", "ReLU", "TopK", *SERVED}
    assert (folded(x) - head(x)).norm() <= 1e-6 * head(x).norm()
    torch.testing.assert_close(
        head.double().fold()(x.double()), head(x.double()), rtol=1e-12, atol=1e-12
    )


SERVED = {"Softplus", "Sigmoid", "_Exp", "Identity", "GELU", "LeakyReLU"}


def test_a_relu_head_folds_into_one_linear_layer_and_relu():
    assert [type(m).__name__ for m in head_of(4, 3, density=0.1).fold()] == ["Linear", "ReLU"]


def test_top_k_keeps_the_largest_and_passes_only_their_gradient():
    z = torch.tensor([[3.0, 1.0, -4.0, 2.0], [0.0, 5.0, 0.0, 0.0]], requires_grad=True)
    cut = top_k(z, 2)
    assert cut.tolist() == [[3.0, 0.0, -4.0, 0.0], [0.0, 5.0, 0.0, 0.0]]
    cut[0].sum().backward()
    assert z.grad[0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert ((head_of(8, 20, k=3)(batch(50, 8)) > 0).sum(dim=1) <= 3).all()


def test_running_moments_are_those_of_all_rows_seen():
    norm = SharedNorm(3)
    parts = [batch(40, 3, mean=2, seed=seed) for seed in range(5)]
    for part in parts:
        norm(part)
    torch.testing.assert_close(norm.mean, torch.cat(parts).mean(dim=0))
    torch.testing.assert_close(norm.variance, torch.stack([p.var(dim=0) for p in parts]).mean(0))
    before = norm.mean.clone()
    norm.eval()(parts[0] + 100)
    assert torch.equal(norm.mean, before)


def test_a_saved_head_comes_back_whole():
    head = head_of(8, 16, density=0.1, hidden_dim=4)
    for seed in range(4):
        head.anneal(seed / 4)
        head(batch(32, 8, seed=seed))
    copy = head_of(8, 16, density=0.1, hidden_dim=4, seed=1)
    copy.load_state_dict(head.state_dict())
    assert torch.equal(copy.eval()(batch(32, 8)), head.eval()(batch(32, 8)))


@pytest.mark.parametrize("training", [True, False])
def test_the_head_stays_on_its_device(training, unchecked):
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(32, 8)
        for options in ({"density": 0.1}, {"batch_norm": False, "k": 2}, {"hidden_dim": 4}):
            head = NonNegHead(8, 16, **options).train(training)
            head.anneal(0.5)
            assert head(x).device.type == "cuda"
            assert head.fold()(x).device.type == "cuda"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "tanh"}, "activation must be one of relu, .*got 'tanh'"),
        ({"k": 9}, r"k must lie in 1\.\.8"),
        ({"k": 0}, r"k must lie in 1\.\.8"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1"),
        ({"density": 0.0}, "density must lie in"),
        ({"density": 0.6}, "density must lie in"),
        ({"density": 0.1, "batch_norm": False}, "density needs batch_norm"),
        ({"density": 0.1, "activation": "none"}, "density needs batch_norm and activation relu"),
    ],
)
def test_bad_options_are_refused_in_words(options, words, unchecked):
    with pytest.raises(ValueError, match=words):
        NonNegHead(4, 8, **options)


def test_bad_input_is_refused_in_words(unchecked):
    head = head_of(4, 8)
    for x in (torch.randn(3, 5), torch.randn(4), torch.randn(2, 3, 4)):
        with pytest.raises(ValueError, match="takes rows of 4 features"):
            head(x)
    with pytest.raises(ValueError, match="at least two rows"):
        head(torch.randn(1, 4))
    assert head.eval()(torch.randn(1, 4)).shape == (1, 8)
    for k in (0, 9):
        with pytest.raises(ValueError, match=r"k must lie in 1\.\.8"):
            top_k(torch.randn(2, 8), k)


def test_a_head_starts_on_the_axes_where_features_are_sparse():
    torch.manual_seed(0)
    # Rows with three entries out of sixteen, turned so that none of it can be seen.
    hidden = torch.zeros(2000, 16).scatter(1, torch.rand(2000, 16).topk(3).indices, 1.0)
    x = (hidden * torch.randn(2000, 16)) @ torch.linalg.qr(torch.randn(16, 16))[0]
    head = NonNegHead(16, 32, batch_norm=False)
    head._fresh = False
    torch.nn.init.zeros_(head.out.bias)
    random = top_k(head(x), 3).norm(dim=1) / head(x).norm(dim=1)
    head.start_on(x)
    z = head(x)
    assert (top_k(z, 3).norm(dim=1) / z.norm(dim=1)).mean() > 0.999 > random.mean() + 0.1
    # Both directions of orthogonal axes: nothing of a row is lost.
    torch.testing.assert_close(
        z.norm(dim=1) / z.norm(dim=1).mean(), x.norm(dim=1) / x.norm(dim=1).mean()
    )


def blobs(kinds, rows, dtype=torch.float64):
    """Rows in tight clusters around far points, in random order, and the kind of each row."""
    points = 10 * torch.randn(kinds, 6, dtype=dtype)
    y = torch.arange(kinds * rows)[torch.randperm(kinds * rows)] % kinds
    return points[y] + 0.01 * torch.randn(len(y), 6, dtype=dtype), y


def test_k_means_finds_clusters_that_are_there_wherever_they_lie():
    torch.manual_seed(0)
    for offset in (0.0, 1e4):
        x, y = blobs(5, 40)
        centres = k_means(x + offset, 5) - offset
        means = torch.stack([x[y == kind].mean(dim=0) for kind in range(5)])
        match = torch.cdist(means, centres).argmin(dim=1)
        assert match.unique().numel() == 5
        torch.testing.assert_close(centres[match], means)


def test_lloyd_steps_never_raise_the_squared_distance_to_the_nearest_centre():
    x = torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    costs = []
    for steps in range(8):
        torch.manual_seed(1)
        costs.append(torch.cdist(x, k_means(x, 12, steps)).amin(dim=1).square().sum().item())
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.9 * costs[0]


def test_k_means_at_rest_has_each_centre_in_the_mean_of_the_rows_nearest_to_it():
    torch.manual_seed(0)
    x = torch.randn(200, 3, dtype=torch.float64)
    centres = k_means(x, 7, steps=1000)
    nearest = [min(range(7), key=lambda c: (row - centres[c]).norm().item()) for row in x]
    for c in range(7):
        members = x[[i for i, at in enumerate(nearest) if at == c]]
        assert torch.allclose(centres[c], members.mean(dim=0), rtol=1e-9)


def test_equal_rows_make_one_cluster_and_more_are_not_invented():
    x = torch.randn(3, 50)[torch.arange(30) % 3] + 5
    assert k_means(x, 8).shape == (3, 50)
    assert torch.allclose(k_means(x, 1), x.mean(dim=0, keepdim=True), atol=1e-5)
    with pytest.raises(ValueError, match="0 rows"):
        k_means(x[:0], 2)


def spread(rows):
    """The squared distances of rows to their mean."""
    return (rows - rows.mean(dim=0)).square().sum().item()


def ward_by_hand(clusters, k):
    """Join the two lists of rows whose union spreads more than both by the least."""
    clusters = list(clusters)
    while len(clusters) > k:
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i)]
        rises = {
            (i, j): spread(torch.cat([clusters[i], clusters[j]]))
            - spread(clusters[i])
            - spread(clusters[j])
            for i, j in pairs
        }
        i, j = min(rises, key=rises.get)
        clusters[j] = torch.cat([clusters[i], clusters[j]])
        del clusters[i]
    return torch.stack([rows.mean(dim=0) for rows in clusters])


@pytest.mark.parametrize("k", [1, 3, 8])
def test_ward_joins_the_clusters_whose_rows_spread_least(k):
    torch.manual_seed(k)
    clusters = [
        torch.randn(count, 3, dtype=torch.float64) + 5 for count in (1, 2, 3, 1, 4, 2, 1, 5)
    ]
    centres = torch.stack([rows.mean(dim=0) for rows in clusters])
    got = ward(centres, torch.tensor([len(rows) for rows in clusters]), k)
    expected = ward_by_hand(clusters, k)
    assert got.shape == expected.shape
    match = torch.cdist(expected, got).argmin(dim=1)
    assert match.unique().numel() == k
    torch.testing.assert_close(got[match], expected)


def test_ward_takes_empty_clusters_for_nothing():
    centres = torch.tensor([[0.0], [9.0], [3.0], [8.0]], dtype=torch.float64)
    got = ward(centres, torch.tensor([1, 0, 2, 1]), 2)
    assert got.sort(dim=0).values[:, 0].tolist() == pytest.approx([2, 8], abs=1e-6)
    assert ward(centres, torch.tensor([1, 0, 2, 1]), 9).equal(centres)


def test_joined_clusters_are_those_that_are_there_and_no_more_than_the_rows_allow():
    torch.manual_seed(0)
    x, y = blobs(5, 40)
    centres = joined_clusters(x, 5)
    means = torch.stack([x[y == kind].mean(dim=0) for kind in range(5)])
    torch.testing.assert_close(centres[torch.cdist(means, centres).argmin(dim=1)], means)
    assert joined_clusters(torch.eye(4)[torch.arange(12) % 4], 8).shape == (4, 4)


def test_a_head_that_starts_on_clusters_fires_one_dimension_most_for_each():
    torch.manual_seed(0)
    x, y = blobs(5, 40, torch.float32)
    x = x - x.mean(dim=0)
    head = NonNegHead(6, 5, k=1)
    head.start_on(x, "clusters")
    strongest = head(x).argmax(dim=1)
    pairs = set(zip(y.tolist(), strongest.tolist(), strict=True))
    assert len(pairs) == 5 == len({dim for _, dim in pairs})


def test_dimensions_beyond_the_clusters_keep_their_random_start():
    head = NonNegHead(4, 8)
    before = head.out.weight.detach().clone()
    head.start_on(torch.eye(4)[torch.arange(12) % 4], "clusters")
    assert torch.equal(head.out.weight[4:], before[4:])
    assert torch.allclose(head.out.weight[:4].norm(dim=1), before.norm(dim=1).mean())


@pytest.mark.parametrize("way", ["axes", "clusters"])
def test_only_a_linear_head_starts_on_features(way):
    with pytest.raises(ValueError, match="hidden layer"):
        NonNegHead(4, 8, hidden_dim=4).start_on(torch.randn(9, 4), way)


def test_an_unknown_start_is_refused(unchecked):
    with pytest.raises(ValueError, match="axes, clusters; got 'corners'"):
        NonNegHead(4, 8).start_on(torch.randn(9, 4), "corners")


@pytest.mark.filterwarnings("default")
def test_a_fresh_head_starts_alive_when_it_is_compiled(unchecked):
    torch.manual_seed(0)
    plain = NonNegHead(8, 16, batch_norm=False)
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="aot_eager")
    x = 3 * torch.randn(32, 8) + 5
    torch.testing.assert_close(compiled(x), plain(x))
    assert 0.3 < (compiled(x) > 0).float().mean() < 0.7

"""Every loss against its formula written with loops, then its symmetries and its edges."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.nn import functional as F

from ncl_multi.losses import (
    InfoNCE,
    NonNegCrossEntropy,
    Spectral,
    imitation,
    imitation_and_contrast,
    info_nce,
    nonneg_cross_entropy,
    spectral,
)

FORMS = pytest.mark.parametrize("within_view", [False, True])


def views(n=7, d=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    za, zb = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    return za.to(dtype).requires_grad_(), zb.to(dtype).requires_grad_()


def info_nce_by_hand(za, zb, temperature, within_view, groups=None):
    """Equation 1 of SimCLR, one anchor at a time."""
    za, zb = F.normalize(za, dim=1), F.normalize(zb, dim=1)
    groups = list(range(len(za))) if groups is None else groups.tolist()
    total = 0.0
    for view, other in ((za, zb), (zb, za)):
        for i, anchor in enumerate(view):
            rivals = [anchor @ z for j, z in enumerate(other) if groups[j] != groups[i]]
            if within_view:
                rivals += [anchor @ z for j, z in enumerate(view) if groups[j] != groups[i]]
            match = torch.exp(anchor @ other[i] / temperature)
            total = total - torch.log(
                match / (match + sum(torch.exp(s / temperature) for s in rivals))
            )
    return total / (2 * len(za))


def spectral_by_hand(za, zb):
    n = len(za)
    matches = sum(za[i] @ zb[i] for i in range(n)) / n
    negatives = sum((za[i] @ zb[j]) ** 2 for i in range(n) for j in range(n) if i != j)
    return -2 * matches + negatives / (n * (n - 1))


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def assert_same(loss, expected, inputs, rel=1e-9):
    assert loss.item() == pytest.approx(expected.item(), rel=rel)
    for got, want in zip(gradients(loss, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=rel, atol=rel * want.abs().max().item())


@FORMS
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
def test_info_nce_is_its_formula(within_view, grouped, tile, temperature):
    za, zb = views()
    groups = torch.tensor([0, 1, 0, 2, 3, 2, 0]) if grouped else None
    learnt = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    options = {"temperature": learnt, "within_view": within_view, "groups": groups}
    loss = info_nce(za, zb, tile=tile, **options)
    assert_same(loss, info_nce_by_hand(za, zb, **options), (za, zb, learnt))


@pytest.mark.parametrize("d", [3, 20])
def test_spectral_is_its_formula(d):
    za, zb = views(d=d)
    assert_same(spectral(za, zb), spectral_by_hand(za, zb), (za, zb))


@pytest.mark.parametrize("nonneg_weight", [False, True])
def test_nonneg_cross_entropy_is_its_formula(nonneg_weight):
    z, weight = views(n=6, d=4)
    y = torch.tensor([0, 1, 5, 2, 2, 0])
    loss = nonneg_cross_entropy(z, weight, y, nonneg_weight=nonneg_weight)
    total = 0.0
    for row, label in zip(z, y.tolist(), strict=True):
        classes = [w.clamp(min=0) if nonneg_weight else w for w in weight]
        scores = [torch.exp(row @ w) for w in classes]
        total = total - torch.log(scores[label] / sum(scores))
    assert_same(loss, total / len(z), (z, weight))


@FORMS
@pytest.mark.parametrize("tile", [None, 2])
def test_gradients_of_info_nce_pass_gradcheck(within_view, tile):
    za, zb = views(n=5, d=3)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    groups = torch.tensor([0, 1, 1, 2, 3])

    def loss(a, b, t):
        return info_nce(a, b, temperature=t, within_view=within_view, groups=groups, tile=tile)

    assert gradcheck(loss, (za, zb, temperature))


def test_gradients_of_spectral_and_cross_entropy_pass_gradcheck():
    za, zb = views(n=5, d=3)
    assert gradcheck(spectral, (za, zb))
    y = torch.tensor([0, 4, 2, 1, 3])
    assert gradcheck(lambda z, w: nonneg_cross_entropy(z, w, y), (za, zb))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 40),
    d=st.integers(1, 8),
    tile=st.integers(1, 45),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    within_view=st.booleans(),
    grouped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_info_nce_does_not_depend_on_tiles(n, d, tile, dtype, within_view, grouped, seed):
    za, zb = views(n, d, dtype, seed)
    groups = torch.arange(n) // 3 if grouped else None
    whole = info_nce(za, zb, within_view=within_view, groups=groups)
    tiled = info_nce(za, zb, within_view=within_view, groups=groups, tile=tile)
    assert tiled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rel = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 2e-2)
    assert tiled.item() == pytest.approx(whole.item(), rel=rel, abs=1e-6)
    for got, want in zip(gradients(tiled, (za, zb)), gradients(whole, (za, zb)), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=rel, atol=rel)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 60),
    d=st.integers(1, 80),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_spectral_agrees_with_all_pairs(n, d, dtype):
    za, zb = views(n, d, dtype)
    products = za.double() @ zb.double().T
    matches = products.diagonal()
    negatives = (products.square().sum() - matches.square().sum()) / (n * (n - 1))
    rel = 1e-9 if dtype == torch.float64 else 1e-4
    expected = (negatives - 2 * matches.mean()).item()
    assert spectral(za, zb).item() == pytest.approx(expected, rel=rel, abs=rel * negatives.item())


@FORMS
def test_the_order_of_rows_views_and_axes_does_not_matter(within_view):
    za, zb = views(n=9)
    rows, axes = torch.randperm(9), torch.randperm(5)
    for loss in (lambda a, b: info_nce(a, b, within_view=within_view, tile=4), spectral):
        value = loss(za, zb).item()
        assert loss(za[rows], zb[rows]).item() == pytest.approx(value, rel=1e-9)
        assert loss(zb, za).item() == pytest.approx(value, rel=1e-9)
        assert loss(za[:, axes], zb[:, axes]).item() == pytest.approx(value, rel=1e-9)


def test_the_signed_losses_do_not_see_a_rotation():
    za, zb = views(n=9)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    for loss in (info_nce, spectral):
        assert loss(za @ turn, zb @ turn).item() == pytest.approx(loss(za, zb).item(), rel=1e-9)


@FORMS
def test_groups_of_one_change_nothing_and_one_group_leaves_no_rivals(within_view):
    za, zb = views(n=6)
    alone = info_nce(za, zb, within_view=within_view, groups=torch.arange(6))
    assert alone.item() == pytest.approx(info_nce(za, zb, within_view=within_view).item(), rel=1e-9)
    together = torch.zeros(6, dtype=torch.long)
    for tile in (None, 4):
        loss = info_nce(za, zb, within_view=within_view, groups=together, tile=tile)
        assert loss.item() == pytest.approx(0, abs=1e-12)
        assert all(g.isfinite().all() for g in gradients(loss, (za, zb)))


@FORMS
@pytest.mark.parametrize("tile", [None, 3])
def test_dead_rows_sit_at_chance_with_finite_gradients(within_view, tile):
    za = torch.zeros(8, 3, requires_grad=True)
    loss = info_nce(za, torch.zeros(8, 3), within_view=within_view, tile=tile)
    assert loss.item() == pytest.approx(math.log(15 if within_view else 8))
    assert gradients(loss, (za,))[0].isfinite().all()


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [20, 300])
def test_autocast_leaves_the_sums_in_float32(within_view, dtype, n):
    za, zb = views(n, 16, torch.float32)
    half_a, half_b = (z.detach().to(dtype).requires_grad_() for z in (za, zb))
    plain = info_nce(half_a.float(), half_b.float(), temperature=0.07, within_view=within_view)
    with torch.autocast("cpu", dtype=dtype):
        # At this temperature exp() of a match is past the largest fp16 number.
        loss = info_nce(half_a, half_b, temperature=0.07, within_view=within_view)
        same = info_nce(half_a, half_a, temperature=0.07, within_view=within_view)
        loss.backward()
        factor = spectral(half_a, half_b)
        entropy = nonneg_cross_entropy(half_a, half_b, torch.arange(n))
    assert {x.dtype for x in (loss, same, factor, entropy)} == {torch.float32}
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert same.isfinite()
    assert half_a.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [1 / 60, 0.01, 0.002])
@pytest.mark.parametrize("within_view", [False, True])
def test_float32_holds_where_matches_are_perfect_and_rivals_opposite(temperature, within_view):
    """Logits of 60 and of -60 in one tile, and colder, where exp() alone would overflow."""
    za, _ = views(64, 8)
    za = torch.cat([za, -za]).requires_grad_()
    zb = za.detach().clone().requires_grad_()
    options = {"temperature": temperature, "within_view": within_view, "tile": 32}
    exact = gradients(info_nce(za, zb, **options), (za, zb))
    a, b = (z.detach().float().requires_grad_() for z in (za, zb))
    single = gradients(info_nce(a, b, **options), (a, b))
    assert info_nce(a, b, **options).item() == pytest.approx(
        info_nce(za, zb, **options).item(), rel=1e-4, abs=1e-6 / temperature
    )
    for got, wanted in zip(single, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


def test_modules_are_thin_coats():
    za, zb = views(n=6)
    coat = InfoNCE(0.1, learnable=True, within_view=True)
    expected = info_nce(za, zb, temperature=coat.temperature.detach(), within_view=True)
    assert coat(za, zb).item() == pytest.approx(expected.item(), rel=1e-9)
    coat(za, zb).backward()
    assert coat.log_temperature.grad.abs() > 0
    assert Spectral()(za, zb) == spectral(za, zb)
    y = torch.arange(6)
    for nonneg in (False, True):
        coat = NonNegCrossEntropy(5, 6, nonneg_weight=nonneg).double()
        expected = nonneg_cross_entropy(za, coat.weight, y, nonneg_weight=nonneg)
        assert coat(za, y) == expected
    assert (coat.weight >= 0).all()


def test_a_learnt_temperature_stays_above_its_floor():
    loss = InfoNCE(0.02, learnable=True, min_temperature=0.02)
    with torch.no_grad():
        loss.log_temperature.sub_(5)
    assert loss.temperature.item() == pytest.approx(0.02)


COMPILED = """
import shutil
import torch
from ncl_multi.losses import info_nce, nonneg_cross_entropy, spectral
for n in (6, 300):
    za, zb = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, t = torch.arange(n) // 2, torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    losses = {
        "clip": lambda a, b: info_nce(a, b, temperature=t),
        "simclr": lambda a, b: info_nce(a, b, temperature=t, within_view=True, groups=y),
        "spectral": spectral,
        "cross entropy": lambda a, b: nonneg_cross_entropy(a, b, y),
    }
    for name in losses if n > 6 else ["simclr"]:
        loss = losses[name]
        # Inductor takes ten seconds a loss: all five pass it, one is kept here.
        backend = "inductor" if n == 6 and shutil.which("g++") else "aot_eager"
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        want = torch.autograd.grad(loss(za, zb), (za, zb))
        got = torch.autograd.grad(compiled(za, zb), (za, zb))
        for w, g in zip(want, got):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)
        print(name, n)
"""


def test_losses_compile_whole():
    quiet = {**os.environ, "JAXTYPING_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=quiet, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 5


def test_losses_stay_on_their_device(unchecked):
    with FakeTensorMode(), torch.device("cuda"):
        za, zb = torch.empty(300, 8), torch.empty(300, 8)
        y = torch.empty(300, dtype=torch.long)
        measured = [
            info_nce(za[:9], zb[:9], groups=y[:9]),
            info_nce(za, zb, within_view=True, temperature=torch.empty(()), tile=128),
            InfoNCE(learnable=True)(za.half(), zb.half()),
            spectral(za, zb),
            NonNegCrossEntropy(8, 4, nonneg_weight=True)(za, y),
        ]
        assert {x.device.type for x in measured} == {"cuda"}


BAD_VIEWS = {
    "rows": ((4, 3), (5, 3), "same rows"),
    "dimensions": ((4, 3), (4, 2), "same rows"),
    "a vector": ((4,), (4,), "same rows"),
    "one row": ((1, 3), (1, 3), "at least two rows"),
    "no row": ((0, 3), (0, 3), "at least two rows"),
    "no dimension": ((4, 0), (4, 0), "one dimension"),
}


@pytest.mark.parametrize(("a", "b", "words"), BAD_VIEWS.values(), ids=BAD_VIEWS.keys())
@pytest.mark.parametrize("loss", [info_nce, spectral])
def test_bad_shapes_are_refused_in_words(loss, a, b, words, unchecked):
    with pytest.raises(ValueError, match=words):
        loss(torch.randn(a), torch.randn(b))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [4, 300])
def test_numbers_that_are_none_are_refused(bad, n):
    za, zb = torch.randn(n, 3), torch.randn(n, 3)
    za[1, 2] = bad
    weight, y = torch.randn(4, 3), torch.zeros(n, dtype=torch.long)
    losses = (
        lambda: info_nce(za, zb),
        lambda: info_nce(zb, za, within_view=True),
        lambda: spectral(za, zb),
        lambda: nonneg_cross_entropy(za, weight, y),
    )
    for loss in losses:
        with pytest.raises(ValueError, match="NaN or infinity"):
            loss()


@pytest.mark.parametrize("temperature", [0.0, -0.1, float("nan"), torch.tensor(-0.1)])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        info_nce(*views(), temperature=temperature)


def test_other_bad_input_is_refused_in_words(unchecked):
    za, zb = views()
    with pytest.raises(ValueError, match="groups must have one entry per row"):
        info_nce(za, zb, groups=torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match="groups must have one entry per row"):
        info_nce(za, zb, groups=torch.zeros(7, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="tile must be at least 1"):
        info_nce(za, zb, tile=0)
    with pytest.raises(ValueError, match="at least min_temperature"):
        InfoNCE(-1.0)
    with pytest.raises(ValueError, match="at least min_temperature"):
        InfoNCE(0.001, learnable=True)
    y = torch.zeros(7, dtype=torch.long)
    for label in (-1, 7):
        with pytest.raises(ValueError, match=r"labels must lie in 0\.\.6"):
            nonneg_cross_entropy(za, zb, y + label)
    with pytest.raises(ValueError, match="whole numbers"):
        nonneg_cross_entropy(za, zb, y.float())
    for z, weight, labels in ((za, zb[:, :2], y), (za, zb, y[:3]), (za[0], zb, y), (za, zb[0], y)):
        with pytest.raises(ValueError, match="z must be"):
            nonneg_cross_entropy(z, weight, labels)
    with pytest.raises(ValueError, match="at least one row"):
        nonneg_cross_entropy(za[:0], zb, y[:0])


# Imitation


def test_imitation_is_its_formula_for_sides_of_any_length():
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (6, 3), (4, 5), (6, 5))
    za, zb, ha, hb = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    cosine = lambda a, b: float(a @ b / (a.norm() * b.norm()))  # noqa: E731
    total = 0.0
    for (mine, others), (right, rights) in (((za, zb), (ha, hb)), ((zb, za), (hb, ha))):
        for row, wanted in zip(mine, right, strict=True):
            given = [math.exp(cosine(row, other) / 0.3) for other in others]
            truth = [math.exp(cosine(wanted, other) / 0.3) for other in rights]
            p = [t / sum(truth) for t in truth]
            q = [g / sum(given) for g in given]
            apart = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            total += apart / (2 * len(mine))
    assert imitation((za, zb), (ha, hb), 0.3).item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("most", [7, 5])
def test_imitation_and_contrast_are_both_losses(grouped, most):
    student, teacher = views(), views(d=3, seed=4)
    groups = torch.tensor([0, 1, 0, 2, 3, 2, 4]) if grouped else None
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    together = imitation_and_contrast(student, teacher, temperature, groups=groups, most=most)
    apart = (
        imitation(student, teacher, temperature, most=most),
        info_nce(*student, temperature=temperature, groups=groups),
    )
    leaves = (*student, temperature)
    for one, other in zip(together, apart, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-12)
        for got, wanted in zip(
            torch.autograd.grad(one, leaves, retain_graph=True),
            torch.autograd.grad(other, leaves, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="groups must have one entry per row"):
        imitation_and_contrast(student, teacher, temperature, groups=torch.arange(3))


def test_imitation_moves_only_the_student_and_ends_where_both_are_alike():
    student, teacher = (
        tuple(torch.rand(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        for _ in range(2)
    )
    far = imitation(student, teacher, torch.tensor(0.1))
    far.backward()
    assert far > 0
    assert all(z.grad is not None and z.grad.abs().sum() > 0 for z in student)
    assert all(z.grad is None for z in teacher)
    assert imitation(teacher, teacher, torch.tensor(0.1)).abs() < 1e-12
    first = [tuple(z[:5] for z in views) for views in (student, teacher)]
    most = imitation(student, teacher, torch.tensor(0.1), most=5)
    assert torch.allclose(most, imitation(*first, torch.tensor(0.1)))

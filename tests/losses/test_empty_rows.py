"""Rows with no or nearly no active entry have bounded gradients and leave the others alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ncl_multi import NonNegHead
from ncl_multi.losses import (
    correlation_loss,
    imitation,
    imitation_and_contrast,
    info_nce,
    nonneg_cross_entropy,
    normalize_rows,
    reconstruction_loss,
    spectral,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["relu", "rep_relu", "softplus", "sigmoid", "exp", "none", "gelu", "leaky_relu"]
COSINE = {
    "clip": lambda a, b: info_nce(a, b),
    "clip in tiles": lambda a, b: info_nce(a, b, tile=3),
    "simclr": lambda a, b: info_nce(a, b, within_view=True),
    "imitation": lambda a, b: imitation((a, b), (rows(len(a), 3, 7), rows(len(b), 3, 8)), 0.2),
    "imitation and contrast": lambda a, b: sum(
        imitation_and_contrast((a, b), (rows(len(a), 3, 7), rows(len(b), 3, 8)), 0.2)
    ),
    "correlation": lambda a, b: correlation_loss(a, b, rows(len(a), 1, 7)[:, 0]),
    "unit rows": lambda a, b: spectral(normalize_rows(a), normalize_rows(b)),
}
LOSSES = COSINE | {
    "spectral": spectral,
    # Only what was rebuilt has a gradient, so each view is rebuilt from the other.
    "reconstruction": lambda a, b: reconstruction_loss(a, b) + reconstruction_loss(b, a),
    "cross entropy": lambda a, b: nonneg_cross_entropy(a, b, torch.arange(len(a))),
}


def rows(n, d, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    # No row of these is short: each has length 1 or more.
    return (torch.rand(n, d, generator=generator, dtype=torch.float64) + 1).to(dtype)


def gradients(loss, za, zb):
    za, zb = (z.detach().clone().requires_grad_() for z in (za, zb))
    value = loss(za, zb)
    value.backward()
    return value.detach(), za.grad.double(), zb.grad.double()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 12),
    d=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-45, 0),
    short=st.integers(0, 12),
    seed=st.integers(0, 999),
)
def test_gradients_are_bounded_however_short_rows_are(name, n, d, dtype, exponent, short, seed):
    za, zb = rows(n, d, seed, dtype), rows(n, d, seed + 1, dtype)
    za[:short] *= 10.0**exponent
    value, grad_a, grad_b = gradients(LOSSES[name], za, zb)
    assert value.isfinite()
    # 2 / temperature is the most that a unit row feels. Short rows count as 1/100 of the median
    # length, or as 1e-6 (1/64 in fp16) where all are short.
    bound = 100 if short < n / 2 else 1e6
    # Cosines without spread, which one dimension has, count as 1/100 apart.
    bound *= 100 if name == "correlation" else 1
    for grad in (grad_a, grad_b):
        assert grad.isfinite().all()
        assert grad.norm(dim=1).max() <= 10 * bound


@pytest.mark.parametrize("name", COSINE)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rows_that_are_not_short_have_the_gradient_of_the_formula(name, scale):
    za, zb = rows(9, 5, 0) * scale, rows(9, 5, 1) * scale
    za[3], za[4], za[5] = 0, za[4] * 1e-9, za[5] * 0.03
    _, grad, other = gradients(COSINE[name], za, zb)
    _, plain, plain_other = gradients(
        lambda a, b: COSINE[name](F.normalize(a), F.normalize(b)), za, zb
    )
    usual = [0, 1, 2, 5, 6, 7, 8]
    torch.testing.assert_close(grad[usual], plain[usual], rtol=1e-9, atol=1e-12 / scale)
    torch.testing.assert_close(other, plain_other, rtol=1e-9, atol=1e-12 / scale)


@pytest.mark.parametrize("name", ["clip", "clip in tiles", "simclr"])
def test_a_nearly_empty_row_keeps_its_value_and_its_direction(name):
    za, zb = rows(9, 5, 0), rows(9, 5, 1)
    value, grad, _ = gradients(COSINE[name], za, zb)
    za[4] *= 1e-7
    short_value, short_grad, _ = gradients(COSINE[name], za, zb)
    assert short_value.item() == pytest.approx(value.item(), rel=1e-9)
    assert F.cosine_similarity(short_grad[4], grad[4], dim=0).item() == pytest.approx(1)


def test_an_unusually_long_row_does_not_make_the_others_short():
    za, zb = rows(9, 5, 0), rows(9, 5, 1)
    _, grad, _ = gradients(COSINE["clip"], za, zb)
    za[2] *= 1e6
    _, with_long, _ = gradients(COSINE["clip"], za, zb)
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    torch.testing.assert_close(with_long[others], grad[others], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [-1.0, -3.0, -30.0])
def test_a_head_with_empty_rows_can_be_trained(activation, dtype, bias):
    torch.manual_seed(0)
    head = NonNegHead(8, 16, activation=activation, batch_norm=False).to(dtype).eval()
    with torch.no_grad():
        head.out.bias.fill_(bias)
    x = torch.randn(32, 8).to(dtype)
    # Signed rows are long at a bias of -30, and `spectral` grows with their third power.
    for loss in (*COSINE.values(), *([spectral] if bias > -30 else [])):
        head.zero_grad()
        value = loss(head(x), head(x + 0.1))
        value.backward()
        assert value.isfinite()
        norm = torch.stack([p.grad.double().norm() for p in head.parameters()]).norm()
        assert norm < 1e4

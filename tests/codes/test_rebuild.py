"""The decoder of codes: ridge regression, solved in two ways."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from ncl_multi.codes.rebuild import LinearDecoder, ridge


def codes(rows, dims, seed=0):
    """Codes with four entries in a row."""
    draw = np.random.default_rng(seed)
    places = (np.repeat(np.arange(rows), 4), draw.integers(dims, size=4 * rows))
    return csr_array((draw.random(4 * rows), places), shape=(rows, dims))


@pytest.mark.parametrize("dims", [40, 5000])
def test_ridge_is_its_formula_for_narrow_and_for_wide_codes(dims):
    z, target = codes(60, dims), np.random.default_rng(1).standard_normal((60, 3))
    whole = z.toarray()
    # The same matrix with the inverse of the smaller side.
    by_hand = whole.T @ np.linalg.inv(whole @ whole.T + 0.1 * np.eye(60)) @ target
    # Conjugate gradients stop when the squared residual is 1e-8 of the first.
    assert np.allclose(ridge(z, target), by_hand, atol=1e-9 if dims == 40 else 1e-3)


def test_an_embedding_that_is_linear_in_its_code_is_rebuilt():
    z = codes(400, 20)
    x = z @ np.random.default_rng(1).standard_normal((20, 5)) + 3.0
    decoder, error = LinearDecoder.fit(z, x)
    assert error < 0.03
    assert np.square(decoder(z) - x).sum() < 0.03 * np.square(x - x.mean(axis=0)).sum()

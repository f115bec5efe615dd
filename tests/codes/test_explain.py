"""Parts that sum to the whole, names from what fires, and codes steered by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.sparse import csr_array

from ncl_multi.codes.explain import explain, steer, unit_csr, why

ENTRIES = st.one_of(st.just(0.0), st.floats(2**-40, 1e6, width=32))


def cosine_by_hand(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths else 0.0


@settings(max_examples=300, deadline=None)
@given(
    pair=arrays.arrays(
        np.float32, st.tuples(st.just(2), st.integers(1, 50)), elements=ENTRIES
    )
)  # fmt: skip
def test_shares_sum_to_the_similarity(pair):
    parts = explain(*pair)
    assert sum(part.share for part in parts) == pytest.approx(cosine_by_hand(*pair), abs=1e-6)
    assert all(part.share > 0 for part in parts)
    assert [part.share for part in parts] == sorted((p.share for p in parts), reverse=True)


def test_an_explanation_names_what_is_shared():
    a, b = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explain(a, b, names=["a", "b", "", "d"])[0][:2] == (2, "dimension 2")
    assert explain(a, b, names=["a", "b", "wings", "d"])[0].name == "wings"


def test_an_explanation_is_the_same_both_ways_and_at_any_length():
    a, b = torch.rand(2, 30, generator=torch.Generator().manual_seed(0)).double()
    assert explain(a, b) == explain(b, a)
    assert [p.dimension for p in explain(a, b)] == [p.dimension for p in explain(7 * a, b)]
    assert explain(csr_array(a.numpy()[None]), b) == explain(a, b)


def test_codes_that_share_nothing_have_no_parts():
    assert explain(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == []
    assert explain(torch.zeros(2), torch.ones(2)) == []


def test_bad_codes_are_refused():
    with pytest.raises(ValueError, match="same width; got 2 and 3"):
        explain(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="non-negative; got -1"):
        explain(torch.tensor([1.0, -1.0]), torch.ones(2))
    with pytest.raises(ValueError, match="one code and one code; got 2 and 1 rows"):
        explain(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match="expected one name per dimension, 2; got 1"):
        explain(torch.ones(2), torch.ones(2), names=["a"])
    with pytest.raises(ValueError, match="NaN"):
        explain(torch.tensor([1.0, float("nan")]), torch.ones(2))


def test_why_takes_every_result_apart():
    pytest.importorskip("numba")
    from ncl_multi.codes.search import SparseIndex

    z = torch.rand(50, 20, generator=torch.Generator().manual_seed(0)).relu()
    z = z * (z > 0.7)
    index = SparseIndex(20, names=[f"concept {n}" for n in range(20)])
    index.add(range(50), z)
    matches = why(z[3], index, k=5)
    assert matches[0].id == 3
    assert matches[0].score == pytest.approx(1)
    for match in matches:
        assert sum(part.share for part in match.parts) == pytest.approx(match.score, abs=1e-6)
        assert match.parts[0].name == f"concept {match.parts[0].dimension}"


def test_steering_removes_one_concept_and_adds_another():
    pytest.importorskip("numba")
    from ncl_multi.codes.search import SparseIndex

    names = ["dog", "beach", "snow", "beach"]
    index = SparseIndex(4, names)
    index.add([0, 1, 2], np.array([[1.0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 2]]))
    query = np.array([[1.0, 0.9, 0.0, 0.9]])
    assert index.search(query, 1)[0].item() in (0, 2)
    moved = steer(query, drop=["beach"], boost={"snow": 0.5}, names=names)
    assert moved.toarray()[0, [1, 3]].tolist() == [0, 0]
    assert np.linalg.norm(moved.toarray()) == pytest.approx(1)
    assert index.search(moved, 1)[0].item() == 1


def test_steering_nothing_gives_the_unit_code():
    z = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    assert steer(z).toarray() == pytest.approx(unit_csr(z).toarray())


def test_bad_steering_is_refused():
    with pytest.raises(ValueError, match=r"lie in 0..1; got 2"):
        steer(torch.ones(2), drop=[2])
    with pytest.raises(ValueError, match="no dimension is called 'sea'"):
        steer(torch.ones(2), drop=["sea"], names=["dog", "cat"])
    with pytest.raises(ValueError, match="at least 0; got -1"):
        steer(torch.ones(2), boost={0: -1.0})

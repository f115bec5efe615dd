"""The index against brute force, then what a user does to it, then what breaks it."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

pytest.importorskip("numba")

from ncl_multi.codes import search
from ncl_multi.codes.search import SparseIndex


def codes(n, dims=64, density=0.1, seed=0):
    z = csr_array(random_array((n, dims), density=density, rng=np.random.default_rng(seed)))
    first = csr_array((np.ones(n), (np.arange(n), np.arange(n) % dims)), shape=(n, dims))
    return csr_array(z + 0.01 * first)


def index_of(z, ids=None):
    index = SparseIndex(z.shape[1])
    index.add(np.arange(z.shape[0]) if ids is None else ids, z)
    return index


def cosines(queries, z):
    def unit(x):
        x = x.toarray()
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    return unit(queries) @ unit(z).T


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 300),
    dims=st.integers(1, 40),
    k=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    block=st.sampled_from([7, 64, 65_536]),
    signed=st.booleans(),
)
def test_search_is_brute_force(n, dims, k, seed, block, signed):
    z, queries = codes(n, dims, seed=seed), codes(5, dims, seed=seed + 1)
    if signed:
        queries.data *= np.random.default_rng(seed).choice([-1, 1], len(queries.data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_ITEMS", block)
        ids, scores = index_of(z).search(queries, k)
    truth = cosines(queries, z)
    for row in range(5):
        hit = ids[row] >= 0
        assert hit.sum() == min(k, (truth[row] > 0).sum())
        assert len(set(ids[row][hit])) == hit.sum()
        best = np.sort(truth[row])[::-1][:k][: hit.sum()]
        assert scores[row][hit] == pytest.approx(best, abs=1e-6)
        assert truth[row][ids[row][hit]] == pytest.approx(best, abs=1e-6)
        assert (ids[row][~hit] == -1).all()
        assert (scores[row][~hit] == 0).all()


def test_one_thread_and_many_give_the_same():
    z, queries = codes(500), codes(20, seed=1)
    index = index_of(z)
    one, many = index.search(queries, threads=1), index.search(queries, threads=4)
    assert (one[0] == many[0]).all()
    assert (one[1] == many[1]).all()


@pytest.mark.parametrize("make", [torch.tensor, np.array, csr_array])
def test_codes_may_be_tensors_arrays_or_sparse(make):
    index = SparseIndex(2)
    index.add([3, 4], make([[1.0, 0.0], [0.0, 5.0]]))
    ids, scores = index.search(make([[0.0, 2.0]]), 1)
    assert ids.tolist() == [[4]]
    assert scores.tolist() == [[1.0]]


def test_adding_leaves_the_callers_codes_alone():
    z = csr_array((np.array([1.0, 2.0]), np.array([1, 0]), np.array([0, 2])), shape=(1, 2))
    index_of(z)
    assert z.indices.tolist() == [1, 0]
    assert z.data.tolist() == [1.0, 2.0]


def test_many_small_additions_are_one_large():
    z, queries = codes(200), codes(5, seed=1)
    small = SparseIndex(64)
    for row in range(200):
        small.add([row], z[[row]])
        if row % 50 == 0:
            small.search(queries, 1)
    ids, scores = small.search(queries)
    expected_ids, expected_scores = index_of(z).search(queries)
    assert (ids == expected_ids).all()
    assert scores == pytest.approx(expected_scores, abs=1e-6)


@pytest.mark.parametrize("removed", [3, 80, 199])
def test_what_was_removed_is_not_found(monkeypatch, removed):
    monkeypatch.setattr(search, "MOST_ITEMS", 64)
    z, queries = codes(200), codes(5, seed=1)
    index = index_of(z)
    gone = np.random.default_rng(0).permutation(200)[:removed]
    index.remove(gone)
    left = np.setdiff1d(np.arange(200), gone)
    assert len(index) == 200 - removed
    assert sorted(index.ids) == left.tolist()
    _, scores = index.search(queries)
    _, expected = index_of(z[left]).search(queries)
    assert scores == pytest.approx(expected, abs=1e-6)
    index.add(gone, z[gone])
    _, scores = index.search(queries)
    assert scores == pytest.approx(index_of(z).search(queries)[1], abs=1e-6)


def test_a_filter_searches_only_within():
    z, queries = codes(300), codes(5, seed=1)
    wanted = np.arange(0, 300, 7)
    ids, scores = index_of(z).search(queries, within=wanted)
    assert set(ids.ravel()) <= {-1, *wanted.tolist()}
    assert scores == pytest.approx(index_of(z[wanted]).search(queries)[1], abs=1e-6)


def test_rare_dimensions_of_the_items_count_more_if_asked(monkeypatch):
    monkeypatch.setattr(search, "MOST_ITEMS", 64)
    z, queries = codes(200), codes(5, seed=1)
    index = index_of(z)
    for gone in ([], range(60), range(60, 90)):
        index.remove(list(gone))
        left = z[index.ids]
        active = (left.toarray() > 0).sum(axis=0)
        weighed = queries.toarray() * (np.log((1 + len(index)) / (1 + active)) + 1)
        expected = index_of(left).search(weighed)[1]
        assert index.search(queries, idf=True)[1] == pytest.approx(expected, abs=1e-6)
    index.add([0], z[[0]])
    assert index.search(queries, idf=True)[1] != pytest.approx(expected, abs=1e-6)
    expected = index_of(z[index.ids]).search(queries, idf=True)[1]
    assert index.search(queries, idf=True)[1] == pytest.approx(expected, abs=1e-6)


def test_codes_come_back_as_unit_rows_in_the_order_asked():
    z = codes(300)
    index = index_of(z, ids=np.arange(300) + 1000)
    got = index.codes([1299, 1000, 1299])
    expected = z[[299, 0, 299]].toarray()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert got.toarray() == pytest.approx(expected, abs=1e-6)


def test_no_ids_have_no_codes():
    for index in (index_of(codes(300)), SparseIndex(64)):
        assert index.codes([]).shape == (0, 64)


def test_a_saved_index_answers_the_same(tmp_path):
    z, queries = codes(300), codes(5, seed=1)
    index = SparseIndex(64, names=[f"concept {n}" for n in range(64)])
    index.add(np.arange(300), z)
    index.remove([4, 5])
    again = SparseIndex.load(index.save(tmp_path / "items.safetensors"))
    assert again.names == index.names
    assert len(again) == 298
    for got, expected in zip(again.search(queries), index.search(queries), strict=True):
        assert (got == expected).all()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = index_of(codes(10)).save(tmp_path / "items.safetensors")
    before = path.read_bytes()

    def full(tensors, unfinished, metadata):
        unfinished.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(search, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        index_of(codes(20)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_index_saves_and_loads_but_does_not_search(tmp_path):
    index = SparseIndex.load(SparseIndex(5).save(tmp_path / "empty.safetensors"))
    assert len(index) == 0
    with pytest.raises(ValueError, match="empty: add codes"):
        index.search(np.ones(5))
    index.add([1], np.ones(5))
    index.remove([1])
    with pytest.raises(ValueError, match="empty: add codes"):
        index.search(np.ones(5))


def test_an_item_of_zeros_is_kept_and_never_found():
    index = SparseIndex(2)
    index.add([0, 1], np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert len(index) == 2
    assert index.search(np.array([1.0, 0.0]), 2)[0].tolist() == [[1, -1]]


@pytest.mark.parametrize(
    ("ids", "z", "message"),
    [
        ([1, 1], np.eye(2, 4), r"must not repeat; got \[1\]"),
        ([7, 1], np.eye(2, 4), r"must not repeat; got \[7\]"),
        ([1], np.eye(2, 4), "one id per code; got 1 for 2"),
        ([1, 2], np.eye(2, 5), "4 dimensions; got 5"),
        ([1, 2], -np.eye(2, 4), "non-negative; got -1"),
        ([1, 2], np.full((2, 4), np.nan), "NaN"),
        ([-1, 2], np.eye(2, 4), "at least 0; got -1"),
        (np.array([0.5, 2]), np.eye(2, 4), "whole numbers; got float64"),
        (np.array(["a", "b"]), np.eye(2, 4), "whole numbers"),
    ],
)
@pytest.mark.parametrize("settled", [False, True])
def test_bad_additions_are_refused_whole(ids, z, message, settled):
    index = SparseIndex(4)
    index.add([7], np.ones(4))
    if settled:
        index.search(np.ones(4))
    with pytest.raises(ValueError, match=message):
        index.add(ids, z)
    assert index.ids.tolist() == [7]


def test_bad_queries_are_refused():
    index = index_of(csr_array(np.eye(3)))
    with pytest.raises(ValueError, match=r"zeros matches nothing; got zeros in rows \[1\]"):
        index.search(np.array([[1.0, 0, 0], [0, 0, 0]]))
    with pytest.raises(ValueError, match="3 dimensions; got 4"):
        index.search(np.ones(4))
    with pytest.raises(ValueError, match="k must be at least 1; got 0"):
        index.search(np.ones(3), 0)
    with pytest.raises(ValueError, match=r"does not contain \[9\]"):
        index.remove([0, 9])
    assert len(index) == 3
    with pytest.raises(ValueError, match=r"does not contain \[9\]"):
        index.codes([9])
    with pytest.raises(ValueError, match="dims must be at least 1"):
        SparseIndex(0)
    with pytest.raises(ValueError, match="expected one name per dimension, 2; got 1"):
        SparseIndex(2, names=["a"])


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_file_cut_short_is_told(tmp_path, cut):
    path = index_of(codes(50)).save(tmp_path / "items.safetensors")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="cut short"):
        SparseIndex.load(path)


def test_a_file_of_another_kind_or_damaged_is_told(tmp_path):
    from safetensors.numpy import load_file, save_file

    with pytest.raises(FileNotFoundError, match="no index at"):
        SparseIndex.load(tmp_path / "nothing.safetensors")
    save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"another format: expected .*index/1, got None"):
        SparseIndex.load(tmp_path / "other.safetensors")
    index = index_of(codes(50))
    path = index.save(tmp_path / "items.safetensors")
    tensors = load_file(path)
    tensors["0.rows"][0] = 60_000
    about = '{"dims": 64, "names": null, "blocks": 1}'
    save_file(tensors, path, {"format": search.FORMAT, "about": about})
    with pytest.raises(ValueError, match="damaged: its inverted lists do not fit"):
        SparseIndex.load(path)


def parts_of(index):
    """Tensors as `save` writes them, to be changed."""
    index._settle()
    return {
        f"{number}.{name}": part.copy()
        for number, block in enumerate(index._blocks)
        for name, part in block.tensors().items()
    }


def load_parts(path, tensors, about):
    from safetensors.numpy import save_file

    save_file(tensors, path, {"format": search.FORMAT, "about": json.dumps(about)})
    return SparseIndex.load(path)


ABOUT = {"dims": 64, "names": None, "blocks": 1}


def at(place, value):
    def change(part):
        part[place] = value
        return part

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows", lambda part: -part.astype(np.int64) - 10**9, "rows must be U16; got I64"),
        ("rows", lambda part: part.astype(np.int16) - 30_000, "rows must be U16; got I16"),
        ("rows", lambda part: part.astype(np.float32), "rows must be U16; got F32"),
        ("rows", lambda part: part[:, None], "rows must have 1 axes"),
        ("rows", at(0, 50), "do not fit together"),
        ("rows", at(slice(None), 3), "name an item twice"),
        ("starts", lambda part: part.astype(np.uint64), "starts must be I64; got U64"),
        ("starts", at(0, -(2**62)), "do not fit together"),
        ("starts", at(5, 2**62), "do not fit together"),
        ("values", lambda part: part.astype(np.float64), "values must be F32; got F64"),
        ("values", at(0, np.nan), "do not fit together"),
        ("values", at(0, -1), "do not fit together"),
        ("values", lambda part: part[:-1], "do not fit together"),
        ("live", lambda part: part.astype(np.int64), "live must be BOOL; got I64"),
        ("live", lambda part: part[:-1], "do not fit together"),
        ("live", lambda part: (2 * part.astype(np.uint8)).view(bool), "do not fit together"),
        ("ids", at(0, -1), "do not fit together"),
        ("ids", at(0, 7), "do not fit together"),
        ("ids", lambda part: part.astype(np.int32), "ids must be I64; got I32"),
    ],
)
def test_lists_that_would_lead_a_search_astray_are_refused(tmp_path, name, change, message):
    path, tensors = tmp_path / "items.safetensors", parts_of(index_of(codes(50)))
    assert len(load_parts(path, tensors, ABOUT)) == 50
    tensors[f"0.{name}"] = np.ascontiguousarray(change(tensors[f"0.{name}"]))
    with pytest.raises(ValueError, match=message) as error:
        load_parts(path, tensors, ABOUT)
    assert "items.safetensors is damaged" in str(error.value)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"dims": 2**50}, "at most 4194304; got"),
        ({"dims": 64.0}, "whole numbers; got 64.0"),
        ({"dims": True}, "whole numbers; got True"),
        ({"blocks": 2**40}, "blocks; got 5 tensors"),
        ({"blocks": -1}, "blocks; got 5 tensors"),
        ({"names": "a" * 64}, "names must be a list of texts"),
        ({"names": [1] * 64}, "names must be a list of texts"),
        ({"more": 1}, r"unknown: \['more'\]"),
    ],
)
def test_an_index_that_says_wrong_things_about_itself_is_refused(tmp_path, about, message):
    with pytest.raises(ValueError, match=message):
        load_parts(tmp_path / "i.safetensors", parts_of(index_of(codes(50))), ABOUT | about)


def test_an_id_in_two_blocks_is_refused(tmp_path):
    tensors = parts_of(index_of(codes(50)))
    twice = tensors | {name.replace("0.", "1."): part for name, part in tensors.items()}
    with pytest.raises(ValueError, match="ids must not repeat"):
        load_parts(tmp_path / "i.safetensors", twice, ABOUT | {"blocks": 2})
    twice["1.ids"] = twice["1.ids"] + 50
    assert len(load_parts(tmp_path / "i.safetensors", twice, ABOUT | {"blocks": 2})) == 100


DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64,
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(["ids", "starts", "rows", "values", "live"]),
    dtype=st.sampled_from([None, *DTYPES]),
    shape=st.none() | st.lists(st.integers(0, 5), max_size=3),
    value=st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 70),
    place=st.integers(0, 10_000),
    dims=st.sampled_from([64, 63, 65, 1]),
)
def test_an_index_with_any_wrong_part_is_refused_or_searches_as_its_codes_say(
    tmp_path_factory, name, dtype, shape, value, place, dims
):
    tensors = parts_of(index_of(codes(50)))
    part = tensors[f"0.{name}"]
    with np.errstate(all="ignore"):
        part = part if dtype is None else part.astype(dtype)
        part = part if shape is None else np.resize(part, shape)
        if part.size:
            part.flat[place % part.size] = np.array(value).astype(part.dtype)
    tensors[f"0.{name}"] = part
    try:
        path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
        index = load_parts(path, tensors, ABOUT | {"dims": dims})
    except ValueError:
        return
    assert [index.dims, index.ids.dtype] == [64, np.int64]
    z = index.codes(index.ids)
    query = np.ones(64) / 8
    ids, scores = index.search(query, k=50, threads=1)
    totals = dict(zip(index.ids.tolist(), (z @ query).tolist(), strict=True))
    for hit, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True):
        assert hit == -1 or score == pytest.approx(totals[hit], rel=1e-4)


def test_two_hundred_thousand_codes_fit_in_60_megabytes():
    n, active, dims = 2**16, 32, 4096
    generator = np.random.default_rng(0)
    columns = (np.arange(active) * 128 + generator.integers(0, 128, (n, active))).ravel()
    z = csr_array((np.ones(n * active), columns, np.arange(0, n * active + 1, active)), (n, dims))
    index = index_of(z)
    assert index.nbytes / n * 200_000 < 60e6

"""Rows in any form come out as the same float32 numbers, a block or a few at a time."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from ncl_multi.data.shards import Shards

X = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)


def whole(shards):
    blocks = list(shards.blocks(3))
    assert max(map(len, blocks)) <= 3
    return np.concatenate(blocks)


@pytest.mark.parametrize(
    "form", [np.asarray, torch.from_numpy, csr_matrix, np.ndarray.tolist, np.float64]
)
def test_arrays_of_any_form_are_read(form):
    shards = Shards(form(X))
    assert shards.shape == (11, 4)
    assert np.array_equal(whole(shards), X)
    assert np.array_equal(shards.take([9, 0, 9]), X[[9, 0, 9]])


def test_files_follow_each_other_and_parquet_columns_may_come_in_any_order(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    np.save(tmp_path / "a.npy", X[:3].astype(np.float16))
    columns = {f"dim_{n}": X[3:8, n] for n in (2, 0, 3, 1)}
    parquet.write_table(pa.table({"text": list("abcde")} | columns), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"v": X[8:].tolist()},
                                 schema=pa.schema([("v", pa.list_(pa.float32()))])),
                        tmp_path / "c.parquet", row_group_size=2)  # fmt: skip
    shards = Shards([tmp_path / "a.npy", str(tmp_path / "b.parquet"), tmp_path / "c.parquet"])
    expected = np.concatenate([X[:3].astype(np.float16).astype(np.float32), X[3:]])
    assert np.array_equal(whole(shards), expected)
    assert np.array_equal(shards.take([10, 4, 0, 8, 9]), expected[[10, 4, 0, 8, 9]])
    np.save(tmp_path / "d.npy", X[:, :2])
    with pytest.raises(ValueError, match="file 1 has 2"):
        Shards([tmp_path / "a.npy", tmp_path / "d.npy"])


def test_a_bad_number_is_named_by_its_row_over_all_files(tmp_path):
    bad = X.copy()
    bad[2, 1] = np.nan
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "b.npy", bad)
    with pytest.raises(ValueError, match="row 13, column 1 contains NaN"):
        whole(Shards([tmp_path / "a.npy", tmp_path / "b.npy"]))
    with pytest.raises(ValueError, match="row 13, column 1 contains NaN"):
        Shards([tmp_path / "a.npy", tmp_path / "b.npy"]).take([13])
    with pytest.raises(ValueError, match="row 0, column 0 contains infinity"):
        whole(Shards(np.full((2, 2), 1e300)))


def test_what_is_not_a_table_of_numbers_is_refused(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"not numpy")
    with pytest.raises(ValueError, match=r"not a whole \.npy file"):
        Shards(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="empty list"):
        Shards([])
    with pytest.raises(ValueError, match=r"shape \(rows, dimensions\); got \(3,\)"):
        Shards(np.ones(3))
    with pytest.raises(ValueError, match="real numbers"):
        whole(Shards(np.array([["a", "b"]])))


def test_zeros_that_a_small_parquet_file_repeats_without_end_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, zeros = tmp_path / "zeros.parquet", pa.array(np.zeros(50_000_000, np.float32))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(zeros, 500)})
    parquet.write_table(table, path, row_group_size=20_000)
    assert Shards(path).shape == (100_000, 500)
    assert not Shards(path).take([99_999]).any()
    parquet.write_table(table, path)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"would take 200000000 bytes.*smaller row_group_size"):
        Shards(path)

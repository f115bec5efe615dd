"""Embeddings of every kind become the same float32 array, or are refused with their row."""

import numpy as np
import pytest
import torch

from ncl_multi.data.arrays import read_embeddings
from ncl_multi.data.parquet import _group_bytes
from ncl_multi.data.tables import read_table

X = np.random.default_rng(0).standard_normal((7, 4))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">f8", "longdouble"])
@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_a_numpy_file_of_any_float_type_is_read(tmp_path, dtype, as_path):
    np.save(tmp_path / "x.npy", X.astype(dtype))
    read = read_embeddings(as_path(tmp_path / "x.npy"))
    assert read.dtype == np.float32
    assert np.array_equal(read, X.astype(dtype).astype(np.float32))


def test_a_float32_file_stays_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    assert isinstance(read_embeddings(tmp_path / "x.npy"), np.memmap)
    np.save(tmp_path / "f.npy", np.asfortranarray(X.astype(np.float32)))
    assert np.array_equal(read_embeddings(tmp_path / "f.npy"), X.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_tensor_of_any_float_type_is_read(dtype):
    x = torch.tensor(X, dtype=dtype, requires_grad=True)
    assert np.array_equal(read_embeddings(x), x.detach().float().numpy())


def test_arrays_and_lists_are_read():
    assert np.array_equal(read_embeddings(X), X.astype(np.float32))
    assert np.array_equal(read_embeddings(X.tolist()), X.astype(np.float32))
    assert np.array_equal(read_embeddings(X[::2, ::-1]), X[::2, ::-1].astype(np.float32))


def test_an_archive_with_several_arrays_asks_which(tmp_path):
    np.savez(tmp_path / "one.npz", X)
    assert np.array_equal(read_embeddings(tmp_path / "one.npz"), X.astype(np.float32))
    np.savez(tmp_path / "two.npz", a=X, b=2 * X)
    with pytest.raises(ValueError, match=r"has 2 arrays \(a, b\): choose one with name="):
        read_embeddings(tmp_path / "two.npz")
    assert np.array_equal(read_embeddings(tmp_path / "two.npz", name="b"), np.float32(2 * X))
    with pytest.raises(ValueError, match="has no array 'c'"):
        read_embeddings(tmp_path / "two.npz", name="c")


def test_parquet_is_read_from_a_column_of_lists_or_numbered_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def written(**columns):
        parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
        return tmp_path / "x.parquet"

    texts = [f"text {row}" for row in range(len(X))]
    expected = X.astype(np.float32)
    lists = {"text": texts, "score": X[:, 0]}
    assert np.array_equal(read_embeddings(written(**lists, z=X.tolist())), expected)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 4)
    assert np.array_equal(read_embeddings(written(**lists, z=fixed)), expected)
    both = written(a=X.tolist(), b=(2 * X).tolist())
    with pytest.raises(ValueError, match=r"has 2 columns \(a, b\): choose one with name="):
        read_embeddings(both)
    assert np.array_equal(read_embeddings(both, name="b"), np.float32(2 * X))
    # In the order of the numbers, not of the file.
    dims = {f"dim_{column}": X[:, column] for column in (2, 0, 1, 3)}
    assert np.array_equal(read_embeddings(written(text=texts, **dims)), expected)
    with pytest.raises(ValueError, match="no column with a list of floats per row"):
        read_embeddings(written(text=texts, score=X[:, 0], **dims))
    with pytest.raises(ValueError, match="got 1 in row 1 and 2 in row 0"):
        read_embeddings(written(z=[[1.0, 2.0], [1.0]]))
    for missing in (None, [1.0, None]):
        with pytest.raises(ValueError, match=r"row 1( |$)"):
            read_embeddings(written(z=[[1.0, 2.0], missing]))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a whole parquet file"):
        read_embeddings(tmp_path / "x.parquet")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 70_000])
def test_the_first_row_that_is_not_finite_is_named(bad, row):
    x = np.zeros((70_002, 2), np.float32)
    x[row:, 1] = bad
    with pytest.raises(ValueError, match=f"row {row} contains NaN or infinity"):
        read_embeddings(x)


def test_a_number_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="row 1 contains a number too large for float32"):
        read_embeddings(np.array([[1.0], [1e300]]))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (X[0], r"shape \(rows, dimensions\); got \(4,\)"),
        (X[None], r"got \(1, 7, 4\)"),
        (X[:0], r"got \(0, 4\)"),
        (X[:, :0], r"got \(7, 0\)"),
        (np.arange(6).reshape(3, 2), "floating-point numbers; got int64"),
        (torch.arange(6).view(3, 2), "floating-point numbers; got torch.int64"),
        (X + 1j, "got complex128"),
        ([["a", "b"]], "floating-point numbers; got <U1"),
        ([[1.0], [1.0, 2.0]], "rows of one length"),
        (torch.eye(3).to_sparse(), "must be dense"),
        (None, "got object"),
    ],
)
def test_what_is_not_embeddings_is_refused(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_embeddings(source)


def test_files_that_are_wrong_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist; embeddings are .npy"):
        read_embeddings(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_embeddings(tmp_path)
    np.save(tmp_path / "x.npy", np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(
        ValueError, match=r"x.npy is not a whole .npy file of numbers, so it was not"
    ):
        read_embeddings(tmp_path / "x.npy")
    for name in ("x.npy", "x.npz"):
        for content in (b"", b"nothing", b"PK\x03\x04 cut", b"\x93NUMPY\x01\x00v\x00{'descr'"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match="is not a whole"):
                read_embeddings(tmp_path / name)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a .npy, .npz or .parquet file"):
        read_embeddings(tmp_path / "x.bin")
    np.save(tmp_path / "y.npy", X)
    (tmp_path / "y.npy").rename(tmp_path / "y.npz")
    with pytest.raises(ValueError, match=r"it is a .npy file"):
        read_embeddings(tmp_path / "y.npz")


def test_files_that_take_much_more_memory_than_disk_are_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    np.savez_compressed(tmp_path / "x.npz", x=X)
    assert read_embeddings(tmp_path / "x.npz").shape == (7, 4)
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((2**20, 32), np.float32))
    with pytest.raises(ValueError, match="its parts are larger than the file"):
        read_embeddings(tmp_path / "x.npz")
    rows = pa.DictionaryArray.from_arrays(pa.array(np.zeros(300, np.int32)), ["a " * 300_000])
    parquet.write_table(pa.table({"text": rows.cast(pa.string())}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10**6
    with pytest.raises(ValueError, match="would take more than"):
        read_table(tmp_path / "t.parquet")


def columns_by_pyarrow(path, columns):
    """Bytes in memory of each row group, by pyarrow's accessors."""
    from pyarrow import parquet

    widths = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
    about = parquet.read_metadata(path)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    return [
        sum(
            max(c.total_uncompressed_size, c.num_values * widths.get(c.physical_type, 8))
            for c in map(group.column, range(group.num_columns))
            if c.path_in_schema.partition(".")[0] in columns
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 30},
        {"compression": "none", "version": "1.0"},
        {"use_dictionary": False, "write_page_index": True, "data_page_version": "2.0"},
    ],
)
def test_sizes_in_a_parquet_footer_are_those_that_pyarrow_reads(tmp_path, options):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, n = tmp_path / "x.parquet", 100
    table = {
        "text": ["a b"] * n, "number": pa.array(range(n), pa.int32()), "flag": [True] * n,
        "row": [[1.0, 2.5]] * n, "half": pa.array(np.ones(n, np.float16)), "é": [{"x": 1}] * n,
    }  # fmt: skip
    parquet.write_table(pa.table(table), path, **options)
    for columns in (["text"], ["number", "flag"], ["row", "é"], ["half"], list(table)):
        assert _group_bytes(path, columns) == columns_by_pyarrow(path, columns)


def test_a_damaged_parquet_footer_is_an_error_and_not_the_end_of_the_process(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"row": [[1.0, 2.5]] * 9}), path)
    whole = path.read_bytes()
    footer = range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8)
    refused = 0
    for place in footer:
        for value in (0, 1, 0x1C, 0x7F, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                _group_bytes(path, ["row"])
            except OSError:
                refused += 1
    assert refused > 100  # Most bytes are values that no other value contradicts.

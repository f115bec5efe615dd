"""Embeddings larger than memory: rows by number, or all of them a block at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, issparse
from torch import Tensor

from ncl_multi.data.arrays import from_numpy, parquet_columns, parquet_rows, read_embeddings
from ncl_multi.data.parquet import open_parquet

BLOCK = 16_384
"""Rows that are read at a time."""


class Shards:
    """Embeddings in any form as float32 rows; only one block is in memory at a time.

    Takes arrays, memmaps, tensors, sparse matrices, a column of `datasets`, pandas, polars or
    pyarrow, a file (`.npy`, `.npz`, parquet) or a list of files, whose rows follow each other.
    Numbers are checked when they are read: an error names the row, counted from 0 over all files,
    and the column. Parquet files are read a row group at a time; numbered columns may come in any
    order.

    Args:
        source: The embeddings.
        name: Which array of an `.npz` file or column of a parquet file, if there are several.

    Example:
        >>> shards = Shards(np.arange(6, dtype=np.float16).reshape(3, 2))
        >>> shards.shape, shards.take([2, 0])
        ((3, 2), array([[4., 5.],
               [0., 1.]], dtype=float32))
    """

    def __init__(self, source: Any, *, name: str | None = None):
        self._readers = [_reader(one, name) for one in _sources(source)]
        widths = [reader.shape[1] for reader in self._readers]
        for number, width in enumerate(widths):
            if width != widths[0]:
                raise ValueError(
                    f"all files must have {widths[0]} columns like the first; file {number} has "
                    f"{width}"
                )
        self.shape = (sum(reader.shape[0] for reader in self._readers), widths[0])

    def __len__(self) -> int:
        return self.shape[0]

    def blocks(self, size: int = BLOCK) -> Iterator[np.ndarray]:
        """All rows in their order, at most `size` at a time."""
        first = 0
        for reader in self._readers:
            for block in reader.blocks(size):
                yield _finite(block, range(first, first + len(block)))
                first += len(block)

    def take(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """These rows, in the order given."""
        numbers = np.asarray(rows, dtype=np.int64)
        order = np.argsort(numbers, kind="stable")
        result = np.empty((len(numbers), self.shape[1]), np.float32)
        first = 0
        for reader in self._readers:
            places = order[
                slice(*np.searchsorted(numbers[order], (first, first + reader.shape[0])))
            ]
            for start in range(0, len(places), BLOCK):
                chosen = places[start : start + BLOCK]
                result[chosen] = reader.take(numbers[chosen] - first)
            first += reader.shape[0]
        return _finite(result, numbers)


class _Arrays:
    """Rows of something that can be sliced: an array, a memmap, a sparse matrix, a column."""

    def __init__(self, rows: Any, shape: tuple[int, int]):
        self.rows, self.shape = rows, shape

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.shape[0], size):
            yield _float32(self.rows[start : start + size], start, self.shape[1])

    def take(self, rows: np.ndarray) -> np.ndarray:
        chosen = rows if isinstance(self.rows, np.ndarray | Tensor | csr_array) else rows.tolist()
        return _float32(self.rows[chosen], 0, self.shape[1])


class _Parquet:
    """Rows of a parquet file, a row group at a time."""

    def __init__(self, path: Path, name: str | None):
        self.columns, self.path = parquet_columns(path, name), path
        self.file = open_parquet(path, self.columns)
        first = next(self.blocks(1), np.empty((0, 0)))
        self.shape = (self.file.metadata.num_rows, first.shape[1])

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        first = 0
        for batch in self.file.iter_batches(size, columns=self.columns):
            rows = parquet_rows(batch, self.columns, str(self.path), first)
            yield _float32(rows, first, rows.shape[1])
            first += len(rows)

    def take(self, rows: np.ndarray) -> np.ndarray:
        sizes = [self.file.metadata.row_group(g).num_rows for g in range(self.file.num_row_groups)]
        ends = np.cumsum(sizes)
        result = np.empty((len(rows), self.shape[1]), np.float32)
        for group in np.unique(np.searchsorted(ends, rows, side="right")).tolist():
            first = int(ends[group] - sizes[group])
            in_group = (rows >= first) & (rows < ends[group])
            table = self.file.read_row_group(group, columns=self.columns)
            read = parquet_rows(table, self.columns, str(self.path), first)
            result[in_group] = read[rows[in_group] - first]
        return result


def _sources(source: Any) -> list[Any]:
    paths = isinstance(source, list | tuple) and all(isinstance(s, str | Path) for s in source)
    if paths and not source:
        raise ValueError("expected embeddings or a list of files; got an empty list")
    return list(source) if paths else [source]


def _reader(source: Any, name: str | None) -> _Arrays | _Parquet:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix.lower() == ".parquet" and path.is_file():
            return _Parquet(path, name)
        if path.suffix.lower() == ".npy" and path.is_file():
            # A memmap of any float type: it is converted as it is read.
            source = from_numpy(path, name)
        else:
            source = read_embeddings(path, name=name)
    if issparse(source):
        source = csr_array(source)
    elif is_column(source):
        source = read_embeddings(_cells(source))
    elif (
        not hasattr(source, "shape")
        and hasattr(source, "__getitem__")
        and not isinstance(source, dict)
        and len(source)
    ):
        width = np.asarray(source[0]).shape
        if len(width) == 1 and not isinstance(source, list | tuple):
            return _Arrays(source, (len(source), width[0]))
        source = read_embeddings(source)
    shape = tuple(getattr(source, "shape", ()))
    if len(shape) != 2 or not all(shape):
        kind = type(source).__name__
        raise ValueError(
            f"embeddings must have the shape (rows, dimensions); got {shape}, a {kind}"
        )
    return _Arrays(source, (int(shape[0]), int(shape[1])))


def is_column(source: Any) -> bool:
    """Whether it is a column of pandas, polars or pyarrow: a row of numbers in each cell."""
    one = len(getattr(source, "shape", (0,))) == 1
    return one and (hasattr(source, "to_list") or hasattr(source, "to_pylist"))


def _cells(column: Any) -> list[np.ndarray]:
    rows = [np.asarray(cell.as_py() if hasattr(cell, "as_py") else cell) for cell in column]
    for number, row in enumerate(rows):
        if row.dtype.kind not in "fiub" or row.shape != rows[0].shape:
            what = row.shape if row.ndim else repr(row.item())
            raise ValueError(
                f"the cells of a column must be rows of numbers of one length; row {number} is "
                f"{what}, the first {rows[0].shape}"
            )
    return rows


def _float32(rows: Any, first: int, width: int) -> np.ndarray:
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().float().numpy()
    elif issparse(rows):
        rows = rows.toarray()
    try:
        array = np.asarray(rows)
    except ValueError as error:
        raise ValueError(f"rows from {first} must have {width} numbers each: {error}") from error
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"embeddings must be real numbers; got {array.dtype}. Of a table, give the column of "
            f"embeddings"
        )
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"rows from {first} must have {width} numbers each; got {array.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)


def _finite(block: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """The block itself, unless a number is not finite or too large for float32."""
    # The sum is finite unless an entry is not; only then the block is searched.
    if not np.isfinite(block.sum(dtype=np.float64)):
        bad = np.argwhere(~np.isfinite(block))
        if len(bad):
            row, column = bad[0]
            what = "NaN" if np.isnan(block[row, column]) else "infinity (or too large for float32)"
            raise ValueError(
                f"embeddings must be finite numbers; row {rows[row]}, column {column} contains "
                f"{what}"
            )
    return block

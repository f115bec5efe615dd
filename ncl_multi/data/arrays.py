"""Embeddings from anywhere: files and tensors become one checked float32 array."""

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncl_multi.data.parquet import read_parquet, whole_parquet
from ncl_multi.files import DAMAGE, check_zip

_BLOCK = 65_536


def read_embeddings(source: Any, *, name: str | None = None) -> np.ndarray:
    """One row per item, as float32: an array in memory, or a memmap of a float32 `.npy` file.

    Takes `.npy`, `.npz` and parquet files, arrays and tensors of any float type, and lists of rows.
    In a parquet file the embeddings are one column of lists, or numbered columns of floats as
    pandas writes them. Every entry is checked: an error names the first bad row, counted from 0.

    Args:
        source: File, array, tensor or list of rows.
        name: Which array of an `.npz` file or column of a parquet file, if there are several.

    Example:
        >>> read_embeddings(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))
        array([[1., 2.]], dtype=float32)
        >>> read_embeddings([[1.0, float("nan")]])
        Traceback (most recent call last):
        ...
        ValueError: embeddings must be finite numbers; row 0 contains NaN or infinity
    """
    if not isinstance(source, (str, Path)):
        return _checked(_as_array(source), "embeddings")
    path = Path(source)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; embeddings are .npy, .npz or .parquet files")
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz", ".parquet"):
        raise ValueError(f"embeddings must be a .npy, .npz or .parquet file; got {path}")
    if kind == ".parquet":
        return _checked(_from_parquet(path, name), str(path))
    return _checked(from_numpy(path, name), str(path))


def _as_array(source: Any) -> np.ndarray:
    if isinstance(source, Tensor):
        if source.layout != torch.strided:
            raise ValueError(f"embeddings must be dense; got a {source.layout} tensor")
        if not source.is_floating_point():
            raise ValueError(_not_floats("embeddings", source.dtype))
        return source.detach().cpu().float().numpy()
    try:
        return np.asarray(source)
    except ValueError as error:
        raise ValueError(f"embeddings must be rows of one length: {error}") from error


def from_numpy(path: Path, name: str | None) -> np.ndarray:
    """An array of a `.npz` file, or a memmap of a `.npy` file."""
    try:
        if path.suffix.lower() == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        # A pickle inside the file could run code: it is refused.
        if zipfile.is_zipfile(path):
            check_zip(path)
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("it is a .npy file")
            array = arrays[_only(arrays.files, name, path, "array")]
        if not isinstance(array, np.ndarray):
            raise ValueError("its parts are not arrays")
        return array
    except DAMAGE as error:
        if str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is not a whole {path.suffix} file of numbers, so it was not read: {error}"
        ) from error


def _from_parquet(path: Path, name: str | None) -> np.ndarray:
    columns = parquet_columns(path, name)
    with whole_parquet(path):
        table = read_parquet(path, columns)
    return parquet_rows(table, columns, str(path))


def parquet_columns(path: Path, name: str | None) -> list[str]:
    """The column of lists, or the numbered columns in their order, with the embeddings."""
    with whole_parquet(path):
        import pyarrow as pa
        from pyarrow import parquet

        schema = parquet.read_schema(path)
    kinds = {field.name: field.type for field in schema}
    lists = [
        column
        for column, kind in kinds.items()
        if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        and pa.types.is_floating(kind.value_type)
    ]
    numbered = _numbered([c for c, kind in kinds.items() if pa.types.is_floating(kind)])
    if not lists and numbered and name is None:
        return numbered
    if not lists:
        raise ValueError(
            f"{path} has no column with a list of floats per row; its columns are "
            f"{', '.join(f'{column} ({kind})' for column, kind in kinds.items())}"
        )
    return [_only(lists, name, path, "column")]


def parquet_rows(table: Any, columns: list[str], what: str, first_row: int = 0) -> np.ndarray:
    """The embeddings in these columns of a pyarrow table whose first row has this number."""
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.table(table)
    if pa.types.is_floating(table.schema.field(columns[0]).type):
        return np.stack([table[column].to_numpy() for column in columns], axis=1)
    column = table[columns[0]].combine_chunks()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if column.null_count:
        missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        raise ValueError(
            f"{what}: {columns[0]} is missing in {len(missing)} rows, first row "
            f"{first_row + missing[0]}"
        )
    odd = np.flatnonzero(lengths != lengths[:1])
    if len(odd):
        raise ValueError(
            f"{what}: every row of {columns[0]} must have the same length; got {lengths[odd[0]]} "
            f"in row {first_row + odd[0]} and {lengths[0]} in row {first_row}"
        )
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1) if len(column) else flat.reshape(0, 0)


def _numbered(columns: list[str]) -> list[str]:
    """Columns called `0, 1, ...` or `dim_0, dim_1, ...` in the order of their numbers."""
    matches = [re.fullmatch(r"(\D*)(\d+)", column) for column in columns]
    by_number = {int(match[2]): match[0] for match in matches if match}
    prefixes = {match[1] for match in matches if match}
    if len(by_number) < len(columns) or len(prefixes) != 1:
        return []
    start = min(by_number)
    whole = start in (0, 1) and sorted(by_number) == list(range(start, start + len(by_number)))
    return [by_number[number] for number in sorted(by_number)] if whole else []


def _only(names: list[str], name: str | None, path: Path, what: str) -> str:
    if name is not None and name not in names:
        raise ValueError(f"{path} has no {what} {name!r} of embeddings; got {', '.join(names)}")
    if name is None and len(names) != 1:
        raise ValueError(
            f"{path} has {len(names)} {what}s ({', '.join(names)}): choose one with name=..."
        )
    return name or names[0]


def _checked(x: np.ndarray, what: str) -> np.ndarray:
    if x.dtype.kind != "f":
        raise ValueError(_not_floats(what, x.dtype))
    if x.ndim != 2 or not x.shape[0] or not x.shape[1]:
        raise ValueError(f"{what} must have the shape (rows, dimensions); got {x.shape}")
    # float32 of this machine's byte order stays where it is: a file of any size costs no memory.
    ready = x if x.dtype == np.float32 else np.empty(x.shape, np.float32)
    for start in range(0, len(x), _BLOCK):
        block = x[start : start + _BLOCK]
        if ready is not x:
            with np.errstate(over="ignore", invalid="ignore"):
                ready[start : start + _BLOCK] = block
        bad = np.flatnonzero(~np.isfinite(ready[start : start + _BLOCK]).all(axis=1))
        if len(bad):
            problem = "NaN or infinity"
            if np.isfinite(block[bad[0]]).all():
                problem = "a number too large for float32"
            raise ValueError(
                f"{what} must be finite numbers; row {start + bad[0]} contains {problem}"
            )
    return ready


def _not_floats(what: str, dtype: Any) -> str:
    return (
        f"{what} must be floating-point numbers; got {dtype}. If these are embeddings and not ids "
        f"or labels, convert them to float32 first"
    )

"""Parquet files, of which no more is read than fits in memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncl_multi.files import most_memory
from ncl_multi.optional import needs


@contextmanager
def whole_parquet(path: Path) -> Iterator[None]:
    """Read a parquet file inside: errors of pyarrow then name the file."""
    with needs("pyarrow"):
        import pyarrow as pa
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole parquet file: {error}") from error


def read_parquet(path: Path, columns: Sequence[str]) -> Any:
    """These columns of a parquet file as a `pyarrow.Table`, unless they are too large."""
    import pyarrow as pa

    file, size = open_parquet(path, columns), path.stat().st_size
    most = most_memory(size)
    taken = sum(_group_bytes(file, group, columns) for group in range(file.num_row_groups))
    batches, texts = [], 0
    for batch in file.iter_batches(64, columns=list(columns)) if taken <= most else ():
        texts += text_bytes(batch)
        if texts > most:
            break
        batches.append(decoded(batch))
    if max(taken, texts) > most:
        raise ValueError(
            f"{path} has {size} bytes and would take more than {most} in memory, so it was not "
            f"read; write the rows as csv"
        )
    return pa.Table.from_batches(batches, _plain_schema(file.schema_arrow, columns))


def open_parquet(path: Path, columns: Sequence[str]) -> Any:
    """A `pyarrow.parquet.ParquetFile` of which each row group fits in memory.

    A repeated value takes a few bytes in the file and any amount of memory. So
    repeated texts come as dictionaries, whose size `text_bytes` tells before they are `decoded`.
    """
    import pyarrow as pa
    from pyarrow import parquet

    strings = (pa.string(), pa.large_string())
    texts = [field.name for field in parquet.read_schema(path) if field.type in strings]
    most = most_memory(path.stat().st_size)
    file = parquet.ParquetFile(path, read_dictionary=[name for name in texts if name in columns])
    for group in range(file.num_row_groups):
        if (taken := _group_bytes(file, group, columns)) > most:
            raise ValueError(
                f"row group {group} of {path} would take {taken} bytes in memory, more than "
                f"{most}; write the file again with a smaller row_group_size"
            )
    return file


def text_bytes(batch: Any) -> int:
    """Bytes that the texts of a batch take once they are `decoded`.

    Example:
        >>> import pyarrow as pa
        >>> texts = pa.array(["a mug", "a mug", None]).dictionary_encode()
        >>> text_bytes(pa.record_batch({"text": texts}))
        10
    """
    import pyarrow as pa
    from pyarrow import compute

    total = 0
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            lengths = compute.binary_length(column.dictionary).take(column.indices)
            total += compute.sum(lengths.cast(pa.int64())).as_py() or 0
    return total


def decoded(batch: Any) -> Any:
    """The batch with its texts themselves."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _plain_schema(schema: Any, columns: Sequence[str]) -> Any:
    import pyarrow as pa

    kinds = [(name, schema.field(name).type) for name in columns]
    return pa.schema(
        [(name, kind.value_type if pa.types.is_dictionary(kind) else kind) for name, kind in kinds]
    )


def _group_bytes(file: Any, group: int, columns: Sequence[str]) -> int:
    """Bytes in memory of these columns of a row group; repeated texts are counted once."""
    about = file.metadata.row_group(group)
    total = 0
    for number in range(about.num_columns):
        column = about.column(number)
        if column.path_in_schema.partition(".")[0] in columns:
            width = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}.get(column.physical_type, 8)
            total += max(column.total_uncompressed_size, column.num_values * width)
    return total

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

    file, sizes = _opened(path, columns)
    taken, size = sum(sizes), path.stat().st_size
    most = most_memory(size)
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
    return _opened(path, columns)[0]


def _opened(path: Path, columns: Sequence[str]) -> tuple[Any, list[int]]:
    """The file, and the bytes in memory of each row group."""
    import pyarrow as pa
    from pyarrow import parquet

    strings = (pa.string(), pa.large_string())
    texts = [field.name for field in parquet.read_schema(path) if field.type in strings]
    most = most_memory(path.stat().st_size)
    file = parquet.ParquetFile(path, read_dictionary=[name for name in texts if name in columns])
    sizes = _group_bytes(path, columns)
    for group, taken in enumerate(sizes):
        if taken > most:
            raise ValueError(
                f"row group {group} of {path} would take {taken} bytes in memory, more than "
                f"{most}; write the file again with a smaller row_group_size"
            )
    return file, sizes


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


def _group_bytes(path: Path, columns: Sequence[str]) -> list[int]:
    """Bytes in memory of these columns of each row group; repeated texts are counted once."""
    # Fields by their numbers in the format's description. pyarrow's own accessors end the process
    # if a column of a damaged footer contradicts itself.
    try:
        return [
            sum(
                max(about[6], about[5] * _WIDTHS.get(about[1], 8))
                for about in (column[3] for column in group[1])
                if about[3][0].decode() in columns
            )
            for group in _Thrift(_footer(path)).struct()[4]
        ]
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise OSError("its footer is damaged") from error


_WIDTHS = {0: 1, 1: 4, 4: 4}
"""Bytes of a value by physical type, where it is not 8: booleans, int32 and float."""


def _footer(path: Path) -> bytes:
    """The metadata at the end of a parquet file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        end = file.read(8)
        size = int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or size + 8 > path.stat().st_size:
            raise OSError("it has no footer")
        file.seek(-8 - size, 2)
        return file.read(size)


class _Thrift:
    """Values in the compact form of thrift; a struct is its fields by number."""

    def __init__(self, content: bytes):
        self.content, self.place = content, 0

    def struct(self) -> dict[int, Any]:
        fields, number = {}, 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.signed()
            # In a field, the kinds of true and false are their values.
            fields[number] = head & 15 == 1 if head & 15 in (1, 2) else self.value(head & 15)
        return fields

    def value(self, kind: int) -> Any:
        if kind in (1, 2, 3):
            return self.byte()
        if kind in (4, 5, 6):
            return self.signed()
        if kind == 7:
            return self.bytes(8)
        if kind == 8:
            return self.bytes(self.number())
        if kind in (9, 10):
            head = self.byte()
            count = self.number() if head >> 4 == 15 else head >> 4
            return [self.value(head & 15) for _ in range(min(count, len(self.content) + 1))]
        if kind == 12:
            return self.struct()
        raise OSError(f"its footer has a value of the unknown kind {kind}")

    def byte(self) -> int:
        self.place += 1
        return self.content[self.place - 1]

    def bytes(self, count: int) -> bytes:
        self.place += count
        if self.place > len(self.content):
            raise IndexError
        return self.content[self.place - count : self.place]

    def number(self) -> int:
        total = shift = 0
        while True:
            part = self.byte()
            total |= (part & 127) << shift
            shift += 7
            if part < 128:
                return total

    def signed(self) -> int:
        number = self.number()
        return number >> 1 ^ -(number & 1)

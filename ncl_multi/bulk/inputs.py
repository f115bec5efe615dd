"""Inputs of bulk encoding: tables of text and folders of pictures, a range of rows at a time.

A row that cannot be read is not skipped silently: it is returned as `Refused`, with the reason.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ncl_multi.data.cells import KINDS, json_row
from ncl_multi.data.fetch import digest
from ncl_multi.data.parquet import decoded, open_parquet, text_bytes, whole_parquet
from ncl_multi.data.tables import read_table, text_column
from ncl_multi.files import most_memory, read_picture
from ncl_multi.optional import needs

MOST_LINE = 2**26
"""Bytes of one line of a text file."""
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of the pictures of a folder."""

_BLOCK = 2**22
_SAMPLE = 1000
_IDS = ("id", "_id")


class Row(NamedTuple):
    """One item to encode: its place in the input, its id and a text or a picture."""

    row: int
    where: str
    id: str | None
    item: Any


class Refused(NamedTuple):
    """A row that cannot be encoded, and why."""

    row: int
    where: str
    reason: str


@dataclass(frozen=True)
class Part:
    """Rows `start` to `start + rows` of one file; the first is row `first` of the whole input.

    `offset` is where they start in a text file, in bytes.
    """

    number: int
    file: int
    start: int
    rows: int
    first: int
    offset: int = 0


class Source(ABC):
    """One file, or a folder of pictures, whose rows can be read from any place."""

    name: str
    holds = "text"

    @abstractmethod
    def starts(self, size: int) -> tuple[int, list[int]]:
        """Number of rows, and the byte at which every part of `size` rows starts."""

    @abstractmethod
    def digest(self) -> str:
        """A hash that changes when the content does."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[Row | Refused]:
        """The rows of a part, in order, each once."""


@dataclass(frozen=True)
class Input:
    """The input to encode: rows are counted over its sources in order, from 0."""

    sources: list[Source]
    parts: list[Part]
    digest: str

    @property
    def rows(self) -> int:
        """Number of rows, readable or not."""
        return sum(part.rows for part in self.parts)

    def read(self, part: Part) -> Iterator[Row | Refused]:
        """The rows of one part."""
        return self.sources[part.file].read(part)


def open_input(
    path: str | Path, size: int, column: str | None = None, id_column: str | None = None
) -> Input:
    """A parquet, jsonl, txt, csv or tsv file, a folder of such files, or a folder of pictures.

    Args:
        path: File or folder. The files of a folder are read in the order of their names.
        size: Rows per part.
        column: Column of the text; None looks for it as `read_table` does.
        id_column: Column of the ids; None takes `id` or `_id` where there is one.
    """
    path = Path(path).resolve()
    sources = _sources(path, column, id_column)
    parts: list[Part] = []
    first = 0
    whole = hashlib.sha256()
    for file, source in enumerate(sources):
        rows, offsets = source.starts(size)
        for start, offset in zip(range(0, rows, size), offsets, strict=True):
            part_rows = min(size, rows - start)
            parts.append(Part(len(parts), file, start, part_rows, first + start, offset))
        first += rows
        whole.update(f"{source.name}\0{rows}\0{source.digest()}\n".encode())
    if not parts:
        raise ValueError(f"{path} has no rows")
    return Input(sources, parts, whole.hexdigest())


def _sources(path: Path, column: str | None, id_column: str | None) -> list[Source]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        tables = [file for file in files if file.suffix.lower() in KINDS]
        pictures = [file for file in files if file.suffix.lower() in PICTURES]
        if pictures and tables:
            raise ValueError(
                f"{path} has pictures ({pictures[0].name}) and tables ({tables[0].name}): name "
                f"a folder with one kind only"
            )
        if pictures:
            return [_Pictures(path, pictures)]
        names = {file: file.relative_to(path).as_posix() for file in tables}
    else:
        names = {path: path.name}
    if not names:
        raise ValueError(f"{path} has no files that end in {', '.join((*KINDS, *PICTURES))}")
    return [_table(file, name, column, id_column) for file, name in names.items()]


def _table(path: Path, name: str, column: str | None, id_column: str | None) -> Source:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Name a file or a folder")
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _Parquet(path, name, column, id_column)
    if kind in (".jsonl", ".ndjson"):
        return _Lines(path, name, *_json_columns(path, column, id_column))
    if kind == ".txt":
        if column or id_column:
            raise ValueError(f"{path}: a txt file has one text per line and no columns")
        return _Lines(path, name, None, None)
    if kind in (".csv", ".tsv"):
        return _Delimited(path, name, column, id_column)
    raise ValueError(f"{path} must end in one of {', '.join(KINDS)}")


class _Lines(Source):
    """A jsonl or txt file in UTF-8: every line is a row, also an empty one."""

    def __init__(self, path: Path, name: str, column: str | None, id_column: str | None):
        self.path, self.name, self.column, self.id_column = path, name, column, id_column
        with path.open("rb") as file:
            mark = file.read(4)
        if mark[:2] in (b"\xff\xfe", b"\xfe\xff") or mark in (b"\0\0\xfe\xff",):
            raise ValueError(f"{path} is UTF-16 or UTF-32: save it as UTF-8")
        self._digest = ""

    def starts(self, size: int) -> tuple[int, list[int]]:
        # One pass over the file counts the lines and computes their hash.
        whole, lines, position, offsets, last = hashlib.sha256(), 0, 0, [0], b"\n"
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK):
                whole.update(block)
                count = block.count(b"\n")
                if (lines + count) // size > lines // size:
                    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                    at = np.arange(size - lines % size, count + 1, size)
                    offsets += (position + ends[at - 1] + 1).tolist()
                lines, position, last = lines + count, position + len(block), block[-1:]
        rows = lines + (last != b"\n")
        self._digest = whole.hexdigest()
        return rows, offsets[: -(-rows // size)]

    def digest(self) -> str:
        return self._digest

    def read(self, part: Part) -> Iterator[Row | Refused]:
        with self.path.open("rb") as file:
            file.seek(part.offset)
            for place in range(part.rows):
                line = file.readline(MOST_LINE + 1)
                row, where = part.first + place, f"{self.name} line {part.start + place + 1}"
                if len(line) > MOST_LINE:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MOST_LINE)
                    yield Refused(row, where, f"the line is longer than {MOST_LINE} bytes")
                    continue
                if place == 0 and part.offset == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield self._row(row, where, line)

    def _row(self, row: int, where: str, line: bytes) -> Row | Refused:
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            return Refused(row, where, f"the line is not UTF-8: {error}")
        if not text.strip():
            return Refused(row, where, "the line is empty")
        if self.column is None:
            return _text_row(row, where, None, text)
        try:
            cells = json_row(text)
        except ValueError as error:
            return Refused(row, where, f"the line {error}")
        if self.column not in cells:
            return Refused(row, where, f"the line has no {self.column!r}")
        return _text_row(row, where, cells.get(self.id_column or ""), cells[self.column])


def _json_columns(path: Path, column: str | None, id_column: str | None) -> tuple[str, str | None]:
    """Columns of text and id of a jsonl file, from its first readable lines."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in islice(iter(lambda: file.readline(MOST_LINE), b""), _SAMPLE):
            try:
                rows.append(json_row(line.decode("utf-8-sig")))
            except ValueError:
                continue  # It is refused, with the reason, when it is read.
    if not rows:
        raise ValueError(f"{path}: none of its first {_SAMPLE} lines is a JSON object")
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in names}
    texts = {n: v for n, v in values.items() if any(isinstance(cell, str) for cell in v)}
    others = [(name, "not text") for name in names if name not in texts]
    return _columns(texts, others, str(path), column, id_column)


def _columns(
    texts: dict[str, list[Any]],
    others: Sequence[tuple[str, str]],
    source: str,
    column: str | None,
    id_column: str | None,
) -> tuple[str, str | None]:
    names = [*texts, *(name for name, _ in others)]
    if id_column is None:
        id_column = next((name for name in _IDS if name in names), None)
    elif id_column not in names:
        raise ValueError(
            f"{source} has no column {id_column!r} for --id-column: {', '.join(names)}"
        )
    if column is None:
        candidates = {name: cells for name, cells in texts.items() if name != id_column}
        column = text_column(candidates, source, others)
    elif column not in texts:
        raise ValueError(
            f"{source} has no column {column!r} with text. Columns with text: "
            f"{', '.join(texts) or 'none'}"
        )
    return column, id_column


class _Parquet(Source):
    """A parquet file, read a batch of rows at a time."""

    def __init__(self, path: Path, name: str, column: str | None, id_column: str | None):
        self.path, self.name = path, name
        self.most = most_memory(path.stat().st_size)
        pa, parquet = arrow()
        with whole_parquet(path):
            with parquet.ParquetFile(path) as file:
                schema = file.schema_arrow
                self.groups = [
                    file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)
                ]
                kinds = {field.name: _values(field.type) for field in schema}
                text = [n for n, k in kinds.items() if k in (pa.string(), pa.large_string())]
            head = None
            if column is None and text and self.groups:
                with open_parquet(path, text) as file:
                    head = next(map(self._whole, file.iter_batches(_SAMPLE, [0], text)), None)
        texts = {n: [] if head is None else head[n].to_pylist() for n in text}
        others = [(n, str(k)) for n, k in kinds.items() if n not in text]
        self.column, self.id_column = _columns(texts, others, str(path), column, id_column)

    def starts(self, size: int) -> tuple[int, list[int]]:
        rows = sum(self.groups)
        return rows, [0] * -(-rows // size)

    def digest(self) -> str:
        return digest(self.path, "sha256:")

    def read(self, part: Part) -> Iterator[Row | Refused]:
        pa, _ = arrow()
        columns = [self.column, *([self.id_column] if self.id_column else [])]
        position, last = 0, part.start + part.rows
        with open_parquet(self.path, columns) as file:
            for group, rows in enumerate(self.groups):
                begin, position = position, position + rows
                at, stop = max(begin, part.start), min(position, last)
                try:
                    for batch in file.iter_batches(4096, [group], columns) if at < stop else ():
                        begin, end = begin + len(batch), min(begin + len(batch), stop)
                        if at < end:
                            batch = batch.slice(at - begin + len(batch), end - at)
                            yield from self._rows(self._whole(batch), part, at)
                            at = end
                        if at == stop:
                            break
                except (pa.ArrowException, OSError, ValueError) as error:
                    for place in range(at, stop):
                        reason = f"row group {group} cannot be read: {error}"
                        yield Refused(*self._place(part, place), reason)

    def _whole(self, batch: Any) -> Any:
        """The batch with its texts; one that is repeated takes a few bytes in the file."""
        if (taken := text_bytes(batch)) > self.most:
            raise ValueError(
                f"the texts of {len(batch)} rows take {taken} bytes, more than {self.most}"
            )
        return decoded(batch)

    def _rows(self, batch: Any, part: Part, at: int) -> Iterator[Row | Refused]:
        texts = batch[self.column].to_pylist()
        ids = batch[self.id_column].to_pylist() if self.id_column else [None] * len(texts)
        for place, (text, ident) in enumerate(zip(texts, ids, strict=True), at):
            yield _text_row(*self._place(part, place), ident, text)

    def _place(self, part: Part, place: int) -> tuple[int, str]:
        return part.first + place - part.start, f"{self.name} row {place + 1}"


class _Delimited(Source):
    """A csv or tsv file. It is read whole by `read_table`, because rows may span lines."""

    def __init__(self, path: Path, name: str, column: str | None, id_column: str | None):
        self.path, self.name = path, name
        if column is None and id_column is not None:
            raise ValueError(f"{path}: --id-column needs --column, too")
        columns = [column, *([id_column] if id_column else [])] if column else None
        table = read_table(path, columns=columns)
        if columns is None and len(table.columns) > 1:
            raise ValueError(f"{path} has the texts {', '.join(table.columns)}: choose a --column")
        cells_by_line: dict[int, Any] = dict(zip(table.numbers, table.rows, strict=True))
        cells_by_line |= {line: why for why, lines in table.left_out for line in lines}
        self.lines = sorted(cells_by_line.items())

    def starts(self, size: int) -> tuple[int, list[int]]:
        return len(self.lines), [0] * -(-len(self.lines) // size)

    def digest(self) -> str:
        return hashlib.sha256(repr(self.lines).encode()).hexdigest()

    def read(self, part: Part) -> Iterator[Row | Refused]:
        for place, (line, cells) in enumerate(self.lines[part.start : part.start + part.rows]):
            row, where = part.first + place, f"{self.name} line {line}"
            if isinstance(cells, str):
                yield Refused(row, where, cells)
            else:
                yield _text_row(row, where, cells[1] if len(cells) > 1 else None, cells[0])


class _Pictures(Source):
    """The pictures of a folder and its subfolders; their ids are relative paths."""

    holds = "pictures"
    name = "pictures"

    def __init__(self, root: Path, files: list[Path]):
        self.root, self.files = root, files

    def starts(self, size: int) -> tuple[int, list[int]]:
        return len(self.files), [0] * -(-len(self.files) // size)

    def digest(self) -> str:
        """Of names and sizes: to read every picture twice would take too long."""
        names = [f"{self._id(file)}\0{file.stat().st_size}\n" for file in self.files]
        return hashlib.sha256("".join(names).encode(errors="surrogateescape")).hexdigest()

    def read(self, part: Part) -> Iterator[Row | Refused]:
        for place, file in enumerate(self.files[part.start : part.start + part.rows]):
            row, where = part.first + place, self._id(file)
            try:
                where.encode()
                picture = read_picture(file, "the file")
            except (OSError, ValueError) as error:
                yield Refused(row, where, str(error))
            else:
                yield Row(row, where, where, picture)

    def _id(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def arrow() -> tuple[Any, Any]:
    """The libraries that read and write parquet."""
    with needs("ncl-multi[bulk]"):
        import pyarrow
        from pyarrow import parquet
    return pyarrow, parquet


def _values(kind: Any) -> Any:
    """The type of the values of a column, which may be dictionary-encoded."""
    return kind.value_type if str(kind).startswith("dictionary") else kind


def _text_row(row: int, where: str, ident: Any, text: Any) -> Row | Refused:
    if not isinstance(text, str):
        what = "is missing" if text is None else f"is {type(text).__name__}, not a string"
        return Refused(row, where, f"the text {what}")
    if not text.strip():
        return Refused(row, where, "the text is empty")
    try:
        text.encode()
        name = None if ident is None else str(ident)
        (name or "").encode()
    except UnicodeEncodeError as error:
        return Refused(row, where, f"the row is not valid Unicode: {error}")
    return Row(row, where, name, text)

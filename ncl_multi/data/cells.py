"""Cells of tables: csv, tsv, jsonl, parquet and txt files and tables of the hub, as columns.

Encoding, byte-order mark and delimiter are detected. The meaning of columns is not used here.
"""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncl_multi.data.parquet import read_parquet, whole_parquet
from ncl_multi.files import most_memory
from ncl_multi.optional import needs

KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".txt")
"""Endings of the files that are read."""

_MOST_COLUMNS = 4096
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Cells:
    """Columns as they were read; `others` are the names and types of columns that are not text.

    `numbers` are the lines of the rows. `first_line`: its cells were used as names.
    """

    columns: dict[str, list[Any]]
    numbers: Sequence[int]
    others: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    unit: str = "line"
    first_line: bool = False


def read_cells(source: str, *, named: bool = False, known: Sequence[str] = ()) -> Cells:
    """All columns of a file, or of `hf:<name>` on the hub.

    Args:
        source: File, or name on the hub.
        named: Columns will be asked for by name, so a txt file is a table with a line of names.
        known: Names that the caller takes besides files, for the message about a missing file.
    """
    if source.startswith("hf:"):
        return _from_hub(source)
    path = Path(source)
    kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, or hf:<name>"
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        names = f"Known names are {', '.join(known)}. " if known else ""
        raise FileNotFoundError(f"{source} {what}. {names}Files end in {kinds}")
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"files must end in {kinds}; got {source}")
    if kind == ".parquet":
        return _from_parquet(path)
    text, notices = decode(path)
    if kind == ".txt" and not named:
        lines = [(n, line) for n, line in _lines(text) if line.strip()]
        numbers = [number for number, _ in lines]
        return Cells({"text": [line for _, line in lines]}, numbers, notices=notices)
    if kind in (".jsonl", ".ndjson"):
        return _from_json_lines(text, notices, source)
    return _from_rows(delimited(text, source), notices, source)


def decode(path: Path) -> tuple[str, tuple[str, ...]]:
    """Text of a file without its byte-order mark, and notices for the user.

    Without a mark it is UTF-8, else Windows-1252 or Latin-1, with a notice. Binary files and UTF-8
    with damaged bytes are refused.
    """
    content = path.read_bytes()
    marks = [
        (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"), (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ]  # fmt: skip
    mark, encoding = next((m for m in marks if content.startswith(m[0])), (b"", "utf-8"))
    notices: tuple[str, ...] = ()
    try:
        text = content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: len(mark) + error.start].count(b"\n") + 1
        if mark or _damaged_utf8(content):
            raise ValueError(
                f"{path} is {encoding.upper()} except for bytes on line {line}: {error.reason}. "
                f"Save the file again as UTF-8"
            ) from error
        try:
            text, encoding = content.decode("cp1252"), "Windows-1252"
        except UnicodeDecodeError:
            text, encoding = content.decode("latin-1"), "Latin-1"
        notices = (f"not UTF-8, read as {encoding}: look at the accents in the example",)
    # A text may contain a stray control character; in other files one byte in ten is one.
    controls = re.findall(r"[\x01-\x08\x0e-\x1a\x1c-\x1f]", text) if notices else []
    if "\0" in text or 100 * len(controls) > len(text):
        first = "\0" if "\0" in text else controls[0]
        line = text.count("\n", 0, text.index(first)) + 1
        raise ValueError(
            f"{path} is not a text file: line {line} contains the byte {ord(first):#04x}. "
            f"Save it as UTF-8"
        )
    return text, notices


def delimited(text: str, source: str) -> list[tuple[int, list[str]]]:
    r"""Rows of cells, each with its line, split by the one delimiter that fits every line.

    Example:
        >>> delimited("id;text\n1;a, b\n", "a.csv")
        [(1, ['id', 'text']), (2, ['1', 'a, b'])]
    """
    marked = re.match(r"sep=([,;\t|])\r?\n", text)
    if marked:  # A line of Excel. It becomes an empty one, so that line numbers stay right.
        text = "\n" + text[marked.end() :]
    fitting: dict[str, list[tuple[int, list[str]]]] = {}
    problems: list[tuple[int, str]] = []
    for delimiter in [marked[1]] if marked else _DELIMITERS:
        # A delimiter must be in the first line, except commas: a table may have one column.
        if delimiter != "," and not marked and _width(text, delimiter) == 1:
            continue
        rows, problem = _split(text, delimiter)
        if problem and delimiter == "\t":
            # Files with tabs often have quotation marks that enclose nothing.
            plain = _split(text, delimiter, quoting=csv.QUOTE_NONE)
            enclosed = any(re.fullmatch('".*"', cell) for _, row in plain[0] for cell in row)
            rows, problem = (rows, problem) if plain[1] or enclosed else plain
        if problem:
            problems.append((len(rows), problem))
        elif rows:
            fitting[delimiter] = rows
    several = {d: rows for d, rows in fitting.items() if len(rows[0][1]) > 1}
    if len(several) > 1:
        raise ValueError(
            f"{source} can be split by {' or by '.join(_DELIMITERS[d] for d in several)}: put "
            f'quotation marks (") around the cells that contain one of them'
        )
    if several:
        return next(iter(several.values()))
    if problems:
        raise ValueError(f"{source}: {max(problems)[1]}")
    one_column = next(iter(fitting.values()), [])
    for delimiter in [] if marked else (";", "\t", "|"):
        if len(one_column) > 3 and all(delimiter in row[0] for _, row in one_column[1:]):
            raise ValueError(
                f"{source}: the first line names one column, but all others contain "
                f"{_DELIMITERS[delimiter]}: name every column, or save the lines as a txt file"
            )
    return one_column


def json_row(line: str) -> dict[str, Any]:
    """The object on one line of a jsonl file; an error says what the line is instead.

    Example:
        >>> json_row('{"text": "a mug"}')
        {'text': 'a mug'}
    """
    try:
        row = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'must be an object such as {{"text": "..."}}; got {short(line)}')
    return row


def _from_rows(rows: list[tuple[int, list[str]]], notices: tuple[str, ...], source: str) -> Cells:
    if not rows:
        raise ValueError(f"{source} is empty: expected a line of column names, then rows")
    names = [name.strip() for name in rows[0][1]]
    if len(names) > _MOST_COLUMNS:
        raise ValueError(_too_many(source, len(names)))
    double = [name for name, count in Counter(names).items() if count > 1 and name]
    if double:
        raise ValueError(f"{source} has two columns called {double[0]!r}: rename one of them")
    if not any(names):
        raise ValueError(f"{source} must start with a line of column names; got an empty one")
    # Columns without a name are called by their place, to distinguish them.
    names = [name or f"(column {place})" for place, name in enumerate(names, 1)]
    for number, row in rows[1:]:
        if row == rows[0][1]:
            raise ValueError(f"line {number} of {source} repeats the column names: drop it")
    columns = [list(column) for column in zip(*(row for _, row in rows[1:]), strict=True)]
    cells = dict(zip(names, columns or [[] for _ in names], strict=True))
    return Cells(cells, [number for number, _ in rows[1:]], notices=notices, first_line=True)


def _from_json_lines(text: str, notices: tuple[str, ...], source: str) -> Cells:
    rows, numbers = [], []
    names: dict[str, None] = {}
    for number, line in _lines(text, ends="\n"):
        if not line.strip():
            continue
        try:
            row = json_row(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {source} {error}") from error
        rows.append(row)
        numbers.append(number)
        names |= dict.fromkeys(row)
        if len(names) > _MOST_COLUMNS:
            raise ValueError(_too_many(source, len(names)))
    if 8 * len(rows) * len(names) > most_memory(len(text)):
        raise ValueError(
            f"{source} has {len(rows)} rows and {len(names)} names, most of which a row does not "
            f"have: leave out names that are seldom used"
        )
    return Cells({name: [row.get(name) for row in rows] for name in names}, numbers, (), notices)


def _no_double_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a name occurs twice")
    return row


# Made once: json.loads with a hook makes one for every line, which takes as long as reading it.
_JSON = json.JSONDecoder(object_pairs_hook=_no_double_names)


def _from_parquet(path: Path) -> Cells:
    with whole_parquet(path):
        import pyarrow as pa
        from pyarrow import parquet

        schema = parquet.read_schema(path)
        types = {f.name: getattr(f.type, "value_type", f.type) for f in schema}
        lists = {f.name for f in schema if pa.types.is_nested(f.type)}
        texts = [
            name
            for name, kind in types.items()
            if name not in lists and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        ]
        table = read_parquet(path, texts) if texts else None
    others = tuple((f.name, str(f.type)) for f in schema if f.name not in texts)
    columns = {name: table[name].to_pylist() for name in texts} if table else {}
    count = table.num_rows if table else 0
    return Cells(columns, range(1, count + 1), others, unit="row")


def _from_hub(source: str) -> Cells:
    with needs("ncl-multi[sentence]"):
        from datasets import Value, load_dataset
    table = load_dataset(source.removeprefix("hf:"), split="train")
    texts = [
        name
        for name, kind in table.features.items()
        if isinstance(kind, Value) and kind.dtype in ("string", "large_string")
    ]
    others = tuple(
        (name, str(getattr(kind, "dtype", type(kind).__name__)))
        for name, kind in table.features.items()
        if name not in texts
    )
    columns = {name: list(table[name]) for name in texts}
    return Cells(columns, range(1, len(table) + 1), others, unit="row")


def _reader(text: str, delimiter: str, quoting: Any) -> Any:
    file = io.StringIO(text, newline="")
    return csv.reader(
        file, delimiter=delimiter, quoting=quoting, strict=True, skipinitialspace=True
    )


def _width(text: str, delimiter: str) -> int:
    """Cells of the first line; 0 where its quotation marks do not fit."""
    with _long_cells(len(text)):
        try:
            return len(next(filter(None, _reader(text, delimiter, csv.QUOTE_MINIMAL)), [""]))
        except csv.Error:
            return 0


def _split(
    text: str, delimiter: str, quoting: Any = csv.QUOTE_MINIMAL
) -> tuple[list[tuple[int, list[str]]], str]:
    """Rows with their lines up to the first bad one, and what is wrong with it."""
    rows: list[tuple[int, list[str]]] = []
    with _long_cells(len(text)):
        reader = _reader(text, delimiter, quoting)
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return rows, ""
            except csv.Error as error:
                return rows, f"line {line} has a quotation mark that does not fit ({error})"
            if not row:
                continue
            width = len(rows[0][1]) if rows else len(row)
            if len(row) != width:
                problem = (
                    f"line {line} has {len(row)} cells where the first line has {width} (put "
                    f'quotation marks (") around cells that contain {_DELIMITERS[delimiter]})'
                )
                return rows, problem
            if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in row):
                return rows, f"line {line} has a quotation mark that is closed on a later line"
            rows.append((line, row))


@contextmanager
def _long_cells(length: int) -> Iterator[None]:
    """Let csv read cells of any length: its limit of 131,072 characters is global."""
    limit = csv.field_size_limit()
    csv.field_size_limit(max(limit, min(length + 1, 2**31 - 1)))
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _lines(text: str, ends: str = r"\r\n|\n|\r") -> Iterator[tuple[int, str]]:
    """Lines with their numbers; characters such as U+2028 end no line."""
    return enumerate(re.split(ends, text), 1)


def _damaged_utf8(content: bytes) -> bool:
    """Whether it is mostly UTF-8: other encodings contain its sequences only by chance."""
    text = content.decode("utf-8", errors="replace")
    bad = text.count("\ufffd")
    good = sum(not character.isascii() for character in text) - bad
    return 10 * good > bad


def _too_many(source: str, columns: int) -> str:
    return f"{source} has at least {columns} columns; at most {_MOST_COLUMNS} are read"


def short(text: str) -> str:
    """The beginning of a text on one line, in quotation marks, for a message."""
    text = " ".join(text.split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")

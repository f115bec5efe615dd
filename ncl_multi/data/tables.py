"""One reader for tables of text: csv, tsv, jsonl, parquet, txt files and tables of the hub.

Encoding, byte-order mark and delimiter are found out. Columns are taken by name; a column without
a known name is taken only if it is the only one that holds text. Numbers, ids, dates, links, file
paths and categories are never taken for text. What cannot be decided is refused with the choices.
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
from statistics import median
from typing import Any

from ncl_multi.files import most_memory

KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".txt")
"""Endings of the files that are read."""

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_TRIPLET = ("anchor", "positive", "negative")
_PAIRS = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("sentence_a", "sentence_b"),
    ("text1", "text2"),
    ("question", "answer"),
    ("query", "answer"),
    ("query", "document"),
    ("query", "passage"),
)
_SINGLES = (
    "text", "texts", "sentence", "sentences", "review", "review_text", "reviews", "caption",
    "captions", "body", "content", "comment", "document", "abstract", "message", "description",
)  # fmt: skip
# Known, but often only a label of the text in another column.
_WEAK = ("title", "headline", "subject", "summary", "anchor", "question", "query")

_NOT_GIVEN = {"", "-", "n/a", "na", "nan", "none", "null", "#n/a", "<na>", "?"}
_ENDINGS = (
    "avif|bmp|csv|docx?|flac|gif|gz|heic|html?|jpe?g|json|m4a|md|mkv|mov|mp3|mp4|npy|ogg|parquet|"
    "pdf|png|pptx?|pt|svg|tar|tiff?|tsv|txt|wav|webm|webp|xlsx?|xml|zip"
)
_MONTHS = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_CLOCK = r"(?:[T ,]+\d{1,2}:\d{2}[\d:.,+\-Z ]*(?:am|pm|utc|gmt)?)?"
_NOT_TEXT = {
    "numbers": r"[#$€£¥+\-(]*\d[\d.,'_ \u00a0]*(?:e[+-]?\d+)?\)?\s*(?:%|[a-z€$£¥°]{1,3})?",
    "dates": (
        rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}{_CLOCK}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}{_CLOCK}"
        rf"|(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+)?(?:\d{{1,2}}\.?\s+{_MONTHS}"
        rf"|{_MONTHS}\.?\s+\d{{1,2}}),?\s+\d{{4}}{_CLOCK}|\d{{1,2}}:\d{{2}}(?::\d{{2}}[\d.]*)?"
    ),
    "links": r"[a-z][a-z0-9+]*://\S+|www\.\S+|(?:mailto:)?[^\s@]+@[^\s@]+\.[^\s@]+",
    "file paths": (
        rf"[^\n]*\.(?:{_ENDINGS})|(?:~|\.\.?)?/\S.*|[a-z]:[\\/].*"
        r"|[\x21-\x7e]*[\\/][\x21-\x7e]*"
    ),
    "ids": r"(?=\S*[\d_])[a-z0-9_.:#+\-]+",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NOT_TEXT.items()}
# Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese: a sentence need not contain a space.
_NO_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_LOOKED_AT = 1000
# Some patterns take time that grows with the square of the text; numbers, dates, links, paths and
# ids are shorter than this.
_LONGEST = 500
_MOST_COLUMNS = 4096


@dataclass(frozen=True)
class Table:
    """The text of a table: one tuple per row, and what was not taken.

    `numbers` are the lines of the rows (rows of a parquet file or of the hub), counted from 1.
    `left_out` are the lines that were left out, by reason.
    """

    source: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: list[int]
    unused: tuple[str, ...] = ()
    left_out: tuple[tuple[str, tuple[int, ...]], ...] = ()
    notices: tuple[str, ...] = ()
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """What was taken, with one example, and how many rows were left out and why."""
        columns = f"column{'s' * (len(self.columns) > 1)} {', '.join(self.columns)}"
        example = " | ".join(_short(cell) for cell in self.rows[0])
        lines = [
            f"{self.source}: {len(self.rows)} rows, {columns}",
            f"  example, {self.unit} {self.numbers[0]}: {example}",
        ]
        if self.unused:
            lines.append(f"  not used: {', '.join(self.unused)}")
        for reason, numbers in self.left_out:
            lines.append(f"  left out {len(numbers)}: {reason} ({self.unit} {_few(numbers)})")
        return "\n".join([*lines, *(f"  {notice}" for notice in self.notices)])


def read_table(
    source: str | Path, *, columns: Sequence[str] | None = None, known: Sequence[str] = ()
) -> Table:
    r"""Read the text of a csv, tsv, jsonl, parquet or txt file, or of `hf:<name>` on the hub.

    Without `columns`, these names are looked for: anchor, positive, negative; pairs such as
    sentence1, sentence2 or question, answer; text, sentence, review, caption, body and the like.
    If there are none, the only column that holds text is taken. Everything else is refused with
    the list of columns. Rows whose text is empty or missing are left out and counted; a row that
    does not fit the table is refused with its line. The lines of a txt file are its rows, unless
    `columns` are asked for: then it is a table with a line of names, too.

    Args:
        source: File, or `hf:<name>` for the training split of a dataset of the hub.
        columns: Names of the columns to take, in this order; they are not looked at further.
        known: Names that the caller takes besides files, for the message about a missing file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "reviews.csv"
        >>> _ = path.write_text("id;stars;review\n7;5;A good mug\n8;1;It broke\n")
        >>> table = read_table(path)
        >>> table.columns, table.rows
        (('review',), [('A good mug',), ('It broke',)])
    """
    source = str(source)
    if isinstance(columns, str):
        raise ValueError(f"columns must be a list of names; got {columns!r}, say [{columns!r}]")
    cells = _from_hub(source) if source.startswith("hf:") else _from_file(source, columns, known)
    names = _given(cells, columns, source) if columns else _choose(cells, source)
    return _take(cells, names, source)


def decode(path: Path) -> tuple[str, tuple[str, ...]]:
    """Text of a file without its byte-order mark, and what the user should know about it.

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
    controls = r"[\x00-\x08\x0e-\x1a\x1c-\x1f]" if notices else r"\x00"
    if found := re.search(controls, text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(
            f"{path} is not a text file: line {line} contains the byte {ord(found[0]):#04x}. "
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
    if marked:  # Excel's own line. An empty one in its place keeps the line numbers.
        text = "\n" + text[marked.end() :]
    fitting: dict[str, list[tuple[int, list[str]]]] = {}
    problems: list[tuple[int, str]] = []
    for delimiter in [marked[1]] if marked else _DELIMITERS:
        # Where a delimiter is not in the first line, only commas speak for a table of one column.
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
        row = json.loads(line, object_pairs_hook=_no_double_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'must be an object such as {{"text": "..."}}; got {_short(line)}')
    return row


def text_column(
    columns: dict[str, list[Any]], source: str, others: Sequence[tuple[str, str]] = ()
) -> str:
    """The one column that holds text, chosen from a few rows as `read_table` chooses from all.

    `others` are columns of another type, by type, for the message if none can be chosen.

    Example:
        >>> text_column({"id": ["7", "8"], "review": ["A good mug", "It broke"]}, "reviews.jsonl")
        'review'
    """
    cells = _Cells(columns, range(1, 1 + max(map(len, columns.values()), default=0)), tuple(others))
    names = _choose(cells, source)
    if len(names) > 1:
        raise ValueError(_refusal(f"{', '.join(names)} could be meant", cells, source, names[0]))
    return names[0]


def _from_file(source: str, columns: Sequence[str] | None, known: Sequence[str]) -> "_Cells":
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
    if kind == ".txt" and not columns:
        lines = [(n, line) for n, line in _lines(text) if line.strip()]
        numbers = [number for number, _ in lines]
        return _Cells({"text": [line for _, line in lines]}, numbers, notices=notices)
    if kind in (".jsonl", ".ndjson"):
        return _from_json_lines(text, notices, source)
    rows = delimited(text, source)
    return _from_rows(rows, notices, source, named=columns is not None)


@dataclass(frozen=True)
class _Cells:
    """Columns as they were read; `others` are those of another type than text, by type."""

    columns: dict[str, list[Any]]
    numbers: Sequence[int]
    others: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    unit: str = "line"


def _from_rows(
    rows: list[tuple[int, list[str]]], notices: tuple[str, ...], source: str, named: bool
) -> _Cells:
    if not rows:
        raise ValueError(f"{source} is empty: expected a line of column names, then the rows")
    names = [name.strip() for name in rows[0][1]]
    if len(names) > _MOST_COLUMNS:
        raise ValueError(_too_many(source, len(names)))
    double = [name for name, count in Counter(names).items() if count > 1 and name]
    if double:
        raise ValueError(f"{source} has two columns called {double[0]!r}: rename one of them")
    if not any(names):
        raise ValueError(f"{source} must start with a line of column names; got an empty one")
    # A column without a name cannot be asked for; its place in the list tells it from others.
    names = [name or f"(column {place})" for place, name in enumerate(names, 1)]
    for number, row in rows[1:]:
        if row == rows[0][1]:
            raise ValueError(f"line {number} of {source} repeats the column names: drop it")
    columns = [list(column) for column in zip(*(row for _, row in rows[1:]), strict=True)]
    cells = dict(zip(names, columns or [[] for _ in names], strict=True))
    if not named and (why := _no_header(cells)):
        raise ValueError(
            f"the first line of {source} must be column names, but {why}. Add a line of names"
            f"{'' if len(names) == 1 else f', {len(names)} of them'}; if these are the names, "
            f"take the right one with --columns"
        )
    return _Cells(cells, [number for number, _ in rows[1:]], notices=notices)


def _no_header(cells: dict[str, list[str]]) -> str:
    """Why the first line looks like data, if it does."""
    if any(map(_known, cells)):
        return ""
    for name, values in cells.items():
        machine = next((kind for kind in _PATTERNS if _is(kind, name)), None)
        if machine in ("numbers", "dates", "links"):
            return f"{name!r} looks like one of {machine}"
        if not name.startswith("(column ") and name in values:
            return f"{name!r} is also a cell of its column"
        if _words(name) > 3 or (_words(name) > 1 and name.endswith((".", "!"))):
            return f"{_short(name)} looks like text"
    return ""


def _from_json_lines(text: str, notices: tuple[str, ...], source: str) -> _Cells:
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
    return _Cells({name: [row.get(name) for row in rows] for name in names}, numbers, (), notices)


def _no_double_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a name occurs twice")
    return row


def _from_parquet(path: Path) -> _Cells:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("parquet files need pyarrow: pip install pyarrow") from error
    try:
        schema = parquet.read_schema(path)
        types = {f.name: getattr(f.type, "value_type", f.type) for f in schema}
        lists = {f.name for f in schema if pa.types.is_nested(f.type)}
        texts = [
            name
            for name, kind in types.items()
            if name not in lists and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        ]
        table = read_parquet(path, texts) if texts else None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole parquet file: {error}") from error
    others = tuple((f.name, str(f.type)) for f in schema if f.name not in texts)
    columns = {name: table[name].to_pylist() for name in texts} if table else {}
    count = table.num_rows if table else 0
    return _Cells(columns, range(1, count + 1), others, unit="row")


def read_parquet(path: Path, columns: Sequence[str]) -> Any:
    """These columns of a parquet file as a `pyarrow.Table`, if they are not too large for it."""
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

    One value that is repeated takes a few bytes in the file and any number of them in memory. So
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
        part = about.column(number)
        if part.path_in_schema.partition(".")[0] in columns:
            width = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}.get(part.physical_type, 8)
            total += max(part.total_uncompressed_size, part.num_values * width)
    return total


def _from_hub(source: str) -> _Cells:
    try:
        from datasets import Value, load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "hf:<name> needs datasets: pip install 'ncl-multi[sentence]'"
        ) from error
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
    return _Cells(columns, range(1, len(table) + 1), others, unit="row")


def _given(cells: _Cells, columns: Sequence[str], source: str) -> list[str]:
    """The columns that were asked for, if they are there."""
    for name in columns:
        if name not in cells.columns:
            other = dict(cells.others).get(name)
            problem = f"holds {other}, not text" if other else "does not exist"
            raise ValueError(f"column {name!r} of {source} {problem}. Columns:\n{_list(cells)}")
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns must differ; got {', '.join(columns)}")
    return list(columns)


def _choose(cells: _Cells, source: str) -> list[str]:
    """The columns with known names, else the only one that holds text."""
    if not cells.numbers and (cells.columns or not cells.others):
        raise ValueError(f"{source} has no rows")
    kinds = {name: _kind(values) for name, values in cells.columns.items()}
    plain: dict[str, str] = {}
    for name in cells.columns:
        key = re.sub(r"[\s\-]+", "_", name.strip().lower())
        if _known(name) and key in plain:
            raise ValueError(_refusal(f"both {plain[key]!r} and {name!r}", cells, source, name))
        plain[key] = name

    def readable(*keys: str) -> bool:
        return not any(
            kinds[plain[key]] in _PATTERNS or kinds[plain[key]].startswith("values") for key in keys
        )

    named = [tuple(key for key in _TRIPLET if key in plain)]
    if not {"anchor", "positive"} <= plain.keys():
        named = [pair for pair in _PAIRS if plain.keys() >= set(pair)]
        paired = {key for pair in named for key in pair}
        singles = [key for key in _SINGLES if key in plain and key not in paired]
        named += [(key,) for key in singles if readable(key)]
    for keys in named:
        if not readable(*keys):
            problem = f"{', '.join(plain[key] for key in keys)} do not all hold text"
            raise ValueError(_refusal(problem, cells, source, plain[keys[0]]))
    if len(named) == 1:
        return [plain[key] for key in named[0]]
    texts = [name for name, kind in kinds.items() if kind in ("text", "short texts")]
    if len(named) > 1:
        names = " and ".join(", ".join(plain[key] for key in keys) for keys in named)
        raise ValueError(_refusal(f"{names} could be meant", cells, source, plain[named[0][0]]))
    if not texts:
        weak = [plain[key] for key in _WEAK if key in plain and readable(key)]
        if len(weak) == 1:
            return weak
        names_at_all = [*cells.columns, *(name for name, _ in cells.others)]
        raise ValueError(_refusal("no column holds text", cells, source, names_at_all[-1]))
    if len(texts) > 1:
        problem = f"columns {', '.join(texts)} hold text"
        raise ValueError(_refusal(problem, cells, source, texts[-1]))
    if kinds[texts[0]] == "short texts":
        problem = f"column {texts[0]} contains mostly single words"
        raise ValueError(_refusal(problem, cells, source, texts[0]))
    return texts


def _take(cells: _Cells, names: list[str], source: str) -> Table:
    rows, numbers = [], []
    left_out: dict[str, list[int]] = {}
    for number, row in zip(
        cells.numbers, zip(*(cells.columns[name] for name in names), strict=True), strict=True
    ):
        reason = None
        for name, value in zip(names, row, strict=True):
            if value is None or value != value:
                reason = reason or f"{name} is missing"
            elif not isinstance(value, str):
                kind = type(value).__name__
                raise ValueError(
                    f"{cells.unit} {number} of {source}: {name} must be text; got "
                    f"{_short(str(value))}, a {kind}"
                )
            elif not value.strip():
                reason = reason or f"{name} is empty"
            elif not value.isascii() and re.search("[\ud800-\udfff]", value):
                raise ValueError(
                    f"{cells.unit} {number} of {source}: {name} contains half a character "
                    f"({_short(value)})"
                )
        if reason:
            left_out.setdefault(reason, []).append(number)
        else:
            rows.append(tuple(value.strip() for value in row))
            numbers.append(number)
    if not rows:
        why = "; ".join(f"{reason} in {len(lines)}" for reason, lines in left_out.items())
        raise ValueError(f"{source} has no rows{f' that can be used: {why}' if why else ''}")
    unused = tuple(
        name for name in (*cells.columns, *(n for n, _ in cells.others)) if name not in names
    )
    reasons = tuple((reason, tuple(lines)) for reason, lines in left_out.items())
    return Table(
        source, tuple(names), rows, numbers, unused, reasons, cells.notices, cells.unit
    )  # fmt: skip


def _kind(values: Sequence[Any]) -> str:
    """What a column holds: `text`, `short texts`, or what it holds instead."""
    values = [value for value in values if value is not None and value != ""]
    values = values[:: -(-len(values) // _LOOKED_AT) or 1]
    texts = [value.strip() for value in values if isinstance(value, str)]
    given = [text for text in texts if text.lower() not in _NOT_GIVEN]
    others = [value for value in values if not isinstance(value, str)]
    if len(others) > len(given):
        return f"values of type {type(others[0]).__name__}"
    if not given:
        return "nothing"
    for kind in _PATTERNS:
        if sum(_is(kind, text) for text in given) >= 0.9 * len(given):
            return kind
    lengths = [_words(text) for text in given]
    several = sum(length > 1 for length in lengths) / len(lengths)
    distinct = len(set(given)) / len(given)
    if several < 0.1:
        return "single words"
    if len(given) >= 4 and distinct <= 0.5 and median(lengths) <= (3 if distinct > 0.1 else 8):
        return "categories"
    return "text" if several >= 0.5 else "short texts"


def _is(kind: str, text: str) -> bool:
    return len(text) <= _LONGEST and _PATTERNS[kind].fullmatch(text) is not None


def _words(value: str) -> int:
    """Words with letters only, so that `3 kg` is one and `AB-12 34` none."""
    spaceless = len(_NO_SPACES.findall(value))
    tokens = [token for token in value.split() if not _NO_SPACES.search(token)]
    plain = [t for t in tokens if any(c.isalpha() for c in t) and not any(c.isdigit() for c in t)]
    return len(plain) + spaceless // 2


def _known(name: str) -> bool:
    key = re.sub(r"[\s\-]+", "_", name.strip().lower())
    return key in (*_TRIPLET, *_SINGLES, *_WEAK, *(key for pair in _PAIRS for key in pair))


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
    """Rows with their lines up to the first that does not fit, and what is wrong with that one."""
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
    """Let csv read cells of any length: its limit of 131,072 characters is for the process."""
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, min(length + 1, 2**31 - 1)))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(text: str, ends: str = r"\r\n|\n|\r") -> Iterator[tuple[int, str]]:
    """Lines with their numbers; characters such as U+2028 end no line."""
    return enumerate(re.split(ends, text), 1)


def _damaged_utf8(content: bytes) -> bool:
    """True where UTF-8 is meant: in other encodings its sequences occur by chance only."""
    text = content.decode("utf-8", errors="replace")
    bad = text.count("\ufffd")
    good = sum(not character.isascii() for character in text) - bad
    return 10 * good > bad


def _too_many(source: str, columns: int) -> str:
    return f"{source} has at least {columns} columns; at most {_MOST_COLUMNS} are read"


def _refusal(problem: str, cells: _Cells, source: str, example: str) -> str:
    how = f"choose with --columns {example!r} (in Python columns=[{example!r}])"
    return f"{source}: {problem}; {how}. Columns:\n{_list(cells)}"


def _list(cells: _Cells) -> str:
    lines = []
    for name, values in cells.columns.items():
        example = next((v for v in values if v is not None and str(v).strip()), "")
        lines.append(f"  {name}: {_short(str(example))} ({_kind(values)})")
    return "\n".join([*lines, *(f"  {name}: ({kind})" for name, kind in cells.others)])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")

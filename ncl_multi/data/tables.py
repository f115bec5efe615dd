"""One reader for tables of text: which columns contain the text, and which rows have any.

Columns are chosen by name; a column without a known name is used only if it is the only one with
text. Numbers, ids, dates, links, file paths and categories do not count as text. Ambiguous tables
are refused with a list of the choices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ncl_multi.data.cells import Cells, read_cells, short

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
# Known names, but often only titles of the text in another column.
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
        example = " | ".join(short(cell) for cell in self.rows[0])
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
    If there are none, the only column with text is taken. Everything else is refused with the list
    of columns. Rows whose text is empty or missing are left out and counted; a row that
    does not fit the table is refused with its line. The lines of a txt file are its rows, unless
    `columns` are given: then it is a table with a header line, too.

    Args:
        source: File, or `hf:<name>` for the training split of a dataset of the hub.
        columns: Names of the columns to take, in this order; they are not checked further.
        known: Other names that the caller accepts, for the message about a missing file.

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
        raise ValueError(f"columns must be a list of names; got {columns!r}, pass [{columns!r}]")
    cells = read_cells(source, named=bool(columns), known=known)
    if not columns and cells.first_line and (why := _no_header(cells.columns)):
        several = "" if len(cells.columns) == 1 else f", {len(cells.columns)} of them"
        raise ValueError(
            f"the first line of {source} must be column names, but {why}. Add a line of names"
            f"{several}; if these are the names, take the right one with --columns"
        )
    names = _requested(cells, columns, source) if columns else _choose(cells, source)
    return _take(cells, names, source)


def text_column(
    columns: dict[str, list[Any]], source: str, others: Sequence[tuple[str, str]] = ()
) -> str:
    """The one column with text, chosen from a few rows by the rules of `read_table`.

    `others` are columns of another type, by type, for the message if none can be chosen.

    Example:
        >>> text_column({"id": ["7", "8"], "review": ["A good mug", "It broke"]}, "reviews.jsonl")
        'review'
    """
    cells = Cells(columns, range(1, 1 + max(map(len, columns.values()), default=0)), tuple(others))
    names = _choose(cells, source)
    if len(names) > 1:
        raise ValueError(_refusal(f"{', '.join(names)} could be meant", cells, source, names[0]))
    return names[0]


def _requested(cells: Cells, columns: Sequence[str], source: str) -> list[str]:
    """The requested columns, if they exist."""
    for name in columns:
        if name not in cells.columns:
            other = dict(cells.others).get(name)
            problem = f"contains {other}, not text" if other else "does not exist"
            raise ValueError(f"column {name!r} of {source} {problem}. Columns:\n{_list(cells)}")
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns must differ; got {', '.join(columns)}")
    return list(columns)


def _choose(cells: Cells, source: str) -> list[str]:
    """The columns with known names, else the only one with text."""
    if not cells.numbers and (cells.columns or not cells.others):
        raise ValueError(f"{source} has no rows")
    kinds = {name: _kind(values) for name, values in cells.columns.items()}
    plain: dict[str, str] = {}
    for name in cells.columns:
        key = re.sub(r"[\s\-]+", "_", name.strip().lower())
        if _has_known_name(name) and key in plain:
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
            problem = f"{', '.join(plain[key] for key in keys)} do not all contain text"
            raise ValueError(_refusal(problem, cells, source, plain[keys[0]]))
    texts = [name for name, kind in kinds.items() if kind in ("text", "short texts")]
    if len(named) == 1:
        names = [plain[key] for key in named[0]]
        # Anchors and queries may repeat; a text column that repeats is probably a label.
        if len(names) > 1 or kinds[names[0]] not in ("categories", "single words") or not texts:
            return names
        problem = f"{names[0]} contains {kinds[names[0]]}, and there is text in {', '.join(texts)}"
        raise ValueError(_refusal(problem, cells, source, texts[0]))
    if len(named) > 1:
        several = " and ".join(", ".join(plain[key] for key in keys) for keys in named)
        raise ValueError(_refusal(f"{several} could be meant", cells, source, plain[named[0][0]]))
    if not texts:
        weak = [plain[key] for key in _WEAK if key in plain and readable(key)]
        if len(weak) == 1 and kinds[weak[0]] != "categories":
            return weak
        names_at_all = [*cells.columns, *(name for name, _ in cells.others)]
        raise ValueError(_refusal("no column contains text", cells, source, names_at_all[-1]))
    if len(texts) > 1:
        problem = f"columns {', '.join(texts)} contain text"
        raise ValueError(_refusal(problem, cells, source, texts[-1]))
    if kinds[texts[0]] == "short texts":
        problem = f"column {texts[0]} contains mostly single words"
        raise ValueError(_refusal(problem, cells, source, texts[0]))
    return texts


def _take(cells: Cells, names: list[str], source: str) -> Table:
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
                    f"{short(str(value))}, a {kind}"
                )
            elif not value.strip():
                reason = reason or f"{name} is empty"
            elif not value.isascii() and re.search("[\ud800-\udfff]", value):
                raise ValueError(
                    f"{cells.unit} {number} of {source}: {name} contains half a character "
                    f"({short(value)})"
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


def _no_header(cells: dict[str, list[str]]) -> str:
    """Why the first line looks like data, if it does."""
    if any(map(_has_known_name, cells)):
        return ""
    for name, values in cells.items():
        machine = next((kind for kind in _PATTERNS if _is(kind, name)), None)
        if machine in ("numbers", "dates", "links"):
            return f"{name!r} looks like one of {machine}"
        if not name.startswith("(column ") and name in values:
            return f"{name!r} is also a cell of its column"
        if _words(name) > 3 or (_words(name) > 1 and name.endswith((".", "!"))):
            return f"{short(name)} looks like text"
    return ""


def _kind(values: Sequence[Any]) -> str:
    """The content of a column: `text`, `short texts`, or another kind."""
    values = [value for value in values if value is not None and value != ""]
    values = values[:: -(-len(values) // _LOOKED_AT) or 1]
    texts = [value.strip() for value in values if isinstance(value, str)]
    filled = [text for text in texts if text.lower() not in _NOT_GIVEN]
    others = [value for value in values if not isinstance(value, str)]
    if len(others) > len(filled):
        return f"values of type {type(others[0]).__name__}"
    if not filled:
        return "nothing"
    for kind in _PATTERNS:
        if sum(_is(kind, text) for text in filled) >= 0.9 * len(filled):
            return kind
    lengths = [_words(text) for text in filled]
    several = sum(length > 1 for length in lengths) / len(lengths)
    distinct = len(set(filled)) / len(filled)
    if several < 0.1:
        return "single words"
    if len(filled) >= 4 and distinct <= 0.5 and median(lengths) <= (3 if distinct > 0.1 else 8):
        return "categories"
    return "text" if several >= 0.5 else "short texts"


def _is(kind: str, text: str) -> bool:
    return len(text) <= _LONGEST and _PATTERNS[kind].fullmatch(text) is not None


def _words(value: str) -> int:
    """Number of words with letters only: 1 for `3 kg`, 0 for `AB-12 34`."""
    spaceless = len(_NO_SPACES.findall(value))
    tokens = [token for token in value.split() if not _NO_SPACES.search(token)]
    plain = [t for t in tokens if any(c.isalpha() for c in t) and not any(c.isdigit() for c in t)]
    return len(plain) + spaceless // 2


def _has_known_name(name: str) -> bool:
    key = re.sub(r"[\s\-]+", "_", name.strip().lower())
    return key in (*_TRIPLET, *_SINGLES, *_WEAK, *(key for pair in _PAIRS for key in pair))


def _refusal(problem: str, cells: Cells, source: str, example: str) -> str:
    how = f"choose with --columns {example!r} (in Python columns=[{example!r}])"
    return f"{source}: {problem}; {how}. Columns:\n{_list(cells)}"


def _list(cells: Cells) -> str:
    lines = []
    for name, values in cells.columns.items():
        example = next((v for v in values if v is not None and str(v).strip()), "")
        lines.append(f"  {name}: {short(str(example))} ({_kind(values)})")
    return "\n".join([*lines, *(f"  {name}: ({kind})" for name, kind in cells.others)])


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")

"""Output of a run: tables, JSON files and figures."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ncl_multi.files import atomic
from ncl_multi.optional import needs

with needs("ncl-multi[train]"):
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table


def table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line per row, one column per measure; a measure that a row lacks stays empty."""
    measures = list(dict.fromkeys(measure for row in rows.values() for measure in row))
    grid = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    grid.add_column("")
    for measure in measures:
        grid.add_column(escape(measure), justify="right")
    for name, row in rows.items():
        grid.add_row(escape(name), *(_cell(row.get(measure)) for measure in measures))
    console = Console()
    if not console.is_terminal:
        # For a pipe rich assumes 80 columns and would cut the cells of a wide table.
        console = Console(width=10 * len(measures) + 200)
    console.print(grid)


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON, whole or not at all."""
    with atomic(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, default=str) + "\n")
    return Path(path)


def print_json(content: Any, out: Path | None = None) -> None:
    """Print JSON on one line; with `out`, also write it to that file."""
    print(json.dumps(content, default=str))
    if out is not None:
        write_json(out, content)


def print_rows(
    title: str,
    rows: Mapping[str, Mapping[str, Any]],
    measures: Collection[str],
    out: Path | None = None,
) -> None:
    """Print these measures of all rows as a table, then each row as JSON; `out` as `print_json`."""
    table(title, {name: {m: row[m] for m in measures if m in row} for name, row in rows.items()})
    for row in rows.values():
        print(json.dumps(row, default=str))
    if out is not None:
        write_json(out, rows)


def markdown(corner: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Rows that have the same measures as a table in markdown.

    Example:
        >>> print(markdown("kept", {"8": {"probe": "61.0"}}))
        | kept | probe |
        |---|---|
        | 8 | 61.0 |
    """
    measures = list(next(iter(rows.values())))
    lines = [f"| {corner} | {' | '.join(measures)} |", "|---" * (len(measures) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(map(str, row.values()))} |" for name, row in rows.items()]
    return "\n".join(lines)


def save_figure(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a figure of matplotlib as PNG, whole or not at all, with no box around its plots."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=dpi, format="png")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))

"""Is it luck? Figures of several runs of one recipe as one table, mean and spread, in markdown.

Usage:
    python evals/table.py runs/vision-*/metrics.json
    python evals/table.py runs/clip-*/metrics.json --rows "ncl, style" "twin, style" \
--measures t2i_r_at_10 i2t_r_at_10
    python evals/table.py runs/speed/losses.json

It reads `metrics.json` of recipes and the JSON files of evals. A row is a group of figures, named
by its keys in the file; the spread is the standard deviation over the files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import tyro

from ncl_multi.log import show_messages
from ncl_multi.report import markdown

Rows = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Config:
    """Figures of several runs as one table."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of runs that differ only in the seed."""
    rows: tuple[str, ...] = ()
    """Names of the rows to show; none for all."""
    measures: tuple[str, ...] = ()
    """Names of the measures to show; none for all."""


def rows_of(figures: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, float]]]:
    """Every group of figures in a JSON file, with its name.

    In a list, a row is named by its words and whole numbers: `ours, active 8`.
    """
    if isinstance(figures, list):
        for value in figures:
            if isinstance(value, dict):
                words = [v for v in value.values() if isinstance(v, str)]
                counts = [f"{k} {v}" for k, v in value.items() if type(v) is int]
                floats = {k: v for k, v in value.items() if isinstance(v, float)}
                yield from rows_of(floats, (*name, *words, *counts[:1]))
        return
    numbers = {k: float(v) for k, v in figures.items() if type(v) in (int, float)}
    if numbers:
        yield ", ".join(name), numbers
    for key, value in figures.items():
        if isinstance(value, dict | list):
            yield from rows_of(value, (*name, key))


def together(files: list[Rows]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and spread of every figure that all files have."""
    return {
        row: {
            measure: (mean(values), pstdev(values))
            for measure in figures
            if len(values := [f[row][measure] for f in files if measure in f.get(row, {})])
            == len(files)
        }
        for row, figures in files[0].items()
    }


def cell(average: float, spread: float, several: bool) -> str:
    """The mean with two to four digits; the spread in brackets with the same number of decimals."""
    digits = 0 if abs(average) >= 1000 else 1 if abs(average) >= 10 else 2 if average > 1 else 3
    text = f"{average:,.{digits}f}"
    return f"{text} ({spread:.{digits}f})" if several else text


def main(cfg: Config) -> None:
    files = []
    for path in cfg.files:
        try:
            files.append(dict(rows_of(json.loads(path.read_text()))))
        except (OSError, ValueError, AttributeError) as error:
            raise SystemExit(f"{path} does not contain figures: {error}") from error
    averages = together(files)
    rows = cfg.rows or tuple(row for row in averages if averages[row])
    if missing := [row for row in rows if not averages.get(row)]:
        without = [str(p) for p, run in zip(cfg.files, files, strict=True) if missing[0] not in run]
        raise SystemExit(
            f"no row {missing[0]!r} in {', '.join(without) or 'all files with the same figures'}; "
            f"there are {', '.join(map(repr, averages))}"
        )
    measures = cfg.measures or tuple(dict.fromkeys(m for row in rows for m in averages[row]))
    if missing := [m for m in measures if not any(m in averages[row] for row in rows)]:
        available = dict.fromkeys(m for row in rows for m in averages[row])
        raise SystemExit(f"no measure {missing[0]!r}; there are {', '.join(map(repr, available))}")
    several = len(files) > 1
    seeds = f"mean of {len(files)} (spread)" if several else ""
    cells = {
        row: {m: cell(*averages[row][m], several) if m in averages[row] else "" for m in measures}
        for row in rows
    }
    print(markdown(seeds, cells))


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

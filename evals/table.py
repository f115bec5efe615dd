"""Is it luck? Figures of several runs of one recipe as one table, mean and spread, in markdown.

Usage:
    python evals/table.py runs/vision-*/metrics.json
    python evals/table.py runs/clip-*/metrics.json --rows "ncl, style" "twin, style" \
--measures t2i_r_at_10 i2t_r_at_10
    python evals/table.py runs/speed/losses.json

It reads what recipes write to `metrics.json` and evals to their JSON files. A row is a group of
figures, named by where it stands in the file; the spread is the standard deviation over the files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import tyro

from ncl_multi.log import show_messages

Rows = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Config:
    """Figures of several runs as one table."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of runs that differ in nothing but the seed."""
    rows: tuple[str, ...] = ()
    """Names of the rows to show; all if none is named."""
    measures: tuple[str, ...] = ()
    """Names of the measures to show; all if none is named."""


def rows_of(figures: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, float]]]:
    """Every group of figures in a JSON file, with its name.

    In a list, a row is named by its words and whole numbers: `ours, active 8`.
    """
    if isinstance(figures, list):
        for own in figures:
            if isinstance(own, dict):
                words = [v for v in own.values() if isinstance(v, str)]
                counts = [f"{k} {v}" for k, v in own.items() if type(v) is int]
                floats = {k: v for k, v in own.items() if isinstance(v, float)}
                yield from rows_of(floats, (*name, *words, *counts[:1]))
        return
    numbers = {k: float(v) for k, v in figures.items() if type(v) in (int, float)}
    if numbers:
        yield ", ".join(name), numbers
    for key, own in figures.items():
        if isinstance(own, dict | list):
            yield from rows_of(own, (*name, key))


def together(files: list[Rows]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and spread of every figure that all files have."""
    return {
        row: {
            measure: (mean(values), pstdev(values))
            for measure in own
            if len(values := [f[row][measure] for f in files if measure in f.get(row, {})])
            == len(files)
        }
        for row, own in files[0].items()
    }


def cell(average: float, spread: float, several: bool) -> str:
    """Four digits, or two after the point; the spread in brackets with as many."""
    digits = 0 if abs(average) >= 1000 else 1 if abs(average) >= 10 else 2 if average > 1 else 3
    shown = f"{average:,.{digits}f}"
    return f"{shown} ({spread:.{digits}f})" if several else shown


def main(cfg: Config) -> None:
    files = []
    for path in cfg.files:
        try:
            files.append(dict(rows_of(json.loads(path.read_text()))))
        except (OSError, ValueError, AttributeError) as error:
            raise SystemExit(f"{path} does not contain figures: {error}") from error
    found = together(files)
    rows = cfg.rows or tuple(row for row in found if found[row])
    if missing := [row for row in rows if not found.get(row)]:
        without = [str(p) for p, own in zip(cfg.files, files, strict=True) if missing[0] not in own]
        raise SystemExit(
            f"no row {missing[0]!r} in {', '.join(without) or 'all files with the same figures'}; "
            f"there are {', '.join(map(repr, found))}"
        )
    measures = cfg.measures or tuple(dict.fromkeys(m for row in rows for m in found[row]))
    if missing := [m for m in measures if not any(m in found[row] for row in rows)]:
        known = dict.fromkeys(m for row in rows for m in found[row])
        raise SystemExit(f"no measure {missing[0]!r}; there are {', '.join(map(repr, known))}")
    several = len(files) > 1
    seeds = f"mean of {len(files)} (spread)" if several else ""
    print(f"| {seeds} | {' | '.join(measures)} |")
    print("|---" * (len(measures) + 1) + "|")
    for row in rows:
        cells = (cell(*found[row][m], several) if m in found[row] else "" for m in measures)
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

"""How good are sparse sentence codes at k active dimensions, beside what else is short?

Usage:
    python evals/sentence.py runs/sentence_ncl
    python evals/sentence.py runs/sentence_ncl --active 8 16 32 --plot sentence.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Config:
    """STS-B, Cranfield, bytes and search time of every method of a sentence run."""

    run: tyro.conf.Positional[Path]
    """Folder written by recipes/sentence_ncl.py."""
    active: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    """Numbers of active dimensions."""
    plot: Path | None = None
    """File for a plot of STS-B and Cranfield against active dimensions."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def main(cfg: Config) -> None:
    from ncl_multi.adapters.sentence.report import compare, plot
    from ncl_multi.report import table, write_json

    rows = compare(cfg.run, cfg.active)
    table(f"{cfg.run}", {f"{row['method']} {row['active']}": row for row in rows})
    if cfg.plot is not None:
        print(plot(rows, cfg.plot))
    if cfg.out is not None:
        write_json(cfg.out, rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main(tyro.cli(Config))

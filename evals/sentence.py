"""How good are sparse sentence codes at k active entries, compared with other short codes?

Figures of several runs, such as three seeds, are shown as mean and spread. Retrieval is shown as a
share of the whole encoder's.

Usage:
    python evals/sentence.py runs/sentence_ncl
    python evals/sentence.py runs/seed0 runs/seed1 runs/seed2 --active 8 16 32 --plot sentence.png
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Literal

import tyro

from ncl_multi.log import show_messages


@dataclass(frozen=True)
class Config:
    """STS-B, SICK, CISI, LISA and Cranfield of sentence runs, by active entries."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders written by recipes/sentence_ncl.py."""
    active: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of active entries."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of the encoder, as for the recipe."""
    plot: Path | None = None
    """File for a plot of quality against active entries."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(run: Path, active: tuple[int, ...], precision: str = "bf16") -> dict[str, Any]:
    """Figures of the run's model, measured now, and those of its baselines from metrics.json."""
    from functools import partial

    import ncl_multi as ncl
    from ncl_multi.adapters.sentence.corpus import cached_features
    from ncl_multi.adapters.sentence.report import TextBenchmarks, quality, whole_codes
    from ncl_multi.files import read_json

    model = ncl.load(run)
    judged = TextBenchmarks.of(partial(cached_features, model, precision=precision))
    figures = quality(judged, {"ncl": whole_codes(model)}, active)
    stored = read_json(run / "metrics.json") if (run / "metrics.json").is_file() else {}
    return {name: row for name, row in stored.items() if "@" in name} | figures


def shares(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The test figures of each method and k; nDCG as a share of the whole encoder's."""
    dense = figures["dense"]["test"]
    return {
        name: {
            measure: value / dense[measure.partition("_ndcg")[0] + "_ndcg_at_10"]
            if "_ndcg_at_10" in measure
            else value
            for measure, value in row["test"].items()
        }
        for name, row in figures.items()
    }


def main(cfg: Config) -> None:
    from ncl_multi.adapters.sentence.report import plot
    from ncl_multi.report import markdown, write_json

    if not cfg.runs:
        raise ValueError("give at least one folder of a run")
    measured = [evaluate(run, cfg.active, cfg.precision) for run in cfg.runs]
    by_run = [shares(figures) for figures in measured]
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(by_run[0], key=_order):
        same = [run[name] for run in by_run if name in run]
        rows[name] = {}
        for measure in same[0]:
            values = [row[measure] for row in same]
            spread = f" ({pstdev(values):.3f})" if len(values) > 1 else ""
            rows[name][measure] = f"{mean(values):.3f}{spread}"
    # The rows with most measures first: the ways to query a set stand together.
    fullest = sorted(rows.values(), key=len, reverse=True)
    shown = {_title(measure): measure for row in fullest for measure in row}
    shown = {title: measure for title, measure in shown.items() if title}
    page = {
        name: {title: row.get(measure, "") for title, measure in shown.items()}
        for name, row in rows.items()
    }
    print(markdown(f"mean of {len(cfg.runs)} (spread)" if len(cfg.runs) > 1 else "", page))
    if cfg.plot is not None:
        print(plot(measured[0], cfg.plot))
    if cfg.out is not None:
        write_json(cfg.out, rows)
    print(json.dumps(rows))


def _title(measure: str) -> str:
    """`cisi_ndcg_at_10_whole_query` as `CISI, whole query`; nothing for bytes and time."""
    name, part, query = measure.replace("_spearman", "_ndcg_at_10").partition("_ndcg_at_10")
    known = {"stsb": "STS-B", "sick": "SICK", "cisi": "CISI", "lisa": "LISA"}
    title = known.get(name, name.capitalize()) + query.replace("_", ", ", 1).replace("_", " ")
    return title if part else ""


def _order(name: str) -> tuple[str, int]:
    method, _, k = name.partition("@")
    return method, int(k or 0)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

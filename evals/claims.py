"""Does what the paper says hold here? Every claim as one row: paper, twin, NCL, interval, verdict.

Usage:
    python evals/claims.py                      # a part of CIFAR-10, for CI
    python evals/claims.py --preset small       # all of CIFAR-10 on two cores: hours, resumable
    python evals/claims.py --preset paper       # the paper's CIFAR-10 settings, for a GPU
    python evals/claims.py --preset small --minutes 60 --only contrastive
    python evals/claims.py --preset small --show

The figures of each part are saved in `<out>/parts`; the same command resumes. Parts of other
settings or versions are refused. On a CPU several parts run in parallel, one per core, and log to
`<out>/parts/*.log`. The twin is the same model with signed features, trained with the same seeds
and budget.

A claim is held if the whole 95 % interval of the difference is on its side of the goal, not held if
the whole interval is on the other side, else not decided. The interval is over seeds and, for
accuracies, over the test pictures as well; it needs three seeds. When all parts of a preset are
measured, the table is written to `evals/results/<preset>.json`, with versions and commits.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import starmap
from pathlib import Path

import numpy as np
import torch
import tyro
from paper.parts import NONNEGATIVE, SIGNED, Config, Parts, Row, commits, stability_rows
from paper.verdicts import FOLLOW_UPS, curves_of, judged
from tqdm.auto import tqdm

from ncl_multi.files import atomic
from ncl_multi.log import show_messages
from ncl_multi.report import markdown, save_figure, table, write_json


def draw(path: Path, figures: Mapping[str, Row]) -> None:
    """Plot each activation's probe against sparsity and consistency, and SEPIN of both models."""
    from matplotlib.figure import Figure

    def of(part: str, kind: str) -> list[Row]:
        return [row for name, row in figures.items() if name.startswith(f"{part} {kind} ")]

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for kind in (*NONNEGATIVE, *SIGNED):
        if rows := of("short", kind):
            probes = [np.mean(row["short_probe"]) for row in rows]
            for axis, measure in ((left, "sparsity"), (middle, "class_consistency")):
                axis.scatter([row[f"short_{measure}"] for row in rows], probes, label=kind)
    left.set(xlabel="sparsity of the head's output", ylabel="linear probe of the encoder")
    middle.set(xlabel="class consistency of the head's output", ylabel="linear probe")
    if left.collections:
        left.legend(frameon=False, fontsize="small")
    depths = ("1", "10", "100", "all")
    for kind, label in (("none", "twin"), ("relu", "NCL")):
        rows = of("contrastive", kind)
        for convention, style in (("fixed", "-"), ("renormalised", ":")):
            names = [f"sepin@{depth} {convention}" for depth in depths]
            if rows and all(name in rows[0] for name in names):
                line = [np.mean([row[name] for row in rows]) for name in names]
                colour = "C0" if kind == "none" else "C1"
                right.plot(depths, line, style, color=colour, label=f"{label}, {convention}")
    right.set(xlabel="k best dimensions", ylabel="SEPIN@k in nats")
    if right.lines:
        right.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def measured(parts: Parts) -> Iterator[tuple[str, Row | None]]:
    """Name and figures of every part, as they finish; None if out of time."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    minutes = parts.cfg.minutes
    end = float("inf") if minutes is None else time.time() + 60 * minutes
    names = list(parts.all())
    on_cpu = parts.cfg.device == "cpu" or not torch.accelerator.is_available()
    jobs = parts.cfg.jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    if jobs == 1 or not names:
        for name, run in parts.all().items():
            due = time.time() < end or parts.path(name).exists()
            yield name, parts.cached(name, run) if due else None
        return
    (parts.out / "parts").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_apart, parts.cfg, name, end): name for name in names}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _apart(cfg: Config, name: str, end: float) -> Row | None:
    """One part in a separate process with one thread; its progress bars go to a file."""
    from contextlib import redirect_stderr

    torch.set_num_threads(1)
    parts = _parts(cfg)
    if time.time() >= end and not parts.path(name).exists():
        return None
    log = parts.path(name).with_suffix(".log")
    with log.open("a") as file, redirect_stderr(file):
        return parts.cached(name, parts.all()[name])


@cache
def _parts(cfg: Config) -> Parts:
    return Parts(cfg)


def shown(path: Path) -> str:
    """The table of a results file, as markdown."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: measure it with --preset {path.stem}")
    whole = json.loads(path.read_text())
    tables = {f"claim, {len(whole['seeds'])} seeds": whole["rows"], "curve": whole["curves"]}
    return "\n\n".join(markdown(title, rows) for title, rows in tables.items() if rows)


def main(cfg: Config) -> None:
    if cfg.show:
        print(shown(cfg.results / f"{cfg.preset}.json"))
        return
    parts, start = Parts(cfg), time.perf_counter()
    if not parts.all():
        raise SystemExit(f"no part's name starts with {cfg.only!r}")
    try:
        _ = parts.pictures
    except FileNotFoundError as error:
        raise SystemExit(f"preset {cfg.preset} needs {cfg.data}: {error} (--data)") from error
    by_name = dict(tqdm(measured(parts), desc="claims", unit="part", total=len(parts.all())))
    figures = {name: row for name in parts.all() if (row := by_name[name]) is not None}
    if len(figures) < len(by_name):
        print(f"{len(figures)} of {len(by_name)} parts are measured; the same command resumes")
    figures |= stability_rows(parts.out, parts.preset.seeds)
    rows = judged(figures, parts.preset.seeds)
    if not rows:
        print(f"{len(figures)} parts done; the table needs twin and NCL of every seed")
        return
    seeds = f"{len(parts.preset.seeds)} seeds, mean ± spread"
    tables = {f"The paper's claims, preset {cfg.preset}, {cfg.data}, {seeds}": rows}
    if curves := curves_of(figures):
        tables["By temperature and by projector width"] = curves
    for title, content in tables.items():
        table(title, content)
    with atomic(parts.out / "claims.md") as unfinished:
        unfinished.write_text("\n\n".join(starmap(markdown, tables.items())) + "\n")
    means = {
        name: {measure: float(np.mean(value)) for measure, value in row.items()}
        for name, row in figures.items()
    }
    whole = parts.settings | {"commits": commits(parts), "seeds": parts.preset.seeds, "rows": rows}
    whole |= {"curves": curves, "parts": means}
    write_json(parts.out / "claims.json", whole)
    draw(parts.out / "claims.png", figures)
    complete = not cfg.only and cfg.seeds is None and len(figures) >= len(by_name)
    if complete and all(value is not None for value in by_name.values()):
        print(f"written to {write_json(cfg.results / f'{cfg.preset}.json', whole)}")
    of_paper = [row for name, row in rows.items() if name not in {c.says for c in FOLLOW_UPS}]
    words = [row["verdict"] for row in of_paper]
    print(
        f"of the paper's {len(words)}: {words.count('held')} held, {words.count('NOT held')} not "
        f"held; {time.perf_counter() - start:.0f} s; {parts.out / 'claims.md'}"
    )


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

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
accuracies, over the test pictures as well; it needs three seeds. The table and the figures of all
parts are written to `evals/results/<preset>.json`, with versions and commits. Another machine
measures what that file does not have.
"""

import json
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
import tyro
from paper.parts import NONNEGATIVE, SIGNED, Parts
from paper.store import Config, Row
from paper.verdicts import FOLLOW_UPS, curves_of, judged
from tqdm.auto import tqdm

from ncl_multi.log import show_messages
from ncl_multi.report import markdown, save_figure, table


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


def measure(parts: Parts) -> None:
    """Measure the parts that are wanted and have no figures, until out of time."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    minutes = parts.cfg.minutes
    end = float("inf") if minutes is None else time.time() + 60 * minutes
    names = [name for name in parts.wanted if not parts.path(name).exists()]
    on_cpu = parts.cfg.device == "cpu" or not torch.accelerator.is_available()
    jobs = parts.cfg.jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    (parts.out / "parts").mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(names), desc="claims", unit="part") as bar:
        if jobs == 1:
            for name in names:
                if time.time() < end:
                    parts.measure(name)
                bar.update()
            return
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            try:
                waiting = [pool.submit(_apart, parts.cfg, name, end) for name in names]
                for future in as_completed(waiting):
                    future.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _apart(cfg: Config, name: str, end: float) -> None:
    """One part in a separate process with one thread; its progress bars go to a file."""
    from contextlib import redirect_stderr

    torch.set_num_threads(1)
    parts = _parts(cfg)
    if time.time() < end:
        log = parts.path(name).with_suffix(".log")
        with log.open("a") as file, redirect_stderr(file):
            parts.measure(name)


@cache
def _parts(cfg: Config) -> Parts:
    return Parts(cfg)


def shown(path: Path) -> str:
    """The table of a record, as markdown."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: measure it with --preset {path.stem}")
    record = json.loads(path.read_text())
    tables = {f"claim, {len(record['seeds'])} seeds": record["rows"], "curve": record["curves"]}
    return "\n\n".join(markdown(title, rows) for title, rows in tables.items() if rows)


def main(cfg: Config) -> None:
    parts, start = Parts(cfg), time.perf_counter()
    if cfg.show:
        print(shown(parts.record))
        return
    if not parts.wanted:
        raise SystemExit(f"no part's name starts with {cfg.only!r}")
    try:
        _ = parts.pictures
    except FileNotFoundError as error:
        raise SystemExit(f"preset {cfg.preset} needs {cfg.data}: {error} (--data)") from error
    parts.restore()
    measure(parts)
    parts.compare_seeds()
    figures = {name: parts.read(name) for name in parts.measured}
    if parts.missing:
        left = f"{len(parts.missing)} of {len(parts.table)} parts"
        print(f"{left} are not measured yet; the same command resumes")
    rows, curves = judged(figures, parts.preset.seeds), curves_of(figures)
    seeds = f"{len(parts.preset.seeds)} seeds, mean ± spread"
    tables = {f"The paper's claims, preset {cfg.preset}, {cfg.data}, {seeds}": rows}
    tables |= {"By temperature and by projector width": curves}
    for title, content in tables.items():
        if content:
            table(title, content)
    if cfg.seeds is None:
        written = parts.write_record(rows=rows, curves=curves)
        kept = "has other settings or versions: it stays until all parts are measured"
        print(f"{parts.record} {'is written' if written else kept}")
    draw(parts.out / "claims.png", figures)
    of_paper = [row for name, row in rows.items() if name not in {c.says for c in FOLLOW_UPS}]
    words = [row["verdict"] for row in of_paper]
    print(
        f"of the paper's {len(words)}: {words.count('held')} held, {words.count('NOT held')} not "
        f"held; {time.perf_counter() - start:.0f} s; {parts.out / 'claims.png'}"
    )


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

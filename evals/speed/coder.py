"""How long does `SparseCoder` take to fit and to encode, and how much memory?

Usage:
    python evals/speed/coder.py
    python evals/speed/coder.py --rows 10000000 --half --fit-steps 20    # 7.7 GB on disk
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measure import apart, resident_mb

import ncl_multi as ncl
from ncl_multi.report import table, write_json


def coder(
    rows: int = 100_000,
    width: int = 384,
    dims: int = 2048,
    k: int = 32,
    fit_steps: int | None = None,
    half: bool = False,
    folder: Path | None = None,
    out: Path = Path("runs/speed/coder.json"),
) -> None:
    """Seconds and extra memory of `fit`; rows per second and extra memory of `stream`.

    Seconds of the processor are what counts on a busy machine. Pages of the memmap that the system
    keeps, and gives back when asked, are not counted as memory.

    Args:
        rows: How many embeddings: noise around centres, in a memmap.
        width: Width of the embeddings.
        dims: Width of the codes.
        k: Active entries of a code.
        fit_steps: Training steps; None for the estimator's default.
        half: Write the memmap in float16, not in float32.
        folder: Where the memmap is written; none for a temporary folder.
        out: File for the figures.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "x.npy"
        _write(path, rows, width, half)
        row = apart(_cost, path, dims, k, fit_steps)
    table(f"{rows:,} x {width} embeddings", {"ours": row})
    write_json(out, row)


def _write(path: Path, rows: int, width: int, half: bool) -> None:
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((1000, width), dtype=np.float32)
    x = np.lib.format.open_memmap(path, "w+", "f2" if half else "f4", (rows, width))
    # The noise is drawn once: drawing billions of numbers would take longer than encoding them.
    noise = draw.standard_normal((50_000, width), dtype=np.float32)
    for start in range(0, rows, len(noise)):
        block = x[start : start + len(noise)]
        block[:] = centres[draw.integers(1000, size=len(block))] + noise[: len(block)]
    x.flush()


def _cost(path: Path, dims: int, k: int, steps: int | None) -> dict[str, float]:
    x = np.load(path, mmap_mode="r")
    options: dict[str, Any] = {} if steps is None else {"steps": steps}
    model = ncl.SparseCoder(dims, k, random_state=0, verbose=True, **options)
    # A first call, so that one-time loading is not measured.
    ncl.SparseCoder(64, 8, steps=1).fit(np.array(x[:200]))
    row: dict[str, float] = {"rows": len(x)}
    with _measured(row, "fit"):
        model.fit(x)
    done = 0
    with _measured(row, "stream"):
        for codes in model.stream(x):
            done += codes.shape[0]
    return row | {
        "rows/s": done / row["stream seconds"], "rows/CPU s": done / row["stream CPU seconds"]
    }  # fmt: skip


@contextmanager
def _measured(row: dict[str, float], name: str) -> Iterator[None]:
    """Adds seconds, processor seconds and the peak of extra memory of the block to the row."""
    samples = [resident_mb("RssAnon")]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.02):
            samples.append(resident_mb("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, of_processor = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        row[f"{name} seconds"] = time.perf_counter() - start
        row[f"{name} CPU seconds"] = time.process_time() - of_processor
        finished.set()
        watcher.join()
    row[f"{name} extra MB"] = max(samples) - samples[0]


if __name__ == "__main__":
    tyro.cli(coder)

"""Shared by the speed scripts: time and peak extra memory, each case in a separate process."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Seconds of the fastest call, and peak memory beyond its inputs."""

    seconds: float
    extra_mb: float


def need(*modules: str) -> None:
    """Exit and name what to install if a library we benchmark against is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        sys.exit(f"needs {', '.join(missing)}: pip install -e '.[bench]'")


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that no case inherits another's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def cost(call: Callable[[], object], repeats: int, kept_mb: float = 0.0) -> Cost:
    """Measure a call; `kept_mb` is the part of its memory that is its result."""
    baseline_mb = resident_mb("VmRSS")
    forget_peak()
    call()
    extra = resident_mb("VmHWM") - baseline_mb - kept_mb
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Cost(min(times), extra)


def resident_mb(entry: str) -> float:
    """Memory of this process: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def forget_peak() -> None:
    """Let the kernel forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")

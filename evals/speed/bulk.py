"""How much slower is `ncl-encode` than `encode`, and does a resumed run write the same bytes?

Usage:
    python evals/speed/bulk.py
    python evals/speed/bulk.py --engines local
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from measure import apart, forget_peak, resident_mb

from ncl_multi.log import show_messages


def bulk(
    texts: int = 200_000,
    dims: int = 2048,
    k: int = 32,
    repeats: int = 3,
    engines: tuple[Literal["local", "ray"], ...] = ("local", "ray"),
    out: Path = Path("runs/speed/bulk.json"),
) -> None:
    """Rate of `ncl-encode` on texts of words of STS-B, with wordllama and an untrained head.

    Args:
        texts: How many to encode.
        dims: Width of the codes.
        k: Active dimensions of a code.
        repeats: Runs of `encode` and of `ncl-encode`, in turn; the median is reported.
        engines: `local` is also killed and resumed; `ray` runs with two workers.
        out: File for the figures.
    """
    from ncl_multi.report import table, write_json

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder, texts, dims, k)
        rows: dict[str, dict[str, Any]] = apart(_local, folder, texts, repeats)
        if "local" in engines:
            rows["ncl-encode"]["resumed equal"] = _killed(folder)
        if "ray" in engines:
            start = time.perf_counter()
            _command(folder, "ray", "--engine", "ray").wait()
            took = time.perf_counter() - start
            same = _content(folder / "ray") == _content(folder / "whole")
            rows["ray, 2 workers, with its start"] = {"texts/s": texts / took, "equal": same}
    table(f"{texts:,} texts through a static encoder", rows)
    write_json(out, rows)


def _prepare(folder: Path, texts: int, dims: int, k: int) -> None:
    from ncl_multi import data, wrap

    words = " ".join(data.stsb("train")[0]).split()
    draw = random.Random(0)  # noqa: S311
    with (folder / "texts.jsonl").open("w") as file:
        for row in range(texts):
            text = " ".join(draw.choices(words, k=draw.randint(5, 15)))
            file.write(json.dumps({"id": row, "text": text}) + "\n")
    wrap(data.wordllama(), dims, k=k).save_pretrained(folder / "model")


def _local(folder: Path, texts: int, repeats: int) -> dict[str, dict[str, Any]]:
    import shutil

    from ncl_multi import load
    from ncl_multi.bulk.encode import encode_files

    model = load(folder / "model")
    items = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    model.encode(items[:5000])
    seconds: dict[str, list[tuple[float, float]]] = {"encode": [], "ncl-encode": []}

    def timed(name: str, call: Callable[[], object]) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        call()
        seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))

    def write() -> None:
        encode_files(folder / "model", folder / "texts.jsonl", folder / "whole", progress=False)

    baseline_mb = resident_mb("VmRSS")
    forget_peak()
    write()
    extra = resident_mb("VmHWM") - baseline_mb
    for _ in range(repeats):
        shutil.rmtree(folder / "whole")
        timed("encode", lambda: model.encode(items))
        timed("ncl-encode", write)
    clock, cpu = ({n: median(s[i] for s in seconds[n]) for n in seconds} for i in (0, 1))
    rows: dict[str, dict[str, Any]] = {n: {"texts/s": texts / clock[n]} for n in seconds}
    # Of CPU time the share is the same on a machine that has other work.
    for what, took in (("share of encode", clock), ("share in CPU time", cpu)):
        rows["ncl-encode"][what] = took["encode"] / took["ncl-encode"]
    rows["ncl-encode"]["extra MB"] = extra
    return rows


def _killed(folder: Path) -> bool:
    """Kill a run after its second shard, resume it, and compare all files with those of one run."""
    run = _command(folder, "killed")
    while run.poll() is None and not (folder / "killed" / "codes-00001.parquet").exists():
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    if len(_content(folder / "killed")) == len(_content(folder / "whole")):
        sys.exit("the run ended before it was killed: raise --texts")
    _command(folder, "killed").wait()
    return _content(folder / "killed") == _content(folder / "whole")


def _command(folder: Path, output: str, *options: str) -> subprocess.Popen:
    arguments = [str(folder / name) for name in ("model", "texts.jsonl", output)]
    return subprocess.Popen([sys.executable, "-m", "ncl_multi.bulk", *arguments, *options])


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


if __name__ == "__main__":
    show_messages()
    tyro.cli(bulk)

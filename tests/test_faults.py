"""Killed again and again, every recipe ends as if nobody had touched it.

A process that has imported everything forks one child a start, which runs the recipe as a script
with the same command line each time: twenty kills then take seconds, not minutes.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_recipes import ROOT, SMALL, command, lay_out

pytest.importorskip("torch_geometric")
pytest.importorskip("open_clip")
pytest.importorskip("sentence_transformers")

KILLS = 20
HOME = """
import json, os, runpy, sys, traceback
import accelerate, datasets, kornia, matplotlib.figure, open_clip, sentence_transformers, timm
import numba, sklearn.linear_model, torch, torch_geometric.nn, torchvision, transformers, tyro
import ncl_multi.adapters.clip_report, ncl_multi.adapters.graph, ncl_multi.adapters.sentence
import ncl_multi.adapters.sentence_compare, ncl_multi.adapters.vision_report, ncl_multi.atlas
print("ready", flush=True)
for line in sys.stdin:
    argv, log = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv, code = argv, 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Home:
    """The process that forks."""

    def __init__(self, folder: Path):
        self.log = folder / "log.txt"
        quiet = {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
        }
        paths = {"PYTHONPATH": str(ROOT), "NCL_CACHE": str(folder / "cache"), "NCL_DATA": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOME], stdin=-1, stdout=-1, text=True, bufsize=1,
            env=os.environ | quiet | paths,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(self, argv: list[str], *, kill_after: float | None = None, with_signal: int = 9) -> int:
        """Start the command, perhaps kill it, and return its exit code."""
        self.process.stdin.write(json.dumps([argv, str(self.log)]) + "\n")
        child = int(self.process.stdout.readline())
        timer = threading.Timer(kill_after or 0, _kill, (child, with_signal))
        if kill_after is not None:
            timer.start()
        code = int(self.process.stdout.readline())
        timer.cancel()
        return code

    def said(self) -> str:
        return self.log.read_text()[-3000:]


def _kill(child: int, with_signal: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, with_signal)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    lay_out(folder)
    yield (found := Home(folder)), folder
    found.process.kill()
    found.process.communicate()


def results(out: Path) -> dict[str, object]:
    """All weights, byte for byte, and all figures but those that are times."""
    weights = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.safetensors")}
    figures = json.loads((out / "metrics.json").read_text())
    if isinstance(figures, list):
        figures = [{k: v for k, v in row.items() if k != "search ms"} for row in figures]
    return weights | {"metrics.json": figures}


@pytest.mark.parametrize("recipe", SMALL)
def test_twenty_kills_change_nothing(recipe, home, tmp_path):
    start, here = home
    flags = ("--steps", "20", "--batch-size", "32")
    began = time.perf_counter()
    whole = command(recipe, here, tmp_path / "whole", *flags)
    assert start.run(whole) == 0, start.said()
    took = time.perf_counter() - began
    wanted = results(tmp_path / "whole")
    assert len(wanted) > 2
    again = command(recipe, here, tmp_path / "again", *flags)
    draw = random.Random(recipe)
    kills = 0
    while kills < KILLS:
        with_signal = (signal.SIGKILL, signal.SIGTERM)[kills % 2]
        began = time.perf_counter()
        code = start.run(again, kill_after=draw.uniform(0, 0.6 * took), with_signal=with_signal)
        if code == 0:
            # Trained to the end: what is left to kill is the evaluation, and takes less long.
            took = min(took, time.perf_counter() - began)
            continue
        # SIGTERM in the training loop saves and ends in order; elsewhere it ends at once.
        assert code in (-9, -15, 143), start.said()
        kills += 1
    assert start.run(again) == 0, start.said()
    found = results(tmp_path / "again")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name

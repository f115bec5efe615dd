"""Killed again and again, or run by two processes, every recipe ends as if nothing had happened.

A process that has imported everything forks one child a start, which runs the recipe as a script
with the same command line each time: twenty kills then take seconds, not minutes. Processes that
work together get the environment that torchrun would give them.
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
import torch
from processes import environments
from small_recipes import ROOT, SMALL, check_run, command, lay_out

pytest.importorskip("torch_geometric")
pytest.importorskip("open_clip")
pytest.importorskip("sentence_transformers")

KILLS = 20
NO_TWIN = dict.fromkeys(("clip_ncl", "vision_ncl", "graph_ncl"), ("--no-twin",))
"""Recipes that train a twin by default, and how not to: its steps are like those before."""
HOME = """
import json, os, runpy, sys, threading, traceback
import tqdm
# The lock of progress bars is shared with children, and one that is killed may hold it for ever.
tqdm.tqdm.set_lock(threading.RLock())
import accelerate, datasets, kornia, matplotlib.figure, open_clip, sentence_transformers, timm
import numba, sklearn.linear_model, torch, torch_geometric.nn, torchvision, transformers, tyro
import ncl_multi.adapters.clip.report, ncl_multi.adapters.graph.model
import ncl_multi.adapters.sentence.objective
import ncl_multi.adapters.sentence.report, ncl_multi.adapters.vision.report, ncl_multi.atlas.page
print("ready", flush=True)
for line in sys.stdin:
    starts, log, prepare = json.loads(line)
    children = []
    for argv, environment in starts:
        children.append(os.fork())
        if children[-1]:
            continue
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        os.environ.update(environment)
        sys.argv, code = argv, 0
        try:
            if prepare:
                import small_recipes
                getattr(small_recipes, prepare)()
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(json.dumps(children), flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
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
        paths = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "NCL_CACHE": str(folder / "cache"),
            "NCL_DATA": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOME], stdin=-1, stdout=-1, text=True, bufsize=1,
            env=os.environ | quiet | paths,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(
        self,
        *commands: list[str],
        kill_after: float | None = None,
        with_signal: int = signal.SIGKILL,
        processes: int = 1,
        prepare: str | None = None,
    ) -> list[int]:
        """Start commands side by side, perhaps kill the last, and return all exit codes.

        With several `processes`, one command is run by all of them together. `prepare` names a
        function of `small_recipes` that is called first.
        """
        with environments(processes) as each:
            together = [(commands[0], environment) for environment in each]
            starts = together if processes > 1 else [(argv, {}) for argv in commands]
            self.process.stdin.write(json.dumps([starts, str(self.log), prepare]) + "\n")
            last = json.loads(self.process.stdout.readline())[-1]
            timer = threading.Timer(kill_after or 0, _kill, (last, with_signal))
            if kill_after is not None:
                timer.start()
            codes = json.loads(self.process.stdout.readline())
        timer.cancel()
        return codes

    def output(self) -> str:
        return self.log.read_text()[-3000:]


def _kill(child: int, with_signal: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, with_signal)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    lay_out(folder)
    yield (resumed := Home(folder)), folder
    resumed.process.kill()
    resumed.process.communicate()


def results(out: Path) -> dict[str, object]:
    """All weights, byte for byte, and all figures but those that are times."""
    weights = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.safetensors")}
    figures = json.loads((out / "metrics.json").read_text())
    for splits in figures.values():
        for row in splits.values():
            row.pop("search_ms", None)
    return weights | {"metrics.json": figures}


@pytest.mark.parametrize("recipe", SMALL)
def test_twenty_kills_change_nothing(recipe, home, tmp_path):
    start, here = home
    # The supervised recipe trains nine models one after another.
    flags = ("--steps", "4" if recipe == "supervised_ncl" else "12", "--batch-size", "32")
    began = time.perf_counter()
    whole = command(recipe, here, tmp_path / "whole", *flags)
    assert start.run(whole) == [0], start.output()
    took = time.perf_counter() - began
    wanted = results(tmp_path / "whole")
    assert len(wanted) > 2
    check_run(tmp_path / "whole")
    again = command(recipe, here, tmp_path / "again", *flags)
    draw = random.Random(recipe)
    kills = 0
    while kills < KILLS:
        with_signal = (signal.SIGKILL, signal.SIGTERM)[kills % 2]
        began = time.perf_counter()
        after = draw.uniform(0, 0.6 * took)
        (code,) = start.run(again, kill_after=after, with_signal=with_signal)
        if code == 0:
            # Trained to the end: what is left to kill is the evaluation, and takes less long.
            took = min(took, time.perf_counter() - began)
            continue
        # SIGTERM in the training loop saves and ends in order; elsewhere it ends at once.
        assert code in (-9, -15, 143), start.output()
        kills += 1
    assert start.run(again) == [0], start.output()
    resumed = results(tmp_path / "again")
    assert resumed.keys() == wanted.keys()
    for name, value in wanted.items():
        assert resumed[name] == value, name


@pytest.mark.parametrize("recipe", SMALL)
def test_two_processes_do_what_one_does(recipe, home, tmp_path):
    start, here = home
    short = ["--steps", "3", "--log-every", "1", *NO_TWIN.get(recipe, ())]
    one, two = tmp_path / "one", tmp_path / "two"
    assert start.run(
        command(recipe, here, one, *short, "--batch-size", "32"), prepare="in_doubles"
    ) == [0], start.output()
    halves = command(recipe, here, two, *short, "--batch-size", "16")
    assert start.run(halves, processes=2, prepare="in_doubles") == [0, 0], start.output()
    logs = sorted(path.relative_to(one) for path in one.rglob("train.jsonl"))
    assert logs
    for log in logs:
        losses = [
            [json.loads(line)["loss"] for line in (folder / log).read_text().splitlines()]
            for folder in (one, two)
        ]
        assert len(losses[0]) == 3
        assert losses[1] == pytest.approx(losses[0], rel=1e-9), log
        weights = [
            torch.load(folder / log.parent / "checkpoint.pt", weights_only=True)["model"]
            for folder in (one, two)
        ]
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-9, atol=1e-9)


def test_a_process_that_dies_ends_the_others_within_a_minute(home, tmp_path):
    start, here = home
    long = command("graph_ncl", here, tmp_path, "--steps", "100000", "--batch-size", "16")
    began = time.perf_counter()
    codes = start.run(long, processes=2, kill_after=8, with_signal=signal.SIGKILL)
    assert codes[1] == -9
    assert codes[0] not in (0, -9)
    assert time.perf_counter() - began < 68
    assert (tmp_path / "checkpoint.pt").exists()
    assert "Error" in start.output()


@pytest.mark.parametrize("recipe", SMALL)
def test_memory_does_not_grow_over_two_hundred_steps(recipe, home, tmp_path):
    start, here = home
    # The supervised recipe trains nine models one after another.
    steps = ("--steps", "25") if recipe == "supervised_ncl" else ("--steps", "200")
    flags = (*steps, *NO_TWIN.get(recipe, ()))
    long = command(recipe, here, tmp_path, *flags, "--batch-size", "32")
    assert start.run(long, prepare="watching_memory") == [0], start.output()
    watched = sorted(tmp_path.rglob("memory.txt"), key=lambda path: path.stat().st_mtime)
    megabytes = [float(line) for path in watched for line in path.read_text().splitlines()]
    assert len(megabytes) >= 200
    # The first fifty steps fill caches and allocators.
    assert max(megabytes[150:]) - max(megabytes[:50]) < 30


def test_of_two_processes_on_one_folder_the_second_is_refused(home, tmp_path):
    start, here = home
    flags = ("--steps", "300", "--batch-size", "16", "--log-every", "1", "--no-twin")
    twice = [command("graph_ncl", here, tmp_path / "run", *flags)] * 2
    codes = start.run(*twice)
    assert sorted(map(bool, codes)) == [False, True], start.output()
    assert "another process is writing to" in start.log.read_text()
    lines = (tmp_path / "run" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 301))


def test_two_recipes_share_a_cache(home, tmp_path):
    start, here = home
    flags = ("--steps", "2", "--batch-size", "32", "--no-twin")
    both = [
        command("clip_ncl", here, tmp_path / name, *flags, "--cache", str(tmp_path / "cache"))
        for name in ("one", "two")
    ]
    assert start.run(*both) == [0, 0], start.output()
    assert results(tmp_path / "one") == results(tmp_path / "two")

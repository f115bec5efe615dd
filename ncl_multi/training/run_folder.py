"""The run folder: one config, one log, one checkpoint; stopping without loss."""

import dataclasses
import json
import logging
import reprlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ncl_multi.distributed import all_reduce_sum, barrier, world_size
from ncl_multi.files import DAMAGE, atomic, lock_folder, read_json, read_torch
from ncl_multi.training.batches import Batches
from ncl_multi.training.config import TrainConfig

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tqdm import tqdm

ADVICE = (
    "Choose another folder (out=, --out), or replace the run there with resume=False (--no-resume)"
)


class RunFolder:
    """The run folder: one config, one log, one checkpoint; or nothing, for a run in memory."""

    def __init__(self, cfg: TrainConfig, main: bool, fingerprint: str | None):
        self.out, self.main = cfg.out, main
        self.saved_at: int | None = None
        self.resumes = False
        if self.out is None:
            return
        config_path = self.out / "config.json"
        settings = as_json(cfg) | {"data_fingerprint": fingerprint, "processes": world_size()}
        self.resumes = cfg.resume and self.checkpoint.exists()
        if self.resumes:
            _check_same_run(config_path, settings, cfg.free)
        # All processes must have read before one of them writes.
        barrier()
        if main:
            if not self.resumes:
                self._forget()
                (self.out / "train.jsonl").unlink(missing_ok=True)
            with atomic(config_path) as unfinished:
                unfinished.write_text(json.dumps(settings, indent=2))

    @property
    def name(self) -> str:
        return "fit" if self.out is None else self.out.name

    @property
    def checkpoint(self) -> Path:
        if self.out is None:
            raise ValueError("a run in memory has no checkpoint")
        return self.out / "checkpoint.pt"

    def restore(self, parts: dict[str, Any], device: torch.device, steps: int) -> int:
        """Load the checkpoint, if there is one, and return the step to resume from."""
        resumes = self.resumes
        if all_reduce_sum(torch.tensor(float(resumes), device=device)) not in (0, world_size()):
            raise ValueError(
                f"only some processes find {self.checkpoint}; choose a folder they all share"
            )
        if not resumes:
            return 0
        state, step = self._read(parts)
        if step > steps:
            raise ValueError(
                f"{self.checkpoint} has {step} steps, {steps} were requested; request more. "
                f"{ADVICE}"
            )
        self._apply(parts, state)
        self.saved_at = step
        if self.main and self.out is not None:
            _shorten_log(self.out / "train.jsonl", step)
            log.info("resuming %s from step %s", self.out, step)
        return step

    def save(self, parts: dict[str, Any], done: int) -> None:
        broken = self._broken(parts["model"].state_dict())
        if broken:
            raise ValueError(
                f"the weights contain NaN or infinity after step {done - 1} ({broken[0]}): lower "
                f"the learning rate or clip gradients (clip_grad=1, --clip-grad 1). {self._last()}"
            )
        if self.out is not None:
            try:
                self._write(parts, done)
            except (OSError, RuntimeError) as error:
                raise OSError(f"could not save step {done}: {error}. {self._last()}") from error
        self.saved_at = done

    def _read(self, parts: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The state in the checkpoint, and its step."""
        try:
            state = read_torch(self.checkpoint)
        except ValueError as error:
            raise ValueError(f"{self.checkpoint} cannot be read: {error}. {ADVICE}") from error
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is not int or step < 0:
            raise ValueError(
                f"{self.checkpoint} has no step to resume from; got {reprlib.repr(step)}. {ADVICE}"
            )
        return state, step

    def _apply(self, parts: dict[str, Any], state: dict[str, Any]) -> None:
        for name, part in parts.items():
            try:
                part.load_state_dict(state[name])
            except DAMAGE as error:
                raise ValueError(
                    f"{self.checkpoint} does not fit this {name}: {error}. {ADVICE}"
                ) from error

    def _broken(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of weights that are not finite, the same on all processes."""
        return [name for name, value in weights.items() if not value.isfinite().all()]

    def _write(self, parts: dict[str, Any], done: int) -> None:
        if self.main:
            state = {name: part.state_dict() for name, part in parts.items()}
            with atomic(self.checkpoint) as unfinished:
                torch.save(state | {"step": done}, unfinished)

    def _forget(self) -> None:
        """Remove the checkpoint of an earlier run."""
        self.checkpoint.unlink(missing_ok=True)

    def log(self, row: Mapping[str, float | int], bar: "tqdm") -> None:
        if not self.main:
            return
        if self.out is not None:
            with (self.out / "train.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        bar.set_postfix(
            loss=f"{row['loss']:.3f}",
            active=f"{row['active']:.1f}",
            alive=f"{row['alive']:.0%}",
            rate=f"{row['samples_per_second']:.0f}/s",
        )

    def where(self, now: int, batches: Batches) -> str:
        """Where a step failed: its number, its rows and the last checkpoint."""
        return f"at step {now}, rows {batches.rows(now)}. {self._last()}"

    def stop_signals(self) -> AbstractContextManager[list[int]]:
        """A list that gets the signal which asks the run to stop; in memory none is caught."""
        return nullcontext([]) if self.out is None else stop_signals()

    def say_goodbye(self, done: int, steps: int) -> None:
        if self.main:
            log.warning(
                "stopped at step %s of %s, saved in %s; run the same command again to resume",
                done, steps, self.checkpoint,
            )  # fmt: skip

    def _last(self) -> str:
        if self.out is None or self.saved_at is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {self.checkpoint}, step {self.saved_at}."


@contextmanager
def open_run(
    cfg: TrainConfig, main: bool, fingerprint: str | None, kind: type[RunFolder] = RunFolder
) -> Iterator[RunFolder]:
    """The folder of a run, locked for other runs until this one ends."""
    lock = nullcontext() if cfg.out is None or not main else lock_folder(cfg.out)
    with lock:
        yield kind(cfg, main, fingerprint)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that gets the signal which asks the run to stop; a second one stops at once."""
    got: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        if not got:
            first = time.monotonic()
        # Ctrl-C under torchrun sends two signals at once: from the terminal and from torchrun.
        elif time.monotonic() - first > 1:
            raise KeyboardInterrupt
        got.append(number)

    heard: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        heard = ()  # Python gives signals only to the main thread.
    old_handlers = {number: signal.signal(number, note) for number in heard}
    try:
        yield got
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def as_json(cfg: Any) -> dict[str, Any]:
    """A config as plain values."""
    return json.loads(json.dumps(dataclasses.asdict(cfg), default=str))


def _check_same_run(config_path: Path, current: dict[str, Any], free: tuple[str, ...]) -> None:
    try:
        stored = read_json(config_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{config_path.parent} contains a run whose config cannot be read: {error}. {ADVICE}"
        ) from error
    if not isinstance(stored, dict) or "data_fingerprint" not in stored:
        raise ValueError(
            f"{config_path.parent} contains a run of version 0.1, which cannot be resumed; "
            f"ncl.load reads its model. {ADVICE}"
        )
    current, stored = _with_rows_of_all(current), _with_rows_of_all(stored)
    differ = {
        name: f"{stored.get(name)!r} there, {current.get(name)!r} here"
        for name in current.keys() | stored.keys()
        if name not in free and stored.get(name) != current.get(name)
    }
    other_data = differ.pop("data_fingerprint", None) is not None
    if other_data or differ:
        run = "a run on other data" if other_data else "another run"
        settings = f": {differ}" if differ else ""
        if other_data and stored.get("steps") != current["steps"]:
            settings += " (a run with few steps may read only as many rows as it needs)"
        raise ValueError(f"{config_path.parent} contains {run}{settings}. {ADVICE}")


def _with_rows_of_all(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the global batch size: a run may resume on another number of processes."""
    processes, rows = settings.get("processes", 1), settings.get("batch_size")
    if not isinstance(processes, int):
        return settings
    together = rows * processes if isinstance(rows, int) else rows
    return {**settings, "processes": "all", "batch_size": together}


def _shorten_log(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: it will be logged again."""
    if path.exists():
        try:
            # A kill can cut the last line short; that line is after the checkpoint.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            rows = [line for line in lines if json.loads(line)["step"] <= step]
        except DAMAGE as error:
            raise ValueError(f"{path} is not the log of a run: {error!r}. {ADVICE}") from error
        with atomic(path) as unfinished:
            unfinished.write_text("".join(line + "\n" for line in rows))

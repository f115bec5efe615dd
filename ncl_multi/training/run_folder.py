"""The run folder: one config, one log, one checkpoint, and a way to stop without loss."""

import dataclasses
import json
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ncl_multi.distributed import all_reduce_sum, barrier, world_size
from ncl_multi.files import atomic
from ncl_multi.training.batches import Batches

if TYPE_CHECKING:
    from tqdm import tqdm

    from ncl_multi.training.fit import TrainConfig

# What may differ between the run in a folder and the one that goes on with it.
_FREE = ("resume", "device", "compile", "log_every", "checkpoint_every", "track")


class Run:
    """The run folder: one config, one log, one checkpoint."""

    def __init__(self, cfg: "TrainConfig", main: bool):
        self.cfg, self.main = cfg, main
        self.checkpoint = cfg.out / "checkpoint.pt"
        self.saved_at: int | None = None
        kept, mine = cfg.out / "config.json", as_json(cfg)
        self.goes_on = cfg.resume and (kept.exists() or self.checkpoint.exists())
        if self.goes_on:
            _check_same_run(kept, mine)
        # All processes have looked before one of them writes.
        barrier()
        if main and not self.goes_on:
            self.checkpoint.unlink(missing_ok=True)
            (cfg.out / "train.jsonl").unlink(missing_ok=True)
            with atomic(kept) as unfinished:
                unfinished.write_text(json.dumps(mine, indent=2))

    def restore(self, parts: dict[str, Any], device: torch.device) -> int:
        """Load the checkpoint, if there is one, and return the step to go on from."""
        found = self.goes_on and self.checkpoint.exists()
        if all_reduce_sum(torch.tensor(float(found), device=device)) not in (0, world_size()):
            raise ValueError(
                f"only some processes find {self.checkpoint}; put --out on a disk they all share"
            )
        if not found:
            return 0
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.checkpoint} cannot be read: {error}. Remove it, or use --no-resume"
            ) from error
        for name, part in parts.items():
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise ValueError(
                    f"{self.checkpoint} does not fit this {name}: {error}. Choose another --out, "
                    f"or --no-resume to replace it"
                ) from error
        self.saved_at = state["step"]
        if self.main:
            _shorten_log(self.cfg.out / "train.jsonl", state["step"])
            print(f"going on with {self.cfg.out} from step {state['step']}", file=sys.stderr)
        return state["step"]

    def save(self, parts: dict[str, Any], done: int) -> None:
        if not all(weight.isfinite().all() for weight in parts["model"].parameters()):
            raise ValueError(
                f"the weights hold NaN or infinity after step {done - 1}: lower the learning rate "
                f"or clip gradients (--clip-grad 1). {self._last()}"
            )
        if self.main:
            state = {name: part.state_dict() for name, part in parts.items()}
            try:
                with atomic(self.checkpoint) as unfinished:
                    torch.save(state | {"step": done}, unfinished)
            except (OSError, RuntimeError) as error:
                raise OSError(f"could not save step {done}: {error}. {self._last()}") from error
        self.saved_at = done

    def log(self, row: Mapping[str, float | int], bar: "tqdm") -> None:
        if self.main:
            with (self.cfg.out / "train.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            bar.set_postfix(
                loss=f"{row['loss']:.3f}",
                active=f"{row['active']:.1f}",
                alive=f"{row['alive']:.0%}",
                rate=f"{row['samples_per_second']:.0f}/s",
            )

    def where(self, now: int, batches: Batches) -> str:
        """What a person needs who must find out why a step went wrong."""
        return f"at step {now}, rows {batches.rows(now)}. {self._last()}"

    def say_goodbye(self, done: int, steps: int) -> None:
        if self.main:
            print(
                f"\nstopped at step {done} of {steps}, saved in {self.checkpoint}; "
                f"run the same command again to go on",
                file=sys.stderr,
            )

    def _last(self) -> str:
        if self.saved_at is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {self.checkpoint}, step {self.saved_at}."


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that gets the signal which asks the run to stop; a second one stops at once."""
    got: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        if not got:
            first = time.monotonic()
        # Ctrl-C under torchrun comes twice at once: from the terminal and from torchrun.
        elif time.monotonic() - first > 1:
            raise KeyboardInterrupt
        got.append(number)

    heard: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        heard = ()  # Python gives signals to the main thread alone.
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def as_json(cfg: Any) -> dict[str, Any]:
    """A config as plain values."""
    return json.loads(json.dumps(dataclasses.asdict(cfg), default=str))


def _check_same_run(kept: Path, mine: dict[str, Any]) -> None:
    advice = "Choose another --out, or --no-resume to replace it"
    try:
        theirs = json.loads(kept.read_text())
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{kept.parent} holds a run that cannot be told apart from this one, as its config "
            f"cannot be read: {error}. {advice}"
        ) from error
    differ = {
        name: f"{theirs.get(name)!r} there, {mine.get(name)!r} here"
        for name in mine.keys() | theirs.keys()
        if name not in _FREE and theirs.get(name) != mine.get(name)
    }
    if differ:
        raise ValueError(f"{kept.parent} holds another run: {differ}. {advice}")


def _shorten_log(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: it will be logged again."""
    if path.exists():
        # A kill can cut the last line short; it is after the checkpoint, too.
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        rows = [line for line in lines if json.loads(line)["step"] <= step]
        with atomic(path) as unfinished:
            unfinished.write_text("".join(line + "\n" for line in rows))

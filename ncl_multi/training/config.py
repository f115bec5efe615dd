"""Settings of a training run."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

log = logging.getLogger(__name__)

LEAST_ROWS = 10
"""Training needs at least this many rows: with fewer there are hardly any negatives."""
Config = TypeVar("Config", bound="TrainConfig")
Active = TypeVar("Active", int, int | None)


@dataclass(frozen=True)
class TrainConfig:
    """Training settings of every recipe.

    Example:
        >>> TrainConfig(epochs=3).for_rows(100, "texts").batch_size
        100
    """

    out: Path | None = None
    """Folder of the run; None trains in memory and writes nothing."""
    epochs: int = 10
    """Passes over the data."""
    steps: int | None = None
    """Stop after this many steps instead of after `epochs`."""
    batch_size: int = 256
    """Rows per process."""
    lr: float = 1e-3
    """Highest learning rate."""
    weight_decay: float = 1e-4
    """Pull of the weights towards zero."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    clip_grad: float | None = None
    """Largest gradient norm; None to leave gradients as they are."""
    accumulate: int = 1
    """Batches whose gradients are added up before the weights move."""
    ema: float | None = None
    """Keep a moving average of the weights with this decay, and end with it."""
    seed: int = 0
    """Seed of everything random."""
    device: str | None = None
    """`cpu`, `cuda`, ...; None takes the best there is."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoder; losses are always summed in fp32. `auto` is bf16 on a GPU or a
    processor that has instructions for it, else fp32."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    resume: bool = True
    """Resume the run in `out`, if there is one; False (`--no-resume`) replaces it."""
    log_every: int = 10
    """Steps between two lines of `train.jsonl`."""
    checkpoint_every: int = 200
    """Steps between two checkpoints."""
    shard: bool = False
    """Split weights and optimizer state over processes (FSDP2), for models too large for one."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Also send the log to TensorBoard or Weights & Biases."""
    progress: bool = True
    """Show a progress bar."""

    free: ClassVar[tuple[str, ...]] = (
        "out", "resume", "device", "compile", "log_every", "checkpoint_every", "track", "steps",
        "epochs", "progress",
    )  # fmt: skip
    """Settings that may change when a run resumes; more steps or epochs extend it."""

    def __post_init__(self) -> None:
        if isinstance(self.out, str):
            object.__setattr__(self, "out", Path(self.out))
        least = {"epochs": 1, "steps": 1, "batch_size": 1, "accumulate": 1, "log_every": 1}
        for name, smallest in (least | {"checkpoint_every": 1}).items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}; got {value}")
        if self.precision == "fp16" and self.device == "cpu":
            raise ValueError("precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
        if self.shard and (self.ema or self.compile or self.precision == "fp16"):
            raise ValueError(
                "shard does not work with ema, compile or precision fp16; leave them out, or train "
                "with shard=False (--no-shard)"
            )

    def on_this_machine(self: Config) -> Config:
        """This config with a precision in place of `auto`."""
        if self.precision != "auto":
            return self
        return replace(self, precision="bf16" if _multiplies_in_bf16(self.device) else "fp32")

    @property
    def rows_seen(self) -> int | None:
        """The most rows that a run of `steps` steps can see; None if `epochs` decides.

        Lets a short run compute features of these rows only. It needs no process group.
        """
        together = self.batch_size * _processes()
        return None if self.steps is None else self.steps * together

    def for_rows(self: Config, count: int, items: str = "rows") -> Config:
        """This config with a batch of at most `count` rows; logs a change, refuses too few rows.

        Cheap, so call it before anything is encoded. `items` names the rows in messages.
        """
        if count < LEAST_ROWS:
            raise ValueError(f"training needs at least {LEAST_ROWS} {items}; got {count}")
        most = max(1, count // _processes())
        # A graph's batch may be None: all nodes.
        size = (
            most
            if self.batch_size is None
            else _lowered("batch_size", self.batch_size, most, count, items)
        )
        return self if size == self.batch_size else replace(self, batch_size=size)


def fitting_sizes(
    dims: int | None, k: Active, count: int, items: str = "rows", *, most: int
) -> tuple[int, Active]:
    """Width and active entries for `count` rows; a requested width is not changed.

    Otherwise it is `most`, but at most one dimension per four rows, with an eighth of them active:
    dimensions of wide codes of few rows repeat each other, or fire for next to no row.

    Example:
        >>> fitting_sizes(None, 16, 24_000, most=1024)
        (1024, 16)
        >>> fitting_sizes(None, 16, 500, most=1024)
        (125, 15)
    """
    fitting = max(LEAST_ROWS, count // 4)
    if dims is None:
        dims = _lowered("dims", most, fitting, count, items)
        return dims, k if k is None else _lowered("k", k, max(4, dims // 8), count, items)
    if dims > fitting and os.environ.get("RANK", "0") == "0":
        log.warning(f"{dims} dims are many for {count} {items}: most fire for next to none of them")
    return dims, k


def command_line(presets: Mapping[str, Config]) -> Config:
    """The config of the command line: the `--preset`, changed by the other options."""
    import tyro

    names = list(presets)
    arguments = [a.split("=", 1) for a in sys.argv[1:]]
    flat = [token for argument in arguments for token in argument]
    name = flat[flat.index("--preset") + 1] if "--preset" in flat[:-1] else names[0]
    config = presets.get(name, presets[names[0]])
    return tyro.cli(type(config), default=config)


def _lowered(name: str, value: int, most: int, count: int, items: str) -> int:
    """The value, lowered to the largest that is allowed; a change is logged."""
    if value > most and os.environ.get("RANK", "0") == "0":
        log.warning(f"{name} lowered from {value} to {most}: there are {count} {items}")
    return min(value, most)


def _multiplies_in_bf16(device: str | None) -> bool:
    """Whether the device has instructions for bf16."""
    import torch

    if device == "cpu" or (device is None and not torch.accelerator.is_available()):
        return torch.cpu._is_avx512_bf16_supported()
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def _processes() -> int:
    """Number of processes that train together, before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))

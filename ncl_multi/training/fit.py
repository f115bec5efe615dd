"""The one training loop: any model, a `step` closure, a loader, a config.

Everything random is a function of the seed and the step, so a run that was killed and started
again ends with the same weights, bit for bit: the order of rows comes from the epoch's seed, and
the generators are seeded anew before each step.
"""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ncl_multi.distributed import all_reduce_sum
from ncl_multi.norm import shared_batch_norm
from ncl_multi.training.batches import Batches, step_seed
from ncl_multi.training.health import Health
from ncl_multi.training.run_folder import Run, as_json, stop_signals

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import send_to_device, set_seed
    from tqdm.auto import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "needs accelerate and tqdm: pip install 'ncl-multi[train]'"
    ) from error

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config", bound="TrainConfig")
Step = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Takes the model and a batch; returns the loss and the codes that `Health` should watch."""


@dataclass(frozen=True)
class TrainConfig:
    """What every recipe can be told about training."""

    out: Path = Path("runs/run")
    """Folder for the checkpoint, the model, the features and the report."""
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
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoder; losses are always summed in fp32."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    resume: bool = True
    """Go on with the run in `out`; `--no-resume` replaces it."""
    log_every: int = 10
    """Steps between two lines of `train.jsonl`."""
    checkpoint_every: int = 200
    """Steps between two checkpoints."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Also send the log to TensorBoard or Weights & Biases."""

    @property
    def rows_seen(self) -> int | None:
        """The most rows that a run of so many `steps` can see; None if it is `epochs` that count.

        For a short run not to wait for the features of others. Known before processes have met.
        """
        together = self.batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        return None if self.steps is None else self.steps * together


def fit(
    model: Model,
    step: Step,
    loader: Iterable,
    cfg: TrainConfig,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Model:
    """Train `model` and return it, in eval mode, on its device.

    A `DataLoader` over a map-style dataset is read in an order of our own, the same for any number
    of processes: with `n` of them each takes its share of a global batch of `n * batch_size` rows.
    Keep random augmentation in `step`, where it is repeatable. Any other iterable is read as it is.

    `<out>/checkpoint.pt` is replaced every `checkpoint_every` steps, and at Ctrl-C or SIGTERM; the
    same call goes on from there. Modules with an `anneal` method are told the progress. A parameter
    group of `optimizer` may hold `lr_scale`, its share of the learning rate.
    """
    # A run before this one, in the same process, may have had another precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=_wants_cpu(cfg.device),
        mixed_precision={"fp32": "no"}.get(cfg.precision, cfg.precision),
        log_with=None if cfg.track == "none" else cfg.track,
        project_dir=cfg.out,
        step_scheduler_with_optimizer=False,
    )
    run = Run(cfg, accelerator.is_main_process)
    batches = Batches(loader, cfg.seed, accelerator.process_index, accelerator.num_processes)
    steps = cfg.steps if cfg.steps is not None else cfg.epochs * len(batches)
    weights = [p for p in model.parameters() if p.requires_grad]
    make = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=cfg.lr, weight_decay=cfg.weight_decay))
    model.to(accelerator.device).train()
    ema = cfg.ema and AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(cfg.ema), use_buffers=False
    )
    parts = {"model": model, "optimizer": make(weights)} | ({"ema": ema} if ema else {})
    start = run.restore(parts, accelerator.device)
    if cfg.compile:
        model.compile()
    if cfg.track != "none":
        accelerator.init_trackers("ncl_multi", config=as_json(cfg))
    prepared, opt = accelerator.prepare(model, parts["optimizer"])
    annealed: list[Any] = [module for module in model.modules() if hasattr(module, "anneal")]
    health, clock, stops = Health(), time.perf_counter(), False
    bar = tqdm(
        total=steps, initial=start, desc=cfg.out.name, unit="step", dynamic_ncols=True,
        disable=not accelerator.is_main_process,
    )  # fmt: skip
    with stop_signals() as stopped, bar, shared_batch_norm(model):
        for now, batch in enumerate(batches.after(start, steps), start):
            set_seed(step_seed(cfg.seed, now, accelerator.process_index))
            for module in annealed:
                module.anneal(now / steps)
            for group in opt.param_groups:
                scale = group.get("lr_scale", 1.0)
                group["lr"] = scale * cfg.lr * lr_factor(now, steps, cfg.warmup, cfg.schedule)
            done = now + 1
            # The weights move when enough batches have had their say, and after the last one.
            moves = done % cfg.accumulate == 0 or done == steps
            with nullcontext() if moves else accelerator.no_sync(prepared):
                try:
                    loss, z = step(prepared, send_to_device(batch, accelerator.device))
                except ValueError as error:
                    raise ValueError(f"{error}\n{run.where(now, batches)}") from error
                accelerator.backward(loss / cfg.accumulate)
            if moves:
                if cfg.clip_grad:
                    accelerator.clip_grad_norm_(weights, cfg.clip_grad)
                opt.step()
                opt.zero_grad()
                if ema:
                    ema.update_parameters(model)
            health.update(loss, z)
            bar.update()
            stops = stops or (bool(stopped) and accelerator.num_processes == 1)
            if done % cfg.log_every == 0 or done == steps:
                row = {"step": done} | health.report() | {"lr": opt.param_groups[0]["lr"]}
                rows = len(z) * accelerator.num_processes * (done - start)
                row["samples_per_second"] = rows / (time.perf_counter() - clock)
                if not math.isfinite(row["loss"]):
                    raise ValueError(f"the loss is {row['loss']}\n{run.where(now, batches)}")
                run.log(row, bar)
                accelerator.log(row, step=done)
                # A signal does not reach all processes in the same step: here they agree.
                stops = bool(all_reduce_sum(torch.tensor(float(len(stopped)), device=loss.device)))
            due = done - (run.saved_at or 0) >= cfg.checkpoint_every
            if moves and (due or done == steps or stops):
                run.save(parts, done)
                if stops and done < steps:
                    run.say_goodbye(done, steps)
                    raise SystemExit(128 + (stopped or [signal.SIGTERM])[0])
    if cfg.track != "none":
        accelerator.end_training()
    accelerator.wait_for_everyone()
    if ema:
        with torch.no_grad():
            for weight, mean in zip(model.parameters(), ema.module.parameters(), strict=True):
                weight.copy_(mean)
    return model.eval()


def twin_of(cfg: Config) -> Config:
    """The same run with signed features: same seed, same budget, in the folder `<out>/twin`.

    Everything that makes codes non-negative or sparse is taken away, and nothing else.
    """
    signed = {"activation": "none", "density": None, "k": None, "twin": False}
    fields = {field.name for field in dataclasses.fields(cfg)}
    changes: dict[str, Any] = {name: value for name, value in signed.items() if name in fields}
    return dataclasses.replace(cfg, out=cfg.out / "twin", **changes)


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the highest learning rate at a step: a rise, then a half cosine or nothing.

    Example:
        >>> [round(lr_factor(s, 100, 0.1, "cosine"), 3) for s in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    rise = int(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    if schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2


def _wants_cpu(device: str | None) -> bool:
    # Without a GPU, torchrun's processes would train alone unless accelerate is told so.
    return device == "cpu" or (device is None and not torch.accelerator.is_available())

"""The one training loop: an objective, its batches, a config.

All random numbers are a function of the seed and the step, so a resumed run ends with the same
weights, bit for bit: the order of rows comes from the epoch's seed, and
the generators are seeded anew before each step.
"""

import math
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ncl_multi.distributed import all_reduce_sum
from ncl_multi.norm import shared_batch_norm
from ncl_multi.optional import needs
from ncl_multi.training.batches import Batches, step_seed
from ncl_multi.training.config import TrainConfig
from ncl_multi.training.health import Health
from ncl_multi.training.run_folder import RunFolder, as_json, open_run
from ncl_multi.training.sharded import ShardedRunFolder, copy_whole_weights, shard

with needs("ncl-multi[train]"):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import send_to_device, set_seed
    from tqdm.auto import tqdm

Objective = TypeVar("Objective", bound=nn.Module)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class StepObjective(nn.Module):
    """A model and your own training step as an objective for `fit`.

    Args:
        model: What is trained.
        step: Takes the model and a batch; returns the loss and the codes for `Health` to watch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from ncl_multi import NonNegHead, spectral
        >>> def step(head, h):
        ...     za, zb = head(h + 0.1 * torch.randn_like(h)), head(h)
        ...     return spectral(za, zb), zb
        >>> objective = StepObjective(NonNegHead(8, 16), step)
        >>> config = TrainConfig(steps=3, device="cpu", progress=False)
        >>> fit(objective, DataLoader(torch.randn(64, 8), 32), config).model.trained
        True
    """

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], tuple[Tensor, Tensor]]):
        super().__init__()
        self.model, self.step = model, step

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.step(self.model, batch)


def fit(
    objective: Objective,
    loader: Iterable,
    cfg: TrainConfig,
    *,
    optimizer: MakeOptimizer | None = None,
    fingerprint: str | None = None,
) -> Objective:
    """Train an objective and return it, in eval mode, on its device.

    An objective is a module whose `forward(batch)` returns the loss and the codes that `Health`
    should watch. Its attribute `model` is what `compile` compiles. Modules with an `anneal` method
    get the progress before every step.

    A `DataLoader` over a map-style dataset is read in our order, the same for any number
    of processes: with `n` of them each takes its share of a global batch of `n * batch_size` rows.
    Put random augmentation into the objective, where it is reproducible. Other iterables keep their
    own order.

    With `cfg.out`, `<out>/checkpoint.pt` is replaced every `checkpoint_every` steps, and at Ctrl-C
    or SIGTERM; the same call resumes from there, and a folder with a run on other data or
    with other settings is refused. Without, nothing is written and no signal is caught. The global
    random state is left as it was.

    With `cfg.shard` a copy of the objective is trained, its weights and optimizer state split over
    the processes, and the whole weights come back into the objective, which stays on its device.
    Checkpoints are folders, `<out>/checkpoints/<step>`, that any number of processes can resume
    from, as long as they have as many rows per step together.

    Args:
        objective: What is trained.
        loader: Its batches.
        cfg: How.
        optimizer: Makes the optimizer from the weights; None is AdamW. A parameter group may have
            `lr_scale`, its factor on the learning rate.
        fingerprint: Identifies the training data; None hashes rows of the dataset.
    """
    with random_state_kept():
        cfg = cfg.on_this_machine()
        return _fit(objective, loader, cfg, optimizer or _adamw(cfg), fingerprint)


def _fit(
    objective: Objective,
    loader: Iterable,
    cfg: TrainConfig,
    optimizer: MakeOptimizer,
    fingerprint: str | None,
) -> Objective:
    # An earlier run in this process may have had another precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=_wants_cpu(cfg.device),
        mixed_precision={"fp32": "no"}.get(cfg.precision, cfg.precision),
        log_with=None if cfg.track == "none" else cfg.track,
        project_dir=cfg.out,
        step_scheduler_with_optimizer=False,
    )
    if cfg.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU, and there is none; use fp32 or bf16")
    batches = Batches(loader, cfg.seed, accelerator.process_index, accelerator.num_processes)
    steps = cfg.steps if cfg.steps is not None else cfg.epochs * len(batches)
    device = accelerator.device
    trained = (shard(objective, device) if cfg.shard else objective.to(device)).train()
    weights = [p for p in trained.parameters() if p.requires_grad]
    ema = cfg.ema and AveragedModel(
        objective, multi_avg_fn=get_ema_multi_avg_fn(cfg.ema), use_buffers=False
    )
    parts = {"model": trained, "optimizer": optimizer(weights)} | ({"ema": ema} if ema else {})
    kind = ShardedRunFolder if cfg.shard else RunFolder
    data = fingerprint or batches.fingerprint()
    with open_run(cfg, accelerator.is_main_process, data, kind) as run:
        start = run.restore(parts, device, steps)
        if cfg.compile:
            getattr(objective, "model", objective).compile()
        if cfg.track != "none":
            accelerator.init_trackers("ncl_multi", config=as_json(cfg))
        with shared_batch_norm(trained):
            _train(accelerator, parts, batches, cfg, run, range(start, steps))
        if cfg.track != "none":
            accelerator.end_training()
        accelerator.wait_for_everyone()
    if cfg.shard:
        copy_whole_weights(trained, objective)
    if ema:
        with torch.no_grad():
            for weight, mean in zip(objective.parameters(), ema.module.parameters(), strict=True):
                weight.copy_(mean)
    return objective.eval()


def _train(
    accelerator: Accelerator,
    parts: dict[str, Any],
    batches: Batches,
    cfg: TrainConfig,
    run: RunFolder,
    steps: range,
) -> None:
    """The loop over the remaining steps."""
    objective, ema = parts["model"], parts.get("ema")
    weights = [p for p in objective.parameters() if p.requires_grad]
    annealed: list[Any] = [module for module in objective.modules() if hasattr(module, "anneal")]
    opt = accelerator.prepare_optimizer(parts["optimizer"])
    # FSDP gathers shards in hooks of the weights: DDP would do so once more.
    prepared = accelerator.prepare_model(objective, evaluation_mode=cfg.shard)
    health, clock, stops = Health(), time.perf_counter(), False
    bar = tqdm(
        total=steps.stop, initial=min(steps.start, steps.stop), desc=run.name, unit="step",
        dynamic_ncols=True, disable=not (cfg.progress and accelerator.is_main_process),
    )  # fmt: skip
    with run.stop_signals() as stopped, bar:
        for now, batch in zip(steps, batches.after(steps.start, steps.stop), strict=True):
            set_seed(step_seed(cfg.seed, now, accelerator.process_index))
            for module in annealed:
                module.anneal(now / steps.stop)
            factor = lr_factor(now, steps.stop, cfg.warmup, cfg.schedule)
            for group in opt.param_groups:
                group["lr"] = group.get("lr_scale", 1.0) * cfg.lr * factor
            done = now + 1
            # Update the weights after `accumulate` batches, and after the last one.
            moves = done % cfg.accumulate == 0 or done == steps.stop
            with nullcontext() if moves else accelerator.no_sync(prepared):
                try:
                    loss, z = prepared(send_to_device(batch, accelerator.device))
                except ValueError as error:
                    raise ValueError(f"{error}\n{run.where(now, batches)}") from error
                accelerator.backward(loss / cfg.accumulate)
            if moves:
                if cfg.clip_grad:
                    accelerator.clip_grad_norm_(weights, cfg.clip_grad)
                opt.step()
                opt.zero_grad()
                if ema:
                    ema.update_parameters(objective)
            health.update(loss, z)
            bar.update()
            stops = stops or (bool(stopped) and accelerator.num_processes == 1)
            if done % cfg.log_every == 0 or done == steps.stop:
                row = {"step": done} | health.report() | {"lr": opt.param_groups[0]["lr"]}
                rows = len(z) * accelerator.num_processes * (done - steps.start)
                row["samples_per_second"] = rows / (time.perf_counter() - clock)
                if not math.isfinite(row["loss"]):
                    raise ValueError(f"the loss is {row['loss']}\n{run.where(now, batches)}")
                run.log(row, bar)
                accelerator.log(row, step=done)
                # A signal may reach processes in different steps: they synchronise here.
                stops = bool(all_reduce_sum(torch.tensor(float(len(stopped)), device=loss.device)))
            due = done - (run.saved_at or 0) >= cfg.checkpoint_every
            if moves and (due or done == steps.stop or stops):
                run.save(parts, done)
                if stops and done < steps.stop:
                    run.say_goodbye(done, steps.stop)
                    raise SystemExit(128 + (stopped or [signal.SIGTERM])[0])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch after the block."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def _adamw(cfg: TrainConfig) -> MakeOptimizer:
    return lambda weights: torch.optim.AdamW(weights, lr=cfg.lr, weight_decay=cfg.weight_decay)


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Factor of the learning rate at a step: a linear rise, then a half cosine or a constant.

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
    # Without a GPU, torchrun's processes train independently unless accelerate gets cpu=True.
    return device == "cpu" or (device is None and not torch.accelerator.is_available())

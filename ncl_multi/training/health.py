"""Warnings during training: dead dimensions, empty rows, collapse; one warning per cause."""

import math
import warnings

import torch
from torch import Tensor

from ncl_multi.distributed import all_reduce_sum, rank, world_size

ACTIVE = 1e-5
"""An entry of a unit row counts as active above this size."""


class HealthWarning(UserWarning):
    """Training continues, but is unlikely to give a useful model."""


class Health:
    """Counts active entries of the codes on the device; `report` copies the counts to the CPU.

    `update` costs no synchronisation and no communication, so it may be called in every step;
    `report` costs one of each, so call it every few steps, on all processes together.

    Example:
        >>> health = Health()
        >>> health.update(torch.tensor(0.5), torch.eye(4))
        >>> report = health.report()
        >>> report["active"], report["alive"], report["empty_rows"]
        (1.0, 1.0, 0.0)
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._steps_at_chance = 0
        self._rows_watched = 0.0
        self._never_fired: set[int] = set()
        self._fired: Tensor | None = None
        self._steps = self._rows = 0

    @torch.no_grad()
    def update(self, loss: Tensor, z: Tensor) -> None:
        """Add one step: its loss and its codes, this process's rows of one view."""
        z = z.detach().float()
        if self._fired is None or len(self._fired) != z.shape[1]:
            self._start(z)
        # Defined on unit rows; comparing with the length avoids normalising.
        active = z.abs() > ACTIVE * z.norm(dim=1, keepdim=True)
        per_row = active.sum(dim=1)
        self._fired += active.sum(dim=0)
        self._sums += torch.stack([loss.detach().double(), per_row.sum(), (per_row == 0).sum()])
        self._steps, self._rows = self._steps + 1, self._rows + len(z)
        self._rows_a_step = len(z) * world_size()

    def report(self) -> dict[str, float]:
        """Mean loss, active dims per row, share of dimensions alive, share of empty rows, since the
        last report. Warns, once for each cause, if training goes wrong.
        """
        if self._fired is None:
            raise ValueError("nothing to report: call update(loss, z) in the training step first")
        counts = all_reduce_sum(torch.cat([self._sums, self._fired.double()])).tolist()
        loss, active, empty = counts[:3]
        rows = self._rows * world_size()
        silent = {dim for dim, count in enumerate(counts[3:]) if count == 0}
        figures = {
            "loss": loss / (self._steps * world_size()),
            "active": active / rows,
            "alive": 1 - len(silent) / len(self._fired),
            "empty_rows": empty / rows,
        }
        self._never_fired = self._never_fired & silent if self._rows_watched else silent
        self._rows_watched += rows
        self._warn(figures, len(self._fired))
        self._fired = None
        return figures

    def _start(self, z: Tensor) -> None:
        self._fired = torch.zeros(z.shape[1], device=z.device)
        self._sums = torch.zeros(3, device=z.device, dtype=torch.float64)
        self._steps = self._rows = 0

    def _warn(self, figures: dict[str, float], dims: int) -> None:
        n = self._rows_a_step
        at_chance = any(abs(figures["loss"] - math.log(m)) < 1e-3 for m in (n, 2 * n - 1))
        self._steps_at_chance = self._steps_at_chance + self._steps if at_chance else 0
        if not math.isfinite(figures["loss"]):
            self._say(
                "nan",
                f"the loss is {figures['loss']}: lower the learning rate, clip gradients "
                f"(--clip-grad 1), or train in fp32",
            )
        if self._steps_at_chance >= 20:
            self._say(
                "collapse",
                f"the loss stays at chance, {figures['loss']:.4f} for {n} rows: every row looks "
                f"alike. Use batch_norm=True in the head, a lower rate or a longer warm-up",
            )
        if self._rows_watched >= 1000:
            dead = len(self._never_fired) / dims
            if dead > 0.5:
                self._say(
                    "dead",
                    f"{dead:.0%} of dimensions never fired in {self._rows_watched:.0f} rows: use "
                    f"batch_norm=True or density=0.1 in the head, activation='rep_relu', or fewer "
                    f"dimensions",
                )
            self._rows_watched = 0.0
        if figures["empty_rows"] > 0.05:
            self._say(
                "empty",
                f"{figures['empty_rows']:.0%} of rows have no active dimension, so they match "
                f"nothing: raise density or k, or widen the head",
            )

    def _say(self, cause: str, words: str) -> None:
        if cause not in self._warned and rank() == 0:
            self._warned.add(cause)
            warnings.warn(words, HealthWarning, stacklevel=4)

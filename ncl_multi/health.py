"""Is training alive? Dead dimensions, empty rows, collapse: found early, said once, in words."""

import math
import warnings

import torch
from torch import Tensor

from ncl_multi.dist import processes, total

ACTIVE = 1e-5
"""An entry of a unit row counts as active above this size."""


class HealthWarning(UserWarning):
    """Training goes on, but not to anything good."""


class Health:
    """Counts on the device what the codes of each step do; `report` brings the counts home.

    `update` costs no synchronisation and no communication, so it may be called in every step;
    `report` costs one of each, so call it now and then. All processes must call it together.

    Example:
        >>> health = Health()
        >>> health.update(torch.tensor(0.5), torch.eye(4))
        >>> report = health.report()
        >>> report["active"], report["alive"], report["empty_rows"]
        (1.0, 1.0, 0.0)
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._chance_in_a_row = 0
        self._fired: Tensor | None = None
        self._clear()

    @torch.no_grad()
    def update(self, loss: Tensor, z: Tensor) -> None:
        """Take in one step: its loss and its codes, this process's rows of any one view."""
        z = z.detach().float()
        # Definitions are on unit rows; comparing to the length avoids making them.
        active = z.abs() > ACTIVE * z.norm(dim=1, keepdim=True)
        if self._fired is None or len(self._fired) != z.shape[1]:
            self._clear()
            self._fired = torch.zeros(z.shape[1], device=z.device)
            self._sums = torch.zeros(5, device=z.device, dtype=torch.float64)
        self._fired += active.sum(dim=0)
        per_row = active.sum(dim=1)
        step = [loss.detach(), per_row.sum(), (per_row == 0).sum(), per_row.new_tensor(len(z))]
        self._sums[:4] += torch.stack([x.double() for x in step])
        self._sums[4] += 1
        self._rows_a_step = len(z) * processes()

    def report(self) -> dict[str, float]:
        """Mean loss, active dims a row, share of dimensions alive, share of empty rows, since the
        last report. Warns, once for each cause, if training is dying.
        """
        if self._fired is None:
            raise ValueError("nothing to report: call update(loss, z) in the training step first")
        counts = total(torch.cat([self._sums, self._fired.double()])).tolist()
        loss, active, empty, rows, steps = counts[:5]
        fired = counts[5:]
        found = {
            "loss": loss / steps,
            "active": active / rows,
            "alive": sum(count > 0 for count in fired) / len(fired),
            "empty_rows": empty / rows,
        }
        self._warn(found, steps / processes())
        self._clear()
        return found

    def _clear(self) -> None:
        self._fired = None
        self._sums = torch.zeros(5, dtype=torch.float64)

    def _warn(self, found: dict[str, float], steps: float) -> None:
        n = self._rows_a_step
        at_chance = any(abs(found["loss"] - math.log(m)) < 1e-3 for m in (n, 2 * n - 1))
        self._chance_in_a_row = self._chance_in_a_row + int(steps) if at_chance else 0
        if not math.isfinite(found["loss"]):
            self._say(
                "nan",
                f"the loss is {found['loss']}: lower the learning rate, clip gradients "
                f"(--clip-grad 1), or train in fp32",
            )
        if self._chance_in_a_row >= 20:
            self._say(
                "collapse",
                f"the loss sits at chance, {found['loss']:.4f} for {n} rows: every row looks "
                f"alike. Use batch_norm=True in the head, a lower rate or a longer warm-up",
            )
        if found["alive"] < 0.5 and steps * n >= 1000:
            self._say(
                "dead",
                f"{1 - found['alive']:.0%} of dimensions never fired in {steps * n:.0f} rows: "
                f"use batch_norm=True or density=0.1 in the head, activation='rep_relu', or fewer "
                f"dimensions",
            )
        if found["empty_rows"] > 0.05:
            self._say(
                "empty",
                f"{found['empty_rows']:.0%} of rows have no active dimension, so they match "
                f"nothing: raise density or k, or widen the head",
            )

    def _say(self, cause: str, words: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(words, HealthWarning, stacklevel=4)

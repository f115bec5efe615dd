"""BayesNCL's gate (arXiv 2605.28441): which entries of a code count, decided by a small network."""

from collections.abc import Iterable
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi import info_nce
from ncl_multi.adapters.vision.model import NonNegVision
from ncl_multi.adapters.vision.views import Views

_OPEN = 0.8
"""Share of gates that the prior expects to be open."""
_PRIOR = 3e-5
"""Weight of the divergence from the prior, summed over the dimensions of a row."""
_RATE = 0.1
"""Highest learning rate of the gate."""


class Gate(nn.Module):
    """Multiplies each entry by 0 or 1; the gradient is that of the probability."""

    def __init__(self, dims: int, hidden_dim: int):
        super().__init__()
        self.logits = nn.Sequential(
            nn.Linear(dims, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, dims)
        )

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The gated codes, and the logit of each gate's probability to be open."""
        logits = self.logits(z.detach().float())
        open_ = logits.sigmoid()
        straight = (logits > 0).float() + (open_ - open_.detach())
        return z * straight, logits


class Gated(nn.Module):
    """SimCLR's loss on gated codes, as an objective."""

    def __init__(self, model: NonNegVision, views: Views, temperature: float, hidden_dim: int):
        super().__init__()
        self.model, self.views, self.temperature = model, views, temperature
        self.gate = Gate(model.head.out_dim, hidden_dim)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        images = batch if isinstance(batch, Tensor) else batch[0]
        z, logits = self.gate(self.model(self.views(torch.cat([images, images]))))
        loss = info_nce(*z.chunk(2), temperature=self.temperature, within_view=True)
        return loss + _PRIOR * divergence(logits), z

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """AdamW with the gate's own learning rate."""
        gate = {"params": [*self.gate.parameters()], "lr_scale": _RATE / lr}
        groups: Iterable[Any] = ({"params": [*self.model.parameters()]}, gate)
        return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)


def divergence(logits: Tensor) -> Tensor:
    """Mean over rows of the divergence of the gates from the prior, in nats."""
    open_ = logits.sigmoid()
    terms = open_ * (F.logsigmoid(logits) - log(_OPEN))
    terms = terms + (1 - open_) * (F.logsigmoid(-logits) - log(1 - _OPEN))
    return terms.sum(dim=1).mean()

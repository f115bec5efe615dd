"""Batch statistics over the rows of all processes, with running values for serving."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ncl_multi.distributed import all_reduce_sum, world_size
from ncl_multi.losses.checks import at_least_float32


class SharedCentre(nn.Module):
    """Subtracts the mean of each dimension over the rows of all processes.

    No gradient passes through the mean: later layers standardise anyway.
    """

    mean: Tensor
    batches: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        if not self.training:
            return (at_least_float32(x) - self.mean).to(x.dtype)
        with torch.no_grad():
            mean = all_reduce_sum(at_least_float32(x).sum(dim=0)) / (len(x) * world_size())
            self.batches += 1
            _follow(self.mean, mean, self.batches)
        return (at_least_float32(x) - mean).to(x.dtype)


class SharedNorm(nn.Module):
    """Zero mean and unit variance per dimension, over the rows of all processes.

    BatchNorm without scale and shift. Unlike torch's it is the same on any device and number of
    processes (SyncBatchNorm needs a GPU), and its running moments are right from the first batch.
    """

    # Only against division by zero: a usual 1e-5 would swamp the variance of small inputs.
    eps = 1e-16
    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, h: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        if not self.training:
            normal = (at_least_float32(h) - self.mean) * (self.variance + self.eps).rsqrt()
            return normal.to(h.dtype)
        rows = len(h) * world_size()
        if rows < 2:
            raise ValueError("batch norm needs at least two rows to train on; got one")
        if world_size() == 1:
            normal, mean, scale = torch.native_batch_norm(
                at_least_float32(h), None, None, None, None, True, 0.0, self.eps
            )
            variance = scale.detach().pow(-2) - self.eps
        else:
            mean, variance = moments(at_least_float32(h))
            normal = (at_least_float32(h) - mean) * (variance + self.eps).rsqrt()
        with torch.no_grad():
            self.batches += 1
            _follow(self.mean, mean.detach(), self.batches)
            _follow(self.variance, variance * (rows / (rows - 1)), self.batches)
        return normal.to(h.dtype)


@contextmanager
def shared_batch_norm(model: nn.Module) -> Iterator[None]:
    """Within this context torch's BatchNorm layers use the rows of all processes, too.

    SyncBatchNorm does this only on GPUs. Every process must have the same number of rows.
    """
    layers: list[Any] = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    for layer in layers if world_size() > 1 else ():
        layer.forward = partial(_batch_norm_of_all, layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _batch_norm_of_all(layer: Any, x: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, x)
    by_channel = at_least_float32(x).transpose(0, 1).flatten(1).T
    mean, variance = moments(by_channel)
    if layer.running_mean is not None and layer.running_var is not None:
        rows = len(by_channel) * world_size()
        with torch.no_grad():
            layer.num_batches_tracked += 1
            step = layer.momentum or 1 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean, step)
            layer.running_var.lerp_(variance * (rows / (rows - 1)), step)
    shape = (1, -1, *[1] * (x.ndim - 2))
    normal = (at_least_float32(x) - mean.view(shape)) * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    return normal.to(x.dtype)


def moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each dimension over the rows of all processes."""
    rows = len(h) * world_size()
    mean = all_reduce_sum(h.sum(dim=0)) / rows
    return mean, all_reduce_sum((h - mean).square().sum(dim=0)) / rows


def _follow(running: Tensor, new: Tensor, batches: Tensor) -> None:
    """A plain average of the first batches, then a moving average."""
    running.lerp_(new.to(running.dtype), (1 / batches).clamp(min=0.1).to(running.dtype))

"""Rows and sums from all processes, with gradients: the only file that knows of processes.

Each process computes the loss of the whole gathered batch. The backward of `gather` adds up what
all of them have to say about one's own rows, DDP then takes the mean over processes, and the two
cancel: the gradient is that of one process with the whole batch, exactly.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many processes train together; 1 where none were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def barrier() -> None:
    """Go on when all processes have come this far."""
    if world_size() > 1:
        dist.barrier()


def gather(z: Tensor) -> Tensor:
    """All processes' rows, in order of rank. Every process must bring as many rows.

    Alone, this returns `z` itself, so a training step may always say `gather`.
    """
    return z if world_size() == 1 else _Gather.apply(z)


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum over processes, with gradients."""
    return x if world_size() == 1 else _AllReduceSum.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.rows = len(z)
        everyone = z.new_empty((world_size() * len(z), *z.shape[1:]))
        dist.all_gather_into_tensor(everyone, z.contiguous())
        return everyone

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        start = rank() * ctx.rows
        return grad[start : start + ctx.rows]


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return _AllReduceSum.apply(grad)

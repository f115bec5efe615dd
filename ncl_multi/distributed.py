"""Rows and sums from all processes, with gradients: the only file that knows of processes.

What is computed from rows of all processes sends back to each process the sum of what all of them
have to say about its own rows. DDP then takes the mean over processes, and the two cancel: the
gradient is that of one process with the whole batch, exactly.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Views = Sequence[Tensor]


def world_size() -> int:
    """How many processes train together; 1 where none were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    """Whether this process writes the files: the first one, or the only one."""
    return rank() == 0


def barrier() -> None:
    """Go on when all processes have come this far."""
    if world_size() > 1:
        dist.barrier()


def gather(z: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """All processes' rows, in order of rank.

    Every process must pass as many rows, or `counts` says how many each of them passes. With one
    process this returns `z` itself, so a training step may always say `gather`.
    """
    return z if world_size() == 1 else _Gather.apply(z, counts or [len(z)] * world_size())


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum over processes, with gradients."""
    return x if world_size() == 1 else _AllReduceSum.apply(x)


def all_reduce_logsumexp(x: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials over processes, with gradients.

    An entry may be minus infinity on one process, but not on all of them.
    """
    if world_size() == 1:
        return x
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return all_reduce_sum((x - largest).exp()).log() + largest


def agree(error: str | None, rows: int, device: torch.device, **options: Any) -> list[int]:
    """How many rows each process has, after all of them were found fit to start.

    Raises the same error on all processes if one of them has an `error`, has no rows, or passes
    other `options` than the rest. Without this the others would wait for it for ever.
    """
    digest = zlib.crc32(repr(options).encode())
    own = torch.tensor([-1 if error else rows, digest], device=device)
    facts = own.new_empty(2 * world_size())
    dist.all_gather_into_tensor(facts, own)
    counts, digests = facts.view(-1, 2).T.tolist()
    if min(counts) > 0 and len(set(digests)) == 1:
        return counts
    states: list[Any] = [None] * world_size()
    dist.all_gather_object(states, (error, rows, options))
    raise ValueError(_disagreement(states))


class Exchange:
    """How rows of this process meet the rows of all: here there is only one process."""

    def __init__(self, counts: Sequence[int]):
        self.counts, self.rank = list(counts), rank() if len(counts) > 1 else 0
        self.rows = sum(counts)

    def span(self, owner: int) -> slice:
        """Which rows of the whole batch belong to a process."""
        start = sum(self.counts[:owner])
        return slice(start, start + self.counts[owner])

    def blocks(self, views: Views) -> Iterator[tuple[int, Views]]:
        """Each process's number and rows, in any order."""
        yield self.rank, views

    def blocks_with_gradients(
        self, views: Views, gradients: Views
    ) -> Iterator[tuple[int, Views, Views]]:
        """The same, with room to add gradients to; `gradients` are those of this process's rows.

        At the end they have in them what all processes have added.
        """
        yield self.rank, views, gradients


class GatherExchange(Exchange):
    """Every process holds the rows of all. Gradients of a block go to its owner at once."""

    def blocks(self, views: Views) -> Iterator[tuple[int, Views]]:
        everyone = [_padded_gather(view, self.counts) for view in views]
        for owner in range(len(self.counts)):
            own = owner == self.rank
            yield owner, views if own else [rows[owner, : self.counts[owner]] for rows in everyone]

    def blocks_with_gradients(
        self, views: Views, gradients: Views
    ) -> Iterator[tuple[int, Views, Views]]:
        arrive = _nothing
        for owner, blocks in self.blocks(views):
            own = owner == self.rank
            sums = None if own else [torch.zeros_like(block) for block in blocks]
            yield owner, blocks, sums or gradients
            arrive()
            # Summed while the next block is computed. All processes go in the same order.
            arrive = self._send_home(owner, sums, gradients)
        arrive()

    def _send_home(self, owner: int, sums: Views | None, gradients: Views) -> Callable[[], None]:
        """Start to add up an owner's gradients; call what is returned to wait for the end."""
        # What others add to its rows an owner keeps apart: its own part is not finished yet.
        received = sums or [torch.zeros_like(total) for total in gradients]
        works = [dist.reduce(block, owner, async_op=True) for block in received]

        def arrive() -> None:
            _wait(works)
            if owner == self.rank:
                for total, block in zip(gradients, received, strict=True):
                    total += block

        return arrive


class RingExchange(Exchange):
    """Blocks of rows go round: every process holds two at a time, besides its own rows.

    The next block arrives while the present one is computed. In the backward its gradients go
    round with it, one step behind, and come home after the last.
    """

    def blocks(self, views: Views) -> Iterator[tuple[int, Views]]:
        world, blocks = len(self.counts), views
        for step in range(world):
            following, on_the_way = (
                self._pass_on(blocks, step + 1) if step + 1 < world else ([], [])
            )
            yield (self.rank + step) % world, blocks
            _wait(on_the_way)
            blocks = following

    def blocks_with_gradients(
        self, views: Views, gradients: Views
    ) -> Iterator[tuple[int, Views, Views]]:
        sums: Views = []
        for step, (owner, blocks) in enumerate(self.blocks(views)):
            if step == 0:
                yield owner, blocks, gradients
                continue
            sums = sums or [torch.zeros_like(block) for block in blocks]
            yield owner, blocks, sums
            sums, on_the_way = self._pass_on(sums, step + 1)
            _wait(on_the_way)
        for total, received in zip(gradients, sums, strict=True):
            total += received

    def _pass_on(self, blocks: Views, step: int) -> tuple[Views, list[Any]]:
        """Send blocks one process back; what arrives belongs to the process `step` ahead."""
        world = len(self.counts)
        count = self.counts[(self.rank + step) % world]
        arriving = [block.new_empty((count, *block.shape[1:])) for block in blocks]
        before, after = (self.rank - 1) % world, (self.rank + 1) % world
        sends = [dist.P2POp(dist.isend, block.contiguous(), before) for block in blocks]
        receives = [dist.P2POp(dist.irecv, block, after) for block in arriving]
        return arriving, dist.batch_isend_irecv(sends + receives)


def _nothing() -> None:
    """Before the first block there is nothing to wait for."""


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _padded_gather(z: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows of all, process by process, each filled up to as many as the largest has."""
    most = max(counts)
    if len(z) < most:
        z = torch.cat([z, z.new_zeros((most - len(z), *z.shape[1:]))])
    everyone = z.new_empty((len(counts) * most, *z.shape[1:]))
    dist.all_gather_into_tensor(everyone, z.contiguous())
    return everyone.view(len(counts), most, *z.shape[1:])


def _disagreement(states: list[Any]) -> str:
    """What to tell all processes: what is wrong on one of them, or where they differ."""
    for process, (error, rows, _) in enumerate(states):
        if error or rows < 1:
            reason = error or "it has no rows. Use drop_last=True in the loader"
            return f"process {process} cannot compute its share of the loss: {reason}"
    options = [state[2] for state in states]
    differing = {
        name: [other[name] for other in options]
        for name in options[0]
        if len({repr(other[name]) for other in options}) > 1
    }
    text = "; ".join(f"{name} {', '.join(map(str, got))}" for name, got in differing.items())
    return f"all processes must pass the same; got, in order of rank: {text}"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, counts):
        ctx.counts = counts
        blocks = _padded_gather(z, counts)
        if min(counts) == max(counts):
            return blocks.flatten(0, 1)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[Exchange(ctx.counts).span(rank())], None


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return _AllReduceSum.apply(grad)

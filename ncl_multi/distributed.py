"""Rows and sums from all processes, with gradients: all collective calls are in this file.

The backward pass of a gather gives each process the sum, over all processes, of the gradients of
its rows. DDP then takes the mean over processes, and the two cancel: the gradient is exactly that
of one process with the whole batch.
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
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    """Whether this process writes the files: the first one, or the only one."""
    return rank() == 0


def barrier() -> None:
    """Wait until all processes have reached this line."""
    if world_size() > 1:
        dist.barrier()


def gather(z: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """All processes' rows, in order of rank.

    Every process must pass the same number of rows, or `counts` lists the number of each. With one
    process this returns `z` itself, so a training step may always call it.
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


def exchange_counts(
    error: str | None, rows: int, device: torch.device, **options: Any
) -> list[int]:
    """The number of rows of each process, after all have passed their checks.

    Raises the same error on all processes if one of them has an `error`, has no rows, or passes
    other `options` than the others. Without this the others would wait forever.
    """
    digest = zlib.crc32(repr(options).encode())
    local = torch.tensor([-1 if error else rows, digest], device=device)
    facts = local.new_empty(2 * world_size())
    dist.all_gather_into_tensor(facts, local)
    counts, digests = facts.view(-1, 2).T.tolist()
    if min(counts) > 0 and len(set(digests)) == 1:
        return counts
    states: list[Any] = [None] * world_size()
    dist.all_gather_object(states, (error, rows, options))
    raise ValueError(_disagreement(states))


class Exchange:
    """Iterates over the rows of all processes; this base class is for one process.

    Rows of this process are anything that can be sliced into tensors. Those of others come in
    pieces of `piece` rows.
    """

    def __init__(self, counts: Sequence[int], piece: int = 0):
        self.counts, self.rank = list(counts), rank() if len(counts) > 1 else 0
        self.rows, self.piece = sum(counts), piece

    @property
    def own(self) -> slice:
        """The rows of the whole batch that belong to this process."""
        return self.span(self.rank)

    def span(self, owner: int, part: slice = slice(None)) -> slice:
        """The rows of the whole batch that belong to a process, or to a part of its rows."""
        start = sum(self.counts[:owner])
        inside = range(start, start + self.counts[owner])[part]
        return slice(inside.start, inside.stop)

    def blocks(self, views: Sequence[Any]) -> Iterator[tuple[int, slice, Sequence[Any]]]:
        """For each process its number, a slice of its rows, and these rows."""
        yield self.rank, slice(0, self.counts[self.rank]), views

    def blocks_with_gradients(
        self, views: Sequence[Any], gradients: Views
    ) -> Iterator[tuple[int, slice, Sequence[Any], Views]]:
        """The same, with buffers to add gradients to; `gradients` are those of this process's rows.

        At the end they contain the sum over all processes.
        """
        yield self.rank, slice(0, self.counts[self.rank]), views, gradients

    @property
    def _pieces(self) -> int:
        """Number of pieces, the same for all processes; none is empty."""
        return min(min(self.counts), -(-max(self.counts) // (self.piece or self.rows)))

    def _part(self, owner: int, piece: int) -> slice:
        """The rows of its owner that are in a piece."""
        count = self.counts[owner]
        return slice(count * piece // self._pieces, count * (piece + 1) // self._pieces)


class GatherExchange(Exchange):
    """Every process gathers a piece of all processes' rows at a time.

    Gradients of a piece go to its owner at once.
    """

    def blocks(self, views: Sequence[Any]) -> Iterator[tuple[int, slice, Sequence[Any]]]:
        yield self.rank, slice(0, self.counts[self.rank]), views
        yield from self._others(views)

    def blocks_with_gradients(
        self, views: Sequence[Any], gradients: Views
    ) -> Iterator[tuple[int, slice, Sequence[Any], Views]]:
        yield self.rank, slice(0, self.counts[self.rank]), views, gradients
        arrive = _nothing
        # Of each piece the owner receives what the others add. All go in the same order.
        for owner, part, blocks in self._others(views, with_own=True):
            sums = [torch.zeros_like(block) for block in blocks]
            if owner != self.rank:
                yield owner, part, blocks, sums
            arrive()
            # Summed while the next block is computed.
            arrive = self._send_home(owner, sums, [total[part] for total in gradients])
        arrive()

    def _others(
        self, views: Sequence[Any], *, with_own: bool = False
    ) -> Iterator[tuple[int, slice, Views]]:
        """Piece by piece, the rows of all other processes; `with_own` also those of this one."""
        for piece in range(self._pieces):
            parts = [self._part(owner, piece) for owner in range(len(self.counts))]
            counts = [part.stop - part.start for part in parts]
            everyone = [_padded_gather(view[parts[self.rank]], counts) for view in views]
            for owner, count in enumerate(counts):
                if with_own or owner != self.rank:
                    yield owner, parts[owner], [rows[owner, :count] for rows in everyone]

    def _send_home(self, owner: int, sums: Views, totals: Views) -> Callable[[], None]:
        """Start the reduction of an owner's gradients; call the result to wait for it."""
        works = [dist.reduce(block, owner, async_op=True) for block in sums]

        def arrive() -> None:
            _wait(works)
            if owner == self.rank:
                for total, block in zip(totals, sums, strict=True):
                    total += block

        return arrive


class RingExchange(Exchange):
    """Pieces of all processes' rows travel around a ring; each process sends to the previous one.

    A process has two pieces at a time, the present one and the next, which arrives while the
    present one is computed. In the backward pass the gradients of a piece follow it, and reach its
    owner after the last step.
    """

    def blocks(self, views: Sequence[Any]) -> Iterator[tuple[int, slice, Sequence[Any]]]:
        stops = self._stops()
        following, arrive = self._next_piece(views, [], stops, 0)
        yield self.rank, slice(0, self.counts[self.rank]), views
        for number, (piece, step) in enumerate(stops):
            arrive()
            present = following
            following, arrive = self._next_piece(views, present, stops, number + 1)
            owner = (self.rank + step) % len(self.counts)
            yield owner, self._part(owner, piece), present

    def blocks_with_gradients(
        self, views: Sequence[Any], gradients: Views
    ) -> Iterator[tuple[int, slice, Sequence[Any], Views]]:
        world, stops = len(self.counts), self._stops()
        arriving: Views = []
        arrive = _nothing
        pieces = self.blocks(views)
        home, part, blocks = next(pieces)
        yield home, part, blocks, gradients
        for (piece, step), (owner, part, blocks) in zip(stops, pieces, strict=True):
            sums = [torch.zeros_like(block) for block in blocks]
            yield owner, part, blocks, sums
            arrive()
            # Gradients from the next process: of this piece, or of the last one of this process.
            into = sums if step > 1 else self._of_home(gradients, piece - 1)
            for total, received in zip(into, arriving, strict=False):
                total += received
            following = self._part((owner + 1) % world, piece)
            arriving = [_empty(following, block) for block in blocks]
            arrive = self._pass_on(sums, arriving)
        arrive()
        for total, received in zip(
            self._of_home(gradients, self._pieces - 1), arriving, strict=True
        ):
            total += received

    def _of_home(self, gradients: Views, piece: int) -> Views:
        return [total[self._part(self.rank, piece)] for total in gradients] if piece >= 0 else []

    def _stops(self) -> list[tuple[int, int]]:
        """The number of each piece, and how many processes ahead its owner is, in order."""
        steps = range(1, len(self.counts))
        return [(piece, step) for piece in range(self._pieces) for step in steps]

    def _next_piece(
        self, views: Sequence[Any], present: Views, stops: list[tuple[int, int]], number: int
    ) -> tuple[Views, Callable[[], None]]:
        """Send the piece that the previous process needs next, and receive the next one."""
        if number == len(stops):
            return [], _nothing
        piece, step = stops[number]
        leaving = present if step > 1 else [view[self._part(self.rank, piece)] for view in views]
        part = self._part((self.rank + step) % len(self.counts), piece)
        arriving = [_empty(part, block) for block in leaving]
        return arriving, self._pass_on(leaving, arriving)

    def _pass_on(self, leaving: Views, arriving: Views) -> Callable[[], None]:
        """Send blocks to the previous process, and receive those of the next one.

        Call what is returned to wait for the end. It also keeps what leaves in memory until then.
        """
        world = len(self.counts)
        previous, following = (self.rank - 1) % world, (self.rank + 1) % world
        sends = [dist.P2POp(dist.isend, block.contiguous(), previous) for block in leaving]
        receives = [dist.P2POp(dist.irecv, block, following) for block in arriving]
        messages = [*sends, *receives]
        works = dist.batch_isend_irecv(messages)

        def arrive() -> None:
            _wait(works)
            messages.clear()

        return arrive


def _empty(part: slice, like: Tensor) -> Tensor:
    return like.new_empty((part.stop - part.start, *like.shape[1:]))


def _nothing() -> None:
    """Before the first block there is nothing to wait for."""


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _padded_gather(z: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows of all processes, each padded to the largest number of rows."""
    most = max(counts)
    if len(z) < most:
        z = torch.cat([z, z.new_zeros((most - len(z), *z.shape[1:]))])
    everyone = z.new_empty((len(counts) * most, *z.shape[1:]))
    dist.all_gather_into_tensor(everyone, z.contiguous())
    return everyone.view(len(counts), most, *z.shape[1:])


def _disagreement(states: list[Any]) -> str:
    """The error for all processes: what is wrong on one of them, or where they differ."""
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

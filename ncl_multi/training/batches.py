"""Batches in an order that depends only on the seed and the epoch."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler


class Rows(Dataset):
    """Row numbers of examples, a whole batch at a time."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.rows[indices]

    @staticmethod
    def together(batch: Any) -> Any:
        """For `collate_fn`: rows come as a batch already."""
        return batch


class Batches:
    """The batches of a run in an order that depends only on the seed and the epoch."""

    def __init__(self, loader: Any, seed: int, rank: int, processes: int):
        self.loader, self.seed, self.rank, self.processes = loader, seed, rank, processes
        # A loader with its own sampler or batches keeps its order.
        self.ours = (
            type(loader) is DataLoader
            and not isinstance(loader.dataset, IterableDataset)
            and type(loader.sampler) in (RandomSampler, SequentialSampler)
            and loader.batch_size is not None
        )
        if len(self) == 0:
            held = f"{len(loader.dataset)} rows" if self.ours else "no batch"
            raise ValueError(
                f"the data has {held}, less than one batch of "
                f"{getattr(loader, 'batch_size', 1)} for each of {processes} processes; "
                f"lower the batch size (--batch-size)"
            )

    def __len__(self) -> int:
        if self.ours:
            return len(self.loader.dataset) // (self.loader.batch_size * self.processes)
        return len(self.loader)

    def after(self, start: int, steps: int) -> Iterator[Any]:
        """Batches from step `start` to the last."""
        while start < steps:
            epoch, skip = divmod(start, len(self))
            stop = min(len(self), skip + steps - start)
            yield from self._epoch(epoch, skip, stop)
            start += stop - skip

    def rows(self, step: int) -> list[int] | str:
        """Row numbers of this process's batch."""
        if not self.ours:
            return "in the loader's own order"
        epoch, index = divmod(step, len(self))
        return self._order(epoch)[index].tolist()

    def fingerprint(self) -> str | None:
        """A hash of the number of rows and of 64 of them; None for a loader in its own order."""
        if not self.ours:
            return None
        dataset = self.loader.dataset
        chosen = torch.linspace(0, len(dataset) - 1, min(64, len(dataset))).long().unique()
        digest = hashlib.sha256(str(len(dataset)).encode())
        for row in chosen.tolist():
            _digest(digest, dataset[row])
        return digest.hexdigest()[:16]

    def _epoch(self, epoch: int, skip: int, stop: int) -> Iterator[Any]:
        if not self.ours:
            # A loader that shuffles takes its seed from here.
            torch.manual_seed(step_seed(self.seed, epoch, -1))
            batches = enumerate(self.loader)
            yield from (batch for index, batch in batches if skip <= index < stop)
            return
        yield from DataLoader(
            self.loader.dataset,
            batch_sampler=self._order(epoch)[skip:stop].tolist(),
            collate_fn=self.loader.collate_fn,
            num_workers=self.loader.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _order(self, epoch: int) -> Tensor:
        """Row numbers of this process, one line per batch."""
        generator = torch.Generator().manual_seed(step_seed(self.seed, epoch, -1))
        order = torch.randperm(len(self.loader.dataset), generator=generator)
        whole = order[: len(self) * self.processes * self.loader.batch_size]
        return whole.view(len(self), self.processes, -1)[:, self.rank]


def _digest(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, list | tuple):
        for entry in value:
            _digest(digest, entry)
    elif isinstance(value, str | int | float | bytes):
        digest.update(repr(value).encode())


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed below 2**32 (numpy's limit) that differs for every step and process."""
    return hash((seed, step, rank)) % 2**32

"""Processes that work together, as torchrun starts them: the port is not chosen in advance."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context, start_processes

# Forked from a process that has imported torch, they start at once.
START = "forkserver"
get_context(START).set_forkserver_preload(["torch.distributed", "torch.nn.parallel"])


@contextmanager
def environments(world: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each process; the store in which they meet is kept by this one.

    The store listens on a port that the system gives it, so that nobody else can take the port
    first, and it is still there when the first process ends before the others.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    yield [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    del store


def run_together(work: Callable[..., None], world: int, *arguments: Any) -> None:
    """Call `work` in as many gloo processes of one thread; raise what went wrong in one of them."""
    with environments(world) as each:
        start_processes(_member, (each, work, arguments), nprocs=world, start_method=START)


def join(environment: dict[str, str]) -> None:
    """Make this process one of those that work together."""
    torch.set_num_threads(1)
    os.environ |= environment
    dist.init_process_group("gloo")


def _member(
    rank: int, each: list[dict[str, str]], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    join(each[rank])
    work(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads may still hold tensors that Python knows. One that lets go of them while the
    # interpreter is taken down aborts the process, on a busy machine now and then.
    os._exit(0)

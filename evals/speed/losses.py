"""How much time and memory do the losses take, on one process and split over several?

Usage:
    python evals/speed/losses.py
    python evals/speed/losses.py --rivals-up-to 32768   # the dense losses need 17 GB there
    python evals/speed/losses.py --processes 1 2 4      # the loss split, one thread per process
    python evals/speed/losses.py --processes 4 --split-sizes 65536 512 --exchanges ring --repeats 0
"""

import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from measure import Cost, apart, cost, forget_peak, need, resident_mb

from ncl_multi.log import show_messages


def losses(
    sizes: tuple[tuple[int, int], ...] = ((256, 512), (2048, 512), (8192, 512), (32768, 256)),
    linear_sizes: tuple[tuple[int, int], ...] = ((32768, 512), (65536, 512)),
    rivals_up_to: int = 16384,
    processes: tuple[int, ...] = (),
    split_sizes: tuple[tuple[int, int], ...] = ((8192, 512),),
    exchanges: tuple[str, ...] = ("gather", "ring"),
    repeats: int = 3,
    out: Path = Path("runs/speed/losses.json"),
) -> None:
    """Forward and backward of every loss, compared with open_clip's, lightly's and a dense one.

    Args:
        sizes: Rows and dimensions of the two views.
        linear_sizes: The same for `spectral`, which makes no n x n matrix.
        rivals_up_to: Side of the largest matrix for the other libraries: n, or 2n for lightly.
        processes: Measure the split loss instead, over n processes with one thread each.
        split_sizes: Rows of all processes together, and dimensions, for the split loss.
        exchanges: How the processes of a split loss exchange rows.
        repeats: Calls, of which the fastest is reported; 0 measures only memory of a split loss.
        out: File for the figures.
    """
    from ncl_multi.report import table, write_json

    if processes:
        rows = _split(processes, split_sizes, exchanges, repeats)
        title = "One step of all processes; CPU seconds and memory of the process that took most"
    else:
        need("open_clip", "lightly")
        rows = _on_one_process(sizes, linear_sizes, rivals_up_to, repeats)
        title = "One n x n x d product is the unit; for spectral, two Gram products d x d x n"
    table(title, rows)
    write_json(out, rows)


def _on_one_process(
    sizes: tuple[tuple[int, int], ...],
    linear_sizes: tuple[tuple[int, int], ...],
    rivals_up_to: int,
    repeats: int,
) -> dict[str, dict[str, float]]:
    from tqdm import tqdm

    cases = [
        (name, n, d)
        for n, d in sizes
        for name in _LOSSES
        if name != "spectral"
        and (name.startswith("ours") or n * (1 + name.startswith("lightly")) <= rivals_up_to)
    ]
    cases += [("spectral", n, d) for n, d in linear_sizes]
    rows, bare = {}, {}
    for name, n, d in tqdm(cases, desc="losses", disable=None):
        if (n, d) not in bare:
            bare[n, d] = apart(_bare, n, d, name == "spectral", repeats).seconds
        cost = apart(_loss_cost, name, n, d, repeats)
        rows[f"n={n} d={d} {name}"] = {
            "ms": cost.seconds * 1e3,
            "products": cost.seconds / bare[n, d],
            "extra MB": cost.extra_mb,
        }
    return rows


def _split(
    processes: tuple[int, ...],
    sizes: tuple[tuple[int, int], ...],
    exchanges: tuple[str, ...],
    repeats: int,
) -> dict[str, dict[str, float]]:
    """Every form of the loss by every number of processes, for the same rows in all."""
    from tqdm import tqdm

    names = {"ours": {}, "ours within_view": {"within_view": True}}
    cases = [
        (n, d, name, world, exchange)
        for n, d in sizes
        for name in names
        for world in processes
        for exchange in (exchanges if world > 1 else exchanges[:1])
    ]
    rows: dict[str, dict[str, float]] = {}
    for n, d, name, world, exchange in tqdm(cases, desc="processes", disable=None):
        row = _together(world, n, d, {**names[name], "exchange": exchange}, repeats)
        label = f"n={n} d={d} {name}"
        if world == 1:
            rows[f"{label} 1 process"] = row
            continue
        first = rows.get(f"{label} 1 process")
        if first:
            row |= {f"{what} of one": row[what] / first[what] for what in first}
        rows[f"{label} {world} processes, {exchange}"] = row
    return rows


def _together(
    world: int, n: int, d: int, options: dict[str, Any], repeats: int
) -> dict[str, float]:
    context = get_context("spawn")
    results = context.SimpleQueue()
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        running = [
            context.Process(
                target=_share, args=(rank, world, store, n, d, options, repeats, results)
            )
            for rank in range(world)
        ]
        for process in running:
            process.start()
        costs = [results.get() for _ in running]
        for process in running:
            process.join()
    return {what: max(cost[what] for cost in costs) for what in costs[0]}


def _share(
    rank: int, world: int, store: str, n: int, d: int, options: dict[str, Any], repeats: int,
    results: Any,
) -> None:  # fmt: skip
    """One process's time and memory for its part of the loss."""
    import torch
    import torch.distributed as dist

    from ncl_multi import info_nce

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    local_rows = n // world + (rank < n % world)
    views = [torch.randn(local_rows, d, requires_grad=True) for _ in range(2)]
    warm = [torch.randn(300, d, requires_grad=True) for _ in range(2)]

    def call(inputs: list[Any]) -> None:
        for view in inputs:
            view.grad = None
        info_nce(*inputs, temperature=0.07, distributed=True, **options).backward()

    call(warm)
    baseline_mb = resident_mb("VmRSS")
    forget_peak()
    call(views)
    extra = resident_mb("VmHWM") - baseline_mb - 2 * local_rows * d * 4 / 2**20
    times, cpu = [], []
    for _ in range(repeats):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        call(views)
        cpu.append(time.process_time() - cpu_start)
        dist.barrier()
        times.append(time.perf_counter() - start)
    timed = {"ms": min(times) * 1e3, "CPU ms": min(cpu) * 1e3} if repeats else {}
    results.put({**timed, "extra MB": extra})
    dist.destroy_process_group()


def _loss_cost(name: str, n: int, d: int, repeats: int) -> Cost:
    import torch

    loss = _LOSSES[name]()
    views = [torch.randn(n, d, requires_grad=True) for _ in range(2)]
    warm = [torch.randn(300, d, requires_grad=True) for _ in range(2)]
    loss(*warm).backward()

    def call() -> None:
        for view in views:
            view.grad = None
        loss(*views).backward()

    return cost(call, repeats, kept_mb=2 * n * d * 4 / 2**20)


def _bare(n: int, d: int, gram: bool, repeats: int) -> Cost:
    import torch

    a, b = torch.randn(n, d), torch.randn(n, d)
    if gram:
        return cost(lambda: (a.T @ a, b.T @ b), repeats)
    # Into memory that is already there: page faults are not arithmetic.
    product = torch.zeros(n, n)
    return cost(lambda: torch.mm(a, b.T, out=product), repeats)


def _ours(**options: Any) -> Callable[..., Any]:
    from ncl_multi import info_nce

    return lambda za, zb: info_nce(za, zb, temperature=0.07, **options)


def _open_clip() -> Callable[..., Any]:
    import torch
    from open_clip.loss import ClipLoss
    from torch.nn.functional import normalize

    loss, scale = ClipLoss(), torch.tensor(1 / 0.07)
    return lambda za, zb: loss(normalize(za, dim=1), normalize(zb, dim=1), scale)


def _lightly() -> Callable[..., Any]:
    from lightly.loss import NTXentLoss

    return NTXentLoss(temperature=0.07)


def _dense() -> Callable[..., Any]:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    def loss(za, zb):
        logits = normalize(za, dim=1) @ normalize(zb, dim=1).T / 0.07
        match = torch.arange(len(za))
        return (cross_entropy(logits, match) + cross_entropy(logits.T, match)) / 2

    return loss


def _spectral() -> Callable[..., Any]:
    from ncl_multi import spectral

    return spectral


_LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "ours": _ours,
    "open_clip ClipLoss": _open_clip,
    "dense": _dense,
    "ours within_view": lambda: _ours(within_view=True),
    "lightly NTXentLoss": _lightly,
    "spectral": _spectral,
}


if __name__ == "__main__":
    show_messages()
    tyro.cli(losses)

"""How fast and how lean? Time and peak extra memory, each case in its own process.

Usage:
    python evals/speed.py losses
    python evals/speed.py losses --rivals-up-to 32768   # the dense losses need 13 GB there
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import tyro


class Cost(NamedTuple):
    """What a call costs: the fastest of several, and the most memory beyond what it was given."""

    seconds: float
    extra_mb: float


def losses(
    sizes: tuple[tuple[int, int], ...] = ((256, 512), (2048, 512), (8192, 512), (32768, 256)),
    linear_sizes: tuple[tuple[int, int], ...] = ((32768, 512), (65536, 512)),
    rivals_up_to: int = 8192,
    repeats: int = 5,
    out: Path = Path("runs/speed/losses.json"),
) -> None:
    """Forward and backward of every loss beside open_clip's, lightly's and a plain dense one.

    Args:
        sizes: Rows and dimensions of the two views.
        linear_sizes: The same for `spectral`, which has no n x n matrix to make.
        rivals_up_to: Most rows for those that keep n x n matrices.
        repeats: Calls of which the fastest counts.
        out: File for the figures.
    """
    from tqdm import tqdm

    from ncl_multi.report import table, write_json

    cases = [
        (name, n, d)
        for n, d in sizes
        for name in _LOSSES
        if name != "spectral" and (name.startswith("ours") or n <= rivals_up_to)
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
    table("One n x n x d product is the unit; for spectral, two Gram products d x d x n", rows)
    write_json(out, rows)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file in a new process, so that no case inherits another's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def cost(call: Callable[[], object], repeats: int, kept_mb: float = 0.0) -> Cost:
    """Measure a call; `kept_mb` is the part of its memory that is its result."""
    before = _resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The kernel forgets the peak so far.
    call()
    extra = _resident_mb("VmHWM") - before - kept_mb
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Cost(min(times), extra)


def _resident_mb(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


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
    tyro.extras.subcommand_cli_from_dict({"losses": losses})

"""How much memory does an epoch on a million nodes take? Generated graph, features on disk.

Usage:
    python evals/speed/graph_epoch.py
    python evals/speed/graph_epoch.py --nodes 100000 --edges 1000000
    python evals/speed/graph_epoch.py --steps 49
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from measure import forget_peak, resident_mb

from ncl_multi.log import show_messages


def graph_epoch(
    nodes: int = 1_000_000,
    edges: int = 10_000_000,
    features: int = 64,
    communities: int = 1000,
    steps: int | None = None,
    out: Path = Path("runs/speed/graph_epoch.json"),
) -> dict[str, dict[str, float]]:
    """One epoch of `NonNegGraph().fit(data)`, then `encode(data)`, and the memory they take.

    Args:
        nodes: Number of nodes.
        edges: Number of edges; each direction counts.
        features: Columns of the features, which are mapped from a file.
        communities: Four of five edges stay within a node's community.
        steps: Steps instead of an epoch.
        out: File for the figures.
    """
    import ncl_multi as ncl
    from ncl_multi.report import table, write_json

    model = ncl.NonNegGraph()
    with tempfile.TemporaryDirectory() as folder:
        data = generated(nodes, edges, features, communities, Path(folder) / "x.bin")
        rows = {
            "fit": _watched(lambda: model.fit(data, device="cpu", steps=steps)),
            "encode": _watched(lambda: model.encode(data)),
        }
    write_json(out, rows)
    part = "one epoch" if steps is None else f"{steps} steps"
    table(f"{nodes:,} nodes, {edges:,} edges, {part}", rows)
    return rows


def _watched(call: Callable[[], Any]) -> dict[str, float]:
    """Time and memory of the process while it runs a function; `late_growth_mb` in its second half.

    The time is that of the processor, which other work on the machine changes little.
    """
    forget_peak()
    before_mb, watch, stop = resident_mb("VmRSS"), [], threading.Event()

    def look() -> None:
        while not stop.wait(1.0):
            watch.append(resident_mb("VmRSS"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    start = time.process_time()
    call()
    seconds = time.process_time() - start
    stop.set()
    thread.join()
    late = watch[len(watch) // 2 :] or [before_mb]
    return {
        "cpu_seconds": seconds,
        "before_mb": before_mb,
        "peak_mb": resident_mb("VmHWM"),
        "late_growth_mb": late[-1] - late[0],
    }


def generated(nodes: int, edges: int, features: int, communities: int, path: Path) -> Any:
    """A graph of communities with noisy features."""
    import numpy as np
    import torch
    from torch_geometric.data import Data

    torch.manual_seed(0)
    y = torch.randint(communities, (nodes,))
    order = y.argsort()
    first = torch.searchsorted(y[order], torch.arange(communities + 1))
    source = torch.randint(nodes, (edges // 2,))
    size = (first[1:] - first[:-1])[y[source]]
    near = order[first[y[source]] + (torch.rand(len(source)) * size).long().clamp(max=size - 1)]
    target = torch.where(torch.rand(len(source)) < 0.8, near, torch.randint(nodes, (len(source),)))
    pairs = torch.stack([source, target])
    centres = torch.randn(communities, features)
    mapped = np.memmap(path, np.float32, "w+", shape=(nodes, features))
    for rows in torch.arange(nodes).split(100_000):
        mapped[rows.numpy()] = (centres[y[rows]] + 2 * torch.randn(len(rows), features)).numpy()
    mapped.flush()
    x = torch.from_file(str(path), shared=True, size=nodes * features).view(nodes, features)
    return Data(x=x, edge_index=torch.cat([pairs, pairs.flip(0)], dim=1))


if __name__ == "__main__":
    show_messages()
    tyro.cli(graph_epoch)

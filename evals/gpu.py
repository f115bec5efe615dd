"""Does everything work on this GPU? One JSON file and one table to paste into an issue.

Without a GPU it says so and runs the same, smaller, on the CPU as a rehearsal.

Usage:
    python evals/gpu.py
    python evals/gpu.py --recipes            # losses only
    python evals/gpu.py --recipes vision_ncl --variants fp32 bf16
"""

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn.functional import normalize

from ncl_multi import info_nce, spectral
from ncl_multi.log import show_messages
from ncl_multi.losses import imitation, nonneg_cross_entropy
from ncl_multi.report import table, write_json

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "fp32": ["--precision", "fp32"],
    "bf16": ["--precision", "bf16"],
    "compiled": ["--precision", "bf16", "--compile"],
}


@dataclass(frozen=True)
class Config:
    """Losses against float64 on the CPU, their time and memory, and short runs of all recipes."""

    rows: int | None = None
    """Rows of the losses that are timed; 16,384 on a GPU, 1,024 on a CPU."""
    dims: int = 512
    """Dimensions of the losses that are timed."""
    recipes: tuple[str, ...] = tuple(sorted(p.stem for p in (ROOT / "recipes").glob("*.py")))
    """Recipes to run for a few steps; none to leave them out."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """How to run them: `fp32`, `bf16`, `compiled` (with bf16)."""
    steps: int = 20
    """Steps of each recipe."""
    timeout: float = 1800
    """Time limit for one run of a recipe, in seconds."""
    out: Path = Path("runs/gpu.json")
    """File for the figures."""


def main(cfg: Config) -> bool:
    """Run everything; return whether all of it passed."""
    unknown = set(cfg.variants) - set(VARIANTS)
    if unknown:
        sys.exit(f"variants must be of {', '.join(VARIANTS)}; got {', '.join(sorted(unknown))}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    rehearsal, device = accelerator is None, accelerator or torch.device("cpu")
    if rehearsal:
        print("No GPU was found: a rehearsal on the CPU. Its figures do not apply to a GPU.")
    report: dict[str, Any] = {"device": _describe(device), "rehearsal": rehearsal}
    report["exact"] = exactness(device)
    table(f"Losses on {report['device']}, differences from float64 on the CPU", report["exact"])
    n = cfg.rows or (1024 if rehearsal else 16384)
    report["speed"] = speed(device, n, cfg.dims)
    table(f"Forward and backward, n={n} d={cfg.dims}", report["speed"])
    write_json(cfg.out, report)
    report["recipes"] = {}
    for name in cfg.recipes:
        for variant in cfg.variants:
            report["recipes"][f"{name} {variant}"] = run_recipe(name, variant, cfg)
            write_json(cfg.out, report)
    if report["recipes"]:
        table(f"Recipes, {cfg.steps} steps", report["recipes"])
    print(f"Please paste {cfg.out} into an issue, with the tables above.")
    return all(row["passed"] for kind in ("exact", "recipes") for row in report[kind].values())


def exactness(device: torch.device) -> dict[str, dict[str, Any]]:
    """Value and gradients of every loss, by type, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    za, zb = (torch.randn(700, 96, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = {}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)):
        # Both sides see the same rounded rows: only the arithmetic is compared.
        views = [z.relu().to(dtype) for z in (za, zb)]
        for name, loss in _LOSSES.items():
            expected, exact = _value_and_gradients(loss, [z.double() for z in views])
            value, got = _value_and_gradients(loss, [z.to(device) for z in views])
            of_value = abs(value - expected) / abs(expected)
            of_gradient = max(
                float((g.double().cpu() - e).norm() / e.norm())
                for g, e in zip(got, exact, strict=True)
            )
            rows[f"{name} {str(dtype).removeprefix('torch.')}"] = {
                "value": of_value,
                "gradient": of_gradient,
                "passed": max(of_value, of_gradient) < tolerance,
            }
    return rows


def speed(device: torch.device, n: int, d: int) -> dict[str, dict[str, float]]:
    """Time and peak memory of the losses, compared with open_clip's where it is installed."""
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        name: _LOSSES[name] for name in ("clip", "simclr", "spectral")
    }
    if find_spec("open_clip"):
        from open_clip.loss import ClipLoss

        clip, scale = ClipLoss(), torch.tensor(1 / 0.07, device=device)
        losses["open_clip ClipLoss"] = lambda a, b: clip(normalize(a), normalize(b), scale)
    rows = {}
    for name, loss in losses.items():
        views = [torch.randn(n, d, device=device) for _ in range(2)]
        _value_and_gradients(loss, views)
        on_gpu = device.type != "cpu"
        if on_gpu:
            allocated = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            # Reading the value waits for the forward; the copy of a gradient for the backward.
            _, (gradient, _) = _value_and_gradients(loss, views)
            gradient[0, 0].item()
            times.append(time.perf_counter() - start)
        rows[name] = {"ms": 1e3 * min(times)}
        if on_gpu:
            peak = torch.accelerator.max_memory_allocated()
            rows[name]["extra MB"] = (peak - allocated) / 2**20
    return rows


def run_recipe(name: str, variant: str, cfg: Config) -> dict[str, Any]:
    """One short run in a separate process, with its last line of output if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "recipes" / f"{name}.py"
        command = [sys.executable, str(script), "--steps", str(cfg.steps), "--out", folder]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command + VARIANTS[variant], capture_output=True, text=True, timeout=cfg.timeout
            )
            passed, last_line = done.returncode == 0, done.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            passed, last_line = False, [f"took more than {cfg.timeout:.0f} s"]
    row = {"passed": passed, "s": time.perf_counter() - start}
    return row if passed else row | {"error": "".join(last_line)[:200]}


def _value_and_gradients(
    loss: Callable[..., Tensor], views: list[Tensor]
) -> tuple[float, tuple[Tensor, ...]]:
    leaves = [z.detach().requires_grad_() for z in views]
    value = loss(*leaves)
    return value.item(), torch.autograd.grad(value, leaves)


def _describe(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    return f"{device.type} {name}, torch {torch.__version__}, Python {platform.python_version()}"


def _imitation(a: Tensor, b: Tensor) -> Tensor:
    return imitation((a, b), (a[:, :50], b[:, :50]), 0.07)


def _cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    return nonneg_cross_entropy(a, b, torch.arange(len(a), device=a.device))


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clip": lambda a, b: info_nce(a, b, temperature=0.07),
    "clip, cold": lambda a, b: info_nce(a, b, temperature=0.01),
    "simclr": lambda a, b: info_nce(a, b, temperature=0.07, within_view=True),
    "spectral": spectral,
    "imitation": _imitation,
    "cross entropy": _cross_entropy,
}


if __name__ == "__main__":
    show_messages()
    sys.exit(not main(tyro.cli(Config)))

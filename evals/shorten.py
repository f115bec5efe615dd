"""How few dimensions are enough? Probe, retrieval and transfer against the number kept.

Usage:
    python evals/shorten.py train.safetensors test.safetensors
    python evals/shorten.py train.safetensors test.safetensors --keep 64 32 16
    python evals/shorten.py train.safetensors test.safetensors \
        --before-activation pre_train.safetensors pre_test.safetensors

Dimensions are ranked on the train file, once, before any probe is fitted. The rules: expected
activation with ReLU (mean of relu(z)) and without (mean of z), variance, random, and truncation
(the first ones). Codes that went through ReLU have the same mean with and without it;
`--before-activation` gives the same rows before it, which the rule without ReLU ranks and keeps.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from ncl_multi.codes.features import Features
from ncl_multi.files import atomic
from ncl_multi.log import show_messages
from ncl_multi.metrics import linear_probe, retrieval
from ncl_multi.report import markdown, print_json, save_figure, table

RULES = ("activation with ReLU", "activation without ReLU", "variance", "random", "truncation")


@dataclass(frozen=True)
class Config:
    """Probe, retrieval and transfer with fewer dimensions."""

    train: tyro.conf.Positional[Path]
    """Features with labels: dimensions are ranked and the probe is fitted on them."""
    test: tyro.conf.Positional[Path]
    """Features with labels to test on."""
    keep: tuple[int, ...] = ()
    """Numbers of dimensions to keep; by default a half, a quarter, an eighth and a sixteenth."""
    before_activation: tuple[Path, Path] | None = None
    """Train and test features of the same rows before the activation."""
    transfer: tuple[Path, Path] | None = None
    """Train and test features of another set, from the same model."""
    seed: int = 0
    """Seed of the random rule."""
    out: Path = Path("runs/shorten")
    """Folder for `shorten.json`, `shorten.md` and the plot, `shorten.png`."""


def ranking(z: Any, rule: str, seed: int = 0) -> Any:
    """All dimensions of unit rows, the most important first."""
    d = z.shape[1]
    if rule == "random":
        return torch.randperm(d, generator=torch.Generator().manual_seed(seed))
    if rule == "truncation":
        return torch.arange(d)
    score = {
        "activation with ReLU": lambda: z.relu().mean(0),
        "activation without ReLU": lambda: z.mean(0),
        "variance": lambda: z.var(0),
    }[rule]()
    return score.argsort(descending=True, stable=True)


def measure(sets: dict[str, tuple[Features, Features]], dims: Any) -> dict[str, float]:
    """Probe and class retrieval on the first set; the probe on the others."""
    row = {}
    for name, (train, test) in sets.items():
        a, b = (features.dense().float()[:, dims] for features in (train, test))
        if train.y is None or test.y is None:
            raise ValueError(f"a probe needs labels; the features of {name} have none")
        row[name] = linear_probe(a, train.y, b, test.y)
        if name == "probe":
            scores = retrieval(b, None, test.y, ks=(10,))
            row |= {"retrieval mAP": scores["map"], "precision@10": scores["precision@10"]}
    return row


def evaluate(
    sets: dict[str, tuple[Features, Features]],
    keep: tuple[int, ...] = (),
    *,
    before: dict[str, tuple[Features, Features]] | None = None,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """One row for all dimensions, then one for each rule and number kept."""
    from tqdm.auto import tqdm

    train, _ = sets["probe"]
    d = train.dims
    keep = keep or tuple(d // divisor for divisor in (2, 4, 8, 16) if d // divisor)
    if any(not 1 <= m <= d for m in keep):
        raise ValueError(f"numbers to keep must lie in 1..{d}, the width; got {keep}")
    for name, (a, b) in sets.items():
        if a.y is None or b.y is None or a.y.ndim != 1 or b.y.ndim != 1:
            raise ValueError(f"{name} needs one label per row in both files; one has none")
        if (a.dims, b.dims) != (d, d):
            raise ValueError(f"all files must be {d} wide, of one model; got {a.dims}, {b.dims}")
    rows = {"all": {"rule": "all", "kept": d} | measure(sets, torch.arange(d))}
    for rule in tqdm(RULES, desc="rules", disable=None):
        chosen = before if before is not None and rule == "activation without ReLU" else sets
        z = torch.nn.functional.normalize(chosen["probe"][0].dense().float(), dim=1)
        order = ranking(z, rule, seed)
        for m in keep:
            rows[f"{m}, {rule}"] = {"rule": rule, "kept": m} | measure(chosen, order[:m])
    return rows


def draw(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Each measure against the number of dimensions kept, one line per rule."""
    from matplotlib.figure import Figure

    measures = [name for name in rows["all"] if name not in ("rule", "kept")]
    figure = Figure(figsize=(4 * len(measures), 3.8), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(measures)), measures, strict=True):
        for rule in RULES:
            line = sorted(
                (row["kept"], row[name])
                for row in rows.values()
                if row["rule"] in (rule, "all") and name in row
            )
            # Dashed, or it would hide the line with ReLU where the two are the same.
            style = "--" if rule == "activation without ReLU" else "-"
            axis.plot(*zip(*line, strict=True), style, marker="o", markersize=3, label=rule)
        axis.axhline(rows["all"][name], color="grey", linewidth=0.8, linestyle=":")
        axis.set(xlabel="dimensions kept", ylabel=name, xscale="log")
        ticks = sorted({row["kept"] for row in rows.values()})
        axis.set_xticks(ticks, labels=ticks, minor=False)
        axis.minorticks_off()
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=len(RULES), frameon=False)
    save_figure(figure, path)


def main(cfg: Config) -> None:
    def pair(paths: tuple[Path, Path]) -> tuple[Features, Features]:
        return Features.load(paths[0]), Features.load(paths[1])

    sets = {"probe": pair((cfg.train, cfg.test))}
    before = None if cfg.before_activation is None else {"probe": pair(cfg.before_activation)}
    if cfg.transfer is not None:
        sets["transfer"] = pair(cfg.transfer)
    rows = evaluate(sets, cfg.keep, before=before, seed=cfg.seed)
    table(f"Fewer dimensions: {cfg.test}", rows)
    test = sets["probe"][1]
    about = test.provenance | {"train": str(cfg.train), "test": str(cfg.test)}
    print_json(about | {"rows": rows}, cfg.out / "shorten.json")
    measures = [name for name in rows["all"] if name not in ("rule", "kept")]
    cells = {
        name: {m: f"{100 * row[m]:.1f}" if m in row else "" for m in measures}
        for name, row in rows.items()
    }
    draw(cfg.out / "shorten.png", rows)
    with atomic(cfg.out / "shorten.md") as unfinished:
        unfinished.write_text(markdown("kept, rule", cells) + "\n")


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

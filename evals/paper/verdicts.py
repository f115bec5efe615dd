"""The paper's claims, and the rule that decides them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncl_multi.metrics import mean_interval
from paper.parts import (
    CHANGES,
    CURVES,
    FEW_PER_CLASS,
    NONNEGATIVE,
    SEEDS_FOR_A_VERDICT,
    SIGNED,
    WRONG_LABELS,
)
from paper.store import Row


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the measure that tests it and the goal.

    Goals are for the difference of NCL and its twin, or for NCL only if `paired` is false.
    """

    says: str
    paper: str
    measure: str
    goal: float = 0.0
    lower: bool = False
    paired: bool = True
    unit: str = "%"
    twin: str = "none"
    ncl: str = "relu"

    @property
    def held_if(self) -> str:
        """The rule in words."""
        digits, unit = (f"{100 * self.goal:g}", "points") if self.unit != "nats" else ("0", "nats")
        of = "NCL - twin" if self.paired else "NCL"
        return f"{of} {'below' if self.lower else 'above'} {digits} {unit}"


SEPIN_IN_PAPER: dict[Any, str] = {1: "0.88 -> 7.43", 10: "0.79 -> 5.93", 100: "0.69 -> 3.87"}
SEPIN_IN_PAPER |= {"all": "0.47 -> 0.48"}
CLAIMS = (
    Claim("Sparsity, head", "over 90 % zeros", "sparsity", 0.9, paired=False),
    Claim("Class consistency, head", "10.0 -> 53.8 % (a rerun)", "class_consistency"),
    Claim("Correlation of dimensions, head", "lower", "correlation", lower=True),
    Claim("Linear probe, encoder", "87.6 -> 87.8 %", "probe", -0.01),
    Claim("Fine-tuning, encoder", "92.3 -> 92.6 %", "fine_tuned"),
    Claim("Corrupted pictures, encoder", "34.5 -> 36.1 % (ImageNet-100)", "corrupted"),
    *(
        Claim(f"SEPIN@{k}, {kind}", f"{paper} (unit not known)", f"sepin@{k} {kind}", unit="nats")
        for kind in ("renormalised", "fixed")
        for k, paper in SEPIN_IN_PAPER.items()
    ),
    Claim(
        "Quarter of dims by activation: probe", "-0.3 -> 0.0", "best_change", -0.01, paired=False
    ),
    Claim("Quarter of dims by activation: mAP", "-0.7 -> 0.0", "map_change", -0.01, paired=False),
    Claim("Quarter of dims at random: probe", "-0.6 -> -4.6", "random_change", lower=True),
    Claim("Cross entropy, non-negative", "76.1 -> 78.6 % (ImageNet-100)", "supervised"),
    Claim("Posterior recovered: correlation", "exact, in theory", "posterior", 0.9, paired=False),
    Claim("Factors of own sprites: DCI", "no figure", "disentanglement"),
)
FOLLOW_UPS = (
    Claim("Linear probe, encoder; twin: untrained network", "not given", "probe", twin="untrained"),
    Claim(f"Probe of codes, {WRONG_LABELS:.0%} wrong labels", "better", "wrong_labels"),
    Claim(f"Probe of codes, {FEW_PER_CLASS} labels per class", "better", "few_labels"),
    Claim("Noise on pictures, encoder", "better", "corrupted noise"),
    Claim(
        "BayesNCL's gate: class consistency at equal density", "CIFAR-100: 9.9 -> 22.0 %",
        "gate_gain", paired=False,
    ),
    Claim("Stability over seeds", "predicted by the theory", "stability"),
    *(
        Claim(
            f"Cross entropy, non-negative, with {change}", "not given", "supervised",
            twin=f"none+{change}", ncl=f"relu+{change}",
        )
        for change in CHANGES
    ),
)  # fmt: skip


def verdict(interval: Any, goal: float, *, lower: bool, seeds: int) -> str:
    """Held or not held if the whole interval agrees; otherwise, or with few seeds, not decided."""
    if seeds < SEEDS_FOR_A_VERDICT:
        return f"not decided ({seeds} seeds)"
    low, high = (interval.low - goal, interval.high - goal)
    if lower:
        low, high = -high, -low
    return "held" if low > 0 else "NOT held" if high <= 0 else "not decided"


def judged(figures: Mapping[str, Row], seeds: Sequence[int]) -> dict[str, dict[str, str]]:
    """The table: one row per claim whose parts are all measured."""

    def values(variant: str, measure: str) -> np.ndarray | None:
        """One row per seed, perhaps with a column per test picture; None if a seed is missing."""
        rows = [row for name, row in figures.items() if name.split()[1] == variant]
        measured = [row[measure] for row in rows if measure in row]
        return np.array(measured) if len(measured) == len(seeds) else None

    def row(claim: Claim, twin: np.ndarray | None, ncl: np.ndarray, twin_cell: str = "") -> dict:
        tested = ncl - twin if claim.paired and twin is not None else ncl
        cells = {
            "paper, twin -> NCL": claim.paper,
            "twin": twin_cell or ("" if twin is None else _spread(twin, claim.unit)),
            "NCL": _spread(ncl, claim.unit),
            "95 % interval": "",
            "held if": claim.held_if,
            "verdict": f"not decided ({len(seeds)} seeds)",
        }
        if len(seeds) >= SEEDS_FOR_A_VERDICT:
            interval = mean_interval(tested)
            cells["95 % interval"] = _interval(interval, claim.unit)
            cells["verdict"] = verdict(interval, claim.goal, lower=claim.lower, seeds=len(seeds))
        return cells

    table = {}
    for claim in CLAIMS + FOLLOW_UPS:
        twin, ncl = values(claim.twin, claim.measure), values(claim.ncl, claim.measure)
        if ncl is not None and (twin is not None or not claim.paired):
            table[claim.says] = row(claim, twin, ncl)
    probes = {kind: values(kind, "short_probe") for kind in (*NONNEGATIVE, *SIGNED)}
    complete = {kind: probe for kind, probe in probes.items() if probe is not None}
    if len(complete) == len(probes):
        # ReLU against the best of the others, the worst non-negative one against the best signed.
        means = {kind: probe.mean() for kind, probe in complete.items()}
        rival = max(NONNEGATIVE[1:], key=means.__getitem__)
        worst = min(NONNEGATIVE, key=means.__getitem__)
        signed = max(SIGNED, key=means.__getitem__)
        others = ", ".join(f"{kind} {_spread(complete[kind])}" for kind in NONNEGATIVE[1:])
        claim = Claim("ReLU best of the non-negative activations: probe", "best", "probe")
        table[claim.says] = row(claim, complete[rival], complete["relu"], others)
        others = ", ".join(f"{kind} {_spread(complete[kind])}" for kind in SIGNED)
        claim = Claim("Leaky ReLU and GELU worst: probe", "far worse", "probe")
        table[claim.says] = row(claim, complete[signed], complete[worst], others)
    return table


def curves_of(figures: Mapping[str, Row]) -> dict[str, dict[str, str]]:
    """Probe and consistency of both models by temperature and by projector width."""
    table: dict[str, dict[str, str]] = {}
    for setting, settings in CURVES.items():
        for x in settings:
            for kind, model in (("none", "twin"), ("relu", "NCL")):
                variant = f"{kind}+{setting}={x}"
                rows = [row for name, row in figures.items() if name.split()[1] == variant]
                for measure in ("probe", "class_consistency", "sparsity") if rows else ():
                    cell = _spread(np.array([np.mean(row[f"short_{measure}"]) for row in rows]))
                    table.setdefault(f"{setting} {x}", {})[f"{measure}, {model}"] = cell
    return table


def _spread(values: np.ndarray, unit: str = "%") -> str:
    """Mean and standard deviation over seeds."""
    by_seed = values.reshape(len(values), -1).mean(axis=1)
    if unit == "nats":
        return f"{by_seed.mean():.4f} ± {by_seed.std():.4f}"
    return f"{100 * by_seed.mean():.1f} ± {100 * by_seed.std():.1f}"


def _interval(interval: Any, unit: str) -> str:
    """`mean [low, high]`, in points or in nats."""
    mean, low, high = interval if unit == "nats" else (100 * end for end in interval)
    digits = 4 if unit == "nats" else 1
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

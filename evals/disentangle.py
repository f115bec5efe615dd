"""Does a dimension carry information that others do not? SEPIN@k; with factors MIG, SAP, DCI.

Usage:
    python evals/disentangle.py runs/vision_ncl/features/test_head.safetensors
    python evals/disentangle.py view_a.safetensors --other-view view_b.safetensors

SEPIN is given in both conventions, `renormalised` and `fixed`; see `ncl_multi.metrics`. Files whose
labels are a table, one column per factor, get the measures that need factors; they are written by
`python evals/claims.py --only sprites`, from our own generator of the dSprites kind.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ncl_multi.codes.features import Features
from ncl_multi.log import show_messages
from ncl_multi.metrics import dci, mig, sap, sepin
from ncl_multi.report import print_rows


@dataclass(frozen=True)
class Config:
    """SEPIN@k of a Features file, and MIG, SAP and DCI if its factors are known."""

    features: tyro.conf.Positional[tuple[Path, ...]]
    """Files written by a recipe; one row of the table for each."""
    other_view: Path | None = None
    """Features of another view of the same items, for one file: a row must find its partner."""
    ks: tuple[int, ...] = (1, 10, 100)
    """Numbers of best dimensions to average over; `all` is always given."""
    rows: int = 10_000
    """Largest number of rows to use."""
    temperature: float = 0.2
    """Temperature of InfoNCE."""
    batch: int = 256
    """Rows that InfoNCE compares; its logarithm is the most that can be measured."""
    seed: int = 0
    """Seed of the batches and the forests."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(features: Features, other: Features | None, cfg: Config) -> dict[str, Any]:
    """Return one row of the report."""
    z = features.z[: cfg.rows]
    zb = None if other is None else other.z[: cfg.rows]
    row: dict[str, Any] = {"temperature": cfg.temperature, "batch": cfg.batch}
    row |= {"rows": int(z.shape[0]), "dims": features.dims}
    for convention in ("renormalised", "fixed"):
        scores = sepin(
            z, zb, convention=convention, ks=cfg.ks, temperature=cfg.temperature,
            batch=cfg.batch, seed=cfg.seed,
        )  # fmt: skip
        row |= {f"sepin@{k} {convention}": score for k, score in scores.items()}
    if features.y is not None and features.y.ndim == 2:
        factors = features.y[: cfg.rows]
        row |= {"mig": mig(z, factors), "sap": sap(z, factors)}
        row |= dci(z, factors, seed=cfg.seed)
    return row


def main(cfg: Config) -> None:
    if not cfg.features or (cfg.other_view is not None and len(cfg.features) != 1):
        raise ValueError(
            f"give at least one file, and exactly one with --other-view; got {len(cfg.features)}"
        )
    other = None if cfg.other_view is None else Features.load(cfg.other_view)
    rows: dict[str, dict[str, Any]] = {}
    measures: dict[str, None] = {}
    for path in cfg.features:
        features = Features.load(path)
        row = evaluate(features, other, cfg)
        measures |= dict.fromkeys(row)
        rows[str(path)] = features.provenance | row
    title = f"Own information, in nats (temperature {cfg.temperature}, {cfg.batch} rivals)"
    print_rows(title, rows, measures, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

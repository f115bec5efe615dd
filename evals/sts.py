"""Do cosines order sentence pairs as people do? Spearman, against active dimensions.

Usage:
    python evals/sts.py first.safetensors second.safetensors
    python evals/sts.py first.safetensors second.safetensors --active 8 16 32 64
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from torch.nn.functional import cosine_similarity

from ncl_multi.codes.features import Features
from ncl_multi.head import top_k
from ncl_multi.log import show_messages
from ncl_multi.metrics import active_dims, spearman
from ncl_multi.report import print_json, table


@dataclass(frozen=True)
class Config:
    """Spearman correlation of cosines and scores on pairs of sentences."""

    first: tyro.conf.Positional[Path]
    """Features of the first sentences; human scores are its labels."""
    second: tyro.conf.Positional[Path]
    """Features of the second sentences, row by row."""
    active: tuple[int, ...] = ()
    """Also keep only this many of the largest entries of every row."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(
    first: Features, second: Features, active: tuple[int, ...] = ()
) -> dict[str, dict[str, float]]:
    """One row with all dimensions, and one for each number of entries kept.

    Pairs with equal cosine, such as codes that share no dimension, share their mean rank.
    """
    if first.y is None or first.y.ndim != 1:
        raise ValueError("the first file must contain human scores as labels; it has none")
    if first.z.shape != second.z.shape:
        raise ValueError(
            f"the two files must contain the two sides of the same pairs; got "
            f"{tuple(first.z.shape)} and {tuple(second.z.shape)}"
        )
    a, b = first.dense().float(), second.dense().float()
    rows = {}
    for keep in (None, *active):
        za, zb = (z if keep is None else top_k(z, keep) for z in (a, b))
        row = {"spearman": spearman(cosine_similarity(za, zb), first.y)}
        rows["all" if keep is None else str(keep)] = row | {"active_dims": active_dims(za)}
    return rows


def main(cfg: Config) -> None:
    first = Features.load(cfg.first)
    rows = evaluate(first, Features.load(cfg.second), cfg.active)
    table(f"STS: {cfg.first} and {cfg.second}, by entries kept", rows)
    whole = first.about | {"first": str(cfg.first), "second": str(cfg.second), "kept": rows}
    print_json(whole, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

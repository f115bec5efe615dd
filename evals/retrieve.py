"""Does search by cosine find the right items, and how many active dimensions does it take?

Usage:
    python evals/retrieve.py test.safetensors                        # same label: right
    python evals/retrieve.py text.safetensors image.safetensors      # row i answers query i
    python evals/retrieve.py queries.safetensors documents.safetensors --judgements right.tsv
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from scipy.sparse import csr_array

from ncl_multi.codes.features import Features, to_csr
from ncl_multi.head import top_k
from ncl_multi.log import show_messages
from ncl_multi.metrics import active_dims, retrieval
from ncl_multi.report import print_json, table


@dataclass(frozen=True)
class Config:
    """Precision@k, recall@k, nDCG@k and mAP of Features files."""

    queries: tyro.conf.Positional[Path]
    """Features of the queries."""
    items: tyro.conf.Positional[Path | None] = None
    """Features of the items to search; none to search the queries among themselves."""
    right: Literal["row", "label"] | None = None
    """With two files: row i answers query i, or all items with the query's label; one file: label.
    None takes the queries' labels as judgements if they contain one gain per item."""
    judgements: Path | None = None
    """Tab separated lines of query row, item row (from 0), gain; instead of `right`."""
    ks: tuple[int, ...] = (1, 5, 10)
    """Depths of the ranking."""
    active: tuple[int, ...] = ()
    """Also keep only this many of the largest entries of every row."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""


def evaluate(
    queries: Features,
    items: Features | None,
    relevant: Any = None,
    *,
    ks: tuple[int, ...] = (1, 5, 10),
    active: tuple[int, ...] = (),
) -> dict[str, dict[str, float]]:
    """One row with all dimensions, and one for each number of entries kept."""
    rows = {}
    for keep in (None, *active):
        cut = [
            features if features is None or keep is None else to_csr(top_k(features.dense(), keep))
            for features in (queries, items)
        ]
        query_codes, answers = (side.z if isinstance(side, Features) else side for side in cut)
        figures = {"active_dims": active_dims(query_codes)} | retrieval(
            query_codes, answers, relevant, ks=ks
        )
        rows["all" if keep is None else str(keep)] = figures
    return rows


def relevance(cfg: Config, queries: Features, items: Features | None) -> Any:
    """What is right, as `ncl_multi.metrics.retrieval` takes it."""
    if cfg.judgements is not None:
        shape = (len(queries), len(queries if items is None else items))
        lines = np.loadtxt(cfg.judgements, delimiter="\t", ndmin=2)
        if lines.shape[1] != 3:
            raise ValueError(
                f"{cfg.judgements} must have query row, item row and gain on each line; got "
                f"{lines.shape[1]} columns"
            )
        pairs = lines[:, :2].astype(int)
        if (pairs < 0).any() or (pairs >= shape).any():
            raise ValueError(f"{cfg.judgements} names rows outside of {shape}")
        return csr_array((np.maximum(lines[:, 2], 0), pairs.T), shape=shape)
    if items is not None and cfg.right != "label":
        judged = queries.y is not None and queries.y.shape == (len(queries), len(items))
        return csr_array(queries.y) if judged and cfg.right is None else None
    sides = [queries] if items is None else [queries, items]
    if any(side.y is None or side.y.ndim != 1 for side in sides):
        raise ValueError(
            "search by label needs one label per row in each file; at least one file has none. "
            "Give --judgements, or two files with --right row"
        )
    return queries.y if items is None else (queries.y, items.y)


def main(cfg: Config) -> None:
    queries = Features.load(cfg.queries)
    items = None if cfg.items is None else Features.load(cfg.items)
    rows = evaluate(queries, items, relevance(cfg, queries, items), ks=cfg.ks, active=cfg.active)
    table(f"Search: {cfg.queries} in {cfg.items or 'itself'}, by entries kept", rows)
    about = {"queries_file": str(cfg.queries), "items_file": str(cfg.items)}
    print_json(queries.provenance | about | {"kept": rows}, cfg.out)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

"""Which settings should `SparseCoder` have? Compared on held-out rows, without any judgement.

A tenth of the embeddings is held out as queries. Measured is the share of the ten rows nearest by
the whole embeddings that are among the ten nearest by codes. The queries and judgements of the
collections that are reported are never read.

Usage:
    python evals/choose_coder.py documents.npy
    python evals/choose_coder.py documents.npy --steps 100 --dims 1024
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import tyro

from ncl_multi.log import show_messages

if TYPE_CHECKING:
    import numpy as np

COMPARED: tuple[dict[str, Any], ...] = (
    {},
    {"start": "clusters"},
    {"imitation": 0.0},
    {"imitation": 3.0},
    {"imitation": 30.0},
    {"temperature": 0.05},
    {"teacher_temperature": 0.1},
    {"noise": 0.3},
    {"learning_rate": 5e-3},
    {"neighbours": 5},
)
"""What is changed in the defaults."""


@dataclass(frozen=True)
class Config:
    """Settings of `SparseCoder` compared by how much of the nearest rows their codes keep."""

    embeddings: tyro.conf.Positional[Path]
    """A .npy, .npz or parquet file."""
    dims: int = 2048
    """Width of the codes."""
    steps: int = 300
    """Training steps."""
    k: tuple[int, ...] = (4, 16, 64)
    """Entries of a code."""
    seeds: tuple[int, ...] = (0,)
    """The mean over these is printed."""


def kept_neighbours(near: "np.ndarray", queries: Any, items: Any) -> float:
    """Share of these rows, for each query, that are among as many nearest by codes."""
    import numpy as np

    scores = (queries @ items.T).toarray()
    found = np.argsort(-scores, axis=1, kind="stable")[:, : near.shape[1]]
    pairs = zip(near, found, strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in pairs]))


def compare(cfg: Config, setting: dict[str, Any], x: "np.ndarray") -> dict[str, Any]:
    """One row of the table: the setting, and for each k equal and whole queries."""
    import numpy as np

    import ncl_multi as ncl

    held = len(x) // 10
    items, queries = x[:-held], x[-held:]
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (queries, items)]
    near = np.argsort(-(unit[0] @ unit[1].T), axis=1, kind="stable")[:, :10]
    found: dict[str, list[float]] = {}
    for seed in cfg.seeds:
        options = {"steps": cfg.steps, "random_state": seed} | setting
        coder = ncl.SparseCoder(cfg.dims, max(cfg.k), **options).fit(items)
        for k in cfg.k:
            codes = coder.transform(items, k=k)
            for name, entries in {"": k, "_free": cfg.dims}.items():
                kept = kept_neighbours(near, coder.transform(queries, k=entries), codes)
                found.setdefault(f"k={k}{name}", []).append(kept)
    return setting | {name: round(mean(values), 3) for name, values in found.items()}


def main(cfg: Config) -> None:
    import numpy as np

    from ncl_multi.data.arrays import read_embeddings

    x = np.array(read_embeddings(cfg.embeddings))
    for setting in COMPARED:
        print(json.dumps(compare(cfg, setting, x)), flush=True)


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

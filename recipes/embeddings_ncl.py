"""Sparse, readable codes of embeddings you already have.

Usage:
    python recipes/embeddings_ncl.py x.npy --items texts.txt
    python recipes/embeddings_ncl.py shard-0.parquet shard-1.parquet --dims 4096 --k 16
    python recipes/embeddings_ncl.py images.npy --other captions.npy

The run folder then contains the model (`ncl.load`), the codes, `metrics.json` and `atlas.html`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import ncl_multi as ncl
from ncl_multi.codes.features import spread
from ncl_multi.data.shards import Shards
from ncl_multi.log import show_messages
from ncl_multi.metrics import readable
from ncl_multi.report import table, write_json
from ncl_multi.training.config import fitting_sizes


@dataclass(frozen=True)
class Config:
    """Sparse codes of embeddings by `SparseCoder`."""

    x: tyro.conf.Positional[tuple[Path, ...]]
    """Embeddings, one row per item: .npy, .npz or parquet files."""
    out: Path = Path("runs/embeddings_ncl")
    """Folder for the model, the codes, the metrics and the page."""
    items: Path | None = None
    """What a person reads of each row: a text file with one line per row. Names dimensions."""
    labels: Path | None = None
    """The class of each row, one line per row: measured, never trained on."""
    other: Path | None = None
    """Embeddings of the same items from another space, as captions of images."""
    dims: int | None = None
    """Width of the codes; None for 2,048, less for fewer than 8,192 rows."""
    k: int = 32
    """Active entries of a code."""
    idf: bool = False
    """Weigh the entries of queries by how rare a dimension is."""
    steps: int = 300
    """Training steps."""
    shown: int = 10_000
    """Most rows that are encoded for the page and the metrics, at even distances."""
    seed: int = 0
    """Seed of everything random."""


def main(cfg: Config) -> None:
    source = [*cfg.x]
    rows = len(Shards(source))
    items, labels = (_lines(path, rows) for path in (cfg.items, cfg.labels))
    dims, k = fitting_sizes(cfg.dims, cfg.k, rows, "embeddings", most=2048)
    coder = ncl.SparseCoder(
        dims, k, idf=cfg.idf, steps=cfg.steps, verbose=True, random_state=cfg.seed
    ).fit(source, other=cfg.other)
    if items is not None:
        coder.name(items)
    chosen = spread(rows, cfg.shown)
    x = Shards(source).take(np.array(chosen))
    read: Any = [
        None if lines is None else [lines[row] for row in chosen] for lines in (items, labels)
    ]
    features = coder.features(x, *read)
    features.save(cfg.out / "features" / "train_head.safetensors")
    coder.save(cfg.out / "model")
    figures = {
        "rows": rows, "dims": coder.dims, "active": features.z.nnz / len(chosen),
        "reconstruction_error": coder.reconstruction_error_,
    } | readable(features.z, features.y).figures  # fmt: skip
    write_json(cfg.out / "metrics.json", {"ncl": {"train": figures}})
    table(f"{cfg.out}", {"ncl": figures})
    print(f"what each dimension means: {coder.atlas(x, *read, out=cfg.out)}")


def _lines(path: Path | None, rows: int) -> list[str] | None:
    """The lines of a text file, one for each row of the embeddings."""
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    if len(lines) != rows:
        raise ValueError(f"{path} must have one line per row of the embeddings, {rows}; got "
                         f"{len(lines)}")  # fmt: skip
    return lines


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

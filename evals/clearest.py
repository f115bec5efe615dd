"""Which dimensions are the easiest to read? The clearest ones of a run, with names and texts.

Names are made from the training texts and tested on held-out texts: the clearest dimensions are
those whose name occurs in most of their 10 strongest held-out texts. Ties are broken by purity,
then by the number of texts for which the dimension fires.

Usage:
    python evals/clearest.py runs/sentence_ncl
    python evals/clearest.py runs/sentence_ncl --count 20 --texts 5
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ncl_multi.codes.features import Features
from ncl_multi.codes.names import name_dimensions
from ncl_multi.log import show_messages
from ncl_multi.metrics import dimension_purity, name_fit
from ncl_multi.metrics.codes import firing_rows, strongest_rows


@dataclass(frozen=True)
class Config:
    """Dimensions whose names fit most of their strongest texts."""

    run: tyro.conf.Positional[Path]
    """Folder written by recipes/sentence_ncl.py."""
    count: int = 10
    """How many dimensions to show."""
    texts: int = 3
    """How many of its strongest texts to show for each."""
    width: int = 40
    """Number of letters of a text to show."""


def clearest(train: Features, test: Features, count: int, texts: int) -> list[dict[str, Any]]:
    """The dimensions with the best names, each with its strongest held-out texts."""
    if test.items is None or test.y is None:
        raise ValueError("the held-out features need items and labels")
    names = name_dimensions(train)
    fit, purity = name_fit(names, test), dimension_purity(test.z, test.y)
    order = np.lexsort((-firing_rows(test.z), -np.nan_to_num(purity), -np.nan_to_num(fit)))
    strongest = strongest_rows(test.z, texts)
    return [
        {
            "dimension": dim,
            "name": names[dim],
            "name_fit": round(float(fit[dim]), 2),
            "purity_at_10": round(float(purity[dim]), 2),
            "texts": [test.items[row] for row in strongest[dim] if row >= 0],
        }
        for dim in order[:count].tolist()
    ]


def main(cfg: Config) -> None:
    train, test = (
        Features.load(cfg.run / "features" / f"{split}_head.safetensors")
        for split in ("train", "test")
    )
    rows = clearest(train, test, cfg.count, cfg.texts)
    print("| name | fits | strongest held-out texts |\n|---|---|---|")
    for row in rows:
        texts = "; ".join(_short(text, cfg.width) for text in row["texts"])
        print(f"| {row['name']} | {row['name_fit']:.0%} | {texts} |")
    print(json.dumps(rows))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

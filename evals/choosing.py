"""Shared by the choose scripts: changes to compare, a row of figures for each, texts to search."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ncl_multi.report import write_json

MODULES = (
    "numpy", "scipy.fft", "scipy.integrate", "scipy.interpolate", "scipy.linalg", "scipy.ndimage",
    "scipy.optimize", "scipy.signal", "scipy.sparse", "scipy.spatial", "scipy.special",
    "scipy.stats", "sklearn.cluster", "sklearn.datasets", "sklearn.decomposition",
    "sklearn.ensemble", "sklearn.linear_model", "sklearn.metrics", "sklearn.preprocessing",
)  # fmt: skip
"""Libraries whose docstrings are read."""


@dataclass(frozen=True)
class Comparison:
    """Options of every comparison."""

    change: tuple[str, ...] = ()
    """Compare only these, together: names and values in JSON (`dims=512`); none for `COMPARED`."""
    seeds: tuple[int, ...] = (0,)
    """Figures are means over these."""
    out: Path | None = None
    """File for the rows as JSON; none to print them only."""

    def changes(self, compared: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The changes to measure."""
        return (read_changes(self.change),) if self.change else compared

    def means(self, measure: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
        """Figures of a seed, averaged over the seeds."""
        by_seed = [measure(seed) for seed in self.seeds]
        return {name: round(mean(row[name] for row in by_seed), 4) for name in by_seed[0]}

    def show(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Print each row as JSON as soon as it is measured; `out` has all rows so far."""
        measured = []
        for row in rows:
            measured.append(row)
            print(json.dumps(row), flush=True)
            if self.out is not None:
                write_json(self.out, measured)
        return measured


def read_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Settings from `name=value`; a value that is not JSON is a text."""
    settings: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"a change is a name and a value, as dims=512; got {change!r}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


class Text(NamedTuple):
    """A text cut in two, and what it is about, if that is known."""

    query: str
    document: str
    kind: str | None


def docstrings() -> list[Text]:
    """Docstrings of public functions and classes: the first sentence, the next 100 words."""
    by_sentence: dict[str, Text] = {}
    for module in map(import_module, MODULES):
        for name, thing in sorted(vars(module).items()):
            if name.startswith("_") or not callable(thing):
                continue
            first, _, body = (inspect.getdoc(thing) or "").partition("\n\n")
            first, words = " ".join(first.split()), body.split()[:100]
            # Compiled functions begin with their signature.
            if "(" not in first and len(first.split()) >= 4 and len(words) >= 20:
                by_sentence.setdefault(first, Text(first, " ".join(words), module.__name__))
    return list(by_sentence.values())

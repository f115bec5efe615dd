"""Where the figures of the claims are kept: a file for each part, and a record of all of them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ncl_multi.report import write_json

Row = dict[str, Any]
"""A measure is a number, or an array with one number per test picture."""


@dataclass(frozen=True)
class Config:
    """The paper's claims, measured."""

    preset: Literal["quick", "small", "paper"] = "quick"
    """A part of CIFAR-10 for CI, all of it for hours of two cores, or the paper's, for a GPU."""
    data: str = "cifar10"
    """Pictures with labels: `cifar10`, `hf:<name>`, or a folder with one folder per class."""
    out: Path | None = None
    """Folder for the parts' figures, models and features; None is `runs/claims/<preset>`."""
    only: str = ""
    """Run only the parts whose name starts with this."""
    minutes: float | None = None
    """Do not start further parts after this many minutes."""
    curves: bool = False
    """Also train with other temperatures and projector widths."""
    seeds: tuple[int, ...] | None = None
    """Seeds to average over; None leaves it to the preset."""
    device: str | None = None
    """`cpu`, `cuda`, ...; None takes the best there is."""
    jobs: int | None = None
    """Parts that run in parallel; None for one per core, or one if there is a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of training."""
    results: Path = Path(__file__).parents[1] / "results"
    """Folder for the record of a preset: the table, and the figures of its parts."""
    show: bool = False
    """Only print the table that is there, as markdown."""


@dataclass(frozen=True)
class Preset:
    """How large everything is."""

    model: str = "resnet18"
    dims: int = 256
    hidden_dim: int = 2048
    size: int = 32
    images: int | None = None
    test_images: int | None = None
    epochs: int = 200
    batch_size: int = 256
    lr: float = 0.4
    lars: bool = True
    view_scale: float = 1.0
    jitter: float = 0.8
    temperature: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)
    short_epochs: int = 50
    """Activations, temperatures and widths are compared with each other after so many."""
    labelled_epochs: int = 50
    sprite_steps: int = 10_000


SMALL = Preset(
    model="resnet-small",
    hidden_dim=512,
    epochs=10,
    lr=4e-3,
    lars=False,
    view_scale=0.75,
    jitter=0.4,
    short_epochs=2,
    labelled_epochs=2,
    sprite_steps=1_000,
)
QUICK = replace(
    SMALL,
    hidden_dim=256,
    images=5_000,
    test_images=2_000,
    epochs=6,
    batch_size=128,
    lr=2e-3,
    short_epochs=6,
    labelled_epochs=4,
    sprite_steps=200,
)
PRESETS = {"quick": QUICK, "small": SMALL, "paper": Preset()}


class Store(ABC):
    """The figures of parts, each in a separate file, and the record of a preset."""

    @property
    @abstractmethod
    def all(self) -> dict[str, Callable[[], Row]]:
        """Names of the parts, and the functions that measure them."""

    @property
    @abstractmethod
    def compared(self) -> list[str]:
        """Names of figures that are computed from several parts."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings and versions that figures depend on; others are refused."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.preset = PRESETS[cfg.preset]
        self.out = cfg.out or Path("runs/claims") / cfg.preset
        if cfg.seeds:
            self.preset = replace(self.preset, seeds=cfg.seeds)

    @property
    def table(self) -> list[str]:
        """Names of the parts that the table is made of: all but those of curves."""
        return [name for name in self.all if "=" not in name]

    @property
    def wanted(self) -> list[str]:
        """Names of the parts that this run measures."""
        names = self.all if self.cfg.curves else self.table
        return [name for name in names if name.startswith(self.cfg.only)]

    def path(self, name: str) -> Path:
        """File of a part's figures."""
        return self.out / "parts" / f"{name.replace(' ', '_')}.json"

    def measure(self, name: str) -> Row:
        """The part's figures, from its file if the same settings and versions wrote one."""
        if not self.path(name).exists():
            self._write(name, {"commit": own_commit(), "figures": pack(self.all[name]())})
        return self.read(name)

    def read(self, name: str) -> Row:
        """The figures of a part that is measured."""
        path = self.path(name)
        stored = json.loads(path.read_text())
        for setting, value in self.settings.items():
            if stored.get(setting) != value:
                raise ValueError(
                    f"{path} was measured with different {setting}: {stored.get(setting)}, now "
                    f"{value}; choose another --out, or delete the folder"
                )
        return unpack(stored["figures"])

    @property
    def measured(self) -> list[str]:
        """Names of the parts that have figures."""
        return [name for name in [*self.all, *self.compared] if self.path(name).exists()]

    @property
    def record(self) -> Path:
        """File with the table and the figures of all parts of a preset."""
        return self.cfg.results / f"{self.cfg.preset}.json"

    @cached_property
    def recorded(self) -> dict[str, Any] | None:
        """What the record has of these settings and versions; None if it has others."""
        stored = json.loads(self.record.read_text()) if self.record.exists() else None
        same = stored and all(stored.get(name) == value for name, value in self.settings.items())
        return stored if same else None

    def restore(self) -> None:
        """Take parts from the record that are not measured here: it may be of another machine."""
        for name, part in (self.recorded or {"parts": {}})["parts"].items():
            if not self.path(name).exists():
                self._write(name, part)

    @property
    def missing(self) -> list[str]:
        """Names of the parts of the table that are not measured."""
        return [name for name in self.table if not self.path(name).exists()]

    def write_record(self, **tables: Any) -> bool:
        """Write all figures; False if the record is of other settings and parts are missing."""
        if self.missing and self.record.exists() and not self.recorded:
            return False
        parts = {}
        for name in self.measured:
            stored = json.loads(self.path(name).read_text())
            parts[name] = {"commit": stored["commit"], "figures": stored["figures"]}
        about = self.settings | {"seeds": self.preset.seeds, "missing": self.missing}
        write_json(self.record, about | tables | {"parts": parts})
        return True

    def _write(self, name: str, part: Row) -> None:
        from ncl_multi.files import atomic

        with atomic(self.path(name)) as unfinished:
            unfinished.write_text(json.dumps(self.settings | part))


def pack(figures: Row) -> Row:
    """Figures as JSON takes them: which pictures are classified correctly is a bit for each."""
    return {
        measure: {"hits": np.packbits(value).tobytes().hex(), "of": len(value)}
        if isinstance(value, np.ndarray)
        else value
        for measure, value in figures.items()
    }


def unpack(packed: Row) -> Row:
    """The figures that were packed, and those that follow from them, picture by picture.

    Example:
        >>> unpack(pack({"head_probe": np.array([True, False]), "sparsity": 0.9}))
        {'head_probe': array([1., 0.]), 'sparsity': 0.9}
    """
    row: Row = {}
    for measure, value in packed.items():
        if isinstance(value, dict):
            bits = np.frombuffer(bytes.fromhex(value["hits"]), np.uint8)
            row[measure] = np.unpackbits(bits, count=value["of"]).astype(float)
        else:
            row[measure] = value
    for fewer in ("best", "random"):
        if f"{fewer}_probe" in row:
            row[f"{fewer}_change"] = row[f"{fewer}_probe"] - row["head_probe"]
    if worse := [hits for measure, hits in row.items() if measure.startswith("corrupted ")]:
        row["corrupted"] = np.mean(worse, axis=0)
    return row


def own_commit() -> str | None:
    """The commit of this repository, marked if files have changed since."""
    import subprocess

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    got = subprocess.run([*git, "--abbrev=12"], capture_output=True, text=True, check=False)
    return got.stdout.strip() or None

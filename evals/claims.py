"""Does what the paper says hold here? Every claim as one row: paper, twin, NCL, interval, verdict.

Usage:
    python evals/claims.py                      # a part of CIFAR-10, for CI
    python evals/claims.py --preset small       # all of CIFAR-10 on two cores: hours, resumable
    python evals/claims.py --preset paper       # the paper's CIFAR-10 settings, for a GPU
    python evals/claims.py --preset small --minutes 60 --only contrastive

The figures of each part are saved in `<out>/parts`; the same command resumes. Parts of other
settings or versions are refused. On a CPU several parts run in parallel, one per core, and log to
`<out>/parts/*.log`. The twin is the same model with signed features, trained with the same seeds
and budget.

A claim is held if the whole 95 % interval of the difference is on its side of the goal, not held if
the whole interval is on the other side, else not decided. The interval is over seeds and, for
accuracies, over the test pictures as well; it needs three seeds. When all parts of a preset are
measured, the table is written to `evals/results/<preset>.json`, with versions and commits.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from ncl_multi.log import show_messages

NONNEGATIVE = ("relu", "softplus", "sigmoid", "exp")
SIGNED = ("leaky_relu", "gelu")
BOTH = ("none", "relu")
CURVES = {"temperature": (0.05, 0.1, 0.2, 0.5), "hidden_dim": (64, 256, 1024)}
SEEDS_FOR_A_VERDICT = 3
WRONG_LABELS, FEW_PER_CLASS = 0.4, 10
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
    results: Path = Path(__file__).parent / "results"
    """Folder for the table of a preset whose parts are all measured."""


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
    labelled_epochs: int = 50
    sprite_steps: int = 10_000


SMALL = Preset(
    model="resnet-small",
    hidden_dim=512,
    epochs=60,
    lr=2e-3,
    lars=False,
    view_scale=0.75,
    jitter=0.4,
    labelled_epochs=10,
    sprite_steps=2_000,
)
QUICK = replace(
    SMALL,
    hidden_dim=256,
    images=5_000,
    test_images=2_000,
    epochs=6,
    batch_size=128,
    labelled_epochs=4,
    sprite_steps=200,
)
PRESETS = {"quick": QUICK, "small": SMALL, "paper": Preset()}


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
        "Quarter of dims by activation: probe", "-0.3 -> 0.0", "probe_change", -0.01, paired=False
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
    Claim("Stability over seeds", "predicted by the theory", "stability"),
    *(
        Claim(
            f"Cross entropy, non-negative, with {change}", "not given", "supervised",
            twin=f"none+{change}", ncl=f"relu+{change}",
        )
        for change in ("batch_norm", "bias", "scale")
    ),
)  # fmt: skip


class Parts:
    """The trainings and their figures, each saved in a separate file."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.preset = PRESETS[cfg.preset]
        self.out = cfg.out or Path("runs/claims") / cfg.preset
        if cfg.seeds:
            self.preset = replace(self.preset, seeds=cfg.seeds)

    @cached_property
    def pictures(self) -> tuple[Any, Any]:
        from ncl_multi import data

        p = self.preset
        train, test = (
            data.images(self.cfg.data, split, size=p.size) for split in ("train", "test")
        )
        return train.first(p.images), test.first(p.test_images)

    def all(self) -> dict[str, Callable[[], Row]]:
        """Names and functions, ordered by seed, so that an interrupted run has complete seeds."""
        changed = [f"{kind}+{c}" for c in ("batch_norm", "bias", "scale") for kind in BOTH]
        curves = [f"{kind}+{name}={x}" for name, xs in CURVES.items() for x in xs for kind in BOTH]
        parts: dict[str, Callable[[], Row]] = {}
        for seed in self.preset.seeds:
            for measure, variants in (
                (self.contrastive, ("untrained", *BOTH)),
                (self.supervised, BOTH),
                (posterior, BOTH),
                (self.contrastive, (*NONNEGATIVE[1:], *SIGNED)),
                (self.sprites, BOTH),
                (self.supervised, changed),
                (self.contrastive, curves if self.cfg.curves else ()),
            ):
                for variant in variants:
                    name = f"{measure.__name__} {variant} {seed}"
                    parts[name] = partial(measure, variant, seed)
        return {name: run for name, run in parts.items() if name.startswith(self.cfg.only)}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings and versions that figures depend on; others are refused."""
        import dataclasses
        from importlib.metadata import version

        import ncl_multi as ncl

        preset = dataclasses.asdict(replace(self.preset, seeds=()))
        versions = {name: version(name) for name in ("torch", "timm")}
        return {
            "preset": {name: value for name, value in preset.items() if name != "seeds"},
            "data": self.cfg.data,
            "precision": self.plan("", 0).on_this_machine().precision,
            "versions": {"ncl_multi": ncl.__version__} | versions,
        }

    def path(self, name: str) -> Path:
        """File of a part's figures."""
        return self.out / "parts" / f"{name.replace(' ', '_')}.json"

    def cached(self, name: str, run: Callable[[], Row]) -> Row:
        """The part's figures, from its file if the same settings and versions wrote one."""
        import json

        from ncl_multi.report import write_json

        path = self.path(name)
        if path.exists():
            stored = json.loads(path.read_text())
            for setting, value in self.settings.items():
                if stored.get(setting) != value:
                    raise ValueError(
                        f"{path} was measured with different {setting}: {stored.get(setting)}, now "
                        f"{value}; choose another --out, or delete the folder"
                    )
            return {measure: _unpacked(value) for measure, value in stored["figures"].items()}
        figures = run()
        packed = {measure: _packed(value) for measure, value in figures.items()}
        write_json(path, self.settings | {"commit": _commit(), "figures": packed})
        return figures

    def plan(self, name: str, seed: int, **changes: Any) -> Any:
        """How a part is trained."""
        from ncl_multi.adapters.vision.config import ClassifierConfig

        p = self.preset
        plan = ClassifierConfig(
            out=self.out / "trained" / name, epochs=p.epochs, batch_size=p.batch_size, lr=p.lr,
            seed=seed, device=self.cfg.device, precision=self.cfg.precision, jitter=p.jitter,
            view_scale=p.view_scale, temperature=p.temperature,
            optimizer="lars" if p.lars else "adamw",
        )  # fmt: skip
        return replace(plan, **changes)

    def model(self, activation: Any, seed: int, **changes: Any) -> Any:
        """The paper's projector, without BatchNorm, for the twin and for NCL."""
        from ncl_multi.adapters.vision.model import NonNegVision

        p = self.preset
        sizes = {"dims": p.dims, "hidden_dim": p.hidden_dim, "size": p.size} | changes
        return NonNegVision(p.model, activation=activation, batch_norm=False, seed=seed, **sizes)

    def contrastive(self, variant: str, seed: int) -> Row:
        """SimCLR with this activation, and all measures of its features.

        A variant may have a change, `relu+temperature=0.1`, and `untrained` is the network before
        its first step.
        """
        from ncl_multi.adapters.vision.report import (
            both_outputs,
            corrupted_hits,
            fine_tuned_hits,
        )
        from ncl_multi.codes.features import Features
        from ncl_multi.metrics import LinearProbe, activity_figures

        p, name = self.preset, f"{variant}_{seed}"
        train, test = self.pictures
        activation, _, change = variant.partition("+")
        setting, _, value = change.partition("=")
        width = {"hidden_dim": int(value)} if setting == "hidden_dim" else {}
        options = {"temperature": float(value)} if setting == "temperature" else {}
        model = self.model("none" if activation == "untrained" else activation, seed, **width)
        if activation == "untrained":
            h, test_h = (model.embed(images.images) for images in (train, test))
            return {"probe": _hits(LinearProbe.fit(h, train.y), test_h, test.y)}
        model.fit(train, self.plan(name, seed, **options))
        (h, z), (test_h, test_z) = (both_outputs(model, data).values() for data in (train, test))
        about = {"model": p.model, "data": self.cfg.data, "seed": seed, "activation": activation}
        about |= {"output": "head", "normalised": False, "classes": test.classes}
        for split, codes, y in (("train", z, train.y), ("test", test_z, test.y)):
            where = self.out / "features" / name / f"{split}_head.safetensors"
            Features(codes, y, about=about | {"split": split}).save(where)
        probe = LinearProbe.fit(h, train.y)
        row: Row = activity_figures(test_z, test.y) | {"probe": _hits(probe, test_h, test.y)}
        if variant in BOTH:
            worse = corrupted_hits(model, probe, test)
            row |= {f"corrupted {kind}": hits.double().numpy() for kind, hits in worse.items()}
            row["corrupted"] = np.mean([row[f"corrupted {kind}"] for kind in worse], axis=0)
            row |= _sepin_scores(test_z) | _quarter(z, train.y, test_z, test.y, seed)
            row |= _hard_labels(z, train.y, test_z, test.y, seed)
            fine_tuned = fine_tuned_hits(model, train, test, epochs=p.labelled_epochs, seed=seed)
            row["fine_tuned"] = fine_tuned.double().numpy()
        return row

    def supervised(self, variant: str, seed: int) -> Row:
        """Cross entropy on the head's output: plain on signed codes, the paper's on others.

        With `+batch_norm` before the activation, or with `+bias` or `+scale` in the classifier.
        """
        import torch

        from ncl_multi.adapters.vision.model import NonNegClassifier
        from ncl_multi.adapters.vision.report import both_outputs

        p = self.preset
        train, test = self.pictures
        activation, _, change = variant.partition("+")
        model = NonNegClassifier(
            p.model, p.dims, classes=len(train.classes), activation=activation,  # type: ignore[arg-type]
            batch_norm=change == "batch_norm", size=p.size, seed=seed,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model.classifier = classifier = _classifier(p.dims, len(train.classes), change)
        name = f"supervised_{variant}_{seed}"
        model.fit(
            train, self.plan(name, seed, epochs=p.labelled_epochs, lr=1e-3, optimizer="adamw")
        )
        with torch.inference_mode():
            guess = classifier.cpu().logits(both_outputs(model, test)["head"]).argmax(1)
        return {"supervised": (guess == test.y).double().numpy()}

    def sprites(self, activation: Any, seed: int) -> Row:
        """Pairs of sprites that differ in one factor, redrawn at random; codes against factors."""
        import torch

        from ncl_multi import StepObjective, fit, info_nce
        from ncl_multi.adapters.vision.report import both_outputs
        from ncl_multi.codes.features import Features
        from ncl_multi.data.sprites import FACTORS, draw, sprites
        from ncl_multi.metrics import dci, mig, sap

        p, sizes, size, pairs = self.preset, torch.tensor(list(FACTORS.values())), 24, 64

        def step(model, _):
            a = (torch.rand(pairs, len(sizes)) * sizes).long()
            other = (torch.rand(pairs, len(sizes)) * sizes).long()
            changed = torch.nn.functional.one_hot(torch.randint(len(sizes), (pairs,)), len(sizes))
            pair = draw(torch.cat([a, torch.where(changed == 1, other, a)]), size)
            device = next(model.parameters()).device
            z = model(pair.to(device).expand(-1, 3, -1, -1).float() / 255)
            return info_nce(*z.chunk(2), temperature=p.temperature, within_view=True), z

        name = f"sprites_{activation}_{seed}"
        model = self.model(activation, seed, dims=64, size=size)
        plan = self.plan(name, seed, steps=p.sprite_steps, lr=1e-3)
        fit(StepObjective(model, step), [None], plan)
        pictures, factors = sprites(4000, seed=1000 + seed, size=size)
        z = both_outputs(model, pictures)["head"]
        about: dict[str, Any] = {"data": "sprites", "factors": list(FACTORS), "output": "head"}
        about |= {"model": p.model, "seed": seed, "activation": activation, "normalised": False}
        where = self.out / "features" / name / "test_head.safetensors"
        Features(z, factors, about=about).save(where)
        return {"mig": mig(z, factors), "sap": sap(z, factors)} | dci(z, factors, seed=seed)


def _hits(probe: Any, z: Any, y: Any) -> np.ndarray:
    """1 for every row that the probe classifies correctly."""
    return (probe.predict(z).cpu() == y).double().numpy()


def _sepin_scores(z: Any) -> Row:
    """SEPIN in both conventions."""
    from ncl_multi.metrics import sepin

    return {
        f"sepin@{k} {convention}": score
        for convention in ("renormalised", "fixed")
        for k, score in sepin(z, convention=convention).items()
    }


def _quarter(z: Any, y: Any, test_z: Any, test_y: Any, seed: int) -> Row:
    """What probe and search on the head's output lose with a quarter of the dimensions."""
    import torch
    from torch.nn.functional import normalize

    from ncl_multi.metrics import LinearProbe, mean_average_precision

    # Ranked on train rows, before anything is fitted.
    activation = normalize(z, dim=1).relu().mean(0).argsort(descending=True)
    chance = torch.randperm(z.shape[1], generator=torch.Generator().manual_seed(seed))
    indices = {"all": torch.arange(z.shape[1])}
    indices |= {"best": activation[: z.shape[1] // 4], "random": chance[: z.shape[1] // 4]}
    hits = {
        name: _hits(LinearProbe.fit(z[:, i], y), test_z[:, i], test_y)
        for name, i in indices.items()
    }
    precision = {
        name: mean_average_precision(test_z[:, indices[name]], None, test_y)
        for name in ("all", "best")
    }
    return {
        "head_probe": hits["all"],
        "head_map": precision["all"],
        "probe_change": hits["best"] - hits["all"],
        "random_change": hits["random"] - hits["all"],
        "map_change": precision["best"] - precision["all"],
    }


def _hard_labels(z: Any, y: Any, test_z: Any, test_y: Any, seed: int) -> Row:
    """Probes of the head's output with wrong labels, and with few labels."""
    import torch

    from ncl_multi.data.corrupt import wrong_labels
    from ncl_multi.metrics import LinearProbe

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    few = torch.cat([order[y[order] == label][:FEW_PER_CLASS] for label in y.unique()])
    noisy = wrong_labels(y, WRONG_LABELS, seed=seed)
    return {
        "wrong_labels": _hits(LinearProbe.fit(z, noisy), test_z, test_y),
        "few_labels": _hits(LinearProbe.fit(z[few], y[few]), test_z, test_y),
    }


def _classifier(dims: int, classes: int, change: str) -> Any:
    """Class weights; with a bias, or for unit codes with a learnt scale."""
    import torch
    from torch.nn import functional as F

    from ncl_multi import NonNegCrossEntropy

    class Classifier(NonNegCrossEntropy):
        def __init__(self) -> None:
            super().__init__(dims, classes)
            self.bias = torch.nn.Parameter(torch.zeros(classes)) if change == "bias" else None
            self.scale = torch.nn.Parameter(torch.tensor(10.0)) if change == "scale" else None

        def logits(self, z: torch.Tensor) -> torch.Tensor:
            z = z if self.scale is None else F.normalize(z, dim=1) * self.scale
            return F.linear(z, self.weight, self.bias)

        def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast(z.device.type, enabled=False):
                return F.cross_entropy(self.logits(z.float()), y)

    return Classifier()


def posterior(activation: str, seed: int, steps: int = 1500) -> Row:
    """Correlation with P(class | x) / sqrt(P(class)) of codes trained with the spectral loss."""
    from ncl_multi.metrics.posterior import World, learn_features, match_columns

    world = World.draw(seed=seed)
    codes = learn_features(world, signed=activation == "none", steps=steps, seed=seed)
    return {"posterior": match_columns(codes, world.features)[1]}


def stability_rows(out: Path, seeds: Sequence[int]) -> dict[str, Row]:
    """Stability of each seed's dimensions against the next seed's, for both models.

    Each seed is in two pairs, so the pairs depend on each other and their interval is too narrow.
    """
    from ncl_multi.codes.features import Features
    from ncl_multi.metrics import stability

    rows = {}
    for kind in BOTH if len(seeds) >= SEEDS_FOR_A_VERDICT else ():
        files = [out / "features" / f"{kind}_{seed}" / "test_head.safetensors" for seed in seeds]
        if all(file.exists() for file in files):
            z = [Features.load(file).z for file in files]
            for seed, current, following in zip(seeds, z, [*z[1:], z[0]], strict=True):
                rows[f"stability {kind} {seed}"] = {"stability": stability(current, following)}
    return rows


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

    from ncl_multi.metrics import mean_interval

    table = {}
    for claim in CLAIMS + FOLLOW_UPS:
        twin, ncl = values(claim.twin, claim.measure), values(claim.ncl, claim.measure)
        if ncl is not None and (twin is not None or not claim.paired):
            table[claim.says] = row(claim, twin, ncl)
    probes = {kind: values(kind, "probe") for kind in (*NONNEGATIVE, *SIGNED)}
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
                    cell = _spread(np.array([np.mean(row[measure]) for row in rows]))
                    table.setdefault(f"{setting} {x}", {})[f"{measure}, {model}"] = cell
    return table


def draw(path: Path, figures: Mapping[str, Row]) -> None:
    """Plot the linear probe against sparsity and consistency, and SEPIN of twin and NCL."""
    from matplotlib.figure import Figure

    from ncl_multi.files import atomic

    def of(kind: str) -> list[Row]:
        return [row for name, row in figures.items() if name.startswith(f"contrastive {kind} ")]

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for kind in ("none", *NONNEGATIVE, *SIGNED):
        if rows := of(kind):
            label = "none (twin)" if kind == "none" else kind
            probes = [np.mean(row["probe"]) for row in rows]
            for axis, measure in ((left, "sparsity"), (middle, "class_consistency")):
                axis.scatter([row[measure] for row in rows], probes, label=label)
    left.set(xlabel="sparsity of the head's output", ylabel="linear probe of the encoder")
    middle.set(xlabel="class consistency of the head's output", ylabel="linear probe")
    if left.collections:
        left.legend(frameon=False, fontsize="small")
    depths = ("1", "10", "100", "all")
    for kind, label in (("none", "twin"), ("relu", "NCL")):
        rows = of(kind)
        for convention, style in (("fixed", "-"), ("renormalised", ":")):
            names = [f"sepin@{depth} {convention}" for depth in depths]
            if rows and all(name in rows[0] for name in names):
                line = [np.mean([row[name] for row in rows]) for name in names]
                colour = "C0" if kind == "none" else "C1"
                right.plot(depths, line, style, color=colour, label=f"{label}, {convention}")
    right.set(xlabel="k best dimensions", ylabel="SEPIN@k in nats")
    if right.lines:
        right.legend(frameon=False, fontsize="small")
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format="png")


def measured(parts: Parts) -> Iterator[tuple[str, Row | None]]:
    """Name and figures of every part, as they finish; None if out of time."""
    import time
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    import torch

    minutes = parts.cfg.minutes
    end = float("inf") if minutes is None else time.time() + 60 * minutes
    names = list(parts.all())
    on_cpu = parts.cfg.device == "cpu" or not torch.accelerator.is_available()
    jobs = parts.cfg.jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    if jobs == 1 or not names:
        for name, run in parts.all().items():
            due = time.time() < end or parts.path(name).exists()
            yield name, parts.cached(name, run) if due else None
        return
    (parts.out / "parts").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_apart, parts.cfg, name, end): name for name in names}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _apart(cfg: Config, name: str, end: float) -> Row | None:
    """One part in a separate process with one thread; its progress bars go to a file."""
    import time
    from contextlib import redirect_stderr

    import torch

    torch.set_num_threads(1)
    parts = _parts(cfg)
    if time.time() >= end and not parts.path(name).exists():
        return None
    log = parts.path(name).with_suffix(".log")
    with log.open("a") as file, redirect_stderr(file):
        return parts.cached(name, parts.all()[name])


@cache
def _parts(cfg: Config) -> Parts:
    return Parts(cfg)


def main(cfg: Config) -> None:
    import time

    from tqdm.auto import tqdm

    from ncl_multi.files import atomic
    from ncl_multi.report import table, write_json

    parts, start = Parts(cfg), time.perf_counter()
    if not parts.all():
        raise SystemExit(f"no part's name starts with {cfg.only!r}")
    try:
        _ = parts.pictures
    except FileNotFoundError as error:
        raise SystemExit(f"preset {cfg.preset} needs {cfg.data}: {error} (--data)") from error
    by_name = dict(tqdm(measured(parts), desc="claims", unit="part", total=len(parts.all())))
    figures = {name: row for name in parts.all() if (row := by_name[name]) is not None}
    if len(figures) < len(by_name):
        print(f"{len(figures)} of {len(by_name)} parts are measured; the same command resumes")
    figures |= stability_rows(parts.out, parts.preset.seeds)
    rows = judged(figures, parts.preset.seeds)
    if not rows:
        print(f"{len(figures)} parts done; the table needs twin and NCL of every seed")
        return
    seeds = f"{len(parts.preset.seeds)} seeds, mean ± spread"
    tables = {f"The paper's claims, preset {cfg.preset}, {cfg.data}, {seeds}": rows}
    if curves := curves_of(figures):
        tables["By temperature and by projector width"] = curves
    lines = []
    for title, content in tables.items():
        table(title, content)
        columns = list(next(iter(content.values())))
        lines += [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in content.items()]
        lines += [""]
    with atomic(parts.out / "claims.md") as unfinished:
        unfinished.write_text("\n".join(lines))
    means = {
        name: {measure: float(np.mean(value)) for measure, value in row.items()}
        for name, row in figures.items()
    }
    whole = parts.settings | {"commits": commits(parts), "seeds": parts.preset.seeds, "rows": rows}
    whole |= {"curves": curves, "parts": means}
    write_json(parts.out / "claims.json", whole)
    draw(parts.out / "claims.png", figures)
    complete = not cfg.only and cfg.seeds is None and len(figures) >= len(by_name)
    if complete and all(value is not None for value in by_name.values()):
        cfg.results.mkdir(parents=True, exist_ok=True)
        print(f"written to {write_json(cfg.results / f'{cfg.preset}.json', whole)}")
    of_paper = [row for name, row in rows.items() if name not in {c.says for c in FOLLOW_UPS}]
    words = [row["verdict"] for row in of_paper]
    print(
        f"of the paper's {len(words)}: {words.count('held')} held, {words.count('NOT held')} not "
        f"held; {time.perf_counter() - start:.0f} s; {parts.out / 'claims.md'}"
    )


def commits(parts: Parts) -> list[str]:
    """The commits at which the parts were measured."""
    import json

    files = [parts.path(name) for name in parts.all()]
    hashes = {json.loads(file.read_text()).get("commit") for file in files if file.exists()}
    return sorted(str(commit) for commit in hashes)


def _commit() -> str | None:
    """The commit of this repository, marked if files have changed since."""
    import subprocess

    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    got = subprocess.run(git, capture_output=True, text=True, check=False)
    return got.stdout.strip() or None


def _packed(value: Any) -> Any:
    """One number per picture as text: these are quarters at most, as there are four corruptions."""
    import base64

    if not isinstance(value, np.ndarray):
        return value
    return {"quarters": base64.b64encode(np.rint(4 * value).astype(np.int8).tobytes()).decode()}


def _unpacked(value: Any) -> Any:
    import base64

    if not isinstance(value, dict):
        return value
    return np.frombuffer(base64.b64decode(value["quarters"]), np.int8) / 4


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


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

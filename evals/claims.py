"""Does what the paper says hold here? Every claim as one row: paper, twin, NCL, held or not.

Usage:
    python evals/claims.py --quick          # CIFAR-10 on two cores, within half an hour
    python evals/claims.py                  # the paper's CIFAR-10 settings, for a GPU
    python evals/claims.py --quick --only sprites

Each part's figures are kept in `<out>/parts`; the same command resumes. On a
CPU several parts run side by side, a core each, and what they say is in `<out>/parts/*.log`. The
twin is the same model with signed features, trained with the same seeds and budget.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Literal

import tyro

from ncl_multi.log import show_messages

NONNEGATIVE = ("relu", "softplus", "sigmoid", "exp")
SIGNED = ("leaky_relu", "gelu")
Row = dict[str, float]


@dataclass(frozen=True)
class Config:
    """The paper's claims, measured."""

    quick: bool = False
    """A small ResNet on a part of CIFAR-10; otherwise the paper's settings, for a GPU."""
    out: Path = Path("runs/claims")
    """Folder for the table, the picture, the features and the parts' figures."""
    only: str = ""
    """Run only the parts whose name starts with this."""
    seeds: tuple[int, ...] | None = None
    """Seeds to average over; None leaves it to the preset."""
    device: str | None = None
    """`cpu`, `cuda`, ...; None takes the best there is."""
    jobs: int | None = None
    """Parts that run side by side; None for one per core, and one where there is a GPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of training."""


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
    jitter: float = 0.8
    temperature: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)
    labelled_epochs: int = 50
    sprite_steps: int = 10_000


QUICK = Preset(
    model="resnet-small",
    hidden_dim=256,
    images=5_000,
    test_images=2_000,
    epochs=6,
    batch_size=128,
    lr=2e-3,
    lars=False,
    jitter=0.4,
    seeds=(0, 1),
    labelled_epochs=4,
    sprite_steps=200,
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, the measure that tests it and the rule that decides."""

    says: str
    paper: str
    measure: str
    rule: Callable[[Sequence[float], Sequence[float]], bool]
    unit: str = "%"


def higher(twin: Sequence[float], ncl: Sequence[float]) -> bool:
    """NCL above its twin with every seed."""
    return all(b > a for a, b in zip(twin, ncl, strict=True))


def lower(twin: Sequence[float], ncl: Sequence[float]) -> bool:
    """NCL below its twin with every seed."""
    return all(b < a for a, b in zip(twin, ncl, strict=True))


def no_worse(twin: Sequence[float], ncl: Sequence[float]) -> bool:
    """NCL's mean at most one point below its twin's."""
    return mean(ncl) >= mean(twin) - 0.01


def over_nine_tenths(twin: Sequence[float], ncl: Sequence[float]) -> bool:
    """NCL's mean above 90 %."""
    return mean(ncl) > 0.9


def loses_nothing(twin: Sequence[float], ncl: Sequence[float]) -> bool:
    """NCL's mean falls by at most one point."""
    return mean(ncl) >= -0.01


SEPIN_IN_PAPER: dict[Any, str] = {1: "0.88 -> 7.43", 10: "0.79 -> 5.93", 100: "0.69 -> 3.87"}
SEPIN_IN_PAPER |= {"all": "0.47 -> 0.48"}
CLAIMS = (
    Claim("Sparsity, head", "over 90 % zeros", "sparsity", over_nine_tenths),
    Claim("Class consistency, head", "10.0 -> 53.8 % (a rerun)", "class_consistency", higher),
    Claim("Correlation of dimensions, head", "lower", "correlation", lower),
    Claim("Linear probe, encoder", "87.6 -> 87.8 %", "probe", no_worse),
    Claim("Fine-tuning, encoder", "92.3 -> 92.6 %", "fine_tuned", higher),
    Claim("Corrupted pictures, encoder", "34.5 -> 36.1 % (ImageNet-100)", "corrupted", higher),
    *(
        Claim(
            f"SEPIN@{k}, {kind}", f"{paper} (unit not known)", f"sepin@{k} {kind}", higher, "nats"
        )
        for kind in ("renormalised", "fixed")
        for k, paper in SEPIN_IN_PAPER.items()
    ),
    Claim(
        "Quarter of dims by activation: probe",
        "-0.3 -> 0.0",
        "probe_change",
        loses_nothing,
        "points",
    ),
    Claim(
        "Quarter of dims by activation: mAP", "-0.7 -> 0.0", "map_change", loses_nothing, "points"
    ),
    Claim("Quarter of dims at random: probe", "-0.6 -> -4.6", "random_change", lower, "points"),
    Claim(
        "Cross entropy, non-negative",
        "76.1 -> 78.6 % (ImageNet-100)",
        "supervised",
        higher,
    ),
    Claim("Posterior recovered: correlation", "exact, in theory", "posterior", over_nine_tenths),
    Claim("Factors of own sprites: DCI", "no figure", "disentanglement", higher),
)


class Parts:
    """The trainings and what was measured on them, each kept in its own file."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.preset = QUICK if cfg.quick else Preset()
        if cfg.seeds:
            self.preset = replace(self.preset, seeds=cfg.seeds)

    @cached_property
    def pictures(self) -> tuple[Any, Any]:
        from ncl_multi import data

        sizes = (self.preset.images, self.preset.test_images)
        train, test = (data.cifar10(split) for split in ("train", "test"))
        return train.first(sizes[0]), test.first(sizes[1])

    def all(self) -> dict[str, Callable[[], Row]]:
        """Names and functions, a seed after the other, so that a stopped run has whole seeds."""
        both = ("none", "relu")
        parts: dict[str, Callable[[], Row]] = {}
        for seed in self.preset.seeds:
            for measure, activations in (
                (self.contrastive, both),
                (self.supervised, both),
                (posterior, both),
                (self.contrastive, (*NONNEGATIVE[1:], *SIGNED)),
                (self.sprites, both),
            ):
                for activation in activations:
                    name = f"{measure.__name__} {activation} {seed}"
                    parts[name] = partial(measure, activation, seed)
        return {name: part for name, part in parts.items() if name.startswith(self.cfg.only)}

    def kept(self, name: str, part: Callable[[], Row]) -> Row:
        """The part's figures, from its file if the same preset wrote one."""
        import dataclasses
        import json

        from ncl_multi.report import write_json

        path = self.cfg.out / "parts" / f"{name.replace(' ', '_')}.json"
        preset = json.loads(json.dumps(dataclasses.asdict(replace(self.preset, seeds=()))))
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["preset"] != preset:
                raise ValueError(f"{path} is of another preset; choose another --out")
            return stored["figures"]
        figures = part()
        write_json(path, {"preset": preset, "figures": figures})
        return figures

    def plan(self, name: str, seed: int, **changes: Any) -> Any:
        """How a part is trained."""
        from ncl_multi.adapters.vision.config import ClassifierConfig

        p = self.preset
        plan = ClassifierConfig(
            out=self.cfg.out / "trained" / name, epochs=p.epochs, batch_size=p.batch_size, lr=p.lr,
            seed=seed, device=self.cfg.device, precision=self.cfg.precision, jitter=p.jitter,
            temperature=p.temperature, optimizer="lars" if p.lars else "adamw",
        )  # fmt: skip
        return replace(plan, **changes)

    def model(self, activation: Any, seed: int, **changes: Any) -> Any:
        """The paper's projector, without BatchNorm, for the twin and for NCL."""
        from ncl_multi.adapters.vision.model import NonNegVision

        p = self.preset
        sizes = {"dims": p.dims, "hidden_dim": p.hidden_dim, "size": p.size} | changes
        return NonNegVision(p.model, activation=activation, batch_norm=False, seed=seed, **sizes)

    def contrastive(self, activation: Any, seed: int) -> Row:
        """SimCLR with this activation, and everything that is asked of its features."""
        from ncl_multi.adapters.vision.report import (
            both_outputs,
            corrupted_accuracy,
            fine_tuned_encoder,
        )
        from ncl_multi.codes.features import Features
        from ncl_multi.metrics import LinearProbe, readability

        p, name = self.preset, f"{activation}_{seed}"
        train, test = self.pictures
        model = self.model(activation, seed).fit(train, self.plan(name, seed))
        (h, z), (test_h, test_z) = (both_outputs(model, own).values() for own in (train, test))
        about = {"model": p.model, "data": "cifar10", "seed": seed, "activation": activation}
        about |= {"output": "head", "normalised": False, "classes": test.classes}
        for split, codes, y in (("train", z, train.y), ("test", test_z, test.y)):
            where = self.cfg.out / "features" / name / f"{split}_head.safetensors"
            Features(codes, y, about=about | {"split": split}).save(where)
        probe = LinearProbe.fit(h, train.y)
        row = readability(test_z, test.y) | {"probe": probe.accuracy(test_h, test.y)}
        if activation in ("none", "relu"):
            worse = corrupted_accuracy(model, probe, test)
            row |= {f"corrupted {kind}": accuracy for kind, accuracy in worse.items()}
            row |= _own(test_z) | _quarter(z, train.y, test_z, test.y, seed)
            row["corrupted"] = mean(worse.values())
            row["fine_tuned"] = fine_tuned_encoder(
                model, train, test, epochs=p.labelled_epochs, seed=seed
            )
        return row

    def supervised(self, activation: Any, seed: int) -> Row:
        """Cross entropy on the head's output: plain on signed codes, the paper's on others."""
        from ncl_multi.adapters.vision.model import NonNegClassifier

        p = self.preset
        train, test = self.pictures
        model = NonNegClassifier(
            p.model, p.dims, classes=len(train.classes), activation=activation, batch_norm=False,
            size=p.size, seed=seed,
        )  # fmt: skip
        name = f"supervised_{activation}_{seed}"
        model.fit(
            train, self.plan(name, seed, epochs=p.labelled_epochs, lr=1e-3, optimizer="adamw")
        )
        return {"supervised": float((model.predict(test.images) == test.y).float().mean())}

    def sprites(self, activation: Any, seed: int) -> Row:
        """Pairs of sprites that differ in one factor, redrawn at random; codes against factors."""
        import torch

        from ncl_multi import StepObjective, fit, info_nce
        from ncl_multi.adapters.vision.report import both_outputs
        from ncl_multi.codes.features import Features
        from ncl_multi.data.sprites import FACTORS, draw, sprites
        from ncl_multi.metrics import dci, mig, sap

        p, many, size, pairs = self.preset, torch.tensor(list(FACTORS.values())), 24, 64

        def step(model, _):
            a = (torch.rand(pairs, len(many)) * many).long()
            other = (torch.rand(pairs, len(many)) * many).long()
            changed = torch.nn.functional.one_hot(torch.randint(len(many), (pairs,)), len(many))
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
        where = self.cfg.out / "features" / name / "test_head.safetensors"
        Features(z, factors, about=about).save(where)
        return {"mig": mig(z, factors), "sap": sap(z, factors)} | dci(z, factors, seed=seed)


def _own(z: Any) -> Row:
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

    from ncl_multi.metrics import linear_probe, mean_average_precision

    # Ranked on train rows, before anything is fitted.
    activation = normalize(z, dim=1).relu().mean(0).argsort(descending=True)
    chance = torch.randperm(z.shape[1], generator=torch.Generator().manual_seed(seed))
    kept = {"all": torch.arange(z.shape[1])}
    kept |= {"best": activation[: z.shape[1] // 4], "random": chance[: z.shape[1] // 4]}
    probe = {name: linear_probe(z[:, i], y, test_z[:, i], test_y) for name, i in kept.items()}
    found = {
        name: mean_average_precision(test_z[:, kept[name]], None, test_y)
        for name in ("all", "best")
    }
    return {
        "head_probe": probe["all"],
        "head_map": found["all"],
        "probe_change": probe["best"] - probe["all"],
        "random_change": probe["random"] - probe["all"],
        "map_change": found["best"] - found["all"],
    }


def posterior(activation: str, seed: int, steps: int = 1500) -> Row:
    """Correlation with P(class | x) / sqrt(P(class)) of codes trained with the spectral loss."""
    from ncl_multi.metrics.posterior import World, learn_features, match_columns

    world = World.draw(seed=seed)
    codes = learn_features(world, signed=activation == "none", steps=steps, seed=seed)
    return {"posterior": match_columns(codes, world.features)[1]}


def judged(figures: dict[str, Row], seeds: Sequence[int]) -> dict[str, dict[str, str]]:
    """The table: one row a claim whose parts are all there."""

    def values(activation: str, measure: str) -> list[float]:
        rows = [row for name, row in figures.items() if name.split()[1] == activation]
        return [row[measure] for row in rows if measure in row]

    table = {}
    for claim in CLAIMS:
        twin, ncl = values("none", claim.measure), values("relu", claim.measure)
        if len(twin) == len(ncl) == len(seeds):
            table[claim.says] = {
                "paper, twin -> NCL": claim.paper,
                "twin": _spread(twin, claim.unit),
                "NCL": _spread(ncl, claim.unit),
                "held if": (claim.rule.__doc__ or "").rstrip("."),
                "held": _word(claim.rule(twin, ncl)),
            }
    probes = {kind: values(kind, "probe") for kind in (*NONNEGATIVE, *SIGNED)}
    if all(len(probe) == len(seeds) for probe in probes.values()):
        means = {kind: mean(probe) for kind, probe in probes.items()}
        others = ", ".join(f"{kind} {_spread(probes[kind])}" for kind in NONNEGATIVE[1:])
        signed = ", ".join(f"{kind} {_spread(probes[kind])}" for kind in SIGNED)
        best = means["relu"] >= max(means[kind] for kind in NONNEGATIVE)
        worst = max(means[kind] for kind in SIGNED) < min(means[kind] for kind in NONNEGATIVE)
        shown = {"paper, twin -> NCL": "best", "twin": others, "NCL": _spread(probes["relu"])}
        rule = {"held if": "ReLU's mean is the highest of the four", "held": _word(best)}
        table["ReLU best of the non-negative activations: probe"] = shown | rule
        shown = {"paper, twin -> NCL": "far worse", "twin": signed, "NCL": _spread(probes["relu"])}
        rule = {"held if": "Both means below all four non-negative ones", "held": _word(worst)}
        table["Leaky ReLU and GELU worst: probe"] = shown | rule
    return table


def draw(path: Path, figures: dict[str, Row]) -> None:
    """Activations by what they cost and give, and SEPIN of twin and NCL."""
    from matplotlib.figure import Figure

    from ncl_multi.files import atomic

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for kind in ("none", *NONNEGATIVE, *SIGNED):
        rows = [row for name, row in figures.items() if name.startswith(f"contrastive {kind} ")]
        if rows:
            label = "none (twin)" if kind == "none" else kind
            for axis, measure in ((left, "sparsity"), (middle, "class_consistency")):
                axis.scatter([r[measure] for r in rows], [r["probe"] for r in rows], label=label)
    left.set(xlabel="sparsity of the head's output", ylabel="linear probe of the encoder")
    middle.set(xlabel="class consistency of the head's output", ylabel="linear probe")
    if left.collections:
        left.legend(frameon=False, fontsize="small")
    depths = ("1", "10", "100", "all")
    for kind, label in (("none", "twin"), ("relu", "NCL")):
        rows = [row for name, row in figures.items() if name.startswith(f"contrastive {kind} ")]
        for convention, style in (("fixed", "-"), ("renormalised", ":")):
            names = [f"sepin@{depth} {convention}" for depth in depths]
            if rows and all(name in rows[0] for name in names):
                line = [mean(row[name] for row in rows) for name in names]
                colour = "C0" if kind == "none" else "C1"
                right.plot(depths, line, style, color=colour, label=f"{label}, {convention}")
    right.set(xlabel="k best dimensions", ylabel="SEPIN@k in nats")
    if right.lines:
        right.legend(frameon=False, fontsize="small")
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=120, format="png")


def measured(parts: Parts) -> Iterator[tuple[str, Row]]:
    """Name and figures of every part, those of several jobs as they come."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    import torch

    names = list(parts.all())
    on_cpu = parts.cfg.device == "cpu" or not torch.accelerator.is_available()
    jobs = parts.cfg.jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    if jobs == 1:
        yield from ((name, parts.kept(name, part)) for name, part in parts.all().items())
        return
    (parts.cfg.out / "parts").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_apart, parts.cfg, name): name for name in names}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _apart(cfg: Config, name: str) -> Row:
    """One part in a separate process, which has one core; its bars go to a file."""
    from contextlib import redirect_stderr

    import torch

    torch.set_num_threads(1)
    parts, log = _parts(cfg), cfg.out / "parts" / f"{name.replace(' ', '_')}.log"
    with log.open("a") as file, redirect_stderr(file):
        return parts.kept(name, parts.all()[name])


@cache
def _parts(cfg: Config) -> Parts:
    return Parts(cfg)


def main(cfg: Config) -> None:
    import time

    from tqdm.auto import tqdm

    from ncl_multi.files import atomic
    from ncl_multi.report import table, write_json

    parts, start = Parts(cfg), time.perf_counter()
    found = dict(tqdm(measured(parts), desc="claims", unit="part", total=len(parts.all())))
    figures = {name: found[name] for name in parts.all()}
    rows = judged(figures, parts.preset.seeds)
    if not rows:
        print(f"{len(figures)} parts done; the table needs twin and NCL of every seed")
        return
    seeds = f"{len(parts.preset.seeds)} seeds, mean ± spread"
    table(f"The paper's claims, {'quick' if cfg.quick else 'full'} preset, {seeds}", rows)
    columns = list(next(iter(rows.values())))
    lines = [f"| claim | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]
    with atomic(cfg.out / "claims.md") as unfinished:
        unfinished.write_text("\n".join(lines) + "\n")
    write_json(
        cfg.out / "claims.json", {"preset": vars(parts.preset), "rows": rows, "parts": figures}
    )
    draw(cfg.out / "claims.png", figures)
    held = sum(row["held"] == "yes" for row in rows.values())
    print(
        f"{held} of {len(rows)} held; {time.perf_counter() - start:.0f} s; {cfg.out / 'claims.md'}"
    )


def _spread(values: Sequence[float], unit: str = "%") -> str:
    """Mean and standard deviation over seeds."""
    if unit == "nats":
        return f"{mean(values):.4f} ± {pstdev(values):.4f}"
    return f"{100 * mean(values):.1f} ± {100 * pstdev(values):.1f}{' %' if unit == '%' else ''}"


def _word(held: bool) -> str:
    return "yes" if held else "NO"


if __name__ == "__main__":
    show_messages()
    main(tyro.cli(Config))

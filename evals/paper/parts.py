"""The trainings behind the paper's claims, and the figures of each."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ncl_multi import NonNegCrossEntropy
from ncl_multi.codes.features import Features
from ncl_multi.metrics import (
    LinearProbe,
    activity_figures,
    dci,
    mean_average_precision,
    mig,
    sap,
    sepin,
    stability,
)
from paper.store import Row, Store, own_commit

NONNEGATIVE = ("relu", "softplus", "sigmoid", "exp")
SIGNED = ("leaky_relu", "gelu")
BOTH = ("none", "relu")
CURVES = {"temperature": (0.05, 0.1, 0.2, 0.5), "hidden_dim": (64, 256, 1024)}
CHANGES = ("batch_norm", "bias", "scale")
SEEDS_FOR_A_VERDICT = 3
WRONG_LABELS, FEW_PER_CLASS = 0.4, 10


class Parts(Store):
    """The trainings and what is measured of each."""

    @cached_property
    def pictures(self) -> tuple[Any, Any]:
        from ncl_multi import data

        p = self.preset
        train, test = (
            data.images(self.cfg.data, split, size=p.size) for split in ("train", "test")
        )
        return train.first(p.images), test.first(p.test_images)

    @cached_property
    def all(self) -> dict[str, Callable[[], Row]]:
        """Names and functions, ordered by seed, so that an interrupted run has complete seeds."""
        changed = [f"{kind}+{change}" for change in CHANGES for kind in BOTH]
        curves = [f"{kind}+{name}={x}" for name, xs in CURVES.items() for x in xs for kind in BOTH]
        parts: dict[str, Callable[[], Row]] = {}
        for seed in self.preset.seeds:
            for measure, variants in (
                (self.contrastive, ("untrained", *BOTH)),
                (self.supervised, BOTH),
                (posterior, BOTH),
                (self.short, (*NONNEGATIVE, *SIGNED)),
                (self.gated, ("relu",)),
                (self.sprites, BOTH),
                (self.supervised, changed),
                (self.short, curves),
            ):
                for variant in variants:
                    name = f"{measure.__name__} {variant} {seed}"
                    parts[name] = partial(measure, variant, seed)
        return parts

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings and versions that figures depend on; others are refused."""
        from importlib.metadata import version

        from ncl_multi import __version__

        preset = asdict(self.preset)
        del preset["seeds"]
        return {
            "preset": preset,
            "data": self.cfg.data,
            "precision": self.plan("", 0).on_this_machine().precision,
            "versions": {"ncl_multi": __version__}
            | {name: version(name) for name in ("torch", "timm")},
        }

    @cached_property
    def compared(self) -> list[str]:
        """Names of the figures of `compare_seeds`."""
        return [f"stability {kind} {seed}" for kind in BOTH for seed in self.preset.seeds]

    def compare_seeds(self) -> None:
        """Stability of each seed's dimensions against the next seed's, for both models.

        Each seed is in two pairs, so the pairs depend on each other and their interval is too
        narrow.
        """
        seeds = self.preset.seeds
        for kind in BOTH if len(seeds) >= SEEDS_FOR_A_VERDICT else ():
            folders = [self.out / "features" / f"{kind}_{seed}" for seed in seeds]
            files = [folder / "test_head.safetensors" for folder in folders]
            if not all(file.exists() for file in files):
                continue
            z = [Features.load(file).z for file in files]
            for seed, current, following in zip(seeds, z, [*z[1:], z[0]], strict=True):
                row = {"stability": stability(current, following)}
                self._write(f"stability {kind} {seed}", {"commit": own_commit(), "figures": row})

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

        `untrained` is the network before its first step, of which only the probe is measured.
        """
        from ncl_multi.adapters.vision.report import both_outputs, corrupted_hits, fine_tuned_hits

        p, name = self.preset, f"{variant}_{seed}"
        train, test = self.pictures
        model = self.model("none" if variant == "untrained" else variant, seed)
        if variant == "untrained":
            h, test_h = (model.embed(images.images) for images in (train, test))
            return {"probe": _hits(LinearProbe.fit(h, train.y), test_h, test.y)}
        plan = self.plan(name, seed)
        model.fit(train, plan)
        (h, z), (test_h, test_z) = (both_outputs(model, data).values() for data in (train, test))
        about = {"model": p.model, "data": self.cfg.data, "seed": seed, "activation": variant}
        about |= {"output": "head", "normalised": False, "classes": test.classes}
        for split, codes, y in (("train", z, train.y), ("test", test_z, test.y)):
            where = self.out / "features" / name / f"{split}_head.safetensors"
            Features(codes, y, about=about | {"split": split}).save(where)
        probe = LinearProbe.fit(h, train.y)
        row: Row = activity_figures(test_z, test.y) | {"probe": _hits(probe, test_h, test.y)}
        worse = corrupted_hits(model, probe, test)
        row |= {f"corrupted {kind}": hits.numpy() for kind, hits in worse.items()}
        for convention in ("renormalised", "fixed"):
            scores = sepin(test_z, convention=convention)
            row |= {f"sepin@{k} {convention}": score for k, score in scores.items()}
        row |= _quarter(z, train.y, test_z, test.y, seed)
        row |= _hard_labels(z, train.y, test_z, test.y, seed)
        fine_tuned = fine_tuned_hits(
            model, train, test, epochs=p.labelled_epochs, view_scale=p.view_scale, seed=seed,
            bf16=plan.on_this_machine().precision == "bf16",
        )  # fmt: skip
        return row | {"fine_tuned": fine_tuned.numpy()}

    def short(self, variant: str, seed: int) -> Row:
        """SimCLR for `short_epochs`: another activation or setting, `relu+temperature=0.1`.

        The probe has 10,000 labels.
        """
        from ncl_multi.adapters.vision.report import both_outputs

        train, test = self.pictures
        known = train.first(10_000)
        activation, _, change = variant.partition("+")
        setting, _, value = change.partition("=")
        width = {"hidden_dim": int(value)} if setting == "hidden_dim" else {}
        options = {"temperature": float(value)} if setting == "temperature" else {}
        model = self.model(activation, seed, **width)
        if activation == "exp":
            # At the rate of the others it overflows within ten steps, at an eighth on some seeds.
            options["lr"] = self.preset.lr / 32
        epochs = self.preset.short_epochs
        model.fit(train, self.plan(f"short_{variant}_{seed}", seed, epochs=epochs, **options))
        test_h, test_z = both_outputs(model, test).values()
        probe = LinearProbe.fit(model.embed(known), known.y)
        row: Row = activity_figures(test_z, test.y) | {"probe": _hits(probe, test_h, test.y)}
        return {f"short_{measure}": value for measure, value in row.items()}

    def gated(self, activation: Any, seed: int) -> Row:
        """Class consistency with BayesNCL's gate, and of `short` codes cut to as many entries."""
        from torch.utils.data import DataLoader

        from ncl_multi import fit
        from ncl_multi.adapters.vision.report import both_outputs
        from ncl_multi.adapters.vision.views import Views
        from ncl_multi.data.pictures import whole
        from ncl_multi.head import top_k
        from ncl_multi.metrics import class_consistency
        from paper.gate import Gated

        p, (train, test) = self.preset, self.pictures
        # Trained already by `short`, whose run is opened again.
        plain = self.model(activation, seed)
        plain.fit(train, self.plan(f"short_{activation}_{seed}", seed, epochs=p.short_epochs))
        views = Views(round(p.view_scale * p.size), jitter=p.jitter, hue=p.jitter / 4)
        objective = Gated(self.model(activation, seed), views, p.temperature, p.hidden_dim)
        plan = self.plan(f"gated_{activation}_{seed}", seed, epochs=p.short_epochs)
        loader: Any = DataLoader(train, p.batch_size, collate_fn=whole, drop_last=True)
        fit(objective, loader, plan, optimizer=lambda _: objective.optimizer(p.lr, 1e-4))
        with torch.inference_mode():
            z, _ = objective.gate.cpu()(both_outputs(objective.model, test)["head"])
        active = round(activity_figures(z, test.y)["active_dims"])
        cut = top_k(both_outputs(plain, test)["head"], max(1, active))
        gated, ungated = (class_consistency(codes, test.y) for codes in (z, cut))
        row = {"gated_consistency": gated, "cut_consistency": ungated, "gated_active": active}
        return row | {"gate_gain": gated - ungated}

    def supervised(self, variant: str, seed: int) -> Row:
        """Cross entropy on the head's output: plain on signed codes, the paper's on others.

        With `+batch_norm` before the activation, or with `+bias` or `+scale` in the classifier.
        """
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
            model.classifier = classifier = Classifier(p.dims, len(train.classes), change)
        name = f"supervised_{variant}_{seed}"
        model.fit(
            train, self.plan(name, seed, epochs=p.labelled_epochs, lr=1e-3, optimizer="adamw")
        )
        with torch.inference_mode():
            guess = classifier.cpu().logits(both_outputs(model, test)["head"]).argmax(1)
        return {"supervised": (guess == test.y).numpy()}

    def sprites(self, activation: Any, seed: int) -> Row:
        """Pairs of sprites that differ in one factor, redrawn at random; codes against factors."""
        from ncl_multi import StepObjective, fit, info_nce
        from ncl_multi.adapters.vision.report import both_outputs
        from ncl_multi.data.sprites import FACTORS, draw, sprites

        p, sizes, size, pairs = self.preset, torch.tensor(list(FACTORS.values())), 24, 64

        def step(model, _):
            a = (torch.rand(pairs, len(sizes)) * sizes).long()
            other = (torch.rand(pairs, len(sizes)) * sizes).long()
            changed = F.one_hot(torch.randint(len(sizes), (pairs,)), len(sizes))
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
    """Whether the probe classifies a row correctly."""
    return (probe.predict(z).cpu() == y).numpy()


def _quarter(z: Any, y: Any, test_z: Any, test_y: Any, seed: int) -> Row:
    """What probe and search on the head's output lose with a quarter of the dimensions."""
    # Ranked on train rows, before anything is fitted.
    activation = F.normalize(z, dim=1).relu().mean(0).argsort(descending=True)
    chance = torch.randperm(z.shape[1], generator=torch.Generator().manual_seed(seed))
    indices = {"all": torch.arange(z.shape[1])}
    indices |= {"best": activation[: z.shape[1] // 4], "random": chance[: z.shape[1] // 4]}
    hits = {
        name: _hits(LinearProbe.fit(z[:, i], y), test_z[:, i], test_y)
        for name, i in indices.items()
    }
    head_map, best_map = (
        mean_average_precision(test_z[:, indices[name]], None, test_y) for name in ("all", "best")
    )
    return {
        "head_probe": hits["all"],
        "best_probe": hits["best"],
        "random_probe": hits["random"],
        "head_map": head_map,
        "map_change": best_map - head_map,
    }


def _hard_labels(z: Any, y: Any, test_z: Any, test_y: Any, seed: int) -> Row:
    """Probes of the head's output with wrong labels, and with few labels."""
    from ncl_multi.data.corrupt import wrong_labels

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    few = torch.cat([order[y[order] == label][:FEW_PER_CLASS] for label in y.unique()])
    noisy = wrong_labels(y, WRONG_LABELS, seed=seed)
    return {
        "wrong_labels": _hits(LinearProbe.fit(z, noisy), test_z, test_y),
        "few_labels": _hits(LinearProbe.fit(z[few], y[few]), test_z, test_y),
    }


class Classifier(NonNegCrossEntropy):
    """Class weights; with a bias, or for unit codes with a learnt scale."""

    def __init__(self, dims: int, classes: int, change: str):
        super().__init__(dims, classes)
        self.bias = torch.nn.Parameter(torch.zeros(classes)) if change == "bias" else None
        self.scale = torch.nn.Parameter(torch.tensor(10.0)) if change == "scale" else None

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        z = z if self.scale is None else F.normalize(z, dim=1) * self.scale
        return F.linear(z, self.weight, self.bias)

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(z.device.type, enabled=False):
            return F.cross_entropy(self.logits(z.float()), y)


def posterior(activation: str, seed: int, steps: int = 1500) -> Row:
    """Correlation with P(class | x) / sqrt(P(class)) of codes trained with the spectral loss."""
    from ncl_multi.metrics.posterior import World, learn_features, match_columns

    world = World.draw(seed=seed)
    codes = learn_features(world, signed=activation == "none", steps=steps, seed=seed)
    return {"posterior": match_columns(codes, world.features)[1]}

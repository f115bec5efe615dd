"""Every eval on small files whose answer is known, its output, and what it refuses."""

import json
import math
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ncl_multi.codes.features import Features
from ncl_multi.data.corrupt import wrong_labels

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

EVALS = Path(__file__).parents[2] / "evals"


def script(name):
    """An eval's names, and its command line."""
    return runpy.run_path(str(EVALS / f"{name}.py"), run_name="eval")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an eval as a person does; give what it printed as rows of JSON."""

    def command(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        runpy.run_path(str(EVALS / f"{name}.py"), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    return command


def noisy_classes(n, seed, dims=16):
    """Four classes, each with its own four dimensions, and a little noise everywhere."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 4
    z = torch.nn.functional.one_hot(y, 4).repeat_interleave(dims // 4, dim=1).float()
    return z * torch.rand(z.shape, generator=generator), y


@pytest.fixture
def files(tmp_path):
    """Train and test features of one model."""
    paths = []
    for seed, (split, n) in enumerate({"train": 80, "test": 40}.items()):
        z, y = noisy_classes(n, seed)
        about = {"split": split, "seed": 3, "output": "head", "classes": list("abcd")}
        paths.append(Features(z, y, about=about).save(tmp_path / f"{split}.safetensors"))
    return paths


def test_interpret_reads_prints_and_draws(files, run, tmp_path):
    (row,) = run("interpret", files[1], "--out", tmp_path / "out")
    assert row["sparsity"] == pytest.approx(0.75)
    assert row["class_consistency"] == 1
    assert (row["split"], row["seed"]) == ("test", 3)
    assert (tmp_path / "out/interpret.png").read_bytes().startswith(b"\x89PNG")
    (stored,) = json.loads((tmp_path / "out/interpret.json").read_text()).values()
    assert stored == row


def test_interpret_without_labels_is_refused_unless_asked_for(run, tmp_path):
    path = Features(torch.eye(4)).save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"needs one label per row.*--no-labels"):
        run("interpret", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (row,) = run("interpret", path, "--out", tmp_path / "out", "--no-labels")
    assert row["sparsity"] == 0.75
    assert "class_consistency" not in row


@pytest.mark.parametrize(
    ("content", "words"),
    [({"z": torch.eye(3)}, "has another format"), (None, "no features file")],
)
def test_a_file_of_another_version_is_refused(run, tmp_path, content, words):
    path = tmp_path / "other.safetensors"
    if content:
        save_file(content, path, {"format": "ncl_multi.features/0"})
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        run("interpret", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nan_is_refused_before_it_is_stored():
    with pytest.raises(ValueError, match="NaN or infinity"):
        Features(torch.tensor([[math.nan]]))


def test_disentangle_names_both_conventions(files, run):
    (row,) = run("disentangle", files[1], "--ks", 1, 4, "--batch", 8)
    for convention in ("renormalised", "fixed"):
        scores = [row[f"sepin@{k} {convention}"] for k in ("1", "4", "all")]
        assert scores == sorted(scores, reverse=True)
    assert "mig" not in row


def test_disentangle_uses_factors_where_labels_are_a_table(run, tmp_path):
    factors = torch.cartesian_prod(torch.arange(3), torch.arange(4)).repeat(20, 1)
    path = Features(factors.float() + 1, factors).save(tmp_path / "factors.safetensors")
    (row,) = run("disentangle", path)
    assert row["mig"] == pytest.approx(1)
    assert row["informativeness"] == 1


def test_probe_finds_the_classes_and_says_which_output(files, run, tmp_path):
    (row,) = run(
        "probe", *files, "--label-noise", 0.5, "--shifted", files[1], "--k", 3,
        "--out", tmp_path / "probe.json",
    )  # fmt: skip
    assert (row["knn"], row["linear"], row["linear on test"], row["output"]) == (1, 1, 1, "head")
    assert json.loads((tmp_path / "probe.json").read_text()) == row


def test_label_noise_changes_its_share_to_other_classes():
    y = torch.arange(4).repeat(25)
    noisy = wrong_labels(y, 0.3, seed=0)
    assert (noisy != y).sum() == 30
    assert set(noisy.tolist()) == {0, 1, 2, 3}


def test_probe_without_labels_is_refused(files, run, tmp_path):
    path = Features(torch.eye(16)).save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"one label per row; .*bare.safetensors has none"):
        run("probe", files[0], path)


def test_shorten_ranks_on_train_rows_and_writes_table_and_plot(files, run, tmp_path):
    (row,) = run("shorten", *files, "--keep", 8, 4, "--out", tmp_path / "out")
    assert row["rows"]["all"]["probe"] == 1
    assert len(row["rows"]) == 1 + 5 * 2
    assert (tmp_path / "out/shorten.png").stat().st_size > 1000
    table = (tmp_path / "out/shorten.md").read_text()
    assert "| 4, activation with ReLU |" in table


def test_shorten_keeps_the_most_active_dimensions():
    ranking = script("shorten")["ranking"]
    z = torch.tensor([[1.0, -9.0, 2.0, 0.1], [1.0, 4.0, 2.0, 0.1]])
    assert ranking(z, "activation with ReLU").tolist() == [1, 2, 0, 3]  # ties keep their order
    assert ranking(z, "activation without ReLU").tolist() == [2, 0, 3, 1]
    assert ranking(z, "variance")[0] == 1
    assert ranking(z, "truncation").tolist() == [0, 1, 2, 3]
    assert sorted(ranking(z, "random").tolist()) == [0, 1, 2, 3]


def test_shorten_refuses_more_than_there_is(files, run, tmp_path):
    with pytest.raises(ValueError, match=r"must lie in 1\.\.16"):
        run("shorten", *files, "--keep", 17, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_retrieve_by_label_by_row_and_by_judgement(files, run, tmp_path):
    (row,) = run("retrieve", files[1], "--active", 2)
    assert row["kept"]["all"]["precision@5"] == 1
    assert row["kept"]["2"]["active_dims"] == 2
    (row,) = run("retrieve", files[1], files[1])
    assert row["kept"]["all"]["hit@1"] == 1
    (row,) = run("retrieve", files[1], files[0], "--right", "label")
    assert row["kept"]["all"]["ndcg@10"] == pytest.approx(1)
    judged = tmp_path / "right.tsv"
    judged.write_text("0\t0\t2\n1\t5\t1\n")
    (row,) = run("retrieve", files[1], files[0], "--judgements", judged)
    assert row["kept"]["all"]["queries"] == 2
    judged.write_text("0\t99\t2\n")
    with pytest.raises(ValueError, match="names rows outside of"):
        run("retrieve", files[1], files[0], "--judgements", judged)


def test_retrieve_takes_a_gain_for_every_item_as_judgements(run, tmp_path):
    gains = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    queries = Features(torch.eye(3)[[1, 0]], y=gains).save(tmp_path / "queries.safetensors")
    items = Features(torch.eye(3)).save(tmp_path / "items.safetensors")
    (row,) = run("retrieve", queries, items, "--ks", 1)
    assert row["kept"]["all"]["ndcg@1"] == 0.5


def test_retrieve_by_label_without_labels_is_refused(run, tmp_path):
    path = Features(torch.eye(4)).save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="needs one label per row"):
        run("retrieve", path)


def test_sts_orders_pairs_as_their_angles_do(run, tmp_path):
    angle = torch.linspace(0, 1.5, 10)
    first = Features(torch.tensor([[1.0, 0.0]]).repeat(10, 1), 5 - angle)
    second = Features(torch.stack([angle.cos(), angle.sin()], dim=1))
    paths = [first.save(tmp_path / "a.safetensors"), second.save(tmp_path / "b.safetensors")]
    (row,) = run("sts", *paths, "--active", 1)
    assert row["kept"]["all"]["spearman"] == pytest.approx(1)
    assert row["kept"]["1"]["spearman"] < 1
    with pytest.raises(ValueError, match="human scores"):
        run("sts", *paths[::-1])
    short = Features(torch.eye(2)).save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="two sides of the same pairs"):
        run("sts", paths[0], short)


def test_changes_are_names_with_values_in_json(capsys, tmp_path):
    from choosing import Comparison

    assert Comparison(change=("dims=512", "start=random")).changes([{}]) == (
        {"dims": 512, "start": "random"},
    )
    assert Comparison().changes([{}, {"k": 1}]) == [{}, {"k": 1}]
    with pytest.raises(ValueError, match=r"a name and a value, as dims=512; got 'dims'"):
        Comparison(change=("dims",)).changes([])
    comparison = Comparison(seeds=(1, 2), out=tmp_path / "rows.json")
    rows = comparison.show(
        {"k": k} | comparison.means(lambda seed: {"x": seed / 3}) for k in (1, 2)
    )
    assert rows == [{"k": 1, "x": 0.5}, {"k": 2, "x": 0.5}]
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


# Claims


def interval(low, high):
    from ncl_multi.metrics import Interval

    return Interval((low + high) / 2, low, high)


def test_a_claim_is_decided_only_if_the_whole_interval_is_on_one_side():
    from paper.verdicts import verdict

    assert verdict(interval(0.01, 0.03), 0.0, lower=False, seeds=3) == "held"
    assert verdict(interval(-0.01, 0.03), 0.0, lower=False, seeds=3) == "not decided"
    assert verdict(interval(-0.005, 0.03), -0.01, lower=False, seeds=3) == "held"
    assert verdict(interval(-0.03, -0.01), 0.0, lower=False, seeds=3) == "NOT held"
    assert verdict(interval(-0.03, -0.01), 0.0, lower=True, seeds=3) == "held"
    assert verdict(interval(0.01, 0.03), 0.0, lower=False, seeds=2) == "not decided (2 seeds)"


def test_claims_are_judged_by_paired_differences_over_seeds_and_pictures():
    from paper.verdicts import judged

    draw = np.random.default_rng(0)
    easy = draw.random(400)
    probes = {"none": 0.62, "relu": 0.6, "softplus": 0.3, "sigmoid": 0.3, "exp": 0.2}
    probes |= {"leaky_relu": 0.55, "gelu": 0.4, "untrained": 0.1}
    hits = {
        (kind, seed): (easy < share + seed / 400).astype(float)
        for kind, share in probes.items()
        for seed in range(3)
    }
    figures = {f"contrastive {kind} {seed}": {"probe": hit} for (kind, seed), hit in hits.items()}
    figures |= {f"short {kind} {seed}": {"short_probe": hit} for (kind, seed), hit in hits.items()}
    table = judged(figures, range(3))
    assert table["Linear probe, encoder"]["verdict"] == "not decided"
    assert table["Linear probe, encoder; twin: untrained network"]["verdict"] == "held"
    assert table["ReLU best of the non-negative activations: probe"]["verdict"] == "held"
    assert table["Leaky ReLU and GELU worst: probe"]["verdict"] == "NOT held"
    assert "Sparsity, head" not in table
    two = {name: row for name, row in figures.items() if not name.endswith("2")}
    rows = judged(two, range(2)).values()
    assert {row["verdict"] for row in rows} == {"not decided (2 seeds)"}


def test_a_part_is_measured_once_and_those_of_other_settings_or_versions_are_refused(tmp_path):
    from paper.parts import Parts
    from paper.store import Config

    parts = Parts(Config(out=tmp_path, results=tmp_path))
    calls = []

    def part():
        calls.append(1)
        hits = {"probe": [True, False, True], "head_probe": [1, 1, 0], "best_probe": [0, 1, 1]}
        hits |= {"corrupted noise": [1, 1, 0], "corrupted blur": [0, 1, 0]}
        return {name: np.array(hit, bool) for name, hit in hits.items()} | {"sparsity": 0.9}

    name = "contrastive none 0"
    vars(parts)["all"] = {name: part}
    first, again = (parts.measure(name) for _ in range(2))
    for row in (first, again):
        assert row["probe"].tolist() == [1.0, 0.0, 1.0]
        assert row["best_change"].tolist() == [-1.0, 0.0, 1.0]
        assert row["corrupted"].tolist() == [0.5, 1.0, 0.0]
        assert row["sparsity"] == 0.9
    assert len(calls) == 1
    other = Parts(Config(preset="small", out=tmp_path, results=tmp_path))
    with pytest.raises(ValueError, match="measured with different preset"):
        other.measure(name)
    vars(parts)["settings"] = parts.settings | {"versions": {"ncl_multi": "0.0.1"}}
    with pytest.raises(ValueError, match=r"measured with different versions.*choose another --out"):
        parts.measure(name)


def test_a_stopped_table_resumes_here_and_on_another_machine(tmp_path, capsys, monkeypatch):
    claims = script("claims")
    calls = []

    def part(name, share, seed):
        calls.append(name)
        probe = np.ones(4, bool)
        return {"class_consistency": share + seed / 100, "sparsity": share, "probe": probe}

    some = {
        (name := f"contrastive {kind} {seed}"): partial(part, name, share, seed)
        for seed in range(3)
        for kind, share in {"none": 0.5, "relu": 0.8}.items()
    }
    monkeypatch.setattr(claims["Parts"], "all", some)
    monkeypatch.setattr(claims["Parts"], "pictures", None)
    where = {"out": tmp_path / "run", "results": tmp_path / "results", "jobs": 1}
    record = tmp_path / "results" / "quick.json"
    claims["main"](claims["Config"](minutes=0, **where))
    assert "6 of 6 parts are not measured yet; the same command resumes" in capsys.readouterr().out
    claims["main"](claims["Config"](only="contrastive none", **where))
    stored = json.loads(record.read_text())
    assert stored["missing"] == [f"contrastive relu {seed}" for seed in range(3)]
    assert "Class consistency, head" not in stored["rows"]
    # Another machine has the record only.
    elsewhere = where | {"out": tmp_path / "elsewhere"}
    claims["main"](claims["Config"](**elsewhere))
    assert sorted(calls) == sorted(some)
    whole = json.loads(record.read_text())
    assert (whole["missing"], set(whole["parts"])) == ([], set(some))
    row = whole["rows"]["Class consistency, head"]
    assert row["verdict"] == "held"
    assert row["95 % interval"] == "+30.0 [+30.0, +30.0]"
    assert set(whole["versions"]) == {"ncl_multi", "torch", "timm"}
    capsys.readouterr()
    claims["main"](claims["Config"](show=True, **where))
    assert "| Class consistency, head | 10.0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"small\.json does not exist: measure it"):
        claims["main"](claims["Config"](preset="small", show=True, **where))
    # A record of another version is not mixed in, and is replaced by a whole one only.
    record.write_text(json.dumps(whole | {"versions": {"ncl_multi": "0.0.1"}}))
    again = where | {"out": tmp_path / "again"}
    claims["main"](claims["Config"](only="contrastive none", **again))
    assert "has other settings or versions" in capsys.readouterr().out
    assert len(calls) == 9
    assert json.loads(record.read_text())["versions"] == {"ncl_multi": "0.0.1"}
    claims["main"](claims["Config"](**again))
    assert json.loads(record.read_text())["versions"] == whole["versions"]


def test_a_preset_without_its_data_says_how_to_get_it(tmp_path, monkeypatch):
    def nowhere(*_, **__):
        raise FileNotFoundError("cannot be fetched, or use the hub's copy: hf:uoft-cs/cifar10")

    monkeypatch.setattr("ncl_multi.data.images", nowhere)
    claims = script("claims")
    with pytest.raises(SystemExit, match=r"preset small needs cifar10.*hf:uoft-cs/cifar10.*--data"):
        claims["main"](claims["Config"](preset="small", out=tmp_path))


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_the_parts_of_the_claims_train_and_measure_what_the_rules_ask_for(tmp_path):
    pytest.importorskip("timm")
    from paper.parts import Parts
    from paper.store import Config, pack, unpack
    from paper.verdicts import CLAIMS, FOLLOW_UPS

    from ncl_multi.data import digits

    parts = Parts(Config(out=tmp_path, device="cpu", seeds=(0,)))
    parts.preset = replace(
        parts.preset,
        size=8,
        dims=16,
        hidden_dim=16,
        epochs=1,
        short_epochs=1,
        labelled_epochs=1,
        batch_size=64,
    )
    vars(parts)["pictures"] = digits("train").first(128), digits("test").first(64)
    row = unpack(pack(parts.contrastive("relu", 0) | parts.supervised("relu", 0)))
    others = {"posterior", "disentanglement", "sepin@100 fixed", "sepin@100 renormalised"}
    others |= {"stability", "gate_gain"}
    asked = {claim.measure for claim in CLAIMS + FOLLOW_UPS}
    assert asked - others <= row.keys()
    assert (tmp_path / "features" / "relu_0" / "test_head.safetensors").exists()
    assert len(parts.contrastive("untrained", 0)["probe"]) == 64
    short = parts.short("relu", 0)
    # As many epochs here, so the same model.
    assert short["short_correlation"] == pytest.approx(row["correlation"])
    changed = parts.short("relu+temperature=0.5", 0)
    assert changed["short_correlation"] != pytest.approx(row["correlation"])
    assert len(parts.short("gelu+hidden_dim=8", 0)["short_probe"]) == 64
    gated = parts.gated("relu", 0)
    assert 0 <= gated["gated_active"] <= 16
    assert gated["gate_gain"] == gated["gated_consistency"] - gated["cut_consistency"]
    for change in ("batch_norm", "bias", "scale"):
        assert len(parts.supervised(f"none+{change}", 0)["supervised"]) == 64


def test_a_gate_is_open_or_closed_and_learns_from_its_probability():
    pytest.importorskip("timm")
    from paper.gate import Gate, divergence

    torch.manual_seed(0)
    gate, z = Gate(6, 5), torch.rand(20, 6, requires_grad=True)
    gated, logits = gate(z)
    assert torch.equal(gated, z * (logits > 0))
    gated.sum().backward()
    assert torch.equal(z.grad, (logits > 0).float())
    assert all(weight.grad.abs().sum() > 0 for weight in gate.parameters())
    assert divergence(torch.tensor([[0.8]]).logit()).item() == pytest.approx(0, abs=1e-7)
    p = torch.tensor([[0.5, 0.9]], dtype=torch.float64)
    by_hand = sum(x * math.log(x / 0.8) + (1 - x) * math.log((1 - x) / 0.2) for x in (0.5, 0.9))
    assert divergence(p.logit()).item() == pytest.approx(by_hand, rel=1e-9)
    sure = torch.tensor([[200.0, -200.0]], requires_grad=True)
    divergence(sure).backward()
    assert sure.grad.isfinite().all()


def test_stability_over_seeds_pairs_each_seed_with_the_next(tmp_path):
    from paper.parts import Parts
    from paper.store import Config

    z = torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
    parts = Parts(Config(out=tmp_path, results=tmp_path))
    parts.compare_seeds()
    assert parts.measured == []
    for seed in range(3):
        for kind in ("none", "relu"):
            where = tmp_path / "features" / f"{kind}_{seed}" / "test_head.safetensors"
            Features(z[:, [seed, 3 - seed, (seed + 1) % 3]]).save(where)
    parts.compare_seeds()
    assert parts.measured == parts.compared
    assert len(parts.compared) == 6
    assert 0 < parts.read("stability relu 1")["stability"] < 1
    two = Parts(Config(out=tmp_path, results=tmp_path / "two", seeds=(0, 1)))
    two.compare_seeds()
    assert not (tmp_path / "two").exists()


def test_spectral_ncl_recovers_the_posterior_and_its_twin_does_not():
    from paper.parts import posterior

    ncl, twin = (posterior(kind, 0, steps=400) for kind in ("relu", "none"))
    assert ncl["posterior"] > 0.95 > twin["posterior"]


# A picture of dimensions


def test_dimensions_are_drawn_with_their_strongest_pictures_for_both_models(run, tmp_path):
    pytest.importorskip("PIL")
    from ncl_multi.data import digits
    from ncl_multi.data.pictures import thumbnails

    images = digits("test").first(60)
    shown = {"items": [images.classes[y] for y in images.y], "thumbnails": thumbnails(images)}
    codes = {"": torch.eye(10)[images.y], "twin": torch.randn(60, 12)}
    for folder, z in codes.items():
        Features(z, images.y, **shown).save(tmp_path / folder / "features/test_head.safetensors")
    (row,) = run("dimensions", tmp_path, "--out", tmp_path / "dimensions.png")
    shares = [words.split(" of ") for words in row["Non-negative"]]
    assert all(words[0] == words[1].split()[0] for words in shares)
    counts = [int(words.split(" of ")[0]) for words in row["Signed twin"]]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == 10
    assert (tmp_path / "dimensions.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "twin/features/test_head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="train both with recipes/vision_ncl"):
        run("dimensions", tmp_path)
    # Features of the claims have no pictures, but say which data they are of.
    for kind, z in zip(("relu", "none"), codes.values(), strict=True):
        features = Features(z, images.y, about={"data": "digits"})
        features.save(tmp_path / f"claims/features/{kind}_0/test_head.safetensors")
    (again,) = run("dimensions", tmp_path / "claims", "--out", tmp_path / "again.png")
    assert again["Non-negative"] == row["Non-negative"]


# Data that only evals use


def test_sprites_show_their_factors():
    pytest.importorskip("PIL")
    from ncl_multi.data.sprites import draw, sprites

    pictures, factors = sprites(50, seed=1, size=32)
    assert torch.equal(pictures.y, factors[:, 0])
    assert torch.equal(draw(factors, 32), pictures.images)
    small, large = draw(torch.tensor([[0, 0, 0, 16, 16], [0, 5, 0, 16, 16]]), 64).flatten(1)
    assert int(large.count_nonzero()) == pytest.approx(4 * int(small.count_nonzero()), rel=0.1)
    left = draw(torch.tensor([[2, 3, 7, 0, 16]]))[0, 0].float().mean(0)
    assert left.argmax() < 16
    with pytest.raises(ValueError, match="must lie below"):
        draw(torch.tensor([[3, 0, 0, 0, 0]]))


@pytest.mark.parametrize("kind", ["noise", "blur", "contrast", "jpeg"])
def test_a_corruption_grows_with_its_severity(kind):
    pytest.importorskip("PIL")
    from ncl_multi.data.corrupt import corrupt

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 16, 16), generator=generator, dtype=torch.uint8)
    harm = [(corrupt(images, kind, s).float() - images).abs().mean() for s in (1, 3, 5)]
    assert 0 < harm[0] < harm[1] < harm[2]
    assert corrupt(images[:, :1], kind).shape == (3, 1, 16, 16)
    with pytest.raises(ValueError, match="severity 1 to 5"):
        corrupt(images, kind, 6)

"""The evals of readable dimensions on small files whose answer is known, and what they refuse."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from ncl_multi.codes.features import Features

pytest.importorskip("tyro")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

EVALS = Path(__file__).parents[2] / "evals"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an eval as a person does; give its rows of JSON and all that it printed."""

    def command(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        runpy.run_path(str(EVALS / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        return [json.loads(x) for x in printed.splitlines() if x.startswith("{")], printed

    return command


def save(folder, *, seed=0, order=None, items=True, name="test"):
    """One dimension for each of four classes, and a signed twin of random codes."""
    z = torch.eye(4).repeat(15, 1)
    generator = torch.Generator().manual_seed(seed)
    names = [f"item {row}" for row in range(60)] if items else None
    y, about = torch.arange(4).repeat(15), {"seed": seed, "output": "head", "classes": list("abcd")}
    codes = z if order is None else z[:, order]
    path = Features(codes, y, names, about).save(folder / "features" / f"{name}.safetensors")
    twin = torch.randn(60, 4, generator=generator)
    Features(twin, y, names, about).save(folder / "twin" / "features" / f"{name}.safetensors")
    return path


def test_readable_prints_a_run_and_its_twin(run, tmp_path):
    path = save(tmp_path)
    (ours, twin), _ = run("readable", path, "--judge", path, "--out", tmp_path / "out.json")
    assert ours["purity_at_10"] == ours["cluster_purity"] == ours["distinct"] == 1
    assert ours["intruder_labels"] == ours["intruder_embeddings"] == 1
    assert ours["active"] == 0.25
    assert (ours["seed"], ours["rows"], ours["left_out"]) == (0, 60, {})
    assert (ours["named"], ours["names_once"], ours["name_fit"]) == (1, 1, 1)
    assert twin["purity_at_10"] < 0.7
    stored = json.loads((tmp_path / "out.json").read_text())
    assert list(stored.values()) == [ours, twin]
    assert len(run("readable", path, "--no-twin")[0]) == 1


def test_readable_says_what_it_leaves_out(run, tmp_path):
    path = Features(torch.eye(3).repeat(5, 1)).save(tmp_path / "bare.safetensors")
    (row,), printed = run("readable", path)
    assert row["distinct"] == 1
    assert "purity_at_10" not in row
    assert "no purity_at_10: the rows have no labels" in printed
    assert "no name_fit: no dimension has a name: items without words" in printed
    scores = Features(torch.eye(3).repeat(5, 1), y=torch.rand(15)).save(tmp_path / "s.safetensors")
    assert "the rows have no labels" in run("readable", scores)[1]


def test_readable_judges_by_rows_with_a_label_only(run, tmp_path):
    y = torch.arange(4).repeat(15)
    y[4:20] = -1
    z = torch.eye(4).repeat(15, 1)
    z[4:20] = 1
    path = Features(z, y).save(tmp_path / "graph.safetensors")
    (row,), _ = run("readable", path, "--judge", path)
    assert (row["rows"], row["purity_at_10"], row["intruder_embeddings"]) == (60, 1, 1)


def test_readable_refuses_a_judge_of_other_items(run, tmp_path):
    judge = Features(torch.eye(3)).save(tmp_path / "judge.safetensors")
    with pytest.raises(ValueError, match="the same items: expected 60, got 3"):
        run("readable", save(tmp_path), "--judge", judge)


def test_stability_matches_two_runs_and_their_twins(run, tmp_path):
    save(tmp_path / "a")
    save(tmp_path / "b", seed=1, order=[2, 0, 3, 1])
    (row,), _ = run("stability", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out.json")
    assert row["files"]["test"]["stability"] == pytest.approx(1)
    assert row["files"]["test"]["above_.8"] == 1
    assert row["files"]["test"]["seeds"] == [0, 1]
    assert 0 < row["files"]["twin: test"]["stability"] < 0.5
    assert json.loads((tmp_path / "out.json").read_text()) == row
    for name in "ab":
        (tmp_path / name / "twin").rename(tmp_path / name / "plain")
    (moved,), _ = run("stability", tmp_path / "a", tmp_path / "b")
    assert moved["files"]["plain: test"] == row["files"]["twin: test"]
    files = [tmp_path / run / "features" / "test.safetensors" for run in "ab"]
    (row,), _ = run("stability", *files)
    assert row["files"]["test"]["stability"] == pytest.approx(1)


def test_stability_reads_seeds_from_configs_where_features_do_not_say_them(run, tmp_path):
    for seed, name in enumerate("ab"):
        Features(torch.eye(4).repeat(15, 1)).save(tmp_path / name / "features/test.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"seed": seed}))
    (row,), _ = run("stability", tmp_path / "a", tmp_path / "b")
    assert row["files"]["test"]["seeds"] == [0, 1]
    for name in "ab":
        (tmp_path / name / "config.json").unlink()
    (row,), _ = run("stability", tmp_path / "a", tmp_path / "b")
    assert row["files"]["test"]["seeds"] == [None, None]


def test_stability_refuses_runs_that_cannot_be_compared(run, tmp_path):
    save(tmp_path / "a")
    save(tmp_path / "b", name="other")
    with pytest.raises(FileNotFoundError, match="no features of a head that both"):
        run("stability", tmp_path / "a", tmp_path / "b")
    z = torch.eye(4).repeat(15, 1)
    other = Features(z, items=["x"] * 60).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="different items"):
        run("stability", tmp_path / "a" / "features" / "test.safetensors", other)


def test_overlap_tells_dimensions_of_one_kind_from_those_of_several(run, tmp_path):
    row = torch.arange(80)
    shape, place = row // 40, row // 20 % 2
    # Each twenty has its strongest row first, but for the third dimension; the last fills rows up
    # to unit length.
    first, last = 0.5 - row % 20 * 0.01, 0.3 + row % 20 * 0.01
    z = torch.stack([(shape == 0) * first, (shape == 1) * (place == 0) * first, last], dim=1)
    z = torch.cat([z, (1 - z.square().sum(dim=1, keepdim=True)).sqrt()], dim=1)
    factors = torch.stack([shape, place, row // 2], dim=1)
    about = {"factors": ["shape", "place", "angle"]}
    path = Features(z, factors, about=about).save(tmp_path / "sprites.safetensors")
    (row,), printed = run("overlap", path, "--out", tmp_path / "rows.json")
    assert [row[f"{kind}, shown by"] for kind in about["factors"]] == [0.75, 0.5, 0.5]
    assert (row["one kind"], row["several kinds"], row["no kind"]) == (0.25, 0.5, 0.25)
    assert "several kinds" in printed
    assert list(json.loads((tmp_path / "rows.json").read_text()).values()) == [row]


def test_overlap_reads_groups_of_classes_and_refuses_unknown_ones(run, tmp_path):
    from ncl_multi.data.cifar import CLASSES

    y = torch.arange(10).repeat_interleave(20)
    animal = torch.isin(y, torch.tensor([2, 3, 4, 5, 6, 7]))
    spread = animal * (torch.arange(200) % 20) * 0.05
    z = torch.stack([y == 0, animal, spread], dim=1).float()
    path = Features(z, y, about={"classes": CLASSES}).save(tmp_path / "c.safetensors")
    (row,), _ = run("overlap", path)
    assert (row["class, shown by"], row["group, shown by"]) == (pytest.approx(1 / 3), 1.0)
    other = Features(z, y % 3, about={"classes": list("abc")}).save(tmp_path / "o.safetensors")
    with pytest.raises(ValueError, match="not known: give a JSON file"):
        run("overlap", other)
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"first": ["a"], "rest": ["b"]}))
    with pytest.raises(ValueError, match="every class needs a group; without one: c"):
        run("overlap", other, "--coarse", groups)
    groups.write_text(json.dumps({"first": ["a"], "rest": ["b", "c"]}))
    assert "group, purity@10" in run("overlap", other, "--coarse", groups)[0][0]


def test_the_groups_of_cifar_have_each_class_once():
    coarse = runpy.run_path(str(EVALS / "overlap.py"))["COARSE"]
    for name, count in (("cifar10", 10), ("cifar100", 100)):
        classes = [c for members in coarse[name].values() for c in members]
        assert len(classes) == len(set(classes)) == count
    assert {len(members) for members in coarse["cifar100"].values()} == {5}

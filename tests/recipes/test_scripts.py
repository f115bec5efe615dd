"""Every script explains itself, and every one-line example runs."""

import ast
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_LINE = sorted((ROOT / "recipes/one_line").glob("*.py"))
FILES = sorted([*(ROOT / "recipes").glob("*.py"), *(ROOT / "evals").glob("*.py")])
SCRIPTS = [path for path in FILES if "__main__" in path.read_text()]


def options(shown):
    """Every option of a help page, and what is said about it besides its values and its default."""
    page = re.sub(r"[│╭╮╰╯─|+]|-{3,}", " ", shown)
    for entry in re.split(r"\n +(?=--[a-z]|-h,)", page)[1:]:
        name = re.search(r"--[a-z][\w-]*", entry)[0]
        words = re.sub(r"(?s)\((default|required|repeatable|fixed|sets).*", "", entry)
        words = re.sub(r"--[\w-]+|\{[^}]*\}|\b[A-Z]{3,}\b|[][,.]", " ", words)
        yield name, " ".join(words.split())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_explains_every_option(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "usage:" in shown
    explained = {name: words for name, words in options(shown) if name != "--help"}
    assert explained
    for name, words in explained.items():
        assert len(words.split()) >= 2, f"{name} is not explained: {words!r}"
    docstring = runpy.run_path(str(script), run_name="script")["__doc__"]
    assert f"python {script.relative_to(ROOT)}" in docstring


@pytest.mark.parametrize("script", ONE_LINE, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_one_line_example_runs(script, capsys):
    needs = {
        "lightning_module": "lightning",
        "open_clip_loss": "open_clip",
        "pyg_grace": "torch_geometric",
        "qdrant_collection": "qdrant_client",
    }
    pytest.importorskip(needs.get(script.stem, "sklearn"))
    source = script.read_text()
    assert source.count("# <- the line") == 1
    runpy.run_path(str(script), run_name="__main__")
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("module", ["ncl_multi.app", "ncl_multi.atlas"])
def test_commands_of_the_package_explain_their_options(module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module, "--help"])
    # Another test of this process may have imported it.
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    explained = {name: words for name, words in options(shown) if name != "--help"}
    assert all(len(words.split()) >= 2 for words in explained.values()), explained
    if module == "ncl_multi.app":
        assert {"--port", "--host"} <= explained.keys()
        assert "127.0.0.1" in shown


@pytest.mark.parametrize("recipe", ["vision_ncl"])
def test_a_preset_is_chosen_by_its_option_only(recipe, monkeypatch):
    from ncl_multi.training.config import command_line

    presets = runpy.run_path(str(ROOT / f"recipes/{recipe}.py"), run_name="script")["PRESETS"]
    for gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr("torch.accelerator.is_available", lambda gpu=gpu: gpu)
        for name, preset in presets.items():
            monkeypatch.setattr("sys.argv", [recipe, "--preset", name])
            assert command_line(presets) == preset
            monkeypatch.setattr("sys.argv", [recipe, f"--preset={name}", "--seed", "7"])
            assert command_line(presets) == replace(preset, seed=7)
        monkeypatch.setattr("sys.argv", [recipe])
        assert command_line(presets) == next(iter(presets.values()))


def test_competitors_are_trained_only_if_asked_for():
    for path in (ROOT / "recipes").glob("*.py"):
        config = runpy.run_path(str(path), run_name="script")["Config"]
        assert not getattr(config, "compare", False), path


def test_an_option_without_words_is_seen():
    page = "usage: x\n\n│ -h, --help   show this help │\n│ --k {None}|INT  Keep k. (default: 3) │\n"
    assert dict(options(page + "│ --dims INT   (default: 4) │"))["--dims"] == ""
    assert dict(options(page))["--k"] == "Keep k"


def test_evals_cite_files_that_recipes_write():
    name = re.compile(r"[a-z]+(_(image|text))?_(head|encoder)\.safetensors")
    for path in (ROOT / "evals").rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for cited in re.findall(r"runs/\S+/features/(\S+)", docstring):
            assert name.fullmatch(cited), f"{path.name} cites {cited}"


def test_speed_says_what_to_install_to_compare_with():
    need = runpy.run_path(str(ROOT / "evals/speed/measure.py"), run_name="script")["need"]
    need("torch")
    with pytest.raises(SystemExit, match=r"needs no_such_rival: pip install -e '\.\[bench\]'"):
        need("torch", "no_such_rival")


def readme_check():
    return runpy.run_path(str(ROOT / ".ci/readme.py"), run_name="script")


def test_a_table_must_be_what_its_command_printed():
    difference = readme_check()["difference"]
    documented = ["| | R@10 |", "|---|---|", "| NCL | 58.6 (.1) |", "| twin | 56.9 (.2) |"]
    printed = ["words before", *documented[:2], "| NCL | 58.9 (.1) |", "| twin | 56.9 (.2) |"]
    assert difference(documented, printed) is None
    assert "no table" in difference(documented, ["nothing"])
    assert "57.5" in difference(documented, [*documented[:3], "| twin | 57.5 (.2) |"])
    assert "ncl" in difference(documented, [*documented[:2], "| ncl | 58.6 (.1) |", documented[3]])
    assert "nothing" in difference(documented, documented[:3])


def test_figures_without_a_spread_may_differ_by_two_per_cent_and_words_not_at_all():
    same_cell = readme_check()["same_cell"]
    assert same_cell("1,065", "1,080")
    assert not same_cell("1,065", "1,100")
    assert same_cell("39.0 ± 0.6 %", "40.1 ± 0.2 %")
    assert not same_cell("39.0 ± 0.6 %", "40.4 ± 0.2 %")
    assert same_cell("39.0 ± 0.1 %", "40.1 ± 0.6 %")
    assert not same_cell("held", "not held")


def test_a_block_of_the_readme_has_the_table_after_it():
    blocks = readme_check()["blocks"]
    page = "```bash\na\n```\n\n| x |\n|---|\n\n```bash\nb \\\n c\n```\nwords\n"
    assert blocks(page) == [("a\n", ["| x |", "|---|"]), ("b \\\n c\n", [])]
    assert len(blocks((ROOT / "README.md").read_text())) >= 1


def test_runs_are_shown_as_mean_and_spread(tmp_path, capsys):
    table = runpy.run_path(str(ROOT / "evals/table.py"), run_name="script")
    for seed, value in enumerate((0.25, 0.75)):
        figures = {"NCL": {"probe": value, "curve": [{"k": 2, "hits": 10.0 * value}], "name": "x"}}
        (tmp_path / f"{seed}.json").write_text(json.dumps(figures))
    files = tuple(sorted(tmp_path.glob("*.json")))
    table["main"](table["Config"](files))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "| mean of 2 (spread) | probe | hits |",
        "|---|---|---|",
        "| NCL | 0.500 (0.250) |  |",
        "| NCL, curve, k 2 |  | 5.00 (2.50) |",
    ]
    with pytest.raises(SystemExit, match="no row 'twin'"):
        table["main"](table["Config"](files, rows=("twin",)))
    (tmp_path / "1.json").write_text(json.dumps({"twin": {"probe": 0.5}}))
    with pytest.raises(SystemExit, match=r"no row 'NCL' in .*1\.json"):
        table["main"](table["Config"](files, rows=("NCL",)))
    with pytest.raises(SystemExit, match="no measure 'hit'"):
        table["main"](table["Config"](files, measures=("hit",)))
    (tmp_path / "0.json").write_text("[1")
    with pytest.raises(SystemExit, match="does not contain figures"):
        table["main"](table["Config"](files))

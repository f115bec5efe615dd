"""Every script explains itself, and every one-line example runs."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ONE_LINE = sorted((ROOT / "recipes/one_line").glob("*.py"))
SCRIPTS = sorted([*(ROOT / "recipes").glob("*.py"), *(ROOT / "evals").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_explains_every_option(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "usage:" in shown
    docstring = runpy.run_path(str(script), run_name="script")["__doc__"]
    assert f"python {script.relative_to(ROOT)}" in docstring


@pytest.mark.parametrize("script", ONE_LINE, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_one_line_example_runs(script, capsys):
    needs = {
        "lightning_module": "lightning",
        "open_clip_loss": "open_clip",
        "pyg_grace": "torch_geometric",
    }
    pytest.importorskip(needs.get(script.stem, "sklearn"))
    source = script.read_text()
    assert source.count("# <- the line") == 1
    runpy.run_path(str(script), run_name="__main__")
    assert "nan" not in capsys.readouterr().out

"""What the first person with a GPU runs, rehearsed."""

import json
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu():
    return runpy.run_path(str(ROOT / "evals/gpu.py"), run_name="script")


def test_the_losses_of_a_device_are_compared_with_float64(gpu, tmp_path, capsys):
    cfg = gpu["Config"](rows=64, dims=8, recipes=(), out=tmp_path / "gpu.json")
    assert gpu["main"](cfg)
    written = json.loads(cfg.out.read_text())
    assert written["rehearsal"] == (not torch.accelerator.is_available())
    assert ("No GPU was found" in capsys.readouterr().out) == written["rehearsal"]
    assert all(row["passed"] for row in written["exact"].values())
    assert all(row["ms"] > 0 for row in written["speed"].values())


def test_a_recipe_that_fails_is_a_row_with_its_error(gpu):
    row = gpu["run_recipe"]("no_such_recipe", "fp32", gpu["Config"](steps=1))
    assert not row["passed"]
    assert "no_such_recipe" in row["error"]


def test_unknown_variants_are_refused(gpu):
    with pytest.raises(SystemExit, match="fp32, bf16, compiled; got fp8"):
        gpu["main"](gpu["Config"](variants=("fp8",)))

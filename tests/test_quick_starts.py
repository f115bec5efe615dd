"""What the README shows runs as it stands, for someone who has nothing but the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_recipes import ROOT, WORDS, lay_out

pytest.importorskip("torch_geometric")
pytest.importorskip("timm")
pytest.importorskip("sentence_transformers")

SNIPPETS = sorted((ROOT / "tests/quick_starts").glob("*.py"))
RUNNER = """
import sys
assert not any("recipes" in path for path in sys.path), sys.path
space = {"__name__": "__main__"}
for number, code in enumerate(sys.stdin.read().split("# next block\\n")):
    exec(compile(code, f"block {number}", "exec"), space)
"""
MOST_LINES = 12


def python_blocks(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Reviews, pictures and edges as a user has them, and tiny encoders in place of the hub's."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("user")
    lay_out(folder)
    draw = torch.Generator().manual_seed(0)
    picked = torch.randint(len(WORDS), (40, 4), generator=draw)
    phrases = list(dict.fromkeys("_".join(WORDS[i] for i in row) for row in picked.tolist()))
    # The first two are alike, so that there is something to explain.
    reviews = [f"{phrases[0]}_the", *phrases]
    (folder / "reviews.txt").write_text("\n".join(p.replace("_", " ") for p in reviews))
    (folder / "pictures").mkdir()
    for phrase in phrases:
        colours = torch.randint(256, (16, 16, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(colours.numpy()).save(folder / "pictures" / f"{phrase}.png")
    np.save(folder / "embeddings.npy", torch.randn(200, 16, generator=draw).numpy())
    edges = [[node, other] for node in (0, 1) for other in range(2, 12)]
    edges += torch.randint(2, 30, (100, 2), generator=draw).tolist()
    lines = [f"{source},{target}" for source, target in edges if source != target]
    (folder / "edges.csv").write_text("\n".join(["source,target", *lines]))
    return folder


def run(blocks: list[str], folder: Path) -> str:
    """Run blocks one after another in a process that knows the package only; what they print."""
    tiny = {
        "sentence-transformers/all-MiniLM-L6-v2": str(folder / "bert"),
        "efficientnet-lite0+minilm": f"hf:{folder / 'clip'}",
        "resnet18": "resnet-small",
    }
    code = "# next block\n".join(blocks)
    for name, replacement in tiny.items():
        code = code.replace(name, replacement)
    settings = {"PYTHONPATH": str(ROOT), "NCL_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=code, cwd=folder, env=os.environ | settings,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_quick_start_of_each_kind_trains_saves_loads_encodes_and_explains(here):
    assert [path.stem for path in SNIPPETS] == ["clip", "graph", "sentence", "vision"]
    sources = [path.read_text() for path in SNIPPETS]
    for source in sources:
        assert len([line for line in source.splitlines() if line.strip()]) <= MOST_LINES
        for verb in (".fit(", "ncl.load(", ".encode(", "ncl.explain("):
            assert verb in source
    said = run(sources, here).splitlines()
    assert len(said) == len(SNIPPETS)
    assert all(line.startswith("[") for line in said)
    assert sum("Part(dimension=" in line for line in said) >= 3, said
    for name in ("reviews", "pictures", "vision", "graph"):
        card = (here / "runs" / name / "model" / "README.md").read_text()
        assert f'ncl.load("runs/{name}/model")' in card
        assert "More Information Needed" not in card
        assert "| seed | 0 |" in card


def test_the_python_of_the_readme_runs_in_order(here):
    run(python_blocks((ROOT / "README.md").read_text()), here)


def test_a_model_that_the_readme_trains_and_loads_is_one_of_the_quick_starts():
    known = {path.read_text() for path in SNIPPETS}
    for block in python_blocks((ROOT / "README.md").read_text()):
        assert block in known or not (".fit(" in block and "ncl.load(" in block)

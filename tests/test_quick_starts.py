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

RUNNER = """
import sys
assert not any("recipes" in path for path in sys.path), sys.path
blocks = sys.stdin.read().split("# next block\\n")
imports = blocks[0].partition("\\n\\n")[0] + "\\n"
for number, code in enumerate(blocks):
    exec(compile(imports + code, f"block {number}", "exec"), {"__name__": "__main__"})
"""
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
"""The Python of the README: embeddings, with the imports; sentences; CLIP; images; graphs."""
MOST_LINES = 12


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
    """What blocks print in a process that knows the package only.

    Each starts with nothing but the imports of the first, so any one can be pasted by itself.
    """
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


def test_the_quick_starts_of_the_readme_train_save_load_encode_and_explain(here):
    embeddings, *models = BLOCKS
    assert len(models) == 4
    assert all(verb in embeddings for verb in ("import ncl_multi", ".fit(", ".transform("))
    for block in models:
        assert len(block.splitlines()) <= MOST_LINES
        assert all(verb in block for verb in (".fit(", "ncl.load(", ".encode(", "ncl.explain("))
    printed = run(BLOCKS, here).splitlines()
    assert len(printed) == len(models)
    assert all(line.startswith("[") for line in printed)
    assert sum("Part(dimension=" in line for line in printed) >= 3, printed
    for name in ("reviews", "pictures", "vision", "graph"):
        card = (here / "runs" / name / "model" / "README.md").read_text()
        assert f'ncl.load("runs/{name}/model")' in card
        assert "More Information Needed" not in card
        assert "| seed | 0 |" in card

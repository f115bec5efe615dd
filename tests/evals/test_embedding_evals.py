"""The recipe and the evals of embeddings, on a few rows."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import ncl_multi as ncl
from ncl_multi.app import Desk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(120) % 5
    x = rng.standard_normal((5, 12))[y] + 0.4 * rng.standard_normal((120, 12))
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    words = ["apple", "bridge", "candle", "dragon", "engine"]
    (tmp_path / "items.txt").write_text("".join(f"the {words[kind]}\n" for kind in y))
    (tmp_path / "labels.txt").write_text("".join(f"{kind}\n" for kind in y))
    return tmp_path


def script(path):
    return runpy.run_path(str(ROOT / path), run_name="script")


def test_the_recipe_writes_a_run_about_the_given_rows(here, capsys):
    recipe = script("recipes/embeddings_ncl.py")
    cfg = recipe["Config"](
        x=(here / "x.npy",), out=here / "run", items=here / "items.txt",
        labels=here / "labels.txt", k=4, steps=5,
    )  # fmt: skip
    recipe["main"](cfg)
    assert "dims lowered from 2048 to 30: there are 120 embeddings" in capsys.readouterr().err
    figures = json.loads((here / "run/metrics.json").read_text())["ncl"]["train"]
    assert figures["rows"] == 120
    assert 0 < figures["purity_at_10"] <= 1
    assert (here / "run/atlas.html").exists()
    coder = ncl.load(here / "run")
    assert coder.transform(np.load(here / "x.npy")).shape == (120, 30)
    assert "apple" in " ".join(coder.get_feature_names_out())
    desk = Desk(here / "run")
    assert [item.text for item in desk.items] == (here / "items.txt").read_text().splitlines()
    assert desk.find(desk.code(item=3))[0].score == pytest.approx(1)
    with pytest.raises(ValueError, match="no model that can encode; give the number of an item"):
        desk.code("apple")
    (here / "short.txt").write_text("one line\n")
    with pytest.raises(ValueError, match="one line per row of the embeddings, 120; got 1"):
        recipe["main"](recipe["Config"](x=(here / "x.npy",), items=here / "short.txt"))


@pytest.mark.filterwarnings("ignore")
def test_every_competitor_gives_codes_of_at_most_k_entries(here):
    import torch

    baselines = script("evals/baselines.py")
    x = torch.from_numpy(np.load(here / "x.npy"))
    budget = baselines["Budget"](dims=24, steps=2, batch_size=32)
    for name, method in baselines["METHODS"].items():
        if name == "csr":
            pytest.importorskip("sentence_transformers")
        z = method(x, 3, budget)(x[:7])
        assert z.shape[0] == 7
        assert (z != 0).sum(dim=1).max() <= 3, name
        assert torch.isfinite(z).all()


def test_methods_are_compared_at_equal_entries(here):
    evals = script("evals/embeddings.py")
    cfg = evals["Config"](
        here / "x.npy", labels=here / "labels.txt", k=(2, 4), dims=24, steps=3,
        methods=("ncl", "pca", "k_means_soft"),
    )  # fmt: skip
    rows = {(row["method"], row["k"]): row for row in evals["compare"](cfg)}
    assert rows["whole", 12]["ndcg_at_10"] == pytest.approx(1)
    assert {method for method, _ in rows} == {
        "whole", "ncl", "ncl_query_4k", "ncl_query_free", "pca", "k_means_soft",
    }  # fmt: skip
    assert rows["ncl", 4]["active"] <= 4
    assert rows["ncl", 4]["bytes"] == 24
    assert 0 <= rows["ncl", 4]["purity_at_10"] <= 1
    assert "purity_at_10" not in rows["pca", 4]


def test_settings_are_chosen_by_texts_that_find_their_rest(here):
    from scipy.sparse import csr_array

    evals = script("evals/choose_coder.py")
    x = np.load(here / "x.npy")
    row = evals["compare"]({"dims": 24, "steps": 3}, x, x, np.arange(120) % 5, (2, 4), 0)
    measures = {f"{name}_{k}" for name in ("item", "topic", "kept") for k in (2, 4)}
    pure = {"purity_2", "purity_4"}
    assert set(row) == measures | {f"{name}_whole_query" for name in measures} | pure
    assert all(0 < value < 1.5 for value in row.values())
    without = evals["compare"]({"dims": 24, "steps": 3}, x, x, None, (2, 4), 0)
    topics = {name for name in row if name.startswith("topic")}
    assert set(row) - set(without) == topics | pure
    near = np.array([[0, 1]])
    codes = csr_array(np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]))
    assert evals["kept_neighbours"](near, codes[[0]], codes) == 0.5


def test_docstrings_are_texts_to_choose_by():
    texts = script("evals/choose_coder.py")["docstrings"]()
    assert len(texts) > 500
    assert len({text.kind for text in texts}) > 10
    assert all(len(text.query.split()) >= 4 for text in texts)
    assert all(20 <= len(text.document.split()) <= 100 for text in texts)


def test_held_out_photographs_take_their_captions_with_them():
    evals = script("evals/two_sides.py")
    links = np.array([[0, 2], [0, 0], [1, 1], [2, 3], [2, 1]])
    whole = evals["Sides"](np.arange(3)[:, None], 10 * np.arange(4)[:, None], links)
    train, held = evals["_hold_out"](whole, 1)
    assert train.images[train.links[:, 0], 0].tolist() == [0, 0, 1]
    assert train.texts[train.links[:, 1], 0].tolist() == [20, 0, 10]
    assert held.images[held.links[:, 0], 0].tolist() == [2, 2]
    assert held.texts[held.links[:, 1], 0].tolist() == [30, 10]
    assert evals["_relevant"](held).toarray().tolist() == [[1, 1]]

"""A user's own data, as it comes: the run is about all of it and nothing else."""

import json
import random
import runpy
from pathlib import Path

import pytest
from PIL import Image
from small_recipes import ROOT, WORDS, lay_out

import ncl_multi as ncl
from ncl_multi.app import Desk

pytest.importorskip("torch_geometric")
pytest.importorskip("open_clip")
pytest.importorskip("sentence_transformers")

IN_STSB = ["A plane is taking off.", "An air plane is taking off."]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Small data of each kind and tiny encoders."""
    folder = tmp_path_factory.mktemp("own")
    lay_out(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NCL_CACHE", str(tmp_path / "cache"))


def run(name: str, **options) -> Path:
    recipe = runpy.run_path(str(ROOT / f"recipes/{name}.py"), run_name="recipe")
    recipe["main"](recipe["Config"](device="cpu", steps=2, batch_size=32, **options))
    return options["out"]


def reviews(path: Path, count: int = 64, seed: int = 0) -> list[str]:
    """A table whose first three columns are not text; two of its texts are in STS-B, too."""
    draw = random.Random(seed)
    texts = [*IN_STSB, *(" ".join([*draw.sample(WORDS, 5), str(n)]) for n in range(count - 2))]
    rows = [f"{n},{draw.choice(('mug', 'lamp'))},{n % 5 + 1},{t}" for n, t in enumerate(texts)]
    path.write_text("\n".join(["review_id,product,rating,review", *rows]) + "\n")
    return texts


def test_a_run_on_reviews_is_about_the_reviews_and_all_of_them(here, tmp_path, capsys):
    texts = reviews(tmp_path / "reviews.csv")
    options = {"data": str(tmp_path / "reviews.csv"), "model": str(here / "bert"), "dims": 32}
    out = run("sentence_ncl", out=tmp_path / "run", k=(4, 8), twin=True, **options)
    told = capsys.readouterr().err
    assert "64 rows, column review" in told
    assert f"example, line 2: '{IN_STSB[0]}'" in told
    assert "not used: review_id, product, rating" in told
    assert set(ncl.Features.load(out / "features" / "train_head.safetensors").items) == set(texts)
    assert "stsb" not in (out / "metrics.json").read_text()
    assert {item.text for item in Desk(out).items} == set(texts)
    assert (out / "atlas.html").exists()
    reviews(tmp_path / "reviews.csv", seed=1)
    with pytest.raises(ValueError, match=r"a run on other data.*--out.*--no-resume"):
        run("sentence_ncl", out=tmp_path / "run", k=(4, 8), twin=True, **options)


def test_columns_are_chosen_by_name(here, tmp_path):
    path = tmp_path / "two.csv"
    texts = reviews(path)
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([lines[0] + ",reply", *(f"{line},thanks a lot" for line in lines[1:])])
    )
    options = {"data": str(path), "model": str(here / "bert"), "dims": 32, "k": (4,)}
    out = run("sentence_ncl", out=tmp_path / "run", columns=("review",), **options)
    assert set(ncl.Features.load(out / "features" / "train_head.safetensors").items) == set(texts)
    with pytest.raises(ValueError, match=r"(?s)'revue' of .* does not exist. Columns:.*review: 'A"):
        run("sentence_ncl", out=tmp_path / "other", columns=("revue",), **options)


def captioned(folder: Path, colour: int = 0) -> Path:
    """Forty pictures with captions; two of them cannot be read."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    lines = ["image,caption"]
    for n in range(40):
        Image.new("RGB", (16, 16), (6 * n, colour, 90)).save(folder / f"{n}.png")
        lines.append(f"{n}.png,{' '.join(draw.sample(WORDS, 5))}")
    (folder / "3.png").write_bytes(b"not a picture")
    (folder / "19.png").write_bytes((folder / "19.png").read_bytes()[:50])
    (folder / "captions.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_on_captioned_pictures_shows_all_of_them_and_says_which_it_learnt_from(
    here, tmp_path, capsys
):
    data = captioned(tmp_path / "pictures")
    options = {"data": str(data), "model": f"hf:{here / 'clip'}", "k": 8}
    out = run("clip_ncl", out=tmp_path / "run", **options)
    told = capsys.readouterr().err
    assert "left out 1 of 36 pictures" in told
    assert "left out 1 of 4 pictures" in told
    assert "k lowered from 8 to 4" in told
    assert "dims lowered from 200 to 10: there are 36 images with captions" in told
    assert "19.png" in told
    shown = ncl.Features.load(out / "features" / "all_image_head.safetensors")
    assert shown.split_of() == ["train"] * 35 + ["test"] * 3
    lines = (data / "captions.csv").read_text().splitlines()[1:]
    captions = [line.partition(",")[2] for line in lines]
    whole = [n for n in range(40) if n not in (3, 19)]
    assert set(shown.items) == {captions[n] for n in whole}
    assert shown.items[-3:] == [captions[n] for n in (9, 29, 39)]
    desk = Desk(out)
    assert [item.text for item in desk.items if item.side == "image"] == list(shown.items)
    assert {item.split for item in desk.items} == {"train", "test"}
    dimensions = json.loads((out / "dimensions.json").read_text())
    assert desk.names == [dimension["name"] for dimension in dimensions]
    page = desk.page(desk.find(desk.code(item=0), k=60))
    assert ", train)" in page
    assert ", test)" in page


def test_pictures_replaced_under_the_same_names_give_other_features(here, tmp_path):
    from ncl_multi.adapters.clip.data import read_pairs

    data = captioned(tmp_path / "pictures")
    model, config = ncl.NonNegClip(f"hf:{here / 'clip'}", 16), ncl.NonNegClip.config_type()
    before = model.tower_features(read_pairs(str(data))["train"], config)
    captioned(data, colour=200)
    after = model.tower_features(read_pairs(str(data))["train"], config)
    assert (before.image != after.image).any(dim=2).all()
    assert (before.text == after.text).all()


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_a_run_on_a_folder_of_classes_shows_all_pictures(tmp_path, capsys):
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for n in range(20):
            path = tmp_path / "pictures" / name / f"{n:02}.png"
            Image.new("RGB", (8, 8), (shade, 6 * n, 0)).save(path)
    (tmp_path / "pictures" / "dog" / "05.png").write_bytes(b"not a picture")
    options = {"data": str(tmp_path / "pictures"), "model": "test_resnet", "size": 16, "dims": 16}
    out = run("vision_ncl", out=tmp_path / "run", hidden_dim=None, **options)
    told = capsys.readouterr().err
    assert "left out 1 of 36 pictures" in told
    assert "16 dims are many for 35 images" in told
    shown = ncl.Features.load(out / "features" / "all_head.safetensors")
    assert shown.split_of() == ["train"] * 35 + ["test"] * 4
    assert sorted(set(shown.items)) == ["cat", "dog"]
    assert len(Desk(out).items) == 39


def test_a_run_on_an_edge_list_shows_its_nodes(tmp_path, capsys):
    names = [f"person {n}" for n in range(40)]
    edges = [(names[n], names[(7 * n + 3) % 40]) for n in range(40)]
    path = tmp_path / "friends.csv"
    path.write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in edges))
    out = run("graph_ncl", data=str(path), out=tmp_path / "run", width=8)
    told = capsys.readouterr().err
    assert "40 edges, 40 nodes; first edge ['person 0', 'person 3']" in told
    shown = ncl.Features.load(out / "features" / "all_head.safetensors")
    active = shown.z.count_nonzero(axis=1)
    # Two on average, but for nodes that are told from each other by nothing.
    assert (shown.dims, len(active)) == (8, 40)
    assert 1 <= active.min() <= active.max() <= 4
    assert 1.5 < active.mean() < 2.5
    assert set(shown.items) == set(names)


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("sentence_ncl", r"Known names are .*\.csv.*hf:<name>"),
        ("clip_ncl", r"expected emoji, flickr8k, hf:<name>, a folder"),
        ("vision_ncl", r"expected cifar10, .*or a folder"),
        ("graph_ncl", r"graphs are files that end in \.csv"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_what_could_be(recipe, kinds, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"none\.csv does not exist.*{kinds}"):
        run(recipe, data=str(tmp_path / "none.csv"), out=tmp_path / "run")


def test_a_run_stores_its_encoder_once(here, tmp_path):
    import transformers

    reviews(tmp_path / "reviews.csv")
    wide = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=32, hidden_size=256, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=512, max_position_embeddings=16,
        )
    )  # fmt: skip
    wide.save_pretrained(tmp_path / "wide")
    transformers.AutoTokenizer.from_pretrained(here / "bert").save_pretrained(tmp_path / "wide")
    out = run(
        "sentence_ncl", data=str(tmp_path / "reviews.csv"), model=str(tmp_path / "wide"), dims=32,
        out=tmp_path / "run", k=(4,), twin=True,
    )  # fmt: skip
    weights = [path for path in out.rglob("*.safetensors") if path.stat().st_size > 2**20]
    assert len(weights) == 4
    assert len({path.stat().st_ino for path in weights}) == 1
    assert ncl.load(out / "twin").encode(["a dog"]).shape == (1, 32)

"""The contract that all kinds of model share: trained, saved, loaded, refused in one way."""

import json
import re
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("torch_geometric")

from PIL import Image
from small_recipes import WORDS, lay_out
from torch_geometric.data import Data

import ncl_multi as ncl
from ncl_multi.adapters.vision.config import VisionConfig
from ncl_multi.adapters.vision.model import NonNegClassifier
from ncl_multi.data.pictures import ImageSet
from ncl_multi.model import UntrainedWarning
from ncl_multi.training.config import LEAST_ROWS

pytestmark = pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
KINDS = ("sentence", "clip", "vision", "classifier", "graph")
QUICK = {"steps": 2, "device": "cpu"}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def phrases(count=24, seed=0):
    picked = torch.randint(len(WORDS), (count, 5), generator=generator(seed))
    return [" ".join(WORDS[i] for i in row) for row in picked.tolist()]


def pictures(count=24, seed=0):
    return torch.randint(256, (count, 3, 16, 16), generator=generator(seed), dtype=torch.uint8)


def labelled(count=24, seed=0):
    return ImageSet(pictures(count, seed), torch.arange(count) % 3, ["a", "b", "c"])


def pairs(count=24, seed=0):
    drawn = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in pictures(count, seed)]
    return list(zip(drawn, phrases(count, seed), strict=True))


def graph(count=24, seed=0):
    edges = torch.randint(count, (2, 6 * count), generator=generator(seed))
    return Data(x=torch.rand(count, 5, generator=generator(seed)), edge_index=edges)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with tiny encoders."""
    folder = tmp_path_factory.mktemp("tiny")
    lay_out(folder)
    return folder


def make(kind, tiny):
    """A model of this kind, data to train on, a maker of other data, and items to encode."""
    if kind == "sentence":
        return ncl.wrap(tiny / "bert", 32, k=4), phrases, phrases(4)
    if kind == "clip":
        return ncl.NonNegClip(f"hf:{tiny / 'clip'}", 32, k=4), pairs, phrases(4)
    if kind == "graph":
        return ncl.NonNegGraph(16, width=8, density=0.3), graph, graph()
    small = {"hidden_dim": None, "size": 16}
    if kind == "vision":
        return ncl.NonNegVision("resnet-small", 16, **small), pictures, pictures(4)
    return NonNegClassifier("resnet-small", 16, classes=3, **small), labelled, pictures(4)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Of every kind a run folder, the model that was trained there, and items."""
    made = {}
    for kind in KINDS:
        model, data, items = make(kind, tiny)
        out = tmp_path_factory.mktemp("runs") / kind
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ncl.HealthWarning)
            made[kind] = (out, model.fit(data(), out=out, **QUICK), items)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_have_the_same_verbs_with_the_same_options(kind, trained):
    model = type(trained[kind][1])
    for verb in ("fit", "encode", "embed", "features", "shorten", "save_pretrained"):
        assert getattr(model, verb) is getattr(ncl.SparseModel, verb), verb
    assert issubclass(model.config_type, ncl.TrainConfig)
    assert ncl.load.__module__ == ncl.SparseModel.__module__


# Training


@pytest.mark.parametrize("kind", ["sentence", "clip", "vision", "graph"])
def test_an_untrained_head_warns_and_says_what_to_call(kind, tiny, trained):
    model, _, items = make(kind, tiny)
    if kind == "graph":
        model = ncl.NonNegGraph(16, in_dim=5, width=8)
    with pytest.warns(UntrainedWarning, match=rf"Call {type(model).__name__}\.fit.*ncl\.load"):
        model.encode(items)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        trained[kind][1].encode(items)
        ncl.load(trained[kind][0]).encode(items)


@pytest.mark.parametrize("kind", KINDS)
def test_two_fits_on_different_data_give_the_same_two_models_in_both_orders(kind, tiny):
    def weights(seed):
        model, data, _ = make(kind, tiny)
        return model.fit(data(seed=seed), **QUICK).state_dict()

    def same(a, b):
        return all(torch.equal(value, b[name]) for name, value in a.items())

    forth = [weights(seed) for seed in (0, 1)]
    back = [weights(seed) for seed in (1, 0)]
    assert not same(*forth)
    assert same(forth[0], back[1])
    assert same(forth[1], back[0])


def test_training_in_memory_leaves_no_file_and_the_random_state_alone(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCL_CACHE", str(tiny / "cache"))
    model, data, _ = make("graph", tiny)
    before = torch.get_rng_state()
    model.fit(data(), **QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_a_run_on_other_data_is_refused(kind, tiny, trained):
    out = trained[kind][0]
    model, data, _ = make(kind, tiny)
    words = r"contains a run on other data.*out=, --out.*resume=False \(--no-resume\)"
    with pytest.raises(ValueError, match=words):
        model.fit(data(seed=1), out=out, **QUICK)


def test_one_pixel_makes_other_data(trained, tiny):
    model, data, _ = make("vision", tiny)
    changed = data()
    changed[17, 1, 3, 5] += 1
    with pytest.raises(ValueError, match="contains a run on other data"):
        model.fit(changed, out=trained["vision"][0], **QUICK)


def test_a_picture_replaced_under_its_name_makes_other_data(tiny, tmp_path):
    from ncl_multi.data.folders import folder

    for number, (picture, _) in enumerate(pairs(90)):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    cfg = VisionConfig(out=tmp_path / "run", steps=1, batch_size=16, device="cpu")

    def train():
        model, _, _ = make("vision", tiny)
        return model.fit(folder(tmp_path / "data", "train", size=16), cfg)

    train()
    train()
    Image.new("RGB", (40, 40)).save(path)
    with pytest.raises(ValueError, match="contains a run on other data"):
        train()


def test_more_steps_and_epochs_extend_a_finished_run(tiny, tmp_path):
    cfg = VisionConfig(out=tmp_path / "run", epochs=1, batch_size=12, log_every=1, device="cpu")
    for epochs in (1, 2):
        model, data, _ = make("vision", tiny)
        model.fit(data(), replace(cfg, epochs=epochs))
    make("vision", tiny)[0].fit(data(), replace(cfg, steps=5))
    lines = (tmp_path / "run" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_folder_that_only_has_a_config_does_not_stand_in_the_way(tiny, tmp_path):
    model, data, _ = make("graph", tiny)
    with pytest.raises(ValueError, match="at least 10 nodes"):
        model.fit(data(4), out=tmp_path, **QUICK)
    (tmp_path / "config.json").write_text(json.dumps({"batch_size": 9, "data_fingerprint": "x"}))
    model.fit(data(), out=tmp_path, **QUICK)
    assert (tmp_path / "model" / "config.json").exists()


def test_a_run_may_be_moved_before_it_resumes(tiny, tmp_path, capfd):
    model, data, _ = make("graph", tiny)
    model.fit(data(), out=tmp_path / "here", **QUICK)
    shutil.move(tmp_path / "here", tmp_path / "there")
    make("graph", tiny)[0].fit(data(), out=tmp_path / "there", steps=3, device="cpu")
    assert "resuming" in capfd.readouterr().err


def test_a_batch_is_lowered_to_the_data_with_a_notice_and_before_encoding(tiny, capfd):
    model, data, _ = make("sentence", tiny)

    class EncodedError(Exception):
        pass

    def encodes(*_, **__):
        raise EncodedError

    model.embed = encodes
    with pytest.raises(EncodedError):
        model.fit(data(20, seed=9), **QUICK)
    output = capfd.readouterr().err
    assert re.search(r"batch_size lowered from \d+ to 20: there are 20 examples", output)


@pytest.mark.parametrize("kind", KINDS)
def test_few_items_are_refused_in_words(kind, tiny):
    model, data, _ = make(kind, tiny)
    for count in (1, LEAST_ROWS - 1):
        complaint = rf"at least (10 .*got {count}|two .*got (1|one))"
        with pytest.raises(ValueError, match=complaint):
            model.fit(data(count), **QUICK)


@pytest.mark.parametrize(
    ("kind", "data", "complaint"),
    [
        ("sentence", [], "needs a list of texts, pairs or triplets"),
        ("sentence", "one text", "needs a list of texts"),
        ("sentence", iter(["a", "b"]), "needs a list of texts"),
        ("sentence", ["a dog", ("a", "b")], "row 1 has 2"),
        ("sentence", ["a dog", 3], "row 1 must be a text"),
        ("sentence", [("a", "b"), ("a", None)], "row 1 has an entry that is not text"),
        ("clip", [], "image with a caption"),
        ("clip", ["a dog", "a cat"], r"row 0 must be an \(image, caption\) pair"),
        ("clip", [*pairs(2), "a dog"], r"row 2 must be an \(image, caption\) pair"),
        ("clip", [*pairs(2), (Image.new("RGB", (4, 4)), " ")], "row 2 must have a caption"),
        ("clip", [*pairs(2), (Image.new("RGB", (4, 4)), 3)], "row 2 must have a caption"),
        ("clip", [*pairs(2), ("a.png", Image.new("RGB", (4, 4)))], "row 2 must have a caption"),
        ("clip", [*pairs(2), (3, "a dog")], "row 2 must have a PIL image"),
        ("vision", [], "at least one image"),
        ("vision", [Image.new("RGB", (4, 4)), 3], "row 1 must be a PIL image or a file"),
        ("vision", ["there is no such file.png"], "row 0 is not an image"),
        ("vision", torch.zeros(20, 3, 4, 4), "images must be uint8"),
        ("classifier", pictures(), "images with labels"),
        ("graph", [], "graph"),
        ("graph", ["a dog"], "graph"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_before_training(
    kind, data, complaint, tiny, unchecked
):
    model, _, _ = make(kind, tiny)
    with pytest.raises(ValueError, match=complaint):
        model.fit(data, **QUICK)
    assert model.trained_on is None


def test_a_plain_config_changes_only_what_was_set(tiny, unchecked):
    model, _, _ = make("vision", tiny)
    merged = model._own_config(ncl.TrainConfig(out="runs/x", lr=0.5))
    assert merged == VisionConfig(out="runs/x", lr=0.5)
    assert str(merged.out) == "runs/x"
    assert model._own_config(None) == VisionConfig()
    with pytest.raises(TypeError, match="trained with a VisionConfig; got a GraphConfig"):
        model.fit(pictures(), ncl.NonNegGraph.config_type())


# Saving and loading


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_model_folder_give_the_model_back(kind, trained):
    out, model, items = trained[kind]
    for path in (out, str(out), out / "model"):
        again = ncl.load(path)
        assert type(again) is type(model)
        assert again.trained_on == model.trained_on
        assert torch.equal(again.encode(items, dense=True), model.encode(items, dense=True))
    config = json.loads((out / "model" / "config.json").read_text())
    assert (config["format"], config["kind"]) == ("ncl_multi.model/2", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_says_what_the_model_is_its_data_its_figures_and_how_to_load_it(
    kind, trained, tmp_path
):
    out, model, _ = trained[kind]
    again = ncl.load(out)
    again.figures = {"sparsity, test": 0.97}
    again.save_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f'ncl.load("{tmp_path / "model"}")' in card
    assert again.example in card
    assert f"| dimensions | {model.dims} |" in card
    assert f", k={model._entries()} |" in card
    assert "| seed | 0 |" in card
    assert "| sparsity, test | 0.97 |" in card


def test_a_card_on_the_hub_names_the_repository(trained, monkeypatch):
    sent = []

    def upload_folder(self, *, folder_path, **_):
        sent.append((folder_path / "README.md").read_text())

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi.upload_folder", upload_folder)
    repository = type("Repository", (), {"repo_id": "someone/graph"})
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi.create_repo", lambda self, **_: repository)
    trained["graph"][1].push_to_hub("someone/graph")
    assert 'ncl.load("someone/graph")' in sent[0]


def damaged(how, source, target):
    shutil.copytree(source / "model", target)
    config = target / "config.json"
    weights = next(p for p in sorted(target.glob("*.safetensors")))
    if how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "weights cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "weights of something else":
        from safetensors.torch import save_file

        save_file({"weight": torch.zeros(2)}, weights)
    elif how == "config cut short":
        config.write_text(config.read_text()[:40])
    else:
        content = json.loads(config.read_text())
        change = {
            "other kind": {"kind": "audio"},
            "other format": {"format": "ncl_multi.model/9"},
            "options of another kind": {"options": {"colour": 3}},
        }[how]
        config.write_text(json.dumps(content | change))
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_every_wrong_folder_is_refused_with_one_kind_of_error(kind, trained, tmp_path):
    ways = (
        "no config", "no weights", "weights cut short", "weights of something else",
        "config cut short", "other kind", "other format", "options of another kind",
    )  # fmt: skip
    for how in ways:
        folder = damaged(how, trained[kind][0], tmp_path / how)
        for load in (ncl.load, type(trained[kind][1]).from_pretrained):
            with pytest.raises(ValueError, match=r"does not contain a model.*ncl\.load takes"):
                load(folder)


def test_what_is_not_a_model_is_refused_with_what_it_is(trained, tiny, tmp_path):
    unfinished = tmp_path / "run"
    shutil.copytree(trained["vision"][0], unfinished)
    shutil.rmtree(unfinished / "model")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    wrong = {
        unfinished: "a run that has not ended",
        tiny / "bert": r"a model of transformers \(bert\)",
        tmp_path / "empty": "no config.json",
        tmp_path / "file": "is not a folder",
        tmp_path / "nowhere": "is not a folder",
        "nowhere": "is not a folder",
    }
    for path, words in wrong.items():
        with pytest.raises(ValueError, match=rf"(?s){words}.*ncl\.load takes.*ncl\.wrap"):
            ncl.load(path)
    with pytest.raises(ValueError, match="contains a NonNegVision, not a NonNegGraph"):
        ncl.NonNegGraph.from_pretrained(trained["vision"][0])
    with pytest.raises(TypeError, match="NonNegVision is loaded without the option colour"):
        ncl.load(trained["vision"][0], colour=3)


@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_a_model_or_a_run_of_ours_says_to_load_it(kind, trained):
    for path in (trained[kind][0], trained[kind][0] / "model"):
        with pytest.raises(ValueError, match=r"use ncl\.load"):
            ncl.wrap(path)


def as_version_1(kind, folder):
    """Rewrite a saved model as version 0.1 did."""
    path = folder / "config.json"
    options = json.loads(path.read_text())["options"]
    if kind == "sentence":
        head = {"out_dim" if name == "dims" else name: v for name, v in options["head"].items()}
        old = options | {"format": "ncl_multi.encoder/1", "head": head}
    elif kind == "clip":
        dims = options.pop("dims")
        old = {"dims": dims, "options": options, "figures": {"alive": 1.0}}
    elif kind == "graph":
        width = options.pop("width")
        old = options | {"hidden_dim": width}
        for name in ("batch_norm",):
            del old[name]
    else:
        old = options
    path.write_text(json.dumps(old))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_version_0_1_is_loaded_from_its_run_and_from_its_folder(kind, trained, tmp_path):
    out, model, items = trained[kind]
    shutil.copytree(out, tmp_path / "run")
    as_version_1(kind, tmp_path / "run" / "model")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        again = ncl.load(path)
        assert torch.equal(again.encode(items, dense=True), model.encode(items, dense=True))
        assert again.trained_on == {"version": "0.1"}


def test_a_run_of_version_0_1_is_not_resumed_and_says_why(tiny, trained, tmp_path):
    shutil.copytree(trained["graph"][0], tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["data_fingerprint"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    model, data, _ = make("graph", tiny)
    with pytest.raises(ValueError, match=r"a run of version 0\.1.*ncl\.load.*--no-resume"):
        model.fit(data(), out=tmp_path / "run", **QUICK)


def test_a_model_of_version_0_1_with_other_layers_is_refused_and_says_what_to_do(trained, tmp_path):
    shutil.copytree(trained["graph"][0] / "model", tmp_path / "model")
    as_version_1("graph", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["hidden_dim"] //= 2
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"saved by version 0\.1.*train it again"):
        ncl.load(tmp_path / "model")

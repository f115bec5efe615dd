"""Saved models of every kind: each file replaced by others, kills and full disks while saving."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_hostile import as_pickle, as_torch, hugging_face, two_towers
from tiny_text import tiny_bert, tiny_tokenizer

import ncl_multi as ncl
from ncl_multi.adapters.vision.model import NonNegClassifier
from ncl_multi.settings import offline

pytest.importorskip("sentence_transformers")
ROOT = Path(__file__).parents[1]


def sentence_transformer(folder: Path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tiny_bert().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(32, "mean")]
    return ncl.wrap(SentenceTransformer(modules=modules, device="cpu"), 8)


NUMBERS = np.random.default_rng(0).random((40, 4))


class Coder(ncl.SparseCoder):
    """A coder that is saved and read like a model."""

    def save_pretrained(self, folder: Path) -> None:
        self.save(folder)


def weights(model) -> dict[str, torch.Tensor]:
    return getattr(model, "heads_", model).state_dict()


KINDS = {
    "clip, open_clip towers": lambda folder: ncl.NonNegClip(two_towers(folder), 8),
    "clip, transformers towers": lambda folder: ncl.NonNegClip(hugging_face(folder), 8),
    "sentence, transformers": lambda folder: ncl.wrap(tiny_bert(), 8, processor=tiny_tokenizer()),
    "sentence, sentence-transformers": sentence_transformer,
    "vision": lambda folder: ncl.NonNegVision("test_resnet", 8, hidden_dim=None),
    "classifier": lambda folder: NonNegClassifier("test_resnet", 8, classes=3),
    "graph": lambda folder: ncl.NonNegGraph(8, in_dim=4, width=4),
    "coder": lambda folder: Coder(dims=8, k=2, steps=1).fit(NUMBERS),
}


def hostile(marker: Path, whole: bytes) -> dict[str, bytes]:
    """What a file is replaced by."""
    return {
        "pickle": as_pickle(marker),
        "torch": as_torch(marker),
        "empty": b"",
        "list": b"[]",
        "number": b"3",
        "object": b"{}",
        "other object": b'{"a": 1}',
        "deep": b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        "code": json.dumps(
            {"auto_map": {"AutoModel": "evil.X"}, "trust_remote_code": True}
        ).encode(),
        "half": whole[: len(whole) // 2],
        "twice": whole * 2,
    }


def try_every_file(folder: Path, marker: Path) -> dict[tuple[str, str], str]:
    """Load the model with each of its files replaced in turn: `loads`, or the words of refusal."""
    outcomes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for name, content in hostile(marker, whole).items():
            path.write_bytes(content)
            try:
                ncl.load(folder)
                outcome = "loads"
            except ValueError as error:
                outcome = str(error)
            outcomes[path.relative_to(folder).as_posix(), name] = outcome
        path.write_bytes(whole)
    return outcomes


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    KINDS[request.param](folder / "source").save_pretrained(folder / "model")
    return folder / "model"


def test_every_file_of_every_model_can_be_anything_and_nothing_runs(saved, tmp_path, monkeypatch):
    asked = []

    def refuse(*given: object) -> None:
        # `load` makes one error of whatever is raised below it, so the call itself is noted.
        asked.append(given)
        raise OSError("no network and no terminal here")

    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(saved, folder)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    whole = weights(ncl.load(folder))
    outcomes = try_every_file(folder, marker)
    assert not asked, "a connection was tried or a question asked on the terminal"
    assert not marker.exists()
    for (file, content), words in outcomes.items():
        if words == "loads":
            # A card is not read; settings of a tokenizer may be empty.
            assert Path(file).name == "README.md" or (
                file.endswith(".json") and content in ("list", "object", "other object")
            ), (file, content)
        else:
            assert f"{folder} does not contain a model" in words, (file, content)
    of_weights = [words for (file, _), words in outcomes.items() if file.endswith(".safetensors")]
    assert "loads" not in of_weights
    again = weights(ncl.load(folder))
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_the_bombs_go_off_where_they_are_opened_directly(tmp_path):
    for number, bomb in enumerate((as_pickle, as_torch)):
        marker, path = tmp_path / f"ran{number}", tmp_path / f"bomb{number}"
        path.write_bytes(bomb(marker))
        if bomb is as_pickle:
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("vision", {"pretrained": True}, "pretrained must not be set"),
        ("vision", {"dims": 2**30}, r"its config asks for \d+ bytes of weights"),
        ("vision", {"size": 2**14}, "size must be 1 to 1024 pixels; got 16384"),
        ("vision", {"model": "hf-hub:user/name"}, "model must be resnet-small"),
        ("vision", {"more": 1}, "unexpected keyword argument 'more'"),
        ("classifier", {"pretrained": True}, "pretrained must not be set"),
        ("classifier", {"classes": 2**30}, r"its config asks for \d+ bytes of weights"),
        ("graph", {"dims": 2**30}, r"its config asks for \d+ bytes of weights"),
        ("graph", {"in_dim": 2**30}, r"its config asks for \d+ bytes of weights"),
        ("graph", {"width": -1}, "width must be at least 1; got -1"),
        ("graph", {"more": 1}, "unexpected keyword argument 'more'"),
        ("clip, transformers towers", {"dims": 2**30}, r"asks for \d+ bytes of weights"),
        ("coder", {"widths": [2**30]}, r"asks for \d+ bytes of weights"),
        ("sentence, transformers", {"pooling": "evil"}, "pooling must be one of"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_words(unchecked, tmp_path, kind, change, words):
    KINDS[kind](tmp_path / "source").save_pretrained(tmp_path / "model")
    ncl.load(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["options"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        ncl.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["evil.py", "pytorch_model.bin", "adapter_config.json"])
def test_files_that_an_encoder_does_not_have_are_refused(tmp_path, name):
    KINDS["sentence, transformers"](tmp_path / "source").save_pretrained(tmp_path / "model")
    ncl.load(tmp_path / "model")
    (tmp_path / "model" / "encoder" / name).write_text("{}")
    with pytest.raises(ValueError, match="does not belong in a saved model"):
        ncl.load(tmp_path / "model")


@pytest.fixture
def no_network(monkeypatch):
    """Connections that were tried, all of which fail."""
    tried = []

    def refuse(*given: object, **options: object) -> None:
        tried.append(given)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


def write(folder: Path, files: dict[str, dict]) -> None:
    """Change or make JSON files below a folder."""
    for name, change in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        whole = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(whole | change))


ENCODER, BERT = "encoder/config.json", "encoder/sentence_bert_config.json"
FETCHED = [
    ("sentence, sentence-transformers", {BERT: {"tokenizer_name_or_path": "user/name"}}),
    ("sentence, sentence-transformers", {BERT: {"model_args": {"gguf_file": "a.gguf"}}}),
    ("sentence, transformers", {ENCODER: {"model_type": "dpt", "backbone": "user/name",
                                          "use_pretrained_backbone": True, "num_channels": 3}}),
    ("sentence, transformers", {ENCODER: {"model_type": "timm_wrapper", "num_channels": 3,
                                          "architecture": "hf-hub:user/name"}}),
    ("sentence, transformers", {ENCODER: {"model_type": "timm_wrapper", "num_channels": 3,
                                          "architecture": "HF_hub:user/name"}}),
    ("sentence, transformers", {ENCODER: {"model_type": "timm_wrapper", "num_channels": 3,
                                          "architecture": "local-dir:/tmp"}}),
    ("clip, transformers towers", {"towers/config.json": {
        "model_type": "timm_wrapper", "architecture": "resnet18",
        "model_args": {"checkpoint_path": "/tmp/a.pth"}}}),
    ("clip, transformers towers", {"towers/config.json": {
        "model_type": "timm_wrapper", "architecture": "hf-hub:user/name"}}),
    ("clip, transformers towers", {"towers/config.json": {
        "model_type": "detr", "backbone_config": {"model_type": "timm_backbone",
                                                  "backbone": "hf_hub:user/name"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "files"), FETCHED)
def test_settings_that_name_what_is_elsewhere_are_refused(
    unchecked, tmp_path, no_network, kind, files
):
    KINDS[kind](tmp_path / "source").save_pretrained(tmp_path / "model")
    no_network.clear()  # sentence-transformers asks when it saves.
    ncl.load(tmp_path / "model")
    write(tmp_path / "model", files)
    with pytest.raises(ValueError, match=r"outside its folder|is not in its folder"):
        ncl.load(tmp_path / "model")
    assert not no_network


@pytest.mark.parametrize("kind", ["upernet", "zoedepth", "vitpose", "table-transformer"])
def test_names_of_the_hub_in_any_key_are_not_asked_for(unchecked, tmp_path, no_network, kind):
    from huggingface_hub import constants

    KINDS["sentence, transformers"](tmp_path / "source").save_pretrained(tmp_path / "model")
    change = {"model_type": kind, "backbone": "user/name", "num_channels": 3}
    write(tmp_path / "model", {ENCODER: change})
    with pytest.raises(ValueError, match="does not contain a model"):
        ncl.load(tmp_path / "model")
    assert not no_network
    assert not constants.HF_HUB_OFFLINE, "other downloads of this process work again"


def test_loads_that_overlap_leave_the_hub_as_it_was():
    from huggingface_hub import constants

    first, second = offline(), offline()
    first.__enter__(), second.__enter__()
    assert constants.HF_HUB_OFFLINE
    first.__exit__(None, None, None)
    assert constants.HF_HUB_OFFLINE, "the second still loads"
    second.__exit__(None, None, None)
    assert not constants.HF_HUB_OFFLINE


def test_names_of_the_hub_would_be_asked_for_without_the_gate(tmp_path, no_network):
    from transformers import AutoConfig

    write(tmp_path, {"config.json": {"model_type": "upernet", "backbone": "user/name"}})
    with pytest.raises(Exception, match="no network"):
        AutoConfig.from_pretrained(tmp_path)
    assert no_network


def test_a_pretrained_backbone_is_fetched_only_where_the_caller_asks(
    tmp_path, no_network, monkeypatch
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(OSError, match="no network"):
        ncl.NonNegVision("torchvision/resnet18", 8, hidden_dim=None, pretrained=True)
    assert no_network
    no_network.clear()
    KINDS["vision"](tmp_path / "source").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["options"] |= {"model": "torchvision/resnet18", "pretrained": True}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="pretrained must not be set"):
        ncl.load(tmp_path / "model")
    assert not no_network


@pytest.mark.parametrize("name", ["fcn_resnet50", "ssd300_vgg16", "maskrcnn_resnet50_fpn"])
def test_torchvision_models_that_fetch_a_backbone_are_refused(
    unchecked, tmp_path, no_network, monkeypatch, name
):
    from torchvision.models import get_model

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(OSError, match="no network"):
        get_model(name, weights=None)
    assert no_network.pop(), "without weights, torchvision asks for those of the backbone"
    no_network.clear()
    KINDS["vision"](tmp_path / "source").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["options"]["model"] = f"torchvision/{name}"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"torchvision has no classifier '{name}'"):
        ncl.load(tmp_path / "model")
    assert not no_network


GPT = {
    "model_type": "gpt_neo", "max_position_embeddings": 40_000, "hidden_size": 8,
    "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 2, "num_heads": 2,
    "attention_types": [[["global"], 2]], "classifier_dropout": 0.1,
}  # fmt: skip
"""Each of its layers has a mask of all positions, which is not among the weights."""
SWIN = {"model_type": "swin", "depths": [2, 40_000]}
TOKENS = "encoder/tokenizer.json"
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
REPEATED = {"type": "Sequence", "normalizers": [REPLACE] * 7}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 3000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 3000, "tokens": ["x"] * 3000}},
}
DENSE = {"in_features": 2**16, "out_features": 2**16, "activation_function": "torch.nn.Tanh"}
SECOND = {"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        ("sentence, transformers", {ENCODER: GPT}, "bytes of weights"),
        ("sentence, transformers", {ENCODER: {"num_hidden_layers": 900}}, "more than .* modules"),
        ("sentence, transformers", {ENCODER: SWIN}, "asks for depths 40000; at most 1000"),
        ("sentence, transformers", {TOKENS: {"normalizer": REPEATED}}, "very long texts"),
        ("sentence, transformers", {TOKENS: {"post_processor": TEMPLATE}}, "very long texts"),
        ("sentence, transformers", {TOKENS: {"padding": {"strategy": {"Fixed": 2**30}}}},
         "very long texts"),
        ("sentence, transformers", {"encoder/tokenizer_config.json": {"pad_to_multiple_of": 2**30}},
         "asks for pad_to_multiple_of"),
        ("clip, open_clip towers", {"towers/any.json": {"text_cfg": {"context_length": 2**30}}},
         "asks for context_length"),
        ("clip, open_clip towers", {"towers/any.json": {"preprocess_cfg": {"size": [32, 2**20]}}},
         "asks for size 1048576; at most 4096"),
        ("clip, transformers towers",
         {"towers/preprocessor_config.json": {"size": {"shortest_edge": 30_000}}},
         "asks for shortest_edge 30000; at most 4096"),
        ("sentence, sentence-transformers", {"encoder/1_Pooling/config.json": {"dimension": 2**30}},
         "asks for"),
        ("sentence, transformers", {"encoder/model.safetensors.index.json": {
            "weight_map": {"a": "../../other.safetensors"}}}, "outside its folder"),
        ("sentence, transformers", {ENCODER: {"intermediate_size": 10**7}}, "bytes of weights"),
        ("sentence, transformers", {ENCODER: {"vocab_size": 10**8}}, "bytes of weights"),
        ("sentence, transformers", {ENCODER: {"model_type": "clap"}}, "bytes of weights"),
        ("sentence, sentence-transformers", {ENCODER: {"hidden_size": 2**14}}, "bytes of weights"),
        ("sentence, sentence-transformers", {"encoder/1_Dense/config.json": DENSE},
         "asks for 65536 x 65536 weights"),
    ],
)  # fmt: skip
def test_layers_much_larger_than_the_weights_are_refused(unchecked, tmp_path, kind, files, words):
    KINDS[kind](tmp_path / "source").save_pretrained(tmp_path / "model")
    ncl.load(tmp_path / "model")
    write(tmp_path / "model", files)
    with pytest.raises(ValueError, match=words):
        ncl.load(tmp_path / "model")


@pytest.mark.parametrize(
    "type_",
    ["os.system", "antigravity.x", "evil.X", "torch.jit.Module", "sentence_transformers.models.X"],
)
def test_modules_of_other_packages_are_not_imported(unchecked, tmp_path, type_):
    model = KINDS["sentence, sentence-transformers"](tmp_path / "source")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "encoder" / "modules.json"
    modules = json.loads(path.read_text())
    modules[1]["type"] = type_
    path.write_text(json.dumps(modules))
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"names .*; expected Transformer, Pooling"):
        ncl.load(tmp_path / "model")
    assert not {"antigravity", "evil"} & (set(sys.modules) - before)


# One process has imported everything and forks the children that are killed.
SAVES = """
import json, os, random, resource, signal, sys, threading, time
from pathlib import Path
import numpy as np
import torch
import tqdm
from scipy.sparse import csr_array
import ncl_multi as ncl
from ncl_multi.atlas.page import write_atlas
from ncl_multi.codes.search import SparseIndex
from ncl_multi.report import write_json
from ncl_multi.bulk.shards import Codes, claim, read_codes, write_shard
from ncl_multi.training.run_folder import RunFolder
from ncl_multi.training.sharded import ShardedRunFolder
from test_saved import KINDS

here, kills = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
# The lock of progress bars is shared with children, and one that is killed may hold it for ever.
tqdm.tqdm.set_lock(threading.RLock())


def filled(kind):
    model = KINDS[kind](here / f"source {kind}")
    def save(path, version):
        with torch.no_grad():
            for part in (*model.parameters(), *model.buffers()):
                if part.is_floating_point():
                    part.fill_(version)
        model.figures = {"version": version}
        model.save_pretrained(path)
    def read(path):
        found = ncl.load(path)
        values = {float(x) for p in found.parameters() for x in (p.min(), p.max())}
        return found.figures["version"] if values == {float(found.figures["version"])} else values
    return save, read


coder = KINDS["coder"](here)
def save_coder(path, version):
    with torch.no_grad():
        for part in coder.heads_.parameters():
            part.fill_(version)
    coder.n_rows_ = version
    coder.save(path)

def read_coder(path):
    found = ncl.load(path)
    values = {float(x) for p in found.heads_.parameters() for x in (p.min(), p.max())}
    return found.n_rows_ if values == {float(found.n_rows_)} else "mixed"

def features(path, version):
    items = [str(version)] * 500
    return ncl.Features(torch.full((500, 64), float(version)), items=items, about={"v": version})

def read_features(path):
    found = ncl.Features.load(path)
    return found.about["v"] if (found.dense() == found.about["v"]).all() and set(
        found.items) == {str(found.about["v"])} else "mixed"

def save_index(path, version):
    index = SparseIndex(8, [str(version)] * 8)
    index.add(range(version, version + 300), torch.ones(300, 8))
    index.save(path)

def read_index(path):
    index = SparseIndex.load(path)
    first = int(index.names[0])
    return first if index.ids.tolist() == list(range(first, first + 300)) else "mixed"

run = RunFolder(ncl.TrainConfig(out=here / "run"), True, "data")
linear = torch.nn.Linear(200, 200)
def save_checkpoint(path, version):
    with torch.no_grad():
        for part in linear.parameters():
            part.fill_(version)
    run.save({"model": linear}, version)

def read_checkpoint(path):
    state = torch.load(run.checkpoint, weights_only=True)
    return state["step"] if all((w == state["step"]).all() for w in state["model"].values()) else ""

split = ShardedRunFolder(ncl.TrainConfig(out=here / "split", shard=True), True, "data")
momentum = torch.optim.SGD(linear.parameters(), 0.1, momentum=0.9)

def save_split(path, version):
    with torch.no_grad():
        for part in linear.parameters():
            part.fill_(version)
    split.save({"model": linear, "optimizer": momentum}, version)

def read_split(path):
    step = split.restore({"model": linear, "optimizer": momentum}, torch.device("cpu"), 10**6)
    return step if all((part == step).all() for part in linear.parameters()) else "mixed"

def save_shard(path, version):
    ids = [str(version)] * 500
    codes = Codes(np.full(500, version), ids, csr_array(np.full((500, 8), float(version))))
    write_shard(path, 0, codes, [], "model")

def read_shard(path):
    (codes,) = read_codes(path)
    same = (codes.z.toarray() == codes.rows[0]).all() and set(codes.ids) == {str(codes.rows[0])}
    return int(codes.rows[0]) if same else "mixed"

def save_page(path, version):
    about = {"output": "head", "names": [f"version{version}"] * 4}
    folder = here / f"page{version % 2}"
    if not (folder / "features").exists():
        features_of_page = ncl.Features(torch.eye(4), items=["a"] * 4, about=about)
        features_of_page.save(folder / "features" / "f.safetensors")
    page = here / "page"
    page.mkdir(exist_ok=True)
    (page / "features").unlink(missing_ok=True)
    (page / "features").symlink_to(folder / "features")
    write_atlas(page)

def read_page(path):
    page = (here / "page" / "atlas.html").read_text()
    return 1 if page.rstrip().endswith("</html>") else "cut"

(here / "shards").mkdir()
claim(here / "shards", {"model": {}, "input": {"rows": 500, "shards": 1}, "options": {}})
split.resumes = True  # The folder as a process finds it that starts after the kill.
asked = [sys.argv[3]] if sys.argv[3] else KINDS
kinds = {kind: (*filled(kind), here / kind) for kind in KINDS if kind in asked and kind != "coder"}
kinds |= {
    "coder": (save_coder, read_coder, here / "coder"),
    "features": (lambda p, v: features(p, v).save(p), read_features, here / "f.safetensors"),
    "index": (save_index, read_index, here / "i.safetensors"),
    "checkpoint": (save_checkpoint, read_checkpoint, run.checkpoint),
    "split checkpoint": (save_split, read_split, here / "split" / "checkpoints"),
    "shard of codes": (save_shard, read_shard, here / "shards"),
    "page": (save_page, read_page, here / "page" / "atlas.html"),
    "metrics": (lambda p, v: write_json(p, {"v": [v] * 5000}),
                lambda p: set(json.loads(p.read_text())["v"]).pop(), here / "metrics.json"),
}
kinds = {kind: parts for kind, parts in kinds.items() if not sys.argv[3] or kind in asked}
silent = os.open(os.devnull, os.O_WRONLY)
draw = random.Random(0)
for name, (save, read, path) in kinds.items():
    error = os.dup(2)
    os.dup2(silent, 2)
    began = time.perf_counter()
    save(path, 1)
    took = time.perf_counter() - began
    whole, seen, odd = 0, set(), []
    for kill in range(kills):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b".")
            for version in range(2 + 50 * kill, 52 + 50 * kill):
                save(path, version)
            os._exit(0)
        os.read(ready, 1), os.close(ready), os.close(tell)
        time.sleep(draw.uniform(0, 4 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            version = read(path)
        except Exception as problem:
            version = repr(problem)
        whole += isinstance(version, int)
        seen.add(version) if isinstance(version, int) else odd.append(str(version)[:200])
    before = read(path)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        try:
            save(path, 99_999)
        except OSError:
            os._exit(7)
        except BaseException:
            os._exit(8)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kept = read(path) == before
    save(path, 5)
    left = [p.name for p in path.parent.iterdir() if p.name.startswith(".") and ".part" in p.name]
    os.dup2(error, 2)
    print(json.dumps([name, whole, len(seen), odd, code, kept, left]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_and_full_disks_leave_what_was_saved_before(tmp_path):
    kills, only = int(os.environ.get("NCL_KILLS", "8")), os.environ.get("NCL_KILLED", "")
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path), str(kills), only],
        capture_output=True, text=True, env=os.environ | paths | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 1 if only else len(KINDS) + 7
    for name, whole, versions, odd, code, kept, left in rows:
        print(
            f"| {name} | {kills} | {whole} | {versions} | {code} | {'whole' if kept else 'lost'} |"
        )
        assert whole == kills, (name, odd)
        assert kept, f"a full disk lost {name}"
        assert code == 7, f"{name} was not saved, and no OSError said so"
        assert not left, (name, left)


if __name__ == "__main__":
    # The table of loads tried: python tests/test_saved.py <folder>
    here = Path(sys.argv[1])
    print("| model | file | loads tried | refused | loaded | ran |\n|---|---|---|---|---|---|")
    for kind, make in KINDS.items():
        make(here / kind / "source").save_pretrained(here / kind / "model")
        found = try_every_file(here / kind / "model", here / "ran")
        # The settings of a tower or a tokenizer are rows of one line.
        what = {".safetensors": "weights", ".json": "settings", ".md": "card"}
        groups = Counter(what.get(Path(file).suffix, "vocabulary") for file, _ in found)
        for group, count in groups.items():
            loaded = sum(
                words == "loads" and what.get(Path(file).suffix, "vocabulary") == group
                for (file, _), words in found.items()
            )
            ran = "code" if (here / "ran").exists() else "nothing"
            print(
                f"| {kind} | {group} | {count} | {count - loaded} | {loaded} | {ran} |", flush=True
            )

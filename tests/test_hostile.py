"""Files that want to run code, write elsewhere or break a reader: refused in words, and no more."""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from ncl_multi import StepObjective, TrainConfig, fit

pytest.importorskip("open_clip")
pytest.importorskip("torch_geometric")

from ncl_multi.adapters.clip.data import read_pairs
from ncl_multi.adapters.clip.model import NonNegClip
from ncl_multi.adapters.clip.pairs import DamagedImageError, pairs_of
from ncl_multi.adapters.clip.towers import (
    HuggingFaceTowers,
    OpenClipTowers,
    Towers,
    build_open_clip,
)
from ncl_multi.adapters.graph.data import load_graph
from ncl_multi.adapters.sentence.encoder import Encoder
from ncl_multi.app import load_model
from ncl_multi.data import images
from ncl_multi.data.arrays import read_embeddings
from ncl_multi.data.members import tar_files
from ncl_multi.data.tables import read_table
from ncl_multi.files import read_picture, read_torch

OURS = (ValueError, OSError)
"""What a reader may raise: errors that say what is wrong with the file."""


class Attack:
    """Unpickling this makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def as_pickle(marker: Path) -> bytes:
    return pickle.dumps(Attack(marker))


def as_torch(marker: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"step": 1, "model": Attack(marker)}, file)
    return file.getvalue()


def go_on(folder: Path | None, **options: object) -> None:
    cfg = TrainConfig(**{"out": folder, "device": "cpu", "steps": 1} | options)
    step = lambda model, batch: (model(batch).square().mean(), model(batch))  # noqa: E731
    fit(StepObjective(torch.nn.Linear(2, 2), step), [torch.ones(2, 2)], cfg)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """A whole file for every reader."""
    from fuzz import good_files

    return good_files(tmp_path_factory.mktemp("readers"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_reader_reads_its_file_and_runs_nothing_from_another(readers, tmp_path):
    assert len(readers) > 30
    for number, (name, reader) in enumerate(readers.items()):
        whole = reader.whole.read_bytes()
        reader.read(reader.whole)
        for bomb in (as_pickle, as_torch):
            marker = tmp_path / f"{number}{bomb.__name__}"
            content = bomb(marker)
            reader.whole.write_bytes(content)
            with pytest.raises(OURS):
                reader.read(reader.whole)
            assert not marker.exists(), name
            if bomb is as_pickle:
                pickle.loads(content)
            else:
                torch.load(io.BytesIO(content), weights_only=False)
            assert marker.exists(), "the attack would have worked"
        reader.whole.write_bytes(whole)
        reader.read(reader.whole)


def test_weights_that_transformers_unpickles_run_no_code(tmp_path):
    from tiny_text import tiny_bert

    model, path = tiny_bert(), tmp_path / "pytorch_model.bin"
    model.config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    torch.save(model.state_dict(), path)
    Encoder.load(tmp_path)
    for bomb in (as_pickle, as_torch):
        marker = tmp_path / bomb.__name__
        path.write_bytes(bomb(marker))
        # transformers has errors of its own; what counts is that nothing ran.
        with pytest.raises(Exception, match=r"[Ww]eights|pickle|invalid"):
            Encoder.load(tmp_path)
        assert not marker.exists()
        torch.load(path, weights_only=False) if bomb is as_torch else pickle.loads(
            path.read_bytes()
        )
        assert marker.exists(), "the attack would have worked"


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    inside = tmp_path / "deep" / "data"
    inside.mkdir(parents=True)
    with tarfile.open(inside / "shard.tar", "w") as tar:
        for name in ("../../evil.txt", "/tmp/ncl_evil.txt", "../evil.jpg"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(OURS):
        read_pairs(str(inside))
    assert set(tmp_path.rglob("*")) == before
    assert not Path("/tmp/ncl_evil.txt").exists()


# Folders of saved towers: what a library would run, ask or fetch.

EVIL = """
from pathlib import Path
from transformers import BertTokenizerFast, BertConfig, BertModel, CLIPImageProcessor

Path({marker!r}).touch()


class X(BertTokenizerFast):
    pass
"""


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "a": 2, "dog": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>", unk_token="<unk>"
    )


def two_towers(folder: Path) -> Towers:
    """A timm and a Hugging Face tower through open_clip."""
    import open_clip
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, vocab_size=4)
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    settings = {
        "embed_dim": 16,
        "vision_cfg": {"timm_model_name": "test_resnet", "timm_proj": "none", "image_size": 32},
        "text_cfg": {
            "hf_model_name": str(folder),
            "hf_tokenizer_name": str(folder),
            "hf_proj_type": None,
            "context_length": 8,
        },
    }
    model = build_open_clip(settings)
    model.visual.preprocess_cfg = vars(open_clip.transform.PreprocessCfg(size=32))
    tokenizer = open_clip.tokenizer.HFTokenizer(str(folder), context_length=8)
    return OpenClipTowers("two", model, settings, tokenizer)


def hugging_face(folder: Path) -> Towers:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    text = {**sizes, "vocab_size": 4, "max_position_embeddings": 8, "eos_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return HuggingFaceTowers("hf", transformers.CLIPModel(config), tiny_tokenizer(), processor)


@pytest.fixture(scope="module", params=[two_towers, hugging_face])
def saved(request, tmp_path_factory):
    """A saved model of each kind, in a folder that is copied before it is changed."""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    NonNegClip(request.param(folder / "source"), dims=8).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, where: tuple[str, ...], value: object) -> None:
    """Set one key of a JSON file, however deep."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    inner = whole
    for key in where[:-1]:
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(whole))


def auto_map(kind: str) -> dict[str, object]:
    return {kind: ["evil.X", "evil.X"] if kind == "AutoTokenizer" else "evil.X"}


KINDS = ("AutoTokenizer", "AutoConfig", "AutoModel", "AutoImageProcessor", "AutoProcessor")
SETTINGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "any.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("with_file", [False, True])
def test_towers_that_name_code_are_refused_before_a_library_sees_them(
    copy, tmp_path, monkeypatch, kind, name, trust, with_file
):
    def no_answer(*words: object) -> str:
        raise AssertionError("a question was asked on the terminal")

    monkeypatch.setattr("builtins.input", no_answer)
    marker, towers = tmp_path / "ran", copy / "towers"
    edit(towers / name, ("auto_map",), auto_map(kind))
    if with_file:
        (towers / "evil.py").write_text(EVIL.format(marker=str(marker)))
    if trust:
        where = ("model_cfg", "text_cfg", "tokenizer_kwargs", "trust_remote_code")
        edit(towers / "open_clip_config.json", where, True)
    for load in (NonNegClip.from_pretrained, load_model):
        with pytest.raises(ValueError, match=r"runs code; it was not loaded|does not belong"):
            load(copy)
    assert not marker.exists()


def test_the_code_in_a_tokenizer_folder_would_run(copy, tmp_path, monkeypatch):
    import transformers

    assert NonNegClip.from_pretrained(copy).encode(["a dog"]).shape == (1, 8)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    marker, towers = tmp_path / "ran", copy / "towers"
    edit(towers / "tokenizer_config.json", ("auto_map",), auto_map("AutoTokenizer"))
    (towers / "evil.py").write_text(EVIL.format(marker=str(marker)))
    with contextlib.suppress(Exception):
        transformers.AutoTokenizer.from_pretrained(towers, trust_remote_code=True)
    assert marker.exists(), "the attack would have worked"


OPEN_CLIP = "open_clip_config.json"


@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        (OPEN_CLIP, ("model_cfg", "text_cfg", "tokenizer_kwargs"), {"cache_dir": "/"}, "cache_dir"),
        (OPEN_CLIP, ("model_cfg", "text_cfg", "tokenizer_kwargs"), [1], "must be an object"),
        (OPEN_CLIP, ("model_cfg", "text_cfg", "more"), 1, r"unknown: \['more'\]"),
        (OPEN_CLIP, ("model_cfg", "vision_cfg", "more"), 1, r"unknown: \['more'\]"),
        (OPEN_CLIP, ("model_cfg", "more"), 1, r"unknown: \['more'\]"),
        (OPEN_CLIP, ("preprocess_cfg", "more"), 1, r"unknown: \['more'\]"),
        (OPEN_CLIP, ("more",), 1, r"unknown: \['more'\]"),
        (OPEN_CLIP, ("model_cfg", "text_cfg"), 3, "must be an object; got int"),
        (OPEN_CLIP, ("model_cfg",), [], "must be an object; got list"),
        (OPEN_CLIP, ("name",), ["siglip"], "name as a text"),
        (
            OPEN_CLIP,
            ("model_cfg", "vision_cfg", "timm_model_name"),
            "hf_hub:a/b",
            "not in its folder",
        ),
        (
            OPEN_CLIP,
            ("model_cfg", "vision_cfg", "timm_model_name"),
            "local-dir:/",
            "not in its folder",
        ),
        (OPEN_CLIP, ("model_cfg", "embed_dim"), "wide", "must be 1 to 65536; got 'wide'"),
        (OPEN_CLIP, ("model_cfg", "embed_dim"), 2**40, "must be 1 to 65536"),
        ("config.json", ("model_type",), "unheard-of", "no towers can be made"),
        ("config.json", ("attn_implementation",), "evil/kernel", "runs code"),
        ("config.json", ("text_config", "attn_implementation"), "evil/kernel", "runs code"),
        ("config.json", ("quantization_config",), {"a": 1}, "runs code"),
        ("config.json", ("deep",), json.loads("[" * 50 + "]" * 50), "levels deep"),
        ("config.json", ("long",), "a" * 2**22, "is larger than"),
        ("tokenizer_config.json", ("a", "b"), {"trust_remote_code": True}, "runs code"),
    ],
)
def test_settings_of_towers_that_do_not_fit_are_refused(copy, name, where, value, message):
    path = copy / "towers" / name
    if not path.exists():
        pytest.skip("these towers have no such file")
    edit(path, where, value)
    with pytest.raises(ValueError, match=message):
        NonNegClip.from_pretrained(copy)


@pytest.mark.parametrize("name", ["evil.py", "pytorch_model.bin", "deep/evil.so", "deep/evil.pyc"])
def test_files_that_towers_do_not_have_are_refused(copy, name):
    path = copy / "towers" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="does not belong in a saved model"):
        NonNegClip.from_pretrained(copy)


def test_every_file_of_towers_can_be_anything_and_nothing_runs(copy, tmp_path):
    marker = tmp_path / "ran"
    for path in sorted((copy / "towers").iterdir()):
        whole = path.read_bytes()
        for content in (as_pickle(marker), as_torch(marker), b"", b"[]", b"3", b"{}", b'{"a": 1}'):
            path.write_bytes(content)
            with contextlib.suppress(ValueError):
                NonNegClip.from_pretrained(copy)
        path.write_bytes(whole)
    assert NonNegClip.from_pretrained(copy).encode(["a dog"]).shape == (1, 8)
    assert not marker.exists()


def test_loading_a_model_touches_no_network_and_starts_no_program(saved):
    script = f"""
import sys
from ncl_multi.adapters.clip.model import NonNegClip

def watch(event, details):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        print(event, details, flush=True)

sys.addaudithook(watch)
NonNegClip.from_pretrained({str(saved)!r}).encode(["a dog"])
import socket
socket.getaddrinfo("localhost", 80)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, input=""
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["socket.getaddrinfo", "('localhost',"]
    ]


# Data of strangers: archives, captions, pictures, graphs.


def tar_of(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pairs_in_a_tar(folder: Path, *more: tuple[tarfile.TarInfo, bytes]) -> str:
    folder.mkdir(exist_ok=True)
    whole = [
        (tarfile.TarInfo(f"{number}.{kind}"), content)
        for number in range(12)
        for kind, content in (("jpg", b"not looked at"), ("txt", b"a dog"))
    ]
    tar_of(folder / "a.tar", [*whole, *more])
    return str(folder)


def entry(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "0.txt"
    return info, b""


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE],
)
@pytest.mark.parametrize("name", ["x.txt", "x.jpg", "x.json"])
def test_a_tar_entry_that_is_no_plain_file_is_refused(tmp_path, kind, name):
    assert len(read_pairs(pairs_in_a_tar(tmp_path / "tar"))["test"]) == 1
    folder = pairs_in_a_tar(tmp_path / "tar", entry("folder.jpg", tarfile.DIRTYPE))
    assert len(read_pairs(folder)["test"]) == 1
    with pytest.raises(ValueError, match=r"a.tar: x.* is not a plain file"):
        read_pairs(pairs_in_a_tar(tmp_path / "tar", entry(name, kind)))


def sparse_tar(path: Path, size: int) -> None:
    """A tar whose one file claims zeros of any length, as GNU tar writes a sparse file."""
    info = tarfile.TarInfo("0.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"00000000000\0"
    block[386:398] = f"{size:011o}".encode() + b"\0"
    block[398:410] = b"00000000000\0"
    block[483:495] = f"{size:011o}".encode() + b"\0"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    path.write_bytes(bytes(block) + bytes(1024))


def test_a_sparse_tar_is_refused_before_its_zeros_are_made(tmp_path):
    (tmp_path / "data").mkdir()
    sparse_tar(tmp_path / "data" / "a.tar", 2**24)
    with tarfile.open(tmp_path / "data" / "a.tar") as tar:
        content = tar.extractfile(tar.next()).read()
    assert len(content) > 1000 * (tmp_path / "data" / "a.tar").stat().st_size, "it would go off"
    with pytest.raises(ValueError, match=r"0.txt is not a plain file"):
        read_pairs(str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"0.txt is not a plain file"):
        list(tar_files(tmp_path / "data" / "a.tar", lambda name: True))


def test_a_caption_that_is_too_long_or_too_deep_is_refused(tmp_path):
    deep = b'{"caption": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(RecursionError):
        json.loads(deep)
    for name, content, message in (
        ("x.json", deep, 'must be an object with "caption"'),
        ("x.txt", b"a" * (2**20 + 1), "has 1048577 bytes; at most 1048576"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pairs(pairs_in_a_tar(tmp_path / "tar", (tarfile.TarInfo(name), content)))


@pytest.mark.parametrize("name", ["../secret.png", "images/../../secret.png", "{root}/secret.png"])
def test_captions_name_no_pictures_outside_their_folder(tmp_path, name):
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "pairs").mkdir()
    for number in range(12):
        (tmp_path / "pairs" / f"{number}.png").write_bytes(b"not looked at yet")
    lines = "".join(f'{number}.png,"a dog, {number}"\n' for number in range(12))
    (tmp_path / "pairs" / "captions.csv").write_text(f"image,caption\n{lines}")
    assert len(read_pairs(str(tmp_path / "pairs"))["train"]) == 11
    outside = name.format(root=tmp_path)
    assert (tmp_path / "pairs" / outside).resolve().name == "secret.png"
    with (tmp_path / "pairs" / "captions.csv").open("a") as file:
        file.write(f"{outside},a secret\n")
    with pytest.raises(ValueError, match="1 images outside its folder"):
        read_pairs(str(tmp_path / "pairs"))


def png(side: int) -> bytes:
    """A picture of 8 x 8 pixels that says it has another size."""
    import struct
    import zlib

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    content = bytearray(file.getvalue())
    content[16:24] = struct.pack(">II", side, side)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_ten_gigapixels_is_refused_in_words(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.png").write_bytes(png(8))
    assert images(str(tmp_path), size=8).images[[0]].shape == (1, 3, 8, 8)
    for side in (9_000, 100_000):
        for path in tmp_path.rglob("*.png"):
            path.write_bytes(png(side))
        with pytest.raises(ValueError, match="none of the 18 pictures"):
            images(str(tmp_path), size=8)
        words = rf"0\.png cannot be read as a picture: {'it has 9000 x' if side == 9_000 else ''}"
        with pytest.raises(ValueError, match=words):
            read_picture(tmp_path / "cat" / "0.png")
    pairs = pairs_of("p", "train", [png(100_000), png(8)], ["big", "small"], [["a"], ["b"]])
    assert pairs.open(1).size == (8, 8)
    with pytest.raises(DamagedImageError, match="big: "):
        pairs.open(0)


@pytest.mark.parametrize("label", [2**40, 2**62, 4])
@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_a_graph_label_beyond_the_nodes_is_refused(tmp_path, label, kind):
    from torch_geometric.data import Data

    def saved_with(last: int) -> str:
        y = torch.tensor([0, 1, 0, last]).to(kind)
        edges = torch.tensor([[0, 1], [1, 0]])
        torch.save(Data(x=torch.ones(4, 2), edge_index=edges, y=y), tmp_path / "graph.pt")
        return str(tmp_path / "graph.pt")

    assert load_graph(saved_with(3)).y.tolist() == [0, 1, 0, 3]
    with pytest.raises(ValueError, match="below the number of nodes, 4"):
        load_graph(saved_with(label))


def test_a_graph_that_claims_more_than_it_stores_is_refused(tmp_path):
    from torch_geometric.data import Data

    path, edges = tmp_path / "graph.pt", torch.tensor([[0], [1]])
    torch.save(Data(x=torch.ones(4, 2), edge_index=edges), path)
    assert load_graph(str(path)).x.shape == (4, 2)
    with zipfile.ZipFile(path) as stored, zipfile.ZipFile(tmp_path / "zip.pt", "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(ValueError, match="parts are larger than the file"):
        load_graph(str(tmp_path / "zip.pt"))
    torch.save(Data(x=torch.ones(1).expand(2**40, 2), edge_index=edges), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"of shape .* is not stored whole"):
        load_graph(str(path))


class Call:
    """Unpickling this calls a function."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("bomb", "words"),
    [
        (Call(bytearray, 2**24), "it names .* bytearray"),
        (Call(torch.FloatTensor, 2**22, 1), "it names torch FloatTensor"),
        (torch.zeros(1).expand(2**22, 1), "is not stored whole"),
    ],
)
def test_a_number_in_a_file_of_tensors_takes_no_memory(tmp_path, bomb, words):
    path = tmp_path / "checkpoint.pt"
    torch.save({"step": 1, "model": torch.ones(3)}, path)
    assert read_torch(path)["step"] == 1
    torch.save({"step": 1, "model": bomb}, path)
    assert path.stat().st_size < 4000
    assert len(torch.load(path, weights_only=True)["model"]) >= 2**22, "torch would read it"
    with pytest.raises(ValueError, match=words):
        read_torch(path)


def test_a_part_of_a_checkpoint_is_not_repeated_in_the_error(tmp_path):
    go_on(tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    deep = ["x" * 10]
    for _ in range(40):
        deep = [deep, deep]
    torch.save(state | {"step": deep}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="has no step to resume from") as refusal:
        go_on(tmp_path)
    assert len(str(refusal.value)) < 1000


def test_rows_with_other_names_each_do_not_make_a_large_table(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "two words", "n": 1}\n' * 2000)
    assert len(read_table(path)) == 2000
    names = json.dumps({f"name {number}": "two words" for number in range(4000)})
    path.write_text(names + "\n{}" * 5000)
    with pytest.raises(ValueError, match="5001 rows and 4000 names, most of which"):
        read_table(path, columns=["name 1"])


def test_a_part_of_an_archive_of_arrays_that_is_no_array_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "hello")
    with pytest.raises(ValueError, match="its parts are not arrays"):
        read_embeddings(path)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "has no step to resume from; got None"),
        (-5, "has no step to resume from; got -5"),
        (True, "has no step to resume from; got True"),
        ("3", "has no step to resume from; got '3'"),
        (10**9, r"has 1000000000 steps, 1 were requested; request more"),
    ],
)
def test_a_checkpoint_with_another_step_is_refused(tmp_path, step, message):
    go_on(tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    go_on(tmp_path)
    state = {name: part for name, part in state.items() if name != "step"}
    torch.save(state | ({} if step is None else {"step": step}), tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=message):
        go_on(tmp_path)


@pytest.mark.parametrize("processes", [None, "x", [1], 2.5, {}])
def test_a_run_of_so_many_processes_as_no_run_has_is_refused(tmp_path, processes):
    go_on(tmp_path)
    go_on(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": processes}))
    with pytest.raises(ValueError, match="contains another run"):
        go_on(tmp_path)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_half_precision_without_a_gpu_is_refused(device):
    with pytest.raises(ValueError, match="precision fp16 needs a GPU"):
        go_on(None, precision="fp16", device=device)


def test_the_gates_that_are_opened_to_try_the_suite_are_there():
    import mutate

    assert all(mutation.opened in mutate.opened(mutation) for mutation in mutate.MUTATIONS)


def test_damaged_files_are_read_or_refused_in_words_and_take_little_memory():
    script = Path(__file__).with_name("fuzz.py")
    paths = f"{Path(__file__).parents[1]}:{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, script, "--seconds", "0.2"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30, done.stderr[-2000:]
    assert all(int(row.split("|")[2]) > 0 for row in rows), "a reader was given nothing"
    assert done.returncode == 0, "\n".join(row for row in rows if not row.endswith("| "))

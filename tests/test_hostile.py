"""Files that want to run code, write elsewhere or break a reader: refused in words, and no more."""

import contextlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from ncl_multi import Features, TrainConfig, fit
from ncl_multi.codes.search import SparseIndex

pytest.importorskip("open_clip")
pytest.importorskip("torch_geometric")

from ncl_multi.adapters.clip.data import read_pairs
from ncl_multi.adapters.clip.load import load_towers
from ncl_multi.adapters.clip.model import NonNegClip
from ncl_multi.adapters.graph.data import load_graph
from ncl_multi.adapters.graph.model import GraphCL
from ncl_multi.adapters.sentence.data import read_examples
from ncl_multi.adapters.sentence.encoder import Encoder
from ncl_multi.adapters.sentence.model import NonNegEncoder
from ncl_multi.adapters.vision.model import NonNegVision
from ncl_multi.app import load_model

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


def go_on(folder: Path) -> None:
    cfg = TrainConfig(out=folder, device="cpu", steps=1)
    step = lambda model, batch: (model(batch).square().mean(), model(batch))  # noqa: E731
    fit(torch.nn.Linear(2, 2), step, [torch.ones(2, 2)], cfg)


BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
LOADERS = {
    "features": ("f.safetensors", lambda f: Features.load(f / "f.safetensors")),
    "index": ("i.safetensors", lambda f: SparseIndex.load(f / "i.safetensors")),
    "checkpoint": ("checkpoint.pt", go_on),
    "graph": ("graph.pt", lambda f: load_graph(str(f / "graph.pt"))),
    "csv": ("a.csv", lambda f: read_examples(f / "a.csv")),
    "jsonl": ("a.jsonl", lambda f: read_examples(f / "a.jsonl")),
    "captions": ("captions.csv", lambda f: read_pairs(str(f))),
    "tar": ("a.tar", lambda f: read_pairs(str(f))),
    "encoder": ("pytorch_model.bin", lambda f: Encoder.load(f)),
    "open_clip": ("w.pt", lambda f: load_towers(f"RN50:{f / 'w.pt'}")),
    "saved encoder": ("model.safetensors", lambda f: NonNegEncoder.from_pretrained(f)),
    "saved clip": ("model.safetensors", lambda f: NonNegClip.from_pretrained(f)),
    "saved vision": ("model.safetensors", lambda f: NonNegVision.from_pretrained(f)),
    "saved graph": ("model.safetensors", lambda f: GraphCL.from_pretrained(f)),
    "app": ("model.safetensors", load_model),
}


@pytest.mark.parametrize("bomb", [as_pickle, as_torch])
@pytest.mark.parametrize("loader", LOADERS)
def test_nothing_that_is_loaded_runs_code(loader, bomb, tmp_path):
    marker, folder = tmp_path / "ran", tmp_path / "folder"
    name, load = LOADERS[loader]
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(bomb(marker))
    config = {"checkpoint": json.loads(json.dumps(vars(TrainConfig(out=folder)), default=str))}
    config["checkpoint"] |= {"device": "cpu", "steps": 1}
    (folder / "config.json").write_text(json.dumps(config.get(loader, BERT | {"size": 8})))
    # transformers and open_clip have errors of their own; what counts is that nothing ran.
    with pytest.raises(Exception):  # noqa: B017, PT011
        load(folder)
    assert not marker.exists()
    pickle.loads(as_pickle(marker))
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


IMAGES = [f"{number}.png" for number in range(12)]


def good_files(folder: Path) -> dict[str, Path]:
    """One whole file for each reader."""
    z = csr_array(np.eye(6, 5, dtype=np.float32))
    about = {"model": "m", "classes": ["a", "b"]}
    features = Features(z, torch.arange(6) % 2, items=[f"item {i}" for i in range(6)], about=about)
    index = SparseIndex(5)
    index.add(range(6), z)
    files = {
        "features": features.save(folder / "f.safetensors"),
        "index": index.save(folder / "i.safetensors"),
        "csv": folder / "a.csv",
        "jsonl": folder / "a.jsonl",
        "txt": folder / "a.txt",
        "captions": folder / "pairs/captions.csv",
    }
    files["csv"].write_text('anchor,positive\n"a dog, here",one\ntwo,"three\nlines"\n')
    rows = ({"anchor": "a", "positive": "b"}, {"anchor": "ä", "positive": "\U0001f436"})
    files["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["txt"].write_text("A document of two sentences. This is the second one.\n\nÄnother one\n")
    files["captions"].parent.mkdir()
    files["captions"].write_text(
        "image,caption\n" + "".join(f'{name},"a dog, {name}"\n' for name in IMAGES)
    )
    for name in IMAGES:
        (folder / "pairs" / name).write_bytes(b"not looked at yet")
    return files


READERS = {
    "features": Features.load,
    "index": lambda path: SparseIndex.load(path).search(csr_array(np.eye(1, 5)), k=2),
    "csv": read_examples,
    "jsonl": read_examples,
    "txt": read_examples,
    "captions": lambda path: read_pairs(str(path.parent)),
}
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "cut", "repeat"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=6,
)


def changed(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for how, where, value in changes:
        at = int(where * len(content))
        if how == "set":
            content = content[:at] + value + content[at + len(value) :]
        elif how == "insert":
            content = content[:at] + value + content[at:]
        elif how == "cut":
            content = content[:at] + content[at + 3 * len(value) :]
        else:
            content = content[:at] + content[at : at + 40] * 2 + content[at + 40 :]
    return content


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return good_files(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("reader", READERS)
def test_a_whole_file_is_read(reader, good):
    READERS[reader](good[reader])


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=CHANGES)
def test_a_damaged_file_is_read_or_refused_in_words(reader, good, tmp_path, changes):
    whole = good[reader]
    other = tmp_path / whole.parent.name / whole.name
    other.parent.mkdir(exist_ok=True)
    for name in IMAGES:
        (other.parent / name).write_bytes(b"")
    other.write_bytes(changed(whole.read_bytes(), changes))
    with contextlib.suppress(*OURS):
        READERS[reader](other)

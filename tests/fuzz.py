"""Damaged files of every kind: each is read or refused in words, and takes little memory.

A whole file of each kind is changed at random, byte by byte, in the dtypes and shapes of its header
and in the values of its JSON, and read by a process of its own. What is raised must be a
`ValueError` or an `OSError`; memory may grow by 10 times the file and 100 MB. An input that breaks
this, or ends the process, is kept.

Usage:
    python tests/fuzz.py --seconds 300
    python tests/fuzz.py --seconds 10 --readers index tar
"""

import io
import json
import os
import random
import re
import resource
import shutil
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.sparse import csr_array, save_npz

OURS = (ValueError, OSError)
"""What a reader may raise: errors that say what is wrong with the file."""
IMAGES = [f"{number}.png" for number in range(12)]
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U16", "U8", "BOOL")
NUMBERS = (-1, 0, 1, 7, 255, 65_536, 2**31, 2**32 + 1, 2**40, 2**63, 10**30, 1.5, -0.0)


class Reader(NamedTuple):
    """A whole file, and what reads it."""

    whole: Path
    read: Callable[[Path], Any]


class Outcome(NamedTuple):
    """What became of the inputs of one reader; `kept` is one that broke the rules."""

    inputs: int
    read: int
    megabytes: float
    problem: str


def good_files(folder: Path) -> dict[str, Reader]:
    """One whole file for each reader."""
    import pyarrow as pa
    from pyarrow import parquet
    from test_hostile import hugging_face, two_towers
    from tiny_text import tiny_bert, tiny_tokenizer
    from torch_geometric.data import Data

    import ncl_multi as ncl
    from ncl_multi.adapters.clip.data import read_pairs
    from ncl_multi.adapters.graph.data import load_graph
    from ncl_multi.app import Desk
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.bulk.shards import read_codes
    from ncl_multi.codes.search import SparseIndex
    from ncl_multi.data.arrays import read_embeddings
    from ncl_multi.data.tables import read_table
    from ncl_multi.files import read_picture

    def search(path: Path) -> Any:
        return SparseIndex.load(path).search(csr_array(np.eye(1, 5)), k=2)

    folder.mkdir(parents=True, exist_ok=True)
    z = csr_array(np.eye(6, 5, dtype=np.float32))
    items = [f"item {row}" for row in range(6)]
    about = {"model": "m", "classes": ["a", "b"], "splits": {"train": 4, "test": 2}}
    features = ncl.Features(z, torch.arange(6) % 2, items, about)
    index = SparseIndex(5, names=["a", "b", "c", "d", "e"])
    index.add(range(6), z)
    texts = ["a dog, here", "two cats and a bird", "ein schöner Tag", "the last of these texts"]
    edges = [(n, (7 * n + 3) % 20) for n in range(20)]
    graph = Data(x=torch.ones(20, 2), edge_index=torch.tensor(edges).T, y=torch.arange(20) % 3)
    for name in ("pairs", "tars", "run"):
        (folder / name).mkdir(exist_ok=True)
    for name in IMAGES:
        (folder / "pairs" / name).write_bytes(b"not looked at yet")
    with tarfile.open(folder / "tars" / "a.tar", "w") as tar:
        for number in range(12):
            for kind, content in (("jpg", b"not looked at"), ("json", b'{"caption": "a dog"}')):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    write = {
        "a.csv": 'anchor,positive\n"a dog, here",one of it\ntwo words,"three\nlines"\n',
        "a.jsonl": "".join(json.dumps({"text": text, "n": 3}) + "\n" for text in texts),
        "a.txt": "A document of two sentences. This is the second one.\n\nÄnother one\n",
        "pairs/captions.csv": "image,caption\n" + "".join(f"{n},a dog\n" for n in IMAGES),
        "edges.csv": "source,target\n" + "".join(f"{a},{b}\n" for a, b in edges),
        "g.graphml": graphml(edges),
    }
    for name, content in write.items():
        (folder / name).write_text(content)
    torch.save(graph, folder / "graph.pt")
    save_npz(folder / "adjacency.npz", csr_array(np.eye(20, k=1)))
    np.save(folder / "x.npy", np.eye(6, 5))
    np.savez_compressed(folder / "x.npz", x=np.eye(6, 5))
    parquet.write_table(pa.table({"text": texts, "n": range(4)}), folder / "t.parquet")
    parquet.write_table(pa.table({"x": np.eye(4).tolist()}), folder / "x.parquet")
    for ending in ("png", "jpg", "gif", "tiff", "webp"):
        Image.effect_noise((24, 24), 50).convert("RGB").save(folder / f"p.{ending}")
    resume(folder / "run" / "checkpoint.pt")
    models: dict[str, Any] = {
        "graph model": ncl.NonNegGraph(8, in_dim=4, width=4),
        "vision model": ncl.NonNegVision("test_resnet", 8, hidden_dim=None),
        "sentence model": ncl.wrap(tiny_bert(), 8, processor=tiny_tokenizer()),
        "clip model": ncl.NonNegClip(two_towers(folder / "source"), 8),
        "siglip model": ncl.NonNegClip(hugging_face(folder), 8),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "features": ("f.safetensors", lambda path: ncl.Features.load(path).split_of()),
        "index": ("i.safetensors", search),
        "csv": ("a.csv", read_table),
        "jsonl": ("a.jsonl", read_table),
        "txt": ("a.txt", read_table),
        "parquet": ("t.parquet", read_table),
        "captions": ("pairs/captions.csv", lambda path: read_pairs(str(path.parent))),
        "tar": ("tars/a.tar", lambda path: read_pairs(str(path.parent))),
        "graph": ("graph.pt", lambda path: load_graph(str(path))),
        "edge list": ("edges.csv", lambda path: load_graph(str(path))),
        "graphml": ("g.graphml", lambda path: load_graph(str(path))),
        "adjacency": ("adjacency.npz", lambda path: load_graph(str(path))),
        "npy": ("x.npy", read_embeddings),
        "npz": ("x.npz", read_embeddings),
        "embeddings": ("x.parquet", read_embeddings),
        "png": ("p.png", read_picture),
        "jpeg": ("p.jpg", read_picture),
        "gif": ("p.gif", read_picture),
        "tiff": ("p.tiff", read_picture),
        "webp": ("p.webp", read_picture),
        "checkpoint": ("run/checkpoint.pt", resume),
        "run config": ("run/config.json", resume),
        "run log": ("run/train.jsonl", resume),
    }
    numbers = np.random.default_rng(0).random((40, 4))
    ncl.SparseCoder(dims=8, k=2, steps=1).fit(numbers).save(folder / "coder model")
    for name in (*models, "coder model"):
        kind = name.split()[0]
        weights = {"sentence": "head", "coder": "coder"}.get(kind, "model")
        for file in ("config.json", f"{weights}.safetensors"):
            readers[f"{kind} {file}"] = (f"{name}/{file}", lambda path: ncl.load(path.parent))
    for file in (
        "sentence model/encoder/config.json", "clip model/towers/open_clip_config.json",
        "clip model/towers/config.json", "clip model/towers/tokenizer_config.json",
        "clip model/towers/tokenizer.json", "siglip model/towers/config.json",
        "siglip model/towers/preprocessor_config.json", "siglip model/towers.safetensors",
    ):  # fmt: skip
        kind, _, part = file.partition(" model/")
        up = part.count("/")
        readers[f"{kind} {part}"] = (file, lambda path, up=up: ncl.load(path.parents[up]))
    for name, read in (("page", write_atlas), ("app", Desk)):
        features.save(folder / name / "features" / "f.safetensors")
        path = f"{name}/features/f.safetensors"
        readers[name] = (path, lambda path, read=read: read(path.parents[1]))
    shards(folder / "shards", z)
    for file in ("manifest.json", "codes-00000.parquet"):
        readers[f"shards {file}"] = (f"shards/{file}", lambda path: list(read_codes(path.parent)))
    resume(folder / "split run" / "config.json", shard=True)
    for file in (".metadata", "__0_0.distcp"):
        readers[f"split run {file}"] = (
            f"split run/checkpoints/2/{file}",
            lambda path: resume(path.parents[2] / "config.json", shard=True),
        )
    features.save(folder / "f.safetensors")
    index.save(folder / "i.safetensors")
    return {name: Reader(folder / path, read) for name, (path, read) in readers.items()}


def shards(folder: Path, z: Any) -> None:
    """One shard as ncl-encode writes it."""
    from ncl_multi.bulk.shards import Codes, claim, write_shard

    folder.mkdir()
    claim(folder, {"model": {}, "input": {"rows": 6, "shards": 1}, "options": {}})
    write_shard(folder, 0, Codes(np.arange(6), list("abcdef"), z), [], "model")


def graphml(edges: Sequence[tuple[int, int]]) -> str:
    """A graph as networkx writes it."""
    import networkx

    file = io.BytesIO()
    networkx.write_graphml(networkx.Graph(edges), file)
    return file.getvalue().decode()


def resume(path: Path, *, shard: bool = False) -> None:
    """A run of two steps that goes on where the folder of the file says."""
    from ncl_multi import StepObjective, TrainConfig, fit

    def step(model: Any, batch: Any) -> Any:
        return model(batch).square().mean(), model(batch)

    config = path.with_name("config.json")
    if config.exists():
        # The folder is a copy of the one where the run began.
        text = config.read_text(errors="replace")
        config.write_text(re.sub('"out": "[^"]*"', f'"out": "{path.parent}"', text))
    cfg = TrainConfig(out=path.parent, device="cpu", steps=2, shard=shard)
    fit(StepObjective(torch.nn.Linear(2, 2), step), [torch.ones(2, 2)] * 2, cfg)


def changed(content: bytes, draw: random.Random) -> bytes:
    """The content after a few changes of bytes, of a header, or of JSON."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        change = draw.choice((_bytes, _bytes, _dtype, _number, _json))
        content = change(content, draw)
    return content


def _bytes(content: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(content) + 1), draw.choice((1, 2, 4, 8, 40))
    value = draw.choice((draw.randbytes(length), b"\0" * length, b"\xff" * length, b'"', b"\n"))
    return draw.choice((
        content[:at] + value + content[at + len(value) :],
        content[:at] + value + content[at:],
        content[:at] + content[at + length :],
        content[:at] + content[at : at + length] * 2 + content[at + length :],
        content[:at],
    ))  # fmt: skip


def _dtype(content: bytes, draw: random.Random) -> bytes:
    """Another dtype, of the same length in letters, in the header of a safetensors file."""
    names = [name.encode() for name in DTYPES]
    places = [m for name in names for m in re.finditer(b'"%s"' % name, content[:4000])]
    if not places:
        return content
    place = draw.choice(places)
    others = [name for name in names if len(name) == len(place[0]) - 2]
    return content[: place.start() + 1] + draw.choice(others) + content[place.end() - 1 :]


def _number(content: bytes, draw: random.Random) -> bytes:
    """Another number in the place of one that is written in digits."""
    places = list(re.finditer(rb"-?\d+", content[:20_000]))
    if not places:
        return content
    place = draw.choice(places)
    return content[: place.start()] + str(draw.choice(NUMBERS)).encode() + content[place.end() :]


def _json(content: bytes, draw: random.Random) -> bytes:
    """Another value in the place of one in a JSON object."""
    try:
        whole = json.loads(content)
    except ValueError:
        return content
    parents = [whole]
    for parent in parents:
        if isinstance(parent, dict | list):
            parents += list(parent.values()) if isinstance(parent, dict) else parent
    parent = draw.choice([p for p in parents if isinstance(p, dict | list) and p] or [whole])
    values = (None, True, "", "x", [], {}, [1], {"a": 1}, *NUMBERS)
    if isinstance(parent, dict) and parent:
        key = draw.choice([*parent, "more"])
        parent[key] = draw.choice(values)
    elif isinstance(parent, list) and parent:
        parent[draw.randrange(len(parent))] = draw.choice(values)
    return json.dumps(whole).encode()


def fuzz(name: str, reader: Reader, seconds: float, seed: int, here: Path) -> Outcome:
    """Read changed files in a separate process for so long."""
    # Readers of a folder see a copy of it, in which one file is changed.
    folder = here / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    parts = reader.whole.relative_to(here / "whole").parts
    folder.mkdir() if len(parts) == 1 else shutil.copytree(here / "whole" / parts[0], folder)
    target, found = folder / Path(*parts[1:] or parts), here / "found.json"
    found.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            _read_changed(reader, target, seconds, random.Random(f"{name}{seed}"), found)
        except BaseException as error:
            found.write_text(json.dumps([0, 0, 0.0, f"the whole file: {error!r}"]))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    counts = json.loads(found.read_text()) if found.exists() else [0, 0, 0.0, ""]
    outcome = Outcome(*counts)
    if os.WIFSIGNALED(status):
        outcome = outcome._replace(problem=f"ended by signal {os.WTERMSIG(status)}")
    if outcome.problem:
        kept = Path(tempfile.gettempdir()) / f"fuzzed-{name}-{seed}".replace(" ", "-")
        shutil.copy(target, kept)
        outcome = outcome._replace(problem=f"{outcome.problem}; the input is {kept}")
    return outcome


def _read_changed(
    reader: Reader, target: Path, seconds: float, draw: random.Random, found: Path
) -> None:
    whole = reader.whole.read_bytes()
    siblings = {p: p.read_bytes() for p in target.parent.iterdir() if p.is_file() and p != target}
    inputs = read = 0
    most, problem = 0.0, ""
    target.write_bytes(whole)
    reader.read(target)  # What is imported late, and caches that are filled once.
    end = time.monotonic() + seconds
    while time.monotonic() < end and not problem:
        for path, content in siblings.items():
            path.write_bytes(content)
        content = changed(whole, draw)
        target.write_bytes(content)
        before = _peak_from_now()
        inputs += 1
        try:
            reader.read(target)
            read += 1
        except OURS:
            pass
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:200]
        taken = (_peak() - before) / 1024
        most = max(most, taken)
        if taken > 100 + 10 * len(content) / 2**20:
            problem = f"{taken:.0f} MB for {len(content)} bytes"
        found.write_text(json.dumps([inputs, read, most, problem]))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_from_now() -> int:
    """Forget the memory of earlier inputs, which would hide that of the next; only on Linux."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


@dataclass(frozen=True)
class Config:
    """Fuzz every reader."""

    seconds: float = 300
    """Time for each reader."""
    seed: int = 0
    """Where the changes start."""
    readers: tuple[str, ...] = ()
    """Only these; all by default."""


def main(cfg: Config) -> None:
    # A child that is forked from a process with threads would wait for them for ever.
    torch.set_num_threads(1)
    print("| reader | inputs | read | refused | most memory, MB |\n|---|---|---|---|---|")
    bad = False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = Path(folder)
        for name, reader in good_files(here / "whole").items():
            if cfg.readers and name not in cfg.readers:
                continue
            inputs, read, memory, problem = fuzz(name, reader, cfg.seconds, cfg.seed, here)
            refused = inputs - read
            print(
                f"| {name} | {inputs} | {read} | {refused} | {memory:.0f} | {problem}", flush=True
            )
            bad = bad or bool(problem)
    sys.exit(bad)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))

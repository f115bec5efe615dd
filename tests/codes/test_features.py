"""The Features file: what goes in comes out, and a damaged file says so."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from scipy.sparse import csr_array

from ncl_multi import Features
from ncl_multi.codes.features import FORMAT, join, to_csr

ABOUT = {"model": "m", "split": "test", "seed": 3, "classes": ["cat", "dog"]}


def codes(n=20, d=16, share=0.2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(n, d, generator=generator, dtype=torch.float64)
    return (z * (torch.rand(n, d, generator=generator) < share)).to(dtype)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_saved_is_loaded(tmp_path, share, dtype):
    z = codes(share=share, dtype=dtype)
    items = ["", "schön", "日本語\n", *map(str, range(17))]
    thumbnails = [bytes([i]) * i for i in range(20)]
    saved = Features(z, torch.arange(20) % 2, items, ABOUT, thumbnails)
    loaded = Features.load(saved.save(tmp_path / "deep" / "er" / "test.safetensors"))
    assert torch.equal(loaded.dense().double(), z.double())
    assert np.array_equal(loaded.sparse().toarray(), z.double().numpy())
    assert torch.equal(loaded.y, saved.y)
    assert (loaded.items, loaded.about, loaded.thumbnails) == (items, ABOUT, thumbnails)
    assert (len(loaded), loaded.dims) == (20, 16)


def test_sparse_codes_come_back_as_they_were(tmp_path):
    z = csr_array(codes(dtype=torch.float64).numpy())
    loaded = Features.load(Features(z).save(tmp_path / "z.safetensors"))
    assert (loaded.z != z).nnz == 0
    assert loaded.z.dtype == np.float64
    counts = csr_array([[0, 2], [1, 0]])
    assert (Features.load(Features(counts).save(tmp_path / "c")).z != counts).nnz == 0
    assert loaded.y is loaded.items is loaded.thumbnails is None


def test_unit_rows_leave_zeros_out():
    z = to_csr(codes())
    lengths = np.sqrt((z.toarray() ** 2).sum(axis=1))
    assert ((np.abs(lengths - 1) < 1e-6) | (lengths == 0)).all()
    assert z.nnz == torch.count_nonzero(codes()).item()


def test_many_codes_take_little_room_and_stay_on_disk(tmp_path):
    n, k, d = 50_000, 32, 4096
    columns = np.arange(k) * (d // k) + np.random.default_rng(0).integers(0, d // k, (n, k))
    # Row pointers of 64 bits are what scipy often makes.
    z = csr_array((np.ones(n * k, np.float32), columns.ravel(), np.arange(0, n * k + 1, k)), (n, d))
    path = Features(z).save(tmp_path / "many.safetensors")
    assert path.stat().st_size < 300 * n
    loaded = Features.load(path)
    assert loaded.z.data.base is not None
    assert loaded.z.indices.base is not None
    assert str(path) in Path("/proc/self/maps").read_text()


def test_the_old_file_stays_whole_when_the_disk_is_full(tmp_path):
    path = Features(codes(), about={"old": True}).save(tmp_path / "z.safetensors")
    script = f"""
import resource, torch
from ncl_multi import Features
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
Features(torch.randn(1000, 100)).save({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert Features.load(path).about == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["z.safetensors"]


def test_no_file_and_no_features_file_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="no features file"):
        Features.load(tmp_path / "none.safetensors")
    text = tmp_path / "text.safetensors"
    text.write_text("hello")
    with pytest.raises(ValueError, match="cut short"):
        Features.load(text)
    with pytest.raises(ValueError, match="is a folder"):
        Features.load(tmp_path)
    save_file({"z": codes()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=f"another format: expected {FORMAT}, got None"):
        Features.load(tmp_path / "other.safetensors")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_never_anything_else(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "whole.safetensors"
    if not path.exists():
        Features(codes(), torch.arange(20), [str(i) for i in range(20)], ABOUT).save(path)
    content = bytearray(path.read_bytes())
    del content[data.draw(st.integers(1, len(content))) :]
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(content)
    try:
        loaded = Features.load(damaged)
    except ValueError:
        return
    assert len(loaded) == loaded.z.shape[0]


PARTS = ["data", "indices", "indptr", "shape", "y", "items", "items.ends"]


@settings(max_examples=100, deadline=None)
@given(
    part=st.sampled_from(PARTS),
    dtype=st.sampled_from([torch.int64, torch.float32, torch.uint8, torch.bfloat16, torch.bool]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    fill=st.integers(-3, 300),
    about=st.sampled_from([json.dumps(ABOUT), "[]", "{", "3"]),
    drop=st.booleans(),
)
def test_a_file_with_wrong_parts_is_refused_or_read(
    tmp_path_factory, part, dtype, shape, fill, about, drop
):
    z = csr_array(codes(5, 4, 0.5).numpy())
    tensors = {
        "data": torch.tensor(z.data),
        "indices": torch.tensor(z.indices),
        "indptr": torch.tensor(z.indptr),
        "shape": torch.tensor(z.shape),
        "y": torch.arange(5),
        "items": torch.zeros(5, dtype=torch.uint8),
        "items.ends": torch.arange(1, 6),
    }
    tensors[part] = torch.full(shape, fill).to(dtype)
    if drop:
        del tensors[part]
    path = tmp_path_factory.getbasetemp() / "wrong.safetensors"
    save_file(tensors, path, {"format": FORMAT, "about": about})
    try:
        loaded = Features.load(path)
    except ValueError:
        return
    assert isinstance(loaded.about, dict)
    assert loaded.dense().shape == (len(loaded), loaded.dims)


NNZ = csr_array(codes(5, 4, 0.5).numpy()).nnz


def file_of(path, **changes):
    """A file of five sparse codes with items, with parts changed, or dropped for None."""
    z = csr_array(codes(5, 4, 0.5).numpy())
    tensors = {
        "data": torch.tensor(z.data),
        "indices": torch.tensor(z.indices),
        "indptr": torch.tensor(z.indptr),
        "shape": torch.tensor(z.shape),
        "y": torch.arange(5),
        "items": torch.full((5,), ord("a"), dtype=torch.uint8),
        "items.ends": torch.arange(1, 6),
    }
    tensors |= {name.replace("_", "."): part for name, part in changes.items()}
    saved = {name: part for name, part in tensors.items() if part is not None}
    save_file(saved, path, {"format": FORMAT, "about": "{}"})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items_ends": torch.tensor([5, 0, 5, 0, 5])}, "items must follow each other"),
        ({"items_ends": torch.tensor([-1, 2, 3, 4, 5])}, "items must follow each other"),
        ({"items_ends": torch.tensor([1, 2, 3, 4, 2**60])}, "items must follow each other"),
        ({"items_ends": torch.tensor([1, 2, 3, 4, 4])}, "items must follow each other"),
        ({"items_ends": None}, "items.ends"),
        ({"items_ends": torch.arange(1.0, 6.0)}, "items.ends must be I64; got F32"),
        ({"items": torch.full((5,), 255, dtype=torch.uint8)}, "decode"),
        ({"shape": torch.tensor([5, 2**50])}, "1 to 4194304 columns"),
        ({"shape": torch.tensor([2**50, 4])}, "shape must be 5 rows"),
        ({"shape": torch.tensor([5, 0])}, "1 to 4194304 columns"),
        ({"shape": torch.tensor([5, -4])}, "1 to 4194304 columns"),
        ({"shape": torch.tensor([5])}, "shape must be 5 rows"),
        ({"indptr": torch.zeros(0, dtype=torch.int32)}, "shape must be"),
        ({"indices": torch.full((9,), 9, dtype=torch.int32)}, "damaged"),
        ({"indices": torch.full((NNZ,), 4, dtype=torch.int32)}, "damaged"),
        ({"indices": torch.full((NNZ,), -1, dtype=torch.int32)}, "damaged"),
        ({"indptr": torch.tensor([0, NNZ, 0, NNZ, 0, NNZ], dtype=torch.int32)}, "damaged"),
        ({"y": torch.zeros(5, 1, 1)}, "y must have 1 or 2 axes"),
        ({"z": torch.zeros(0, 2**50)}, "1 to 4194304 columns"),
        ({"z": torch.zeros(2**50, 0)}, "1 to 4194304 columns"),
        ({"other": torch.zeros(1)}, "contains 'other'"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_words(tmp_path, changes, message):
    assert Features.load(file_of(tmp_path / "f.safetensors")).items == ["a"] * 5
    with pytest.raises(ValueError, match=message) as error:
        Features.load(file_of(tmp_path / "f.safetensors", **changes))
    assert "f.safetensors" in str(error.value)


def test_memory_stays_within_ten_times_the_file_and_100_megabytes(tmp_path):
    n = 200_000
    shape = {"shape": torch.tensor([n, 4]), "indptr": torch.zeros(n + 1, dtype=torch.int32)}
    none = {"data": torch.zeros(0), "indices": torch.zeros(0, dtype=torch.int32)}
    short = {"items": torch.full((2 * n,), 97, dtype=torch.uint8)}
    short["items_ends"] = torch.arange(2, 2 * n + 1, 2)
    # Each second item would be a copy of all bytes: 2 GB.
    bomb = {"items": short["items"][:20_000], "items_ends": torch.tensor([20_000, 0] * (n // 2))}
    for items, loads in ((short, True), (bomb, False)):
        parts = shape | none | items | {"y": None}
        path = file_of(tmp_path / "f.safetensors", **parts)
        script = f"""
import resource
from ncl_multi import Features
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    kept = Features.load({str(path)!r})
    print(True)
except ValueError:
    print(False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stdout.split()[0] == str(loads), done.stderr
        assert int(done.stdout.split()[1]) * 1024 < 10 * path.stat().st_size + 100e6


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = Features(codes(), about={"old": True}).save(tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match="may take 4194304 bytes"):
        Features(codes(), about={"classes": ["\\" * 2**22]}).save(path)
    assert Features.load(path).about == {"old": True}
    nearly = {"text": '"' * (2**20 - 100)}
    assert Features.load(Features(codes(), about=nearly).save(path)).about == nearly


def test_bad_features_are_refused_in_words():
    for z in (torch.randn(3), torch.randn(3, 2, 2)):
        with pytest.raises(ValueError, match="z must have shape"):
            Features(z)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            Features(torch.tensor([[1.0, bad]]))
        with pytest.raises(ValueError, match="NaN or infinity"):
            Features(csr_array([[1.0, bad]]))
    with pytest.raises(ValueError, match="y must have one entry per row"):
        Features(codes(), y=torch.arange(3))
    with pytest.raises(ValueError, match="items must have one entry per row"):
        Features(codes(), items=["a"])


@pytest.mark.parametrize("name", ["activation", "output", "side", "split"])
def test_what_features_are_is_said_in_texts(name):
    for value in (3, ["a"], {"a": 1}):
        with pytest.raises(ValueError, match=f"{name} must be a text"):
            Features(torch.eye(3), about={name: value})


def test_a_short_line_says_what_features_are():
    items = [f"a long text number {row}" for row in range(1000)]
    about = {"data": "mine.csv", "split": "train", "output": "head"}
    features = Features(torch.eye(1000), torch.arange(1000), items, about)
    description = (
        "1000 x 1000 torch.float32, y, items, data='mine.csv', split='train', output='head'"
    )
    assert repr(features) == f"Features({description})"


def test_splits_are_joined_marked_and_taken_together(tmp_path):
    parts = {
        "train": Features(torch.eye(4), torch.arange(4), list("abcd"), {"data": "d"}),
        "test": Features(torch.eye(4)[:2], torch.arange(2), list("ef")),
    }
    both = Features.load(join(parts).save(tmp_path / "all.safetensors"))
    assert both.items == list("abcdef")
    assert both.y.tolist() == [0, 1, 2, 3, 0, 1]
    assert both.split_of() == ["train"] * 4 + ["test"] * 2
    subset = both.take([0, 3, 5])
    assert (subset.items, subset.split_of()) == (list("adf"), ["train", "train", "test"])
    assert subset.y.tolist() == [0, 3, 1]
    for splits in ({"train": 7}, {"train": -1, "test": 7}, {"train": "6"}, [6], {"train": True}):
        with pytest.raises(ValueError, match="splits must"):
            Features(both.z, about={"splits": splits}).split_of()

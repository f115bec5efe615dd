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
from ncl_multi.codes.features import FORMAT, to_csr

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
    kept = Features(z, torch.arange(20) % 2, items, ABOUT, thumbnails)
    found = Features.load(kept.save(tmp_path / "deep" / "er" / "test.safetensors"))
    assert torch.equal(found.dense().double(), z.double())
    assert np.array_equal(found.sparse().toarray(), z.double().numpy())
    assert torch.equal(found.y, kept.y)
    assert (found.items, found.about, found.thumbnails) == (items, ABOUT, thumbnails)
    assert (len(found), found.dims) == (20, 16)


def test_sparse_codes_come_back_as_they_were(tmp_path):
    z = csr_array(codes(dtype=torch.float64).numpy())
    found = Features.load(Features(z).save(tmp_path / "z.safetensors"))
    assert (found.z != z).nnz == 0
    assert found.z.dtype == np.float64
    counts = csr_array([[0, 2], [1, 0]])
    assert (Features.load(Features(counts).save(tmp_path / "c")).z != counts).nnz == 0
    assert found.y is found.items is found.thumbnails is None


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
    found = Features.load(path)
    assert found.z.data.base is not None
    assert found.z.indices.base is not None
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
    with pytest.raises(ValueError, match="features file"):
        Features.load(tmp_path)
    save_file({"z": codes()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=f"expected format {FORMAT}, got None"):
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
        found = Features.load(damaged)
    except ValueError:
        return
    assert len(found) == found.z.shape[0]


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
        found = Features.load(path)
    except ValueError:
        return
    assert isinstance(found.about, dict)
    assert found.dense().shape == (len(found), found.dims)


def test_bad_features_are_refused_in_words():
    for z in (torch.randn(3), torch.randn(3, 2, 2)):
        with pytest.raises(ValueError, match="z must have shape"):
            Features(z)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            Features(torch.tensor([[1.0, bad]]))
        with pytest.raises(ValueError, match="NaN or infinity"):
            Features(csr_array([[1.0, bad]]))
    with pytest.raises(ValueError, match="y must have one entry a row"):
        Features(codes(), y=torch.arange(3))
    with pytest.raises(ValueError, match="items must have one entry a row"):
        Features(codes(), items=["a"])

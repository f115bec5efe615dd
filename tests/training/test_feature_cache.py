"""Features are computed once, shard by shard, and never taken for others."""

import pytest
import torch

from ncl_multi.training import feature_cache
from ncl_multi.training.feature_cache import cached_shards

ABOUT = {"model": "tiny", "weights": "abc", "data": "xyz"}


@pytest.fixture
def shards_of_four(monkeypatch):
    monkeypatch.setattr(feature_cache, "_ROWS", 4)


def counting(calls, fails_at=None):
    def compute(rows, done):
        if fails_at in rows:
            raise KeyboardInterrupt
        calls.append(list(rows))
        done(len(rows))
        rows_kept = [row for row in rows if row != 5]
        return torch.tensor([[float(row), 1.0] for row in rows_kept]), rows_kept

    return compute


def test_a_stopped_run_resumes_with_the_next_shard_and_a_finished_one_reads(
    tmp_path, shards_of_four
):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        cached_shards(tmp_path, "rows", 10, ABOUT, counting(calls, fails_at=8))
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(2):
        h, rows_kept = cached_shards(tmp_path, "rows", 10, ABOUT, counting(calls))
        assert rows_kept == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert h[:, 0].tolist() == rows_kept
    assert calls[2:] == [[8, 9]]


def test_other_weights_are_another_folder(tmp_path):
    calls = []
    for weights in ("abc", "abd"):
        cached_shards(tmp_path, "rows", 3, ABOUT | {"weights": weights}, counting(calls))
    assert len(calls) == 2
    first, second = tmp_path.glob("*/*.safetensors")
    content = [first.read_bytes(), second.read_bytes()]
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    with pytest.raises(ValueError, match=r"made with another weights.*Delete the folder"):
        cached_shards(tmp_path, "rows", 3, ABOUT, counting(calls))


def test_a_shard_that_is_cut_short_or_has_other_rows_is_refused(tmp_path, shards_of_four):
    cached_shards(tmp_path, "rows", 8, ABOUT, counting([]))
    first, second = sorted(tmp_path.glob("*/*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="has other rows than"):
        cached_shards(tmp_path, "rows", 8, ABOUT, counting([]))
    first.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="Delete it to have it computed again"):
        cached_shards(tmp_path, "rows", 8, ABOUT, counting([]))


def test_features_that_are_not_numbers_are_not_kept(tmp_path):
    def compute(rows, done):
        return torch.full((len(rows), 2), torch.nan), list(rows)

    with pytest.raises(ValueError, match="NaN or infinity"):
        cached_shards(tmp_path, "rows", 3, ABOUT, compute)
    assert not list(tmp_path.rglob("*.safetensors"))

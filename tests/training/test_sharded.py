"""Weights split over processes train as those of one process do, and resume on any number."""

import io
import json
import pickle
import tracemalloc
from dataclasses import replace

import pytest
import torch
from processes import run_together
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from ncl_multi import NonNegHead, StepObjective, TrainConfig, fit, info_nce
from ncl_multi.distributed import rank, world_size
from ncl_multi.training import sharded

pytest.importorskip("accelerate")
ROWS = torch.randn(80, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Tower(nn.Module):
    """Layers in a list, and a head."""

    def __init__(self):
        super().__init__()
        # Processes that start apart are to train what the first one starts with.
        torch.manual_seed(rank())
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = NonNegHead(6, 15, hidden_dim=7, density=0.3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x))


def step(model, batch):
    (x,) = batch
    za, zb = model(torch.cat([x, x * 1.1 + 0.1])).chunk(2)
    return info_nce(za, zb, distributed=True), za


def config(out, **options):
    return TrainConfig(
        out=out, batch_size=20 // world_size(), log_every=1, clip_grad=0.5, accumulate=2,
        **{"steps": 8, "device": "cpu", "checkpoint_every": 4, "shard": True} | options,
    )  # fmt: skip


def trained(cfg, step=step):
    data = DataLoader(TensorDataset(ROWS), cfg.batch_size, shuffle=True, drop_last=True)
    return fit(StepObjective(Tower().double(), step), data, cfg).model


def interrupted(cfg):
    """Stop a run in its sixth step, after the checkpoint of the fourth."""
    left = iter(range(5))

    def first_steps(model, batch):
        if next(left, None) is None:
            raise InterruptedError
        return step(model, batch)

    with pytest.raises(InterruptedError):
        trained(cfg, first_steps)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "train.jsonl").read_text().splitlines()]


def worker(folder):
    trained(config(folder / "ddp", shard=False))
    # So that each layer is gathered alone, as in a large model.
    sharded._LEAST_WEIGHTS = 40
    model = trained(config(folder / "sharded"))
    torch.save(model.state_dict(), folder / f"sharded{rank()}.pt")
    interrupted(config(folder / "half"))
    parts = sharded.shard(StepObjective(Tower().double(), step), torch.device("cpu"), 40)
    shares = [p.to_local().numel() for p in parts.parameters() if isinstance(p, DTensor)]
    torch.save(torch.tensor(shares), folder / f"shares{rank()}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    run_together(worker, 2, folder)
    return folder


def test_two_processes_have_the_losses_of_ddp(two):
    assert losses(two / "sharded") == pytest.approx(losses(two / "ddp"), rel=1e-9)
    assert len(losses(two / "sharded")) == 8


def test_each_process_keeps_half_of_every_layer(two):
    shares = [torch.load(two / f"shares{i}.pt") for i in range(2)]
    whole = [p.numel() for p in Tower().parameters()]
    assert (shares[0] + shares[1]).tolist() == whole
    assert max(shares[0].sum(), shares[1].sum()) < 0.6 * sum(whole)


def test_the_model_comes_back_whole_on_all_processes(two):
    first, second = (torch.load(two / f"sharded{i}.pt") for i in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    plain = Tower()
    assert not any(isinstance(p, DTensor) for p in first.values())
    plain.load_state_dict(first)
    ddp = torch.load(two / "ddp" / "checkpoint.pt", weights_only=True)["model"]
    for name, value in first.items():
        torch.testing.assert_close(value, ddp[f"model.{name}"], rtol=1e-9, atol=1e-9)


def test_a_checkpoint_of_two_processes_resumes_on_one(two, capsys):
    model = trained(config(two / "half"))
    assert "from step 4" in capsys.readouterr().err
    assert losses(two / "half") == pytest.approx(losses(two / "sharded"), rel=1e-9)
    wanted = torch.load(two / "sharded0.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-9)
    assert [p.name for p in (two / "half" / "checkpoints").iterdir()] == ["8"]


def test_alone_it_trains_as_without(tmp_path):
    one, other = (trained(config(tmp_path / str(s), shard=s)) for s in (True, False))
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_another_batch_of_all_processes_is_another_run(two):
    cfg = config(two / "ddp", shard=False)
    with pytest.raises(ValueError, match=r"another run.*batch_size.*20 there, 10 here"):
        trained(replace(cfg, batch_size=10))


def test_metadata_that_names_code_is_refused(tmp_path):
    trained(config(tmp_path, steps=4))
    (tmp_path / "checkpoints" / "4" / ".metadata").write_bytes(pickle.dumps(len))
    with pytest.raises(ValueError, match=r"cannot be read.*its metadata names builtins.len"):
        trained(config(tmp_path))


def test_metadata_that_changes_a_class_is_refused(tmp_path):
    from torch.distributed.checkpoint.metadata import Metadata

    # Metadata.values = torch.Size: no entry would be looked at any more, in the whole process.
    attack = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    attack += b"N}U\x06valuesctorch\nSize\ns\x86b."
    trained(config(tmp_path, steps=4))
    (tmp_path / "checkpoints" / "4" / ".metadata").write_bytes(attack)
    with pytest.raises(ValueError, match=r"cannot be read.*its metadata changes a class"):
        trained(config(tmp_path))
    assert not hasattr(Metadata, "values")
    pickle.loads(attack)
    assert Metadata.values is torch.Size, "the attack would have worked"
    del Metadata.values


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x05\x96" + (2**30).to_bytes(8, "little") + b".",  # a bytearray of this length
        b"\x80\x05\x8e" + (2**50).to_bytes(8, "little") + b".",  # bytes of this length
        b"\x80\x05e.", b"\x80\x05h\x07.", b"\x80\x05NQ.", b"",
    ],
)  # fmt: skip
def test_metadata_that_is_damaged_is_refused_in_words(tmp_path, attack):
    trained(config(tmp_path, steps=4))
    (tmp_path / "checkpoints" / "4" / ".metadata").write_bytes(attack)
    tracemalloc.start()
    with pytest.raises(ValueError, match="cannot be read"):
        trained(config(tmp_path))
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 2**28


def test_a_share_that_takes_memory_for_a_number_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return bytearray, (2**20,)

    trained(config(tmp_path, steps=4))
    folder = tmp_path / "checkpoints" / "4"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, item = next(iter(metadata.storage_data.items()))
    packed = io.BytesIO()
    torch.save(Bomb(), packed)
    (folder / "bomb").write_bytes(packed.getvalue())
    metadata.storage_data[index] = replace(
        item, relative_path="bomb", offset=0, length=len(packed.getvalue())
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"does not fit this model: it names .*bytearray"):
        trained(config(tmp_path))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = sharded.ShardedRunFolder(config(None), True, None)
    model = Tower()
    with torch.no_grad():
        model.layers[1].weight[2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or infinity after step 2 \(layers.1.weight\)"):
        run.save({"model": model}, 3)


def test_what_does_not_go_together_is_refused():
    for options in ({"ema": 0.9}, {"compile": True}, {"precision": "fp16"}):
        with pytest.raises(ValueError, match="shard does not work with ema, compile"):
            TrainConfig(shard=True, **options)

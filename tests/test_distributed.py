"""Two real processes do what one does. They are started once; every test reads what they left."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from processes import run_together
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ncl_multi import Health, HealthWarning, NonNegHead, gather, info_nce, spectral
from ncl_multi.distributed import all_reduce_sum, rank, world_size

LOSSES = {
    "clip": lambda a, b: info_nce(a, b, temperature=0.3),
    "simclr": lambda a, b: info_nce(a, b, within_view=True, tile=5),
    "spectral": spectral,
}


def rows(n=16, d=6):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def network():
    torch.manual_seed(0)
    head = NonNegHead(5, 12, hidden_dim=8, density=0.3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), head).double()


def alone_or_together(model, x, loss, accumulate=1):
    """Gradients, then every buffer, after micro-batches that are split between the processes."""
    wrapped = DistributedDataParallel(model) if world_size() > 1 else model
    chunks = x.chunk(accumulate)
    for index, chunk in enumerate(chunks):
        mine = chunk.chunk(world_size())[rank()]
        last = index == len(chunks) - 1
        with nullcontext() if world_size() == 1 or last else wrapped.no_sync():
            za, zb = wrapped(torch.cat([mine, mine * 1.1 + 0.1])).chunk(2)
            loss(gather(za), gather(zb)).backward()
    results = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return results | dict(model.named_buffers())


def everything():
    """What both sides compute."""
    results = {name: alone_or_together(network(), rows(), loss) for name, loss in LOSSES.items()}
    results["accumulated"] = alone_or_together(network(), rows(), LOSSES["clip"], accumulate=2)
    plain = nn.Sequential(NonNegHead(6, 4, batch_norm=False)).double()
    plain[0].out.load_state_dict(nn.Linear(6, 4).double().state_dict() | seeded_linear())
    results["first batch"] = alone_or_together(plain, rows() + 9, LOSSES["spectral"])
    return results


def seeded_linear():
    generator = torch.Generator().manual_seed(5)
    return {
        "weight": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "bias": torch.randn(4, generator=generator, dtype=torch.float64),
    }


def trained(out: Path, batch_size: int):
    """Final weights of a short run of `fit`, in doubles."""
    from ncl_multi import StepObjective, TrainConfig, fit

    def step(model, batch):
        (x,) = batch
        za, zb = model(torch.cat([x, x * 1.1 + 0.1])).chunk(2)
        return info_nce(gather(za), gather(zb)), za

    data = DataLoader(TensorDataset(rows(80)), batch_size, shuffle=True, drop_last=True)
    cfg = TrainConfig(out=out, steps=7, accumulate=3, ema=0.5, clip_grad=0.1, device="cpu")
    return fit(StepObjective(network(), step), data, cfg).model.state_dict()


def health_of(z):
    health = Health()
    mine = z.chunk(world_size())[rank()]
    for _ in range(3):
        health.update(torch.tensor(2.0), mine)
    return health.report()


def codes():
    """Dimensions that fire on rank 0, on rank 1, on both and never; and an empty row."""
    z = torch.zeros(8, 4)
    z[1:4, 0] = 1
    z[4:, 1] = 1
    z[:, 2] = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0])
    return z


def worker(folder: str) -> None:
    results = everything()
    x = torch.full((2, 3), float(rank()), requires_grad=True)
    (gather(x) * torch.arange(4.0)[:, None]).sum().backward()
    y = torch.tensor(float(rank() + 1), requires_grad=True)
    all_reduce_sum(y).square().backward()
    results["gathered"] = {"rows": gather(x), "grad": x.grad, "total.grad": y.grad}
    results["health"] = {k: torch.tensor(v) for k, v in health_of(codes()).items()}
    results["fit"] = trained(Path(folder) / "run", batch_size=10)
    # The same config, so it resumes: nothing to do.
    trained(Path(folder) / "run", batch_size=9)
    results["again"] = {"ran": torch.tensor(True)}
    torch.save(results, f"{folder}/{rank()}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_together(worker, 2, str(folder))
    return [torch.load(folder / f"{i}.pt", weights_only=True) for i in range(2)], folder


@pytest.mark.parametrize("case", [*LOSSES, "accumulated", "first batch"])
def test_gradients_and_statistics_are_those_of_one_process(two, case):
    for results in two[0]:
        for name, expected in everything()[case].items():
            torch.testing.assert_close(results[case][name], expected, rtol=1e-12, atol=1e-12)


def test_gather_keeps_the_order_of_ranks_and_adds_up_gradients(two):
    for number, results in enumerate(two[0]):
        got = results["gathered"]
        assert got["rows"].tolist() == [[0] * 3, [0] * 3, [1] * 3, [1] * 3]
        weights = [2.0 * number, 2.0 * number + 1]
        assert got["grad"].tolist() == [[2 * w] * 3 for w in weights]
        assert got["total.grad"] == 12


def test_health_speaks_of_all_rows(two):
    with pytest.warns(HealthWarning, match="no active dimension"):
        expected = health_of(codes())
    assert expected["alive"] == 3 / 4
    assert expected["empty_rows"] == pytest.approx(1 / 8)
    for results in two[0]:
        assert {name: x.item() for name, x in results["health"].items()} == pytest.approx(expected)


def test_fit_ends_with_the_weights_of_one_process(two, tmp_path):
    alone = trained(tmp_path / "run", batch_size=20)
    for results in two[0]:
        for name, expected in alone.items():
            torch.testing.assert_close(results["fit"][name], expected, rtol=1e-10, atol=1e-10)


def test_one_process_writes_the_run_folder(two):
    results, folder = two
    assert all(f["again"]["ran"] for f in results)
    lines = (folder / "run" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [7]
    assert sorted(p.name for p in (folder / "run").iterdir()) == [
        ".lock", "checkpoint.pt", "config.json", "train.jsonl",
    ]  # fmt: skip


def test_alone_gather_is_the_identity():
    z = torch.randn(3, 2)
    assert gather(z) is z
    assert all_reduce_sum(z) is z
    assert (world_size(), rank()) == (1, 0)

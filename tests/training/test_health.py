"""Health: counts on codes whose answer needs no computing, and words when training dies."""

import math
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ncl_multi import Health, HealthWarning


def fed(loss, z, steps=1):
    health = Health()
    for _ in range(steps):
        health.update(torch.tensor(loss), z)
    return health


def test_counts_are_those_one_can_see():
    z = torch.zeros(4, 10)
    z[:2, 0] = z[0, 3] = z[3, 9] = 2.0
    z[3, 1] = 1e-6
    with pytest.warns(HealthWarning, match="25% of rows have no active dimension"):
        figures = fed(0.5, z, steps=3).report()
    assert figures == pytest.approx({"loss": 0.5, "active": 1.0, "alive": 0.3, "empty_rows": 0.25})


def test_size_of_the_codes_does_not_matter():
    z = torch.rand(6, 8) * (torch.rand(6, 8) < 0.7) + torch.eye(6, 8)
    assert fed(1.0, z).report() == pytest.approx(fed(1.0, z * 1e-8).report())


def test_a_report_starts_anew():
    health = fed(0.5, torch.eye(4), steps=2)
    health.report()
    health.update(torch.tensor(0.7), torch.ones(4, 4))
    assert health.report() == pytest.approx(
        {"loss": 0.7, "active": 4.0, "alive": 1.0, "empty_rows": 0.0}
    )


@pytest.mark.parametrize("chance", [math.log(32), math.log(63)])
def test_collapse_is_said_once(chance):
    health = fed(chance, torch.ones(32, 4), steps=10)
    assert health.report()["loss"] == pytest.approx(chance)  # Too early to tell.
    for _ in range(10):
        health.update(torch.tensor(chance), torch.ones(32, 4))
    with pytest.warns(HealthWarning, match="stays at chance, .* for 32 rows.*batch_norm=True"):
        health.report()
    for _ in range(30):
        health.update(torch.tensor(chance), torch.ones(32, 4))
    health.report()


def test_a_loss_that_moves_is_no_collapse():
    for loss in (math.log(32) - 0.01, 1.0):
        fed(loss, torch.ones(32, 4), steps=40).report()


def test_dead_dimensions_are_said_even_if_reports_are_short():
    z = torch.zeros(100, 10)
    z[:, :4] = 1
    health = Health()
    for _ in range(9):
        health.update(torch.tensor(1.0), z)
        assert health.report()["alive"] == pytest.approx(0.4)
    health.update(torch.tensor(1.0), z)
    with pytest.warns(HealthWarning, match="60% of dimensions never fired in 1000 rows.*density"):
        health.report()


def test_dimensions_that_take_turns_are_not_dead():
    health = Health()
    for step in range(20):
        z = torch.zeros(100, 10)
        z[:, step % 10] = 1
        health.update(torch.tensor(1.0), z)
        health.report()


def test_a_loss_that_is_no_number_is_said():
    with pytest.warns(HealthWarning, match="the loss is nan: lower the learning rate"):
        assert math.isnan(fed(float("nan"), torch.ones(4, 4)).report()["loss"])


def test_each_cause_is_said_once():
    health = Health()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            health.update(torch.tensor(1.0), torch.zeros(4, 4))
            health.report()
    assert [w.category for w in said] == [HealthWarning]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.devices = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        self.devices |= {x.device.type for x in (out,) if isinstance(x, torch.Tensor)}
        return out


def test_a_step_neither_reads_the_device_nor_copies_to_it():
    with FakeTensorMode():
        health, z, loss = Health(), torch.empty(8, 4, device="cuda"), torch.empty((), device="cuda")
        with Operations() as seen:
            health.update(loss, z)
            health.update(loss, z.half())
    assert seen.devices == {"cuda"}
    assert not any("_local_scalar_dense" in name or "lift" in name for name in seen.names)


def test_nothing_to_report_is_an_error():
    with pytest.raises(ValueError, match="call update"):
        Health().report()

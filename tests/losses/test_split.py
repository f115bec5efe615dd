"""Processes that split a loss get the value and the gradient of one with the whole batch."""

import os
import re
import time
from itertools import product

import pytest
import torch
from processes import START, environments, join, run_together
from torch import nn
from torch.multiprocessing import get_context
from torch.nn.parallel import DistributedDataParallel

from ncl_multi.distributed import rank, world_size
from ncl_multi.losses import (
    InfoNCE,
    Spectral,
    correlation_loss,
    imitation,
    imitation_and_contrast,
    info_nce,
    normalize_rows,
    reconstruction_loss,
    spectral,
)

# Rows of each process, by how many there are: uneven, and more than a tile of 4 has.
COUNTS = {2: [9, 14], 4: [3, 8, 2, 10]}
GROUPS = torch.arange(23) % 15


class Towers(nn.Module):
    """Two views of each row, some rows empty, and a temperature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(6, 7).double(), nn.Linear(6, 7).double()
        self.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x):
        return self.left(x).relu(), self.right(x + 0.1).relu(), self.temperature * 1.0


def own(x):
    return x if world_size() == 1 else x.split(COUNTS[world_size()])[rank()]


def batch():
    return torch.randn(23, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def options():
    """Every combination, by name."""
    for within_view, grouped, cold, exchange, tile in product(
        [False, True], [False, True], [False, True], ["gather", "ring"], [None, 4]
    ):
        name = f"{within_view=} {grouped=} {cold=} {exchange} {tile=}"
        yield name, within_view, grouped, cold, {"exchange": exchange, "tile": tile}


def cases():
    def contrast(within_view, grouped, cold, others):
        def loss(za, zb, t):
            return info_nce(
                za, zb, temperature=t / 50 if cold else t, within_view=within_view,
                groups=own(GROUPS) if grouped else None, distributed=True, **others,
            )  # fmt: skip

        return loss

    results = {name: contrast(*how) for name, *how in options()}
    for exchange in ("gather", "ring"):
        results[f"module {exchange}"] = lambda za, zb, t, e=exchange: (
            InfoNCE(within_view=True, distributed=True, exchange=e)(za, zb) + t
        )
    results["spectral"] = lambda za, zb, t: spectral(za, zb, distributed=True) * t
    results["spectral module"] = lambda za, zb, t: Spectral(distributed=True)(za, zb) * t
    for most in (2048, 10):
        results[f"imitation {most=}"] = lambda za, zb, t, m=most: imitation(
            (za, zb), (za[:, :4].square(), zb[:, 3:]), t, most=m, distributed=True
        )
        for grouped in (False, True):
            results[f"imitation and contrast {most=} {grouped=}"] = (
                lambda za, zb, t, m=most, g=grouped: sum(
                    imitation_and_contrast(
                        (za, zb), (za[:, :4].square(), zb[:, 3:]), t, most=m,
                        groups=own(GROUPS) if g else None, distributed=True,
                    )
                )
            )  # fmt: skip
    results["correlation"] = lambda za, zb, t: (
        t * correlation_loss(za, zb, own(torch.linspace(0, 1, 23)).double(), distributed=True)
    )
    # Only what was rebuilt has a gradient, so each view is rebuilt from the other.
    results["reconstruction"] = lambda za, zb, t: (
        t
        * (
            reconstruction_loss(za, zb, distributed=True)
            + reconstruction_loss(zb, za, distributed=True)
        )
    )
    results["normalized rows"] = lambda za, zb, t: spectral(
        normalize_rows(za, distributed=True) * t,
        normalize_rows(zb, distributed=True),
        distributed=True,
    )
    # The loss as a part of what is trained, weighted differently by each process.
    results["weighted"] = lambda za, zb, t: (
        info_nce(za, zb, temperature=t, distributed=True) * (2 * (rank() + 1) / (world_size() + 1))
    )
    return results


def mixed(za, zb, t):
    return info_nce(za.float(), zb, temperature=t, within_view=True, distributed=True)


def learnt(loss):
    """The value of a loss, and the gradients of a model that was trained with it."""
    model = Towers()
    wrapped = DistributedDataParallel(model) if world_size() > 1 else model
    value = loss(*wrapped(own(batch())))
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"value": value.detach(), **gradients}


def bad_input():
    """What only the last process does wrong, and what all of them are to be told."""
    last = rank() == world_size() - 1
    za, zb = torch.rand(4, 3), torch.rand(4, 3)
    broken = torch.full((4, 3), float("nan")) if last else za
    wide = torch.rand(4, 5) if last else za
    double = za.double() if last else za
    none = za[:0] if last else za
    groups = torch.arange(4)
    yield "width", lambda: info_nce(wide, wide, distributed=True), "width .3, 3., .*.5, 5."
    yield "dtype", lambda: info_nce(double, double, distributed=True), "dtype .*float64"
    yield "spectral", lambda: spectral(double, zb, distributed=True), "dtype .*float64"
    yield "no rows", lambda: info_nce(none, none, distributed=True), "at least one row in each"
    yield "no spectral", lambda: spectral(none, none, distributed=True), "at least one row in each"
    yield "NaN", lambda: info_nce(broken, zb, distributed=True), "NaN or infinity"
    yield (
        "NaN in a ring",
        lambda: info_nce(broken, zb, distributed=True, exchange="ring"),
        "NaN or infinity",
    )
    yield "NaN spectral", lambda: spectral(broken, zb, distributed=True), "NaN or infinity"
    yield (
        "NaN imitation",
        lambda: imitation((broken, zb), (za, zb), 0.1, distributed=True),
        "NaN or infinity",
    )
    yield (
        "temperature",
        lambda: info_nce(za, zb, temperature=0.1 + last, distributed=True),
        "temperature .*1.1",
    )
    yield (
        "form",
        lambda: info_nce(za, zb, within_view=last, distributed=True),
        "within_view False, .*True",
    )
    yield (
        "groups",
        lambda: info_nce(za, zb, groups=groups if last else None, distributed=True),
        "groups False, .*True",
    )
    yield (
        "length of groups",
        lambda: info_nce(za, zb, groups=groups[: 3 if last else 4], distributed=True),
        "process . cannot .* one entry per row",
    )
    yield (
        "exchange",
        lambda: info_nce(za, zb, exchange="ring" if last else "gather", distributed=True),
        "exchange gather, .*ring",
    )
    yield (
        "unknown exchange",
        lambda: info_nce(za, zb, exchange="mail", distributed=True),
        "exchange must be one of gather, ring; got 'mail'",
    )
    yield (
        "views",
        lambda: info_nce(za, zb[: 3 if last else 4], distributed=True),
        "process . cannot .* same rows",
    )
    yield (
        "most",
        lambda: imitation((za, zb), (za, zb), 0.1, most=2 + last, distributed=True),
        "most 2, .*3",
    )
    yield (
        "groups of an imitation",
        lambda: imitation_and_contrast(
            (za, zb), (za, zb), 0.1, groups=groups if last else None, distributed=True
        ),
        "groups False, .*True",
    )
    yield (
        "correlation",
        lambda: correlation_loss(za, zb, za[: 3 if last else 4, 0], distributed=True),
        "process . cannot .* similarity .n,.",
    )
    yield (
        "reconstruction",
        lambda: reconstruction_loss(wide, za, distributed=True),
        "process . cannot .* rebuilt and h",
    )
    yield (
        "NaN reconstruction",
        lambda: reconstruction_loss(broken, za, distributed=True),
        "NaN or infinity",
    )
    yield (
        "teacher",
        lambda: imitation((za, zb), (za[: 3 if last else 4], zb), 0.1, distributed=True),
        "student and teacher",
    )


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def worker(folder):
    results = {name: learnt(loss) for name, loss in cases().items()}
    results["mixed"] = learnt(mixed)
    errors = {name: (message(call), words) for name, call, words in bad_input()}
    torch.save((results, errors), f"{folder}/{rank()}.pt")


def dies(environment, exchange):
    join(environment)
    za, zb = (torch.rand(600, 8, requires_grad=True) for _ in range(2))
    loss = info_nce(za, zb, distributed=True, exchange=exchange)
    if rank() == 1:
        os._exit(3)
    loss.backward()


@pytest.fixture(scope="module", params=COUNTS, ids="{} processes".format)
def processes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    run_together(worker, request.param, str(folder))
    return [torch.load(folder / f"{i}.pt") for i in range(request.param)]


def test_value_and_gradient_are_those_of_one_process(processes):
    for name, loss in cases().items():
        alone = learnt(loss)
        for number, (results, _) in enumerate(processes):
            assert results[name].keys() == alone.keys()
            for what, expected in alone.items():
                if (name, what) == ("weighted", "value"):
                    expected = expected * (2 * (number + 1) / (len(processes) + 1))
                torch.testing.assert_close(
                    results[name][what], expected, rtol=1e-12, atol=1e-12, msg=f"{name}: {what}"
                )


def test_views_of_unequal_precision_meet_in_the_wider_one(processes):
    alone = learnt(mixed)
    assert alone["value"].dtype == torch.float64
    for results, _ in processes:
        torch.testing.assert_close(results["mixed"], alone, rtol=1e-6, atol=1e-7)


def test_bad_input_on_one_process_is_the_same_error_on_all(processes):
    _, errors = processes[0]
    for name, (told, words) in errors.items():
        assert re.search(words, told), (name, told)
        assert {others[name][0] for _, others in processes} == {told}, name


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_process_that_dies_ends_the_others_within_a_minute(exchange):
    context, start = get_context(START), time.monotonic()
    with environments(3) as each:
        running = [context.Process(target=dies, args=(own, exchange)) for own in each]
        for process in running:
            process.start()
        for process in running:
            process.join(60)
        codes = [process.exitcode for process in running]
        for process in running:
            process.kill()
    assert codes[1] == 3
    assert codes[0] not in (0, None)
    assert codes[2] not in (0, None)
    assert time.monotonic() - start < 60


def test_alone_the_option_changes_nothing():
    za, zb = batch(), batch() + 0.1
    for exchange in ("gather", "ring"):
        split = info_nce(za, zb, distributed=True, exchange=exchange)
        assert split == info_nce(za, zb)
    assert spectral(za, zb, distributed=True) == spectral(za, zb)

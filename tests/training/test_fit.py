"""The loop: killed and resumed bit for bit, and words for everything that goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from ncl_multi import NonNegHead, StepObjective, TrainConfig, fit, info_nce
from ncl_multi.training.batches import Batches
from ncl_multi.training.fit import lr_factor

SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_fit
import torch
torch.set_num_threads(1)
if os.environ.get("FULL_DISK_AFTER"):
    test_fit.fill_the_disk_after(int(os.environ["FULL_DISK_AFTER"]))
pause = float(os.environ.get("PAUSE", 0))
model = test_fit.run(Path(sys.argv[1]), pause=pause, steps=30, checkpoint_every=7, log_every=5)
torch.save(model.state_dict(), sys.argv[1] + "/final.pt")
"""


def rows(n=64):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(0))


def loader(n=64, batch_size=16, **options):
    return DataLoader(TensorDataset(rows(n)), batch_size, shuffle=True, drop_last=True, **options)


def step(model, batch):
    (x,) = batch
    za, zb = model(torch.cat([x, x]) + 0.1 * torch.randn(2 * len(x), 8)).chunk(2)
    return info_nce(za, zb, within_view=True), za


def network(seed=0, **options):
    torch.manual_seed(seed)
    return NonNegHead(8, 64, hidden_dim=8, **({"density": 0.2} | options))


def run(out, *, pause=0.0, model=None, data=None, how=step, **options):
    def slow(model, batch):
        time.sleep(pause)
        return how(model, batch)

    cfg = TrainConfig(**({"out": out, "device": "cpu", "steps": 6} | options))
    objective = StepObjective(model or network(), slow)
    return fit(objective, loader() if data is None else data, cfg).model


def same(a, b):
    return all(torch.equal(x, b[name]) for name, x in a.items())


def start(out, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent)), str(out)],
        stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise TimeoutError(path)


def fill_the_disk_after(saves):
    """No file may grow past 2 kB after this many checkpoints."""
    import resource

    from ncl_multi.training.run_folder import RunFolder

    save = RunFolder.save

    def counted(self, parts, done):
        if done > 7 * saves:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        save(self, parts, done)

    RunFolder.save = counted


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(out, steps=30, checkpoint_every=7, log_every=5).state_dict(), out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_ends_bit_for_bit_as_if_it_had_not(tmp_path, whole, number):
    out = tmp_path / "run"
    process = start(out, PAUSE="0.15")
    wait_for(out / "checkpoint.pt", process)
    process.send_signal(number)
    output = process.communicate(timeout=60)[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert ("run the same command again to resume" in output) == (number != signal.SIGKILL)
    assert not (out / "final.pt").exists()
    ended = run(out, steps=30, checkpoint_every=7, log_every=5).state_dict()
    assert same(ended, whole[0])
    logs = [
        [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        for folder in (out, whole[1])
    ]
    assert [row["step"] for row in logs[0]] == [5, 10, 15, 20, 25, 30]
    if number == signal.SIGKILL:
        assert logs[0][-1]["loss"] == logs[1][-1]["loss"]


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, whole):
    process = start(tmp_path, FULL_DISK_AFTER="1")
    output = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert "could not save step 14" in output
    assert "The last good checkpoint is" in output
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 7
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.part"))
    assert same(run(tmp_path, steps=30, checkpoint_every=7, log_every=5).state_dict(), whole[0])


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path, ema=0.9).state_dict()
    again = run(tmp_path, ema=0.9, how=None)
    assert same(again.state_dict(), first)
    assert not again.training


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"contains another run.*'lr': '0.001 there, 0.1 here'"):
        run(tmp_path, steps=2, lr=0.1)
    run(tmp_path, steps=2, lr=0.1, resume=False)
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 0.1
    run(tmp_path, steps=2, lr=0.1, log_every=1)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"(?s)does not fit this model.*--no-resume"):
        run(tmp_path, steps=2, model=NonNegHead(8, 13))
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:900])
    with pytest.raises(ValueError, match="cannot be read"):
        run(tmp_path, steps=2)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config cannot be read"):
        run(tmp_path, steps=2)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="config cannot be read"):
        run(tmp_path, steps=2)


def test_a_run_in_memory_writes_nothing_and_leaves_the_random_state_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = network()
    torch.manual_seed(3)
    before, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    run(None, model=model)
    assert torch.equal(torch.get_rng_state(), before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not list(tmp_path.iterdir())
    assert same(model.state_dict(), run(tmp_path / "kept").state_dict())


def test_two_runs_on_different_data_give_the_same_two_models_in_both_orders():
    data = [loader(), loader(48)]
    forth = [run(None, data=expected_rows).state_dict() for expected_rows in data]
    back = [run(None, data=expected_rows).state_dict() for expected_rows in reversed(data)]
    assert not same(*forth)
    assert same(forth[0], back[1])
    assert same(forth[1], back[0])


def test_a_folder_with_a_run_on_other_data_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"contains a run on other data.*resume=False"):
        run(tmp_path, data=loader(48))
    other = DataLoader(TensorDataset(rows() + 1), 16, drop_last=True)
    with pytest.raises(ValueError, match="contains a run on other data"):
        run(tmp_path, data=other)


def test_more_steps_extend_a_finished_run_and_fewer_are_refused(tmp_path):
    run(tmp_path, steps=6, log_every=3)
    run(tmp_path, steps=9, log_every=3)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 6, 9]
    with pytest.raises(ValueError, match="has 9 steps, 4 were requested"):
        run(tmp_path, steps=4)


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    process = start(tmp_path / "run", PAUSE="0.3")
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    try:
        with pytest.raises(ValueError, match="another process is writing"):
            run(tmp_path / "run", steps=30, checkpoint_every=7, log_every=5)
    finally:
        process.kill()
        process.communicate()


def test_buffers_that_are_no_numbers_stop_the_run(tmp_path):
    def breaks(model, batch):
        model.norm.variance.fill_(float("inf"))
        return step(model, batch)

    with pytest.raises(ValueError, match=r"NaN or infinity after step 0 .*norm"):
        run(tmp_path, how=breaks, checkpoint_every=1)


@pytest.mark.filterwarnings("ignore::ncl_multi.HealthWarning")
def test_one_long_row_or_a_large_rate_does_not_end_in_codes_that_are_no_numbers(tmp_path):
    batches = [(x,) for x in rows().chunk(8)]
    long = rows(8)
    long[5] = 1e25
    model = network()
    z = model(long)
    assert info_nce(z, z).isfinite(), "the loss does not show it"
    assert not model.eval()(rows()).isfinite().all(), "the codes do"
    for name, data, options in (
        ("row", [*batches[:6], (long,), batches[7]], {}),
        ("rate", batches, {"lr": 1e12, "warmup": 0.0}),
    ):
        words = rf"NaN or infinity after step \d.*{name}/checkpoint.pt, step [246]"
        with pytest.raises(ValueError, match=words):
            run(tmp_path / name, data=data, steps=8, checkpoint_every=2, **options)
        state = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"]
        assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize("options", [{"steps": -3}, {"accumulate": 0}, {"log_every": 0}])
def test_counts_below_one_are_refused(options):
    with pytest.raises(ValueError, match="must be at least 1; got"):
        TrainConfig(**options)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(tmp_path / "file" / "run")


def test_a_loss_that_is_no_number_names_the_step_the_rows_and_the_checkpoint(tmp_path):
    count = 0

    def breaks(model, batch):
        nonlocal count
        count += 1
        (x,) = batch
        return step(model, (x * (float("nan") if count == 4 else 1),))

    words = r"(?s)NaN or infinity.*at step 3, rows \[.*last good checkpoint is .*step 2"
    with pytest.raises(ValueError, match=words):
        run(tmp_path, how=breaks, checkpoint_every=2)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    def breaks(model, batch):
        loss, z = step(model, batch)
        return loss + 0 * torch.sqrt(model.out.weight.sum() * 0), z

    with pytest.raises(ValueError, match="weights contain NaN or infinity after step 0"):
        run(tmp_path, how=breaks, checkpoint_every=1)
    assert not (tmp_path / "checkpoint.pt").exists()


def plain(model, batch):
    """A loss that is a mean over rows, so that batches add up."""
    (x,) = batch
    z = model(x)
    return (z - 1).square().mean(), z


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 3).double()


def test_accumulated_batches_move_the_weights_as_one_batch(tmp_path):
    data = [(x,) for x in rows(64).double().chunk(8)]
    pairs = [(torch.cat([data[i][0], data[i + 1][0]]),) for i in range(0, 8, 2)]
    options = {"how": plain, "schedule": "constant", "warmup": 0.0}
    small = run(tmp_path / "a", model=linear(), data=data, steps=8, accumulate=2, **options)
    large = run(tmp_path / "b", model=linear(), data=pairs, steps=4, **options)
    torch.testing.assert_close(small.weight, large.weight, rtol=1e-9, atol=1e-12)


def test_the_last_batches_move_the_weights_even_if_they_are_few(tmp_path):
    data = [(x,) for x in rows(64).double().chunk(8)]
    options = {"how": plain, "model": linear(), "data": data, "schedule": "constant"}
    model = run(tmp_path, steps=3, accumulate=5, warmup=0.0, **options)
    assert not torch.equal(model.weight, linear().weight)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3


def test_clipping_and_the_average_of_weights_are_their_formulas(tmp_path):
    data = [(rows(16).double(),)]
    expected, mean = linear(), None
    for now in range(5):
        loss, _ = plain(expected, data[0])
        grads = torch.autograd.grad(loss, tuple(expected.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        with torch.no_grad():
            for p, g in zip(expected.parameters(), grads, strict=True):
                p -= 0.1 * lr_factor(now, 5, 0.0, "cosine") * g * min(1, 0.01 / (norm + 1e-6))
        weights = [p.detach().clone() for p in expected.parameters()]
        if mean is None:
            mean = weights
        mean = [0.8 * m + 0.2 * w for m, w in zip(mean, weights, strict=True)]
    cfg = TrainConfig(
        out=tmp_path, device="cpu", steps=5, clip_grad=0.01, ema=0.8, lr=0.1, warmup=0.0
    )
    model = fit(
        StepObjective(linear(), plain), data, cfg, optimizer=lambda ps: torch.optim.SGD(ps, 0.1)
    ).model
    for got, want in zip(model.parameters(), mean, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"compile": True}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_ways_to_compute_train_too(tmp_path, options, monkeypatch, unchecked):
    # The same tracing without the wait for a C++ compiler.
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    model = run(tmp_path, **options)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    reference = run(tmp_path / "reference")
    close = {"rtol": 0.1, "atol": 0.02} if "precision" in options else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(model.out.weight, reference.out.weight, **close)


def test_a_group_may_learn_at_its_own_rate(tmp_path):
    still = network()
    fit(
        StepObjective(still, step), loader(), TrainConfig(out=tmp_path, device="cpu", steps=2),
        optimizer=lambda ps: torch.optim.SGD(
            [{"params": list(ps)[:1], "lr_scale": 0.0}, {"params": list(still.out.parameters())}],
            0.1,
        ),
    )  # fmt: skip
    assert torch.equal(still.hidden.weight, network().hidden.weight)
    assert not torch.equal(still.out.weight, network().out.weight)


def test_every_row_is_read_once_an_epoch_by_one_process_or_by_several():
    batches = Batches(loader(70, 8), seed=1, rank=0, processes=1)
    seen = torch.cat([batch[0] for batch in batches.after(0, len(batches))])
    assert len(batches) == 8
    assert len(seen.unique(dim=0)) == 64
    parts = [Batches(loader(70, 4), seed=1, rank=r, processes=2) for r in range(2)]
    for step_number in (0, 5, 8, 13):
        halves = [r for part in parts for r in part.rows(step_number)]
        assert sorted(halves) == sorted(batches.rows(step_number))
    tail = [batch[0] for batch in batches.after(5, 11)]
    full = [batch[0] for batch in batches.after(0, 11)]
    assert all(torch.equal(a, b) for a, b in zip(tail, full[5:], strict=True))


def test_a_loader_with_a_sampler_of_its_own_is_left_alone():
    weights = WeightedRandomSampler([1.0] + [0.0] * 63, 64)
    batches = Batches(DataLoader(TensorDataset(rows()), 8, sampler=weights), 0, 0, 1)
    assert all(torch.equal(b[0], rows()[:1].expand(8, -1)) for b in batches.after(0, 8))
    expected_rows = [[0, 1], [2, 3]]
    batches = Batches(DataLoader(TensorDataset(rows()), batch_sampler=expected_rows), 0, 0, 1)
    assert len(list(batches.after(0, 5))) == 5

    class Other(DataLoader):
        pass

    data = TensorDataset(rows())
    batches = Batches(Other(data, 8, sampler=RandomSampler(data)), 3, 0, 1)
    full = [b[0] for b in batches.after(0, 12)]
    assert all(torch.equal(a[0], b) for a, b in zip(batches.after(10, 12), full[10:], strict=True))


def test_too_little_data_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"has 10 rows, less than one batch of 16.*--batch-size"):
        run(tmp_path, data=loader(10))


def test_tensorboard_gets_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, track="tensorboard", log_every=2)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_rows_seen_are_those_of_all_processes_and_of_steps_alone(monkeypatch):
    assert TrainConfig(epochs=3).rows_seen is None
    assert TrainConfig(steps=5, batch_size=4).rows_seen == 20
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TrainConfig(steps=5, batch_size=4).rows_seen == 40


def test_auto_is_bf16_on_a_device_that_has_instructions_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for supported, precision in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, yes=supported: yes
        )
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda yes=supported: not yes)
        config = TrainConfig(precision="auto", device="cuda").on_this_machine()
        assert config.precision == precision
        config = TrainConfig(precision="auto", device="cpu").on_this_machine()
        assert config.precision != precision
    assert TrainConfig(precision="fp32").on_this_machine().precision == "fp32"

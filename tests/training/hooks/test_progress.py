import io
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.errors import ConfigError
from nvalchemi.training import Progress, TrainContext, TrainingStage, ValidationConfig, on
from nvalchemi.training.hooks import ProgressHook, SpikeHook
from nvalchemi.training.hooks.progress import Pace, clock, numbers
from tests.training.hooks.runs import SGD, batches, linear, network, rows, strategy, weight_row


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, hook_settings=None, hooks=(), **kwargs):
    hook = ProgressHook(stream=stream, **(hook_settings or {}))
    strategy(network(), [hook, *hooks], **kwargs).run(batches())
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    config = ValidationConfig(validation_data=batches(1), every_n_steps=3)
    text = shown(io.StringIO(), {"interval": 0.0}, validation_config=config, num_steps=6)
    lines = text.splitlines()
    assert sum(line.startswith("validation at step") for line in lines) == 2
    assert "100% | step 6/6 | epoch 1 |" in lines[-1]
    assert "structures/s" in lines[-1] and "loss " in lines[-1] and "lr 0.01" in lines[-1] and "left" in lines[-1]
    assert "\x1b" not in text


def test_lines_are_rare():
    text = shown(io.StringIO(), {"interval": 60.0}, num_steps=200)
    assert len(text.splitlines()) <= 2  # the end, and a first one after a second where the machine is slow


def test_the_loss_is_not_fetched_each_step():
    class Counting(torch.Tensor):
        fetched = 0

        def __float__(self):
            Counting.fetched += 1
            return 0.0

    @on(TrainingStage.STEP_END)
    def count(ctx):
        ctx.loss.total = ctx.loss.total.as_subclass(Counting)

    shown(io.StringIO(), {"interval": 60.0}, hooks=[count], num_steps=200)
    assert Counting.fetched <= 1


def test_a_live_display_on_a_terminal():
    config = ValidationConfig(validation_data=batches(1), every_n_steps=3)
    text = shown(Terminal(), {"refresh": 0.0}, validation_config=config, num_steps=6)
    assert "\x1b[" in text and "step 6/6" in text and "validation at step 3: loss" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again


def test_the_terminal_is_left_in_order_after_an_error():
    stream = Terminal()

    @on(TrainingStage.STEP_END)
    def fail(ctx):
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        shown(stream, hooks=[fail])
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_why_it_ended_and_what_was_skipped():
    @on(TrainingStage.STEP_END)
    def stop(ctx):
        if ctx.progress.step == 2:
            ctx.stop("for the test")

    stream = io.StringIO()
    strategy(
        weight_row(1.0), [ProgressHook(stream=stream), SpikeHook(), stop], optimizer_configs=SGD, loss_fn=linear, num_epochs=1
    ).run(rows((1.0,), (float("nan"),), (1.0,), (1.0,)))
    assert "1 skipped" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1] == "stopped: for the test"


def test_only_rank_0_shows_anything():
    manager = single_process()
    assert ProgressHook().is_active(manager)
    assert not ProgressHook().is_active(type("Second", (), {"rank": 1})())


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = Clock()
    monkeypatch.setattr("nvalchemi.training.hooks.progress.time", fake)
    return fake


def a_run(**ends):
    """As much of a run as a pace looks at."""
    return TrainContext(
        manager=single_process("cpu"), models={}, main="", objective=None, progress=Progress(), generator=torch.Generator(),
        cursor=SimpleNamespace(num_batches=ends.pop("num_batches", None)), **ends,
    )  # fmt: skip


def test_the_pace_by_steps(time):
    run, pace = a_run(num_steps=100), Pace()
    pace.look(run)
    assert pace.rates is None and pace.left is None and pace.fraction == 0.0
    time.now += 10.0
    run.progress.step, run.progress.samples = 20, 160
    pace.look(run)
    assert pace.rates == (2.0, 16.0)
    assert (pace.fraction, pace.left, pace.elapsed) == (0.2, 40.0, 10.0)


def test_validation_does_not_slow_the_pace(time):
    run, pace = a_run(num_steps=100), Pace()
    pace.look(run)
    time.now += 30.0
    pace.pause(20.0)
    run.progress.step = 20
    pace.look(run)
    assert pace.rates[0] == 2.0


def test_a_time_budget_may_come_first(time):
    run, pace = a_run(num_steps=100), Pace()
    run.metrics["budget_used"] = 0.4  # of an earlier sitting
    pace.look(run)
    time.now += 10.0
    pace.pause(8.0)  # a validation is the budget's time as well
    run.progress.step, run.metrics["budget_used"] = 10, torch.tensor(0.5)
    pace.look(run)
    assert (pace.fraction, pace.left) == (0.5, 18.0)  # by steps: 90 of them, of which 10 took 2 s
    run.num_steps = None
    pace = Pace()
    pace.look(run)
    time.now += 10.0
    run.metrics["budget_used"] = 0.75
    pace.look(run)
    assert (pace.fraction, pace.left) == (0.75, 10.0)


@pytest.mark.parametrize("settings", [{"refresh": -1.0}, {"interval": float("nan")}])
def test_intervals_that_are_none(settings):
    with pytest.raises(ConfigError, match="progress cannot be shown like this"):
        ProgressHook(**settings)


def test_the_past_is_forgotten(time):
    run, pace = a_run(num_steps=1000), Pace()
    for i in range(100):
        run.progress.step += 1 if i < 50 else 10
        pace.look(run)
        time.now += 1.0
    assert pace.rates[0] == pytest.approx(10.0)


def test_words():
    assert [clock(s) for s in (0.4, 62, 3723)] == ["0:00", "1:02", "1:02:03"]
    assert numbers({"loss": 0.01234567, "n": 5, "n_forces": 30}) == "loss 0.01235"

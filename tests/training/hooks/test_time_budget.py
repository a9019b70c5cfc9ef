"""A run that ends with its time, and its learning rate with it."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import ConfigError
from nvalchemi.testing import assert_resumes, assert_single_process_noop
from nvalchemi.training import Hook, OptimizerConfig, TrainingStage, on
from nvalchemi.training.hooks import time_budget
from nvalchemi.training.hooks.time_budget import TimeBudgetHook
from nvalchemi.training.schedules import Shape
from tests.training.hooks.runs import SGD, batches, network, strategy


class Clock:
    """One second a step, as far as the hook can tell."""

    now = 100.0

    def monotonic(self):
        return self.now


class Tick(Hook):
    """The clock goes on, and the learning rate is noted."""

    def __init__(self, clock):
        self.clock, self.rates = clock, []

    @on(TrainingStage.LOSS_READY)
    def tick(self, ctx):
        self.rates.append(ctx.optimizers["model"].param_groups[0]["lr"])
        self.clock.now += 1.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time_budget, "time", clock)
    return clock


def run(clock, hook, **kwargs):
    tick = Tick(clock)
    settings = {"optimizer_configs": SGD, "num_steps": None, **kwargs}
    if settings["num_steps"] is None:
        del settings["num_steps"]
        settings.setdefault("num_epochs", None)
    ctx = strategy(network(), [hook, tick], **settings).run(batches())
    return ctx, tick.rates


def test_the_time_ends_the_run_and_the_rate(clock):
    ctx, rates = run(clock, TimeBudgetHook(5, Shape("linear")))
    assert ctx.progress.step == 5 and "time budget of 5 s" in ctx.stop_reason
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_without_a_shape_the_rates_are_left_alone(clock):
    ctx, rates = run(clock, TimeBudgetHook(3))
    assert ctx.progress.step == 3 and rates == [1.0] * 3


def test_whatever_ends_the_run_ends_the_rate(clock):
    ctx, rates = run(clock, TimeBudgetHook(100, Shape("linear")), num_steps=4)
    assert ctx.progress.step == 4 and ctx.stop_reason is None
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_epochs_end_the_rate_as_well(clock):
    steps = len(batches())
    ctx, rates = run(clock, TimeBudgetHook(1000, Shape("linear")), num_epochs=2)
    assert ctx.progress.epoch == 2 and ctx.stop_reason is None
    assert rates == pytest.approx([1.0 - i / (2 * steps) for i in range(2 * steps)])


def test_earlier_sittings_count(clock, tmp_path):
    from nvalchemi.training.hooks import CheckpointHook

    first = strategy(network(), [TimeBudgetHook(10, Shape("linear")), Tick(clock), CheckpointHook(tmp_path)], num_steps=4,
                     optimizer_configs=SGD)  # fmt: skip
    first.run(batches())
    clock.now += 1000  # away
    tick, hook = Tick(clock), TimeBudgetHook(10, Shape("linear"))
    ctx = strategy(
        network(), [hook, tick, CheckpointHook(tmp_path)], num_epochs=99, optimizer_configs=SGD, resume_from="latest"
    ).run(batches())
    assert ctx.progress.step == 10
    assert tick.rates == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    again = strategy(network(), [TimeBudgetHook(10), CheckpointHook(tmp_path)], num_epochs=99, resume_from=tmp_path,
                     optimizer_configs=SGD).run(batches())  # fmt: skip
    assert again.progress.step == 10  # nothing left


def test_groups_keep_their_own_rates(clock):
    model = network()
    config = OptimizerConfig(
        torch.optim.SGD,
        {"lr": 1.0},
        parameters=lambda m: [{"params": [m[0].weight], "lr": 0.1}, {"params": [m[4].weight]}],
    )
    hook = TimeBudgetHook(4, Shape("linear"))
    ctx = strategy(model, [hook, Tick(clock)], optimizer_configs=config, num_epochs=9).run(batches())
    assert [g["lr"] for g in ctx.optimizers["model"].param_groups] == pytest.approx([0.025, 0.25])


def test_a_scheduler_besides_is_refused(clock):
    config = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, torch.optim.lr_scheduler.StepLR, {"step_size": 1})
    with pytest.raises(ConfigError, match="both set the learning rate"):
        run(clock, TimeBudgetHook(4, Shape()), optimizer_configs=config)
    ctx, rates = run(clock, TimeBudgetHook(4), optimizer_configs=config)  # the time alone goes with any scheduler
    assert rates == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_budgets_that_are_none(seconds):
    with pytest.raises(ConfigError, match="must be positive"):
        TimeBudgetHook(seconds)


def test_a_run_without_any_end_is_still_refused():
    with pytest.raises(ConfigError, match="no end"):
        strategy(network(), [], num_epochs=None)


def test_one_process_is_unchanged():
    assert_single_process_noop(TimeBudgetHook(1e6))


def test_resumes():
    def factory(directory):
        return strategy(network(), [TimeBudgetHook(1e6, Shape("cosine"))], num_steps=8), batches()

    assert_resumes(factory, steps=8, stop_at=3, ignore=["hooks.time_budget.elapsed", "metrics.budget_used"])

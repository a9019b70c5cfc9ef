"""Learning rates that follow the world size."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from nvalchemi.errors import ConfigError
from nvalchemi.training import OptimizerConfig, TrainingStrategy, warmup_cosine

# torch 2.8's SequentialLR calls its parts as it asks others not to
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")


def build(world_size, rule="linear", cls=AdamW, lr=1e-3, **settings):
    return OptimizerConfig(cls, {"lr": lr}, lr_scaling=rule, **settings).build(nn.Linear(2, 1), "main", world_size)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_linear_and_square_root():
    assert rates(build(4).optimizer) == [4e-3]
    assert rates(build(4, "sqrt").optimizer) == [2e-3]
    assert rates(build(4, None).optimizer) == [1e-3]


def test_what_was_scaled_is_said():
    assert str(build(4).scaled) == "AdamW: lr 0.001 × 4 (linear in the world size, 4) = 0.004"
    assert str(build(9, "sqrt", SGD, lr=0.1).scaled) == "SGD: lr 0.1 × 3 (square root of the world size, 9) = 0.3"
    assert build(4).scaled.scaled == (4e-3,)


@pytest.mark.parametrize("rule", [None, "linear", "sqrt"])
def test_one_process_is_as_declared(rule):
    optimizer, _, scaled = build(1, rule)
    assert scaled is None
    plain = AdamW(nn.Linear(2, 1).parameters(), lr=1e-3)
    assert optimizer.state_dict() == plain.state_dict()


def test_every_group_is_scaled_and_tensors_stay_the_users():
    def groups(model):
        return [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]

    own = torch.tensor(0.1)
    config = OptimizerConfig(SGD, {"lr": own}, parameters=groups, lr_scaling="linear")
    optimizer, _, scaled = config.build(nn.Linear(2, 1), "main", 2)
    assert rates(optimizer) == pytest.approx([1.0, 0.2])
    assert float(own) == pytest.approx(0.1)
    assert str(scaled) == "SGD: lr 0.5, 0.1 × 2 (linear in the world size, 2) = 1, 0.2"


def test_a_scheduler_starts_from_the_scaled_rate():
    optimizer, scheduler, _ = build(4, scheduler_cls=warmup_cosine, scheduler_kwargs={"total_steps": 8, "warmup_steps": 3})
    seen = []
    for _ in range(8):
        seen += rates(optimizer)
        optimizer.step()
        scheduler.after_step()
    assert seen[:4] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert max(seen) == seen[3]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scheduler_with_rates_of_its_own_is_refused(world_size):
    with pytest.raises(ConfigError, match="OneCycleLR sets rates of its own"):
        build(world_size, scheduler_cls=OneCycleLR, scheduler_kwargs={"max_lr": 1.0, "total_steps": 10})


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="unknown lr_scaling"):
        build(1, "quadratic")


class Rateless(SGD):
    """An optimizer that finds its own steps."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            del group["lr"]


def test_an_optimizer_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match="Rateless has no learning rate"):
        build(2, cls=Rateless)


def sequential(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.5, total_iters=2), CosineAnnealingLR(optimizer, 10)], [2])


SCHEDULERS = {
    "none": {},
    "by closed form": {"scheduler_cls": warmup_cosine, "scheduler_kwargs": {"total_steps": 20, "warmup_steps": 2}},
    "by recursion": {"scheduler_cls": StepLR, "scheduler_kwargs": {"step_size": 2, "gamma": 0.5}},
    "nested": {"scheduler_cls": sequential},
    "by a metric": {
        "scheduler_cls": ReduceLROnPlateau,
        "scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "scheduler_metric": "loss",
    },
}


def advance(built, steps):
    """The rates of so many steps."""
    seen = []
    for step in range(steps):
        seen += rates(built.optimizer)
        built.optimizer.step()
        if built.scheduler is not None:
            built.scheduler.after_step()
            built.scheduler.after_validation({"loss": float(step)})
    return seen


def moved(old, new):
    """``new`` with the state of ``old``."""
    new.optimizer.load_state_dict(old.optimizer.state_dict())
    if new.scheduler is not None:
        new.scheduler.load_state_dict(old.scheduler.state_dict())
    return new


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    ("then", "now"), [((4, "linear"), (2, "linear")), ((1, "linear"), (4, "sqrt")), ((4, "sqrt"), (4, None))]
)
def test_a_run_goes_on_with_the_rates_of_its_new_world(name, then, now):
    """What the scheduler made of the rates is kept, the factor is the present one."""
    whole = advance(build(*now, **SCHEDULERS[name]), 8)
    first = build(*then, **SCHEDULERS[name])
    advance(first, 4)
    second = advance(moved(first, build(*now, **SCHEDULERS[name])), 4)
    if name == "by a metric":  # its count of bad validations begins anew in this test, not in a run
        assert second[0] == pytest.approx(whole[4])
    else:
        assert second == pytest.approx(whole[4:])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_in_the_same_world_not_a_bit_changes(name):
    first = build(3, "sqrt", lr=1 / 3, **SCHEDULERS[name])
    advance(first, 3)
    second = moved(first, build(3, "sqrt", lr=1 / 3, **SCHEDULERS[name]))
    assert second.optimizer.state_dict() == first.optimizer.state_dict()
    assert second.scheduler is None or second.scheduler.state_dict() == first.scheduler.state_dict()


def test_a_run_in_one_process_says_nothing(caplog):
    data = [torch.ones(2, 2)]
    with caplog.at_level(logging.INFO, "nvalchemi"):
        ctx = TrainingStrategy(
            models=nn.Linear(2, 1),
            optimizer_configs=OptimizerConfig(SGD, {"lr": 0.1}, lr_scaling="linear"),
            training_fn=lambda model, x: model(x),
            loss_fn=lambda prediction, x: prediction.square().mean(),
            num_steps=1,
        ).run(data)
    assert ctx.scaled_rates == {} and ctx.learning_rates == {"model": 0.1}
    assert not caplog.records

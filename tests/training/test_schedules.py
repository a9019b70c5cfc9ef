"""Shapes of the learning rate."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import ConfigError
from nvalchemi.training.schedules import Shape, warmup, warmup_cosine


def test_constant():
    assert [Shape()(f, 100) for f in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_linear_after_a_hold():
    shape = Shape("linear", hold=0.5)
    assert [shape(f, 10) for f in (0.0, 0.5, 0.75, 1.0, 2.0)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert Shape("linear", final=0.2)(1.0, 10) == pytest.approx(0.2)


def test_cosine():
    shape = Shape("cosine")
    assert shape(0.0, 0) == 1.0
    assert shape(0.5, 0) == pytest.approx(0.5)
    assert shape(1.0, 0) == pytest.approx(0.0)
    assert Shape("cosine", hold=0.6, final=0.1)(0.8, 0) == pytest.approx(0.55)


def test_warm_up_is_counted_in_steps_and_never_zero():
    shape = Shape(warmup_steps=3)
    assert [shape(0.0, s) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def rates(scheduler_cls, steps, **settings):
    """What a rate of 2 becomes."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2.0)
    scheduler = scheduler_cls(optimizer, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_in_torchs_scheduler():
    by_lambda = rates(torch.optim.lr_scheduler.LambdaLR, 4, lr_lambda=Shape("linear").over_steps(4))
    assert by_lambda == [2.0, 1.5, 1.0, 0.5]


def test_a_warm_up_ends_at_the_declared_rate_and_stays_there():
    assert rates(warmup, 6, warmup_steps=3) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_a_cosine_begins_where_the_warm_up_ends():
    found = rates(warmup_cosine, 13, total_steps=12, warmup_steps=4, final=0.1)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert found[8] == pytest.approx(2.0 * 0.55)  # half way down
    assert found[12] == pytest.approx(0.2)
    assert rates(warmup_cosine, 3, total_steps=2) == pytest.approx([2.0, 1.0, 0.0])


@pytest.mark.parametrize("steps", [(4, 4), (4, 9), (0, 0), (4, -1)])
def test_a_warm_up_is_shorter_than_the_run(steps):
    total, warm = steps
    with pytest.raises(ConfigError, match="warm"):
        rates(warmup_cosine, 1, total_steps=total, warmup_steps=warm)


@pytest.mark.parametrize("settings", [{"kind": "sine"}, {"hold": 1.0}, {"hold": -0.1}, {"final": 1.5}, {"warmup_steps": -1}])
def test_what_is_no_shape(settings):
    with pytest.raises(ConfigError):
        Shape(**settings)
    with pytest.raises(ConfigError):
        Shape().over_steps(0)

"""Shapes of the learning rate."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import ConfigError
from nvalchemi.training.schedules import Shape


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


def test_in_torchs_scheduler():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Shape("linear").over_steps(4))
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [2.0, 1.5, 1.0, 0.5]


@pytest.mark.parametrize("settings", [{"kind": "sine"}, {"hold": 1.0}, {"hold": -0.1}, {"final": 1.5}, {"warmup_steps": -1}])
def test_what_is_no_shape(settings):
    with pytest.raises(ConfigError):
        Shape(**settings)
    with pytest.raises(ConfigError):
        Shape().over_steps(0)

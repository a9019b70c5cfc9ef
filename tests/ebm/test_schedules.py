"""Settings as pure functions of the step."""

from __future__ import annotations

import pickle

import pytest

from nvalchemi.ebm import schedules
from nvalchemi.errors import ConfigError

CASES = [
    (schedules.ConstantSchedule(2.0), [2, 2, 2, 2, 2]),
    (schedules.ExponentialSchedule(1.0, 0.5, 0.1), [1, 0.5, 0.25, 0.125, 0.1]),
    (schedules.LinearSchedule(1.0, 0.0, 2), [1, 0.5, 0, 0, 0]),
    (schedules.CosineSchedule(2.0, 0.0, 4), [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
    (schedules.MultiStepSchedule(1.0, (1, 3), 0.1), [1, 0.1, 0.1, 0.01, 0.01]),
    (schedules.WarmupSchedule(schedules.LinearSchedule(1.0, 0.0, 2), 2), [0, 0.5, 1, 0.5, 0]),
    (schedules.WarmupSchedule(schedules.ConstantSchedule(4.0), 2, 0.5), [2, 3, 4, 4, 4]),
    (schedules.TemperatureSchedule(16.0, 1.0, 4), [16, 8, 4, 2, 1]),
    (schedules.HeatingSchedule(4.0, 0.5, 4, sqrt=False), [0, 0, 0, 2, 4]),
    (schedules.HeatingSchedule(4.0, 0.5, 4), [0, 0, 0, 2**0.5, 2]),
    (schedules.HeatingSchedule(4.0, 0.5, 4, t_start=0.25, t_end=1.25), [0, 0, 2**0.5, 2, 2]),
]


@pytest.mark.parametrize(("schedule", "values"), CASES)
def test_values(schedule, values):
    for _ in range(2):  # asked again, and out of order: there is no state
        assert [schedule(step) for step in (4, 0, 1, 2, 3)] == pytest.approx([values[i] for i in (4, 0, 1, 2, 3)])
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule(1000) == pytest.approx(values[-1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.LinearSchedule(1.0, 0.0, 0),
        lambda: schedules.CosineSchedule(1.0, 0.0, 0),
        lambda: schedules.WarmupSchedule(schedules.ConstantSchedule(1.0), 0),
        lambda: schedules.ExponentialSchedule(1.0, 0.0),
        lambda: schedules.TemperatureSchedule(1.0, 0.0, 5),
        lambda: schedules.HeatingSchedule(-1.0),
        lambda: schedules.HeatingSchedule(1.0, 1.0),
        lambda: schedules.HeatingSchedule(1.0, n_steps=0),
        lambda: schedules.HeatingSchedule(1.0, t_start=1.0, t_end=0.5),
    ],
)
def test_what_cannot_be(make):
    with pytest.raises(ConfigError):
        make()

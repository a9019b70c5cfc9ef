import pytest
from torch import nn

from nvalchemi.errors import ConfigError
from nvalchemi.training import TrainingStage, ValidationConfig, on
from nvalchemi.training.hooks import EarlyStopHook
from tests.training.hooks.runs import batches, strategy


def run(values, hook, metric="loss", **kwargs):
    """A run whose n-th validation, one a step, gives the n-th value."""
    left = list(values)

    @on(TrainingStage.VALIDATED)
    def pretend(ctx):
        ctx.validation = {metric: left.pop(0)}

    config = ValidationConfig(validation_data=batches(1), every_n_steps=1)
    return strategy(nn.Linear(3, 1), [pretend, hook], validation_config=config, num_steps=len(values), **kwargs).run(batches())


@pytest.mark.parametrize(
    ("values", "settings", "steps"),
    [
        ([3, 2, 2, 2, 1, 1], {"patience": 2}, 4),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([3, 2.95, 2.5, 2.45, 2.42], {"patience": 2, "min_delta": 0.2}, 5),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
        ([1, 0, 3, 2, 2], {"patience": 1, "mode": "max"}, 2),
        ([float("nan"), 2, float("nan"), float("inf"), 1], {"patience": 2}, 4),
        ([float("nan")] * 4, {"patience": 3}, 3),
        ([5, 4, 3, 2], {"patience": 1}, 4),
    ],
)
def test_when_it_stops(values, settings, steps):
    ctx = run(values, EarlyStopHook(**settings))
    assert ctx.progress.step == steps


def test_the_reason_tells_the_best():
    ctx = run([3.0, 2.0, 2.5], EarlyStopHook(patience=1))
    assert ctx.stop_reason == "loss did not get better in 1 validations; the best was 2 at step 2"


def test_another_metric_and_a_missing_one():
    assert run([3, 4, 5], EarlyStopHook("forces_mae", patience=1), "forces_mae").progress.step == 2
    with pytest.raises(ConfigError, match=r"force_mae.*forces_mae"):
        run([3, 4, 5], EarlyStopHook("force_mae", patience=1), "forces_mae")


def test_the_count_goes_on_and_a_new_run_counts_anew():
    hook = EarlyStopHook(patience=2)
    run([1.0, 2.0], hook)
    state = hook.state_dict()
    assert state == {"best": 1.0, "best_step": 1, "bad": 1}
    assert run([2.0, 1.5, 1.0], hook).progress.step == 3  # nothing left of the run before
    hook.load_state_dict(state)
    assert hook.state_dict() == state


def test_a_run_that_had_stopped_stops_again_unless_given_more_patience(tmp_path):
    from nvalchemi.training import checkpoint

    hook = EarlyStopHook(patience=1)
    saved = checkpoint.save(run([1.0, 2.0], hook), tmp_path)
    assert run([0.5] * 6, EarlyStopHook(patience=1), resume_from=saved).progress.step == 2
    assert run([0.5] * 6, EarlyStopHook(patience=3), resume_from=saved).progress.step == 6


@pytest.mark.parametrize("settings", [{"patience": 0}, {"min_delta": -1.0}, {"mode": "least"}])
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match="patience"):
        EarlyStopHook(**settings)

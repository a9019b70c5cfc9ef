import itertools

import pytest
import torch
from torch import nn

from nvalchemi.distributed import single_process
from nvalchemi.testing import assert_rank_agreement, assert_resumes, assert_single_process_noop, state_differences
from nvalchemi.training import Hook, Order, TrainingStage, on
from nvalchemi.training.hooks import EMAHook, GradientClipHook
from tests.training.hooks.runs import batches, network, strategy


class Scaling(Hook):
    """Scales gradients by a number that changes with the steps: a hook that must save its state."""

    order = Order.TRANSFORM

    def __init__(self):
        self.factor = 1.0

    @on(TrainingStage.GRADIENTS_READY)
    def scale(self, ctx):
        self.factor *= 0.9
        for gradient in ctx.update.gradients():
            gradient.mul_(self.factor)


class Saved(Scaling):
    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


def build(*hooks, model=network, data=batches):
    return lambda folder: (strategy(model(), [hook() for hook in hooks]), data())


def test_a_hook_that_saves_its_state_passes():
    assert_resumes(build(Saved), steps=8, stop_at=3)


def test_a_hook_that_forgets_is_caught():
    with pytest.raises(AssertionError, match=r"the steps after the resume differ: step 5 had loss"):
        assert_resumes(build(Scaling), steps=8, stop_at=3)


def test_a_state_that_differs_is_named():
    class Counting(Hook):
        counter = itertools.count()

        def state_dict(self):
            return {"number": next(self.counter)}

    with pytest.raises(AssertionError, match=r"hooks\.counting\.number: \d+, then \d+"):
        assert_resumes(build(Counting), steps=4, stop_at=2)
    assert_resumes(
        lambda folder: (strategy(network(), [Counting()]), batches()), steps=4, stop_at=2, ignore=["hooks.counting.number"]
    )


def test_a_run_that_is_not_repeatable_is_told():
    def unseeded():
        return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    numbers = itertools.count()

    def drifting():
        return batches(seed=next(numbers))

    with pytest.raises(AssertionError, match="not repeatable"):
        assert_resumes(build(model=unseeded, data=drifting), steps=4, stop_at=2)


def test_stop_at_lies_within_the_run():
    with pytest.raises(AssertionError, match="stop_at"):
        assert_resumes(build(Saved), steps=4, stop_at=4)


def test_differences_are_found_bit_for_bit():
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert list(state_differences({"a": [zero, 1.0]}, {"a": [zero.clone(), 1.0]})) == []
    assert list(state_differences(nan, nan.clone())) == []
    assert list(state_differences({"x": float("nan")}, {"x": float("nan")})) == []
    assert len(list(state_differences(zero, -zero))) == 1
    assert len(list(state_differences(zero, zero.double()))) == 1
    assert len(list(state_differences({"a": 1}, {"a": 1, "b": 2}))) == 1
    assert len(list(state_differences([1, 2], [1]))) == 1
    assert len(list(state_differences({"a": 1}, {"a": 1.0}))) == 1
    assert list(state_differences({"a": {"b": 1}}, {"a": {"b": 2}}, ignore=["a.b"])) == []


def test_a_hook_without_effect_in_one_process():
    assert_single_process_noop(EMAHook(0.9))
    with pytest.raises(AssertionError, match="'gradient_clip' changes the run"):
        assert_single_process_noop(GradientClipHook(1e-3))


def test_one_rank_agrees_with_itself():
    assert_rank_agreement({"a": torch.ones(3), "b": [1, "x"]}, single_process())

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nvalchemi.errors import TrainingError
from nvalchemi.training import Hook, TrainingStage, TrainingStrategy, on
from nvalchemi.training.finite import WAITING, FiniteHook
from nvalchemi.training.hooks import CheckpointHook, SpikeHook
from tests.training.hooks.runs import SGD, predict, squared, strategy, weight_row

NAN = float("nan")


def data(count=200, bad=None):
    batches = [(torch.full((1, 1), 0.1), torch.zeros(1, 1)) for _ in range(count)]
    if bad is not None:
        batches[bad][0].fill_(NAN)
    return batches


def run(batches, hooks=(), model=None, **kwargs):
    model = weight_row(1.0) if model is None else model
    return strategy(model, hooks, optimizer_configs=SGD, **kwargs).run(batches), model


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_nan_in_200_never_ends_in_silence(accumulate):
    model = weight_row(1.0)
    with pytest.raises(TrainingError, match=r"the loss of the step after \d+ is nan.*SpikeHook"):
        run(data(bad=100), model=model, num_epochs=1, accumulate=accumulate)
    assert model.weight.isfinite().all()
    ctx, model = run(data(bad=100), [SpikeHook()], num_epochs=1, accumulate=accumulate)
    assert ctx.progress.skipped == 1 and model.weight.isfinite().all()


class Root(nn.Module):
    """Its gradient at 0 is not finite, though its value is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.weight.abs().sqrt()


def test_weights_that_a_gradient_lost_are_neither_saved_nor_the_end(tmp_path):
    with pytest.raises(TrainingError, match="the weights of optimizer 'model' are not finite after step 1"):
        run(data(1), model=Root(), num_steps=1)
    with pytest.raises(TrainingError, match="the weights of optimizer 'model' are not finite after step 1"):
        run(data(1), [CheckpointHook(tmp_path)], model=Root(), num_steps=1)
    assert not list(tmp_path.glob("step-*"))


def test_on_an_accelerator_no_step_waits_for_its_loss():
    hook = FiniteHook()
    there = SimpleNamespace(total=torch.tensor(1.0, device="meta"))  # to ask it for its value would be an error
    for step in range(WAITING - 1):
        hook.look(SimpleNamespace(skip_reason=None, loss=there, progress=SimpleNamespace(step=step)))
    hook._waiting = [(3, torch.tensor(1.0)), (4, torch.tensor(NAN))]
    with pytest.raises(TrainingError, match="the loss of the step after 4 was nan"):
        hook.catch_up(None)
    hook.catch_up(None)  # nothing waits any longer


def test_it_is_no_name_that_a_user_would_take():
    class Finite(Hook):
        @on(TrainingStage.STEP_END)
        def look(self, ctx):
            pass

    ctx = TrainingStrategy(
        models=weight_row(1.0), optimizer_configs=SGD, loss_fn=squared, training_fn=predict, num_steps=1, hooks=[Finite()]
    ).run(data(1))
    assert ctx.progress.step == 1

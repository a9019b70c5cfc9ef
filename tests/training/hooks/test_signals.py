"""A run that is asked to stop ends as usual."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from nvalchemi.testing import assert_resumes, assert_single_process_noop
from nvalchemi.training import Hook, TrainingStage, ValidationConfig, layout, on
from nvalchemi.training.hooks import CheckpointHook, signals
from nvalchemi.training.hooks.signals import StopOnSignalHook
from tests.training.hooks.runs import batches, network, strategy


class Send(Hook):
    """A signal to this process in the middle of a step."""

    def __init__(self, number, at=3, times=1):
        self.number, self.at, self.times = number, at, times

    @on(TrainingStage.LOSS_READY)
    def send(self, ctx):
        if ctx.progress.step == self.at - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_b70_the_step_is_finished_and_saved(number, tmp_path):
    before = signal.getsignal(number)
    ctx = strategy(network(), [StopOnSignalHook(), Send(number), CheckpointHook(tmp_path)], num_steps=50).run(batches())
    assert ctx.progress.step == 3 and number.name in ctx.stop_reason
    assert layout.latest(tmp_path).step == 3
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_launchers_may_send_a_signal_twice(number, tmp_path):
    """torchrun sends its workers the Ctrl-C that they have had already."""
    ctx = strategy(network(), [StopOnSignalHook(), Send(number, times=3), CheckpointHook(tmp_path)], num_steps=50).run(batches())
    assert ctx.interrupted and ctx.progress.step == 3 and layout.latest(tmp_path).step == 3


def test_a_second_ctrl_c_after_a_while_acts_at_once(monkeypatch):
    monkeypatch.setattr(signals, "AGAIN", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup there is none
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy(network(), [StopOnSignalHook(), Send(signal.SIGINT, times=2)], num_steps=50).run(batches())
    finally:
        signal.signal(signal.SIGINT, before)


def test_b70_a_validation_is_cut_short_and_made_up_for(tmp_path):
    """The resumed run begins with it: what it decides is as in a run that nobody disturbed."""

    def sitting(folder, send_at=None):
        seen, validations = [], []

        def callback(batch, predictions, loss):
            seen.append(1)
            if len(seen) == send_at:
                os.kill(os.getpid(), signal.SIGTERM)

        @on(TrainingStage.VALIDATED)
        def note(ctx):
            validations.append((ctx.progress.step, ctx.validation["loss"]))

        config = ValidationConfig(validation_data=batches(5, seed=1), every_n_steps=2, batch_callback=callback)
        hooks = [StopOnSignalHook(), note, CheckpointHook(folder, keep_last=None)]
        ctx = strategy(network(), hooks, validation_config=config, num_steps=4, resume_from="latest").run(batches())
        return ctx, len(seen), validations

    torch.manual_seed(5)
    ctx, count, validations = sitting(tmp_path / "broken", send_at=7)  # the second of the second validation
    assert (ctx.progress.step, count, [step for step, _ in validations]) == (4, 7, [2])
    assert ctx.interrupted and len(layout.list_checkpoints(tmp_path / "broken")) == 1
    ctx, count, rest = sitting(tmp_path / "broken")
    assert not ctx.interrupted and (count, [step for step, _ in rest]) == (5, [4])
    torch.manual_seed(5)
    whole, _, wanted = sitting(tmp_path / "whole")
    assert validations + rest == wanted
    assert layout.latest(tmp_path / "broken").metric("loss") == wanted[-1][1] == layout.latest(tmp_path / "whole").metric("loss")


def test_before_the_first_step_nothing_is_saved(tmp_path):
    @on(TrainingStage.BUILT)
    def early(ctx):
        os.kill(os.getpid(), signal.SIGTERM)

    ctx = strategy(network(), [StopOnSignalHook(), early, CheckpointHook(tmp_path)]).run(batches())
    assert ctx.interrupted and ctx.progress.step == 0 and layout.latest(tmp_path) is None
    assert strategy(network(), [CheckpointHook(tmp_path)], resume_from="latest").run(batches()).progress.step == 4


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)

    class Fail(Hook):
        @on(TrainingStage.STEP_END)
        def fail(self, ctx):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        strategy(network(), [StopOnSignalHook(), Fail()]).run(batches())
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_it_does_nothing():
    steps = []
    thread = threading.Thread(target=lambda: steps.append(strategy(network(), [StopOnSignalHook()]).run(batches()).progress.step))
    thread.start()
    thread.join(30)
    assert steps == [4]


def test_one_process_is_unchanged():
    assert_single_process_noop(StopOnSignalHook())


def test_resumes():
    assert_resumes(lambda d: (strategy(network(), [StopOnSignalHook()], num_steps=6), batches()), steps=6, stop_at=3)

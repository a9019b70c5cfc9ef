"""A run that is asked to stop ends as usual."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from nvalchemi.testing import assert_resumes, assert_single_process_noop
from nvalchemi.training import Hook, TrainingStage, layout, on
from nvalchemi.training.hooks import CheckpointHook
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b70_the_step_is_finished_and_saved(number, tmp_path):
    before = signal.getsignal(number)
    ctx = strategy(network(), [StopOnSignalHook(), Send(number), CheckpointHook(tmp_path)], num_steps=50).run(batches())
    assert ctx.progress.step == 3 and number.name in ctx.stop_reason
    assert layout.latest(tmp_path).step == 3
    assert signal.getsignal(number) == before


def test_a_second_signal_acts_at_once():
    with pytest.raises(KeyboardInterrupt):
        strategy(network(), [StopOnSignalHook(), Send(signal.SIGINT, times=2)], num_steps=50).run(batches())


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

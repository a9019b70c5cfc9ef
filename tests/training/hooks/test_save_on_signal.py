"""A signal that asks for a checkpoint; ranks are in tests/multiprocess."""

import os
import signal
import threading

import pytest

from nvalchemi.errors import ConfigError
from nvalchemi.training import Every, TrainingStage, layout, on
from nvalchemi.training.hooks import CheckpointHook, StopOnSignalHook
from tests.training.hooks.runs import batches, network, strategy

SIGNAL = signal.SIGUSR2


def run(folder, at, *, every=100, **settings):
    @on(TrainingStage.LOSS_READY)
    def send(ctx):
        if ctx.progress.step in at:
            os.kill(os.getpid(), SIGNAL)

    hook = CheckpointHook(folder, Every(steps=every), keep_last=None, save_on_signal=SIGNAL)
    ctx = strategy(network(), [send, hook], num_steps=7, **settings).run(batches())
    return ctx, [c.step for c in layout.list_checkpoints(folder)]


def test_the_present_step_is_saved_and_the_run_goes_on(tmp_path):
    before = signal.getsignal(SIGNAL)
    ctx, steps = run(tmp_path, (1, 4))
    assert ctx.progress.step == 7 and not ctx.interrupted
    assert steps == [2, 5, 7]
    assert signal.getsignal(SIGNAL) == before


def test_what_is_saved_anyway_is_saved_once(tmp_path):
    assert run(tmp_path, (2,), every=3)[1] == [3, 6, 7]


def test_in_the_last_step_nothing_more_is_saved(tmp_path):
    assert run(tmp_path, (6,))[1] == [7]


def test_in_another_thread_it_does_nothing(tmp_path):
    done = []

    def other():
        hook = CheckpointHook(tmp_path, save_on_signal=SIGNAL)
        done.append(strategy(network(), [hook], num_steps=2).run(batches()).progress.step)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [2]


def test_one_signal_means_one_thing(tmp_path):
    hooks = [CheckpointHook(tmp_path, save_on_signal=signal.SIGUSR1), StopOnSignalHook()]
    with pytest.raises(ConfigError, match="two hooks claim 'SIGUSR1'"):
        strategy(network(), hooks).run(batches())
    with pytest.raises(ConfigError, match=r"save_on_signal is no signal; found: 'USR1'; needed: such as signal\.SIGUSR2"):
        CheckpointHook(tmp_path, save_on_signal="USR1")

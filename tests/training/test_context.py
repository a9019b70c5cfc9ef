"""What a run knows of itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.training import Progress, TrainContext


def run(num_batches=None, **ends):
    """The state of a run of nothing."""
    cursor = SimpleNamespace(num_batches=num_batches)
    return TrainContext(
        manager=single_process("cpu"), models={}, main="", objective=None, progress=Progress(), generator=torch.Generator(),
        cursor=cursor, **ends,
    )  # fmt: skip


def test_how_much_is_done():
    ctx = run(num_steps=100, num_epochs=4, num_batches=10)
    ctx.progress.step, ctx.progress.epoch, ctx.progress.batch = 10, 1, 5
    assert ctx.fraction_done == 1.5 / 4
    ctx.progress.step = 90
    assert ctx.fraction_done == 0.9
    assert run().fraction_done is None
    assert run(num_epochs=2).fraction_done == 0.0
    assert run(num_epochs=2, num_steps=0).finished


def test_the_rates_by_optimizer():
    ctx = run()
    assert ctx.learning_rates == {}
    weight = torch.nn.Parameter(torch.zeros(1))
    ctx.optimizers["a"] = torch.optim.SGD([weight], lr=0.5)
    ctx.optimizers["b"] = torch.optim.Adam([weight], lr=torch.tensor(0.25))
    assert ctx.learning_rates == {"a": 0.5, "b": 0.25}


def test_the_first_reason_is_kept():
    ctx = run()
    ctx.stop("one"), ctx.stop("two"), ctx.skip_step("three"), ctx.skip_step("four")
    assert (ctx.stop_reason, ctx.skip_reason, ctx.finished) == ("one", "three", True)
    ctx.begin_step([], None)
    assert (ctx.stop_reason, ctx.skip_reason) == ("one", None)


@pytest.mark.parametrize(("taken", "counts"), [(True, (1, 0, 0)), (False, (0, 1, 1))])
def test_a_skipped_step_is_no_step(taken, counts):
    progress = Progress()
    progress.advance(batches=2, samples=7, taken=taken)
    assert (progress.step, progress.skipped, progress.consecutive_skips) == counts
    assert (progress.batch, progress.samples, progress.epoch_samples) == (2, 7, 7)

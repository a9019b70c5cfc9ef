"""K02, B29: a run goes on with another number of ranks, and each sample of the epoch is seen once; ranks are simulated, one cursor each."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from nvalchemi.data.datapipes import (
    AtomBudgetBatchSampler,
    DataLoader,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    collate,
    shard_loader,
)
from nvalchemi.data.datapipes.rest import in_one_order
from nvalchemi.errors import CheckpointError
from nvalchemi.training.context import Progress
from nvalchemi.training.cursor import Cursor
from nvalchemi.training.position import described, take_up
from tests.data.random_structures import structure

CPU = torch.device("cpu")
PATH = Path("runs/step-7")


def several() -> MultiDataset:
    return MultiDataset(InMemoryDataset(torch.arange(27)), InMemoryDataset(torch.arange(27, 40)))


def mixture(size: int, **how: Any) -> Any:
    data = several()
    return DataLoader(data, batch_sampler=MultiDatasetBatchSampler(data, size, seed=3, **how), prefetch_factor=0)


STRUCTURES = InMemoryDataset([structure(i, 1 + i % 5) for i in range(40)])
#: a loader of each kind, as a user would write it for one process
KINDS: dict[str, Any] = {
    "one": lambda size: DataLoader(InMemoryDataset(torch.arange(40)), batch_size=size, shuffle=True, seed=3),
    "in order": lambda size: DataLoader(InMemoryDataset(torch.arange(40)), batch_size=size),
    "drop": lambda size: DataLoader(InMemoryDataset(torch.arange(40)), batch_size=size, shuffle=True, drop_last=True),
    "several": lambda size: DataLoader(several(), batch_size=size, shuffle=True, seed=3),
    "several, in order": lambda size: DataLoader(several(), batch_size=size),
    "torch's": lambda size: TorchLoader(TensorDataset(torch.arange(40)), batch_size=size, shuffle=True),
    "torch's of several": lambda size: TorchLoader(several(), batch_size=size, shuffle=True, collate_fn=collate),
    "weights": lambda size: mixture(size, weights=[1, 1], epoch_policy="max_size"),
    "replacement": lambda size: mixture(size, weights=[1, 3], epoch_policy="max_size", replacement=True),
    "samples": lambda size: DataLoader(data := several(), batch_size=size, sampler=MultiDatasetSampler(data, weights=[1, 2])),
    "fixed": lambda size: mixture(4, samples_per_dataset=[3, 1], num_batches=11),
    "atoms": lambda size: DataLoader(STRUCTURES, batch_sampler=AtomBudgetBatchSampler(STRUCTURES, 5 * size, seed=3)),
}


def indices(batch: Any) -> list[int]:
    if isinstance(batch, list):
        batch = batch[0]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch.sample_index.tolist()


@dataclass
class Run:
    """What the loop does with its cursors, on simulated ranks; ``saved`` is what a checkpoint would hold."""

    make: Any
    size: int
    ranks: int
    saved: dict[str, Any] | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)
    steps: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        loaders = [shard_loader(in_one_order(self.make(self.size), 3), rank, self.ranks) for rank in range(self.ranks)]
        self.ctx = [
            SimpleNamespace(
                cursor=Cursor(loader, CPU), progress=Progress(), manager=SimpleNamespace(rank=rank, world_size=self.ranks)
            )
            for rank, loader in enumerate(loaders)
        ]
        if self.saved is not None:
            for ctx in self.ctx:
                ctx.progress.load_state_dict(self.saved["progress"])
                take_up(ctx, self.saved["loader"], self.saved["ranks"], PATH)  # type: ignore[arg-type]
        for ctx in self.ctx:
            self._seek(ctx)

    def _seek(self, ctx: Any) -> None:
        ctx.cursor.seek(ctx.progress)
        ctx.groups = ctx.cursor.groups(1)
        while ctx.cursor.at_end:
            ctx.progress.end_epoch()
            ctx.cursor.seek(ctx.progress)
            ctx.groups = ctx.cursor.groups(1)

    def step(self) -> None:
        """One step of all ranks; the epoch's end comes with the next."""
        for ctx in self.ctx:
            if ctx.cursor.at_end:
                ctx.progress.end_epoch()
                self._seek(ctx)
        self.steps[self.ctx[0].progress.epoch] += 1
        for ctx in self.ctx:
            (batch,) = next(ctx.groups)
            ctx.cursor.at_end = ctx.cursor.read_all
            self.seen.setdefault(ctx.progress.epoch, []).extend(indices(batch))
            ctx.progress.advance(1, 0, True, ctx.cursor.samples_used(ctx.progress.batch + 1))

    def state(self) -> dict[str, Any]:
        ctx: Any = self.ctx[0]
        assert all(other.progress == ctx.progress for other in self.ctx)
        return {"progress": ctx.progress.state_dict(), "loader": described(ctx), "ranks": self.ranks}


def go(make: Any, stages: list[tuple[int, int, int]]) -> list[Run]:
    """Stages of (ranks, batch size, steps), each going on where the one before was saved."""
    runs: list[Run] = []
    for ranks, size, steps in stages:
        runs.append(Run(make, size, ranks, runs[-1].state() if runs else None))
        for _ in range(steps):
            runs[-1].step()
    return runs


def order_of(make: Any, epoch: int) -> list[int]:
    loader = in_one_order(make(1), 3)
    cursor = Cursor(loader, CPU)
    cursor.seek(Progress(epoch=epoch))
    return [i for (batch,) in cursor.groups(1) for i in indices(batch)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_stopped_after_3_steps_of_2_ranks(kind: str, ranks: int, steps: int) -> None:
    """K02: 40 structures, batch 4, stop after 3 steps on 2 ranks, go on with 1, 2 and 4; then ordinary epochs follow."""
    first, second = go(KINDS[kind], [(2, 4, 3), (ranks, 4, 0)])
    position = first.state()["progress"]["epoch_samples"]
    while second.ctx[0].progress.epoch < 2:
        second.step()
    order = Counter(order_of(KINDS[kind], 0))
    seen = Counter(first.seen[0] + second.seen[0])
    assert order <= seen
    if kind in {
        "weights",
        "replacement",
        "fixed",
        "atoms",
    }:  # as many for each rank: a sample or, of a fixed composition, a batch
        assert (seen - order).total() <= (12 if kind == "fixed" else 3)
    else:
        assert seen == order and position == 24 and second.steps[0] == steps
    if kind != "drop":
        assert Counter(order_of(KINDS[kind], 1)) <= Counter(second.seen[1])


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9)), min_size=3, max_size=4),
)
def test_a_chain_of_sizes_sees_each_sample_once(kind: str, stages: list[tuple[int, int, int]]) -> None:
    """B29: saved in the middle of a rest and resumed on yet another number, again and again, into the next epochs."""
    runs = go(KINDS[kind], stages)
    while runs[-1].ctx[0].progress.epoch < 3:
        runs[-1].step()
    seen: dict[int, Counter[int]] = {}
    for run in runs:
        for epoch, found in run.seen.items():
            seen.setdefault(epoch, Counter()).update(found)
    for epoch in range(3):
        order = Counter(order_of(KINDS[kind], epoch))
        if kind == "drop":
            assert seen[epoch] <= order
            continue
        assert order <= seen[epoch]
        # At the end of an epoch the ranks take as many: a sample or, of a fixed composition, a batch each.
        assert (seen[epoch] - order).total() <= 4 * (4 if kind == "fixed" else 1)


@pytest.mark.parametrize("kind", ["one", "several", "torch's", "atoms"])
def test_the_same_division_goes_on_by_batch(kind: str) -> None:
    first, second = go(KINDS[kind], [(2, 4, 3), (2, 4, 1)])
    unbroken = go(KINDS[kind], [(2, 4, 4)])[0]
    assert (second.ctx[0].progress.batch, second.ctx[0].progress.divided_at) == (4, 0)
    assert first.seen[0] + second.seen[0] == unbroken.seen[0]
    divided, again = go(KINDS[kind], [(3, 4, 1), (2, 4, 1), (2, 4, 1)])[1:]
    assert (again.ctx[0].progress.batch, again.ctx[0].progress.divided_at) == (2, divided.ctx[0].progress.divided_at)
    assert again.ctx[0].progress.divided_at > 0


def test_the_position_does_not_count_repeats() -> None:
    """41 samples on 2 ranks: 42 are trained on, and the epoch is over at 41."""
    make = lambda size: DataLoader(InMemoryDataset(torch.arange(41)), batch_size=size, shuffle=True)  # noqa: E731
    first = go(make, [(2, 7, 3)])[0]
    assert len(first.seen[0]) == 42
    saved = first.state()
    assert (saved["progress"]["epoch_samples"], saved["loader"]["at_end"]) == (41, True)
    second = Run(make, 7, 3, saved)
    second.step()
    assert list(second.seen) == [1]  # an epoch that was over is not begun again


def test_an_epoch_that_drops_its_tail_is_over_on_any_number_of_ranks() -> None:
    """40 samples, 3 ranks, batch 4: 36 are used; one rank alone would have had 40."""
    first, second = go(KINDS["drop"], [(3, 4, 3), (1, 4, 1)])
    assert first.ctx[0].progress.epoch_samples == 36 and list(second.seen) == [1]


def test_a_list_of_batches_goes_on_at_the_ends_of_epochs_only() -> None:
    def run(batches: int, ranks: int, batch: int, at_end: bool) -> Any:
        cursor = Cursor([torch.zeros(2)] * batches, CPU)
        then = {"order": {}, "division": {"batches": 4}, "at_end": at_end}
        progress = Progress(batch=batch, epoch_samples=2 * batch)
        ctx: Any = SimpleNamespace(cursor=cursor, progress=progress, manager=SimpleNamespace(rank=0, world_size=ranks))
        take_up(ctx, then, 2, PATH)
        cursor.seek(progress)
        return cursor.at_end

    assert run(4, 2, 3, False) is False
    assert run(9, 1, 4, True) is run(2, 3, 4, True) is True
    assert run(9, 1, 0, False) is False
    words = r"runs/step-7 stands in the middle of an epoch on another number of processes, .*found: processes 1; needed: processes 2; do this: resume on 2"
    with pytest.raises(CheckpointError, match=words):
        run(4, 1, 3, False)
    with pytest.raises(CheckpointError, match=r"of another loader.*found: batches 9; needed: batches 4"):
        run(9, 2, 3, False)


def test_other_orders_are_refused_with_both_sizes() -> None:
    saved = go(KINDS["one"], [(2, 4, 3)])[0].state()
    for kind, words in (
        ("in order", "found: processes 3, order of the data set; needed: processes 2, order shuffled by seed 3"),
        ("several", "found: processes 3, order shuffled mixture of batches by seed 3"),
        ("fixed", "samples 44.*needed: processes 2, samples 40"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Run(KINDS[kind], 4, 3, saved)


def test_a_checkpoint_that_does_not_say_its_order_is_refused_in_the_middle_of_an_epoch_only() -> None:
    """As those of the first format."""
    saved = go(KINDS["one"], [(2, 4, 3)])[0].state()
    with pytest.raises(CheckpointError, match=r"in the middle of an epoch, and its format is an earlier one"):
        Run(KINDS["one"], 4, 2, {**saved, "loader": {}})
    at_end = go(KINDS["one"], [(2, 4, 5)])[0].state()
    at_start = {**at_end, "loader": {}, "progress": {**at_end["progress"], "epoch": 1, "batch": 0, "epoch_samples": 0}}
    assert list(Run(KINDS["one"], 4, 2, at_start).seen) == []


def test_the_log_says_how_the_rest_is_divided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nvalchemi"):
        go(KINDS["one"], [(2, 4, 3), (4, 2, 1)])
    assert [record.message for record in caplog.records] == [
        "what is left of epoch 0, 16 of 40 samples, is divided anew: ranks 4, drop_last False, batch_size 2, "
        "saved with ranks 2, drop_last False, batch_size 4"
    ]

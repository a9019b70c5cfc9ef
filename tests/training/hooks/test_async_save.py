"""Checkpoints written while training goes on."""

import errno
import shutil
import threading

import pytest
import torch

from nvalchemi.errors import CheckpointError, TrainingError
from nvalchemi.testing import state_differences
from nvalchemi.training import Every, TrainingStage, checkpoint, layout, on, reading
from nvalchemi.training.background import HostCopies
from nvalchemi.training.hooks import CheckpointHook, EMAHook
from nvalchemi.training.remote_storage import Remote
from nvalchemi.training.shards import placed
from nvalchemi.training.storage import Disk
from tests.training.hooks.runs import batches, network, strategy


def run(folder, *hooks, steps=6, every=2, **settings):
    hook = CheckpointHook(folder, Every(steps=every), async_save=True, **settings)
    return strategy(network(), [EMAHook(0.9), *hooks, hook], num_steps=steps).run(batches())


def shared(saved):
    return placed(reading.read_shared(saved))


class Gate:
    """Writing waits until it is opened."""

    def __init__(self, monkeypatch):
        self.open, write = threading.Event(), Disk.write

        def slow(disk, name, writer):
            assert self.open.wait(60)
            return write(disk, name, writer)

        monkeypatch.setattr(Disk, "write", slow)


def test_b72_the_file_has_the_values_of_the_save(tmp_path, monkeypatch):
    gate, states = Gate(monkeypatch), {}

    @on(TrainingStage.STEP_END)
    def keep(ctx):
        step = ctx.progress.step
        states[step] = placed(checkpoint.gather(ctx)[0])
        if step in (3, 5):  # a step after the save: the weights have moved on
            assert step == 5 or layout.list_checkpoints(tmp_path) == []
            gate.open.set()

    run(tmp_path, keep, keep_last=None)
    saved = layout.list_checkpoints(tmp_path)
    assert [c.step for c in saved] == [2, 4, 6]
    for one in saved:
        assert list(state_differences(states[one.step], shared(one))) == []
    assert list(state_differences(states[2]["models"], states[4]["models"]))


def test_it_is_what_a_save_that_waits_writes(tmp_path):
    ctx = run(tmp_path / "behind")
    waited = checkpoint.save(ctx, tmp_path / "waited")
    assert list(state_differences(shared(layout.read(waited)), shared(layout.latest(tmp_path / "behind")))) == []
    names = {path.name for path in (tmp_path / "behind").iterdir()}
    assert names == {"step-00000002", "step-00000004", "step-00000006"}  # no debris


def test_retention_is_kept(tmp_path):
    run(tmp_path, steps=9, keep_last=2)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [8, 9]


def failing(monkeypatch, number):
    """The number-th file is not written: the disk is full."""
    write, left = Disk.write, [number]

    def full(disk, name, writer):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(disk, name, writer)

    monkeypatch.setattr(Disk, "write", full)


@pytest.mark.parametrize(("number", "surfaces", "kept"), [(1, 4, []), (2, 4, []), (5, 6, [2]), (9, 6, [2, 4])])
def test_a_failure_surfaces_at_the_next_save_or_at_the_end(tmp_path, monkeypatch, number, surfaces, kept):
    failing(monkeypatch, number)
    seen = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        seen.append(ctx.progress.step)

    with pytest.raises(CheckpointError, match=r"could not be written to .*No space left.*free space") as error:
        run(tmp_path, look)
    assert "CheckpointHook" in error.value.__notes__[0]
    assert seen[-1] == surfaces
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


@pytest.mark.timeout(60)
def test_a_checkpoint_that_cannot_appear_is_told_at_once(tmp_path, monkeypatch):
    """When every part is written, nobody's note is waited for again."""

    def full(disk, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "appear", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_a_folder_that_is_gone_in_the_middle_of_a_save_is_told_as_such(tmp_path, monkeypatch):
    """Not as a note that could not be written."""
    write = Disk.write

    def lost(disk, name, writer):
        shutil.rmtree(tmp_path / "runs")
        return write(disk, name, writer)

    monkeypatch.setattr(Disk, "write", lost)
    with pytest.raises(CheckpointError, match=r"could not be written to .*runs; found: .*\.writing-.* does not exist"):
        run(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("remote", [False, True])
def test_a_checkpoint_that_is_there_stays_where_an_old_one_cannot_be_removed(tmp_path, monkeypatch, remote):
    def refuse(store, folder):
        raise OSError(errno.EACCES, "Permission denied")

    for kind in (Disk, Remote):
        monkeypatch.setattr(kind, "remove", refuse)
    place = "memory://kept-although" if remote else tmp_path
    with pytest.raises(CheckpointError, match="Permission denied"):
        run(place, keep_last=1)
    assert [c.step for c in layout.list_checkpoints(place)] == [2, 4]


def test_weights_that_are_not_finite_push_nothing_out(tmp_path):
    @on(TrainingStage.STEP_END)
    def break_one(ctx):
        if ctx.progress.step == 4:
            with torch.no_grad():
                ctx.model[4].bias.fill_(float("nan"))
        if ctx.progress.step == 5:
            ctx.model[4].bias.data.zero_()

    with pytest.raises(TrainingError, match="the weights after step 4 are not finite"):
        strategy(
            network(),
            [break_one, CheckpointHook(tmp_path, Every(steps=2), async_save=True, keep_last=1)],
            num_steps=6,
            loss_fn=bounded,
        ).run(batches())
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [2]


def bounded(prediction, batch):
    return (prediction.nan_to_num() - batch[1]).square().mean()


def test_after_an_error_of_the_run_the_save_is_whole(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    @on(TrainingStage.STEP_END)
    def fail(ctx):
        if ctx.progress.step == 3:
            threading.Timer(0.2, gate.open.set).start()
            raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        run(tmp_path, fail)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [2]
    assert not any(thread.name.startswith("nvalchemi-save") for thread in threading.enumerate())


def test_copies_use_their_space_again():
    copies, tensors = HostCopies(), {"a": torch.ones(3), "b": [torch.zeros(2, 2)]}
    first = copies.take_all(tensors, "x")
    copies.finish()
    tensors["a"].add_(1)
    second = copies.take_all(tensors, "x")
    copies.finish()
    assert second["a"].data_ptr() == first["a"].data_ptr() and second["a"].tolist() == [2, 2, 2]
    assert second["b"][0].data_ptr() != tensors["b"][0].data_ptr()
    third = copies.take_all({"a": torch.ones(4)}, "x")
    copies.finish()
    assert third["a"].tolist() == [1, 1, 1, 1]
    assert list(copies._kept) == ["x/a"]

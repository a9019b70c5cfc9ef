import errno
import itertools
import os

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.data import datapipes
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training import Every, OptimizerConfig, TrainingStage, ValidationConfig, layout, on
from nvalchemi.training.hooks import CheckpointHook, EarlyStopHook, EMAHook
from nvalchemi.training.schedules import warmup_cosine
from nvalchemi.training.storage import Disk
from tests.training.hooks.runs import batches, network, strategy


def names(folder):
    return [c.path.name for c in layout.list_checkpoints(folder)]


def read(path, *keys):
    state = torch.load(path / "shared.pt", weights_only=True)
    for key in keys:
        state = state[key]
    return state


def test_what_a_killed_run_could_not_delete_is_deleted_by_the_next(tmp_path, monkeypatch):
    """It was killed when its last checkpoint had appeared, so that the run that goes on has nothing to save."""

    def go_on():
        hook = CheckpointHook(tmp_path, Every(steps=1), keep_last=2)
        strategy(network(), [hook], num_steps=4, resume_from="latest").run(batches())

    with monkeypatch.context() as killed:
        killed.setattr(layout, "prune", lambda *args: None)
        go_on()
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [1, 2, 3, 4]
    go_on()
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [3, 4]


def test_by_steps_and_at_the_end(tmp_path):
    strategy(network(), [CheckpointHook(tmp_path, Every(steps=3), keep_last=None)], num_steps=7).run(batches())
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]


def test_by_epochs(tmp_path):
    strategy(network(), [CheckpointHook(dir=tmp_path, every=Every(epochs=2), keep_last=None)], num_epochs=4).run(batches())
    assert names(tmp_path) == ["step-00000008", "step-00000016"]


def test_the_end_is_saved_once_and_not_again_by_a_resume_of_a_finished_run(tmp_path):
    for _ in range(3):
        strategy(network(), [CheckpointHook(tmp_path, Every(steps=3))], num_steps=6, resume_from="latest").run(batches())
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_the_last_few_are_kept(tmp_path):
    strategy(network(), [CheckpointHook(tmp_path, Every(steps=1), keep_last=2)], num_steps=6).run(batches())
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


def test_a_skipped_step_is_not_saved_twice(tmp_path):
    @on(TrainingStage.GRADIENTS_READY)
    def skip(ctx):
        if ctx.progress.step == 2 and ctx.progress.skipped < 3:
            ctx.skip_step("for the test")

    strategy(network(), [CheckpointHook(tmp_path, Every(steps=2), keep_last=None), skip]).run(batches())
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_micro_batches_are_not_steps(tmp_path):
    hook = CheckpointHook(tmp_path, Every(steps=2), keep_last=None)
    strategy(network(), [hook], accumulate=2, num_steps=4).run(batches(8))
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_b58_it_sees_every_other_hooks_last_state_wherever_it_stands(tmp_path, first):
    values = itertools.count(1)

    @on(TrainingStage.VALIDATED)
    def worse_and_worse(ctx):
        ctx.validation = {"loss": float(next(values))}

    hooks = [EMAHook(0.9), EarlyStopHook(patience=100)]
    hooks.insert(first, CheckpointHook(tmp_path, Every(steps=2), keep_last=None))
    config = ValidationConfig(validation_data=batches(1), every_n_steps=2)
    strategy(network(), [worse_and_worse, *hooks], validation_config=config, num_steps=4).run(batches())
    for n, path in enumerate(sorted(tmp_path.glob("step-*")), 1):
        assert read(path, "hooks", "ema", "count") == read(path, "progress", "step") == 2 * n
        assert read(path, "hooks", "early_stop", "bad") == n - 1
        assert layout.read(path).metric("loss") == float(n)


LOADERS = {
    "torch's": lambda data, size: DataLoader(data, batch_size=size, shuffle=True),
    "torch's, 2 workers": lambda data, size: DataLoader(data, batch_size=size, shuffle=True, num_workers=2),
    "ours": lambda data, size: datapipes.DataLoader(datapipes.InMemoryDataset(data.tensors[0]), batch_size=size, shuffle=True),
}


def consumed(folder, kind, size, epochs, stop_at=None):
    """The indices of 20 samples trained on, in order."""
    x = torch.arange(20, dtype=torch.float32).reshape(20, 1).repeat(1, 3)
    indices = []

    @on(TrainingStage.STEP_END)
    def note(ctx):
        rows = ctx.batch if isinstance(ctx.batch, torch.Tensor) else ctx.batch[0]
        indices.extend(rows[:, 0].long().tolist())
        if ctx.progress.step == stop_at:
            ctx.stop("for the test")

    strategy(
        network(),
        [CheckpointHook(folder, Every(steps=100)), note],
        loss_fn=lambda prediction, batch: prediction.square().mean(),
        training_fn=lambda model, batch: model(batch if isinstance(batch, torch.Tensor) else batch[0]),
        num_epochs=epochs,
        resume_from="latest",
    ).run(LOADERS[kind](TensorDataset(x, torch.zeros(20, 1)), size))
    return indices


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("size", "stop"),
    [(2, 14), (2, 20), (3, 3)],
    ids=["B60, four batches of the second epoch", "K05, the end of the second epoch", "K06, step 3 of the first"],
)
def test_b60_k05_k06_a_resume_goes_on_in_the_same_order(tmp_path, kind, size, stop):
    """Whatever torch's own stream is at the time of the resume."""
    whole = consumed(tmp_path / "whole", kind, size, 3)
    assert all(sorted(whole[i : i + 20]) == list(range(20)) for i in (0, 20, 40))
    assert len({tuple(whole[i : i + 20]) for i in (0, 20, 40)}) == 3
    torch.manual_seed(5)
    first = consumed(tmp_path / "broken", kind, size, 3, stop_at=stop)
    torch.manual_seed(6)
    assert first + consumed(tmp_path / "broken", kind, size, 3) == whole


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index)) + torch.randn(3), torch.zeros(1)


@pytest.mark.parametrize("outlive", [False, True])
def test_what_workers_draw_is_taken_up_where_it_can_be_and_told_where_not(tmp_path, caplog, outlive):
    def drawn(folder, epochs):
        seen = []

        @on(TrainingStage.STEP_END)
        def note(ctx):
            seen.append(ctx.batch[0].clone())

        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=outlive)
        strategy(network(), [CheckpointHook(folder), note], num_epochs=epochs, resume_from="latest").run(loader)
        return seen

    whole = drawn(tmp_path / "whole", 2)
    with caplog.at_level("INFO", "nvalchemi"):
        drawn(tmp_path / "broken", 1)
        assert "workers that outlive an epoch" not in caplog.text
        rest = drawn(tmp_path / "broken", 2)
    assert ("workers that outlive an epoch" in caplog.text) == outlive
    assert all(map(torch.equal, rest, whole[2:])) != outlive


def rates(folder, steps, horizon=10, stop_at=None, schedule=CosineAnnealingLR, name="T_max"):
    seen = []

    @on(TrainingStage.STEP_START)
    def note(ctx):
        seen.append(ctx.optimizers["model"].param_groups[0]["lr"])

    @on(TrainingStage.STEP_END)
    def stop(ctx):
        if ctx.progress.step == stop_at:
            ctx.stop("for the test")

    config = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, schedule, {name: horizon})
    hooks = [CheckpointHook(folder, Every(steps=100)), note, stop]
    strategy(network(), hooks, optimizer_configs=config, num_steps=steps, resume_from="latest").run(batches())
    return seen


SCHEDULES = pytest.mark.parametrize(("schedule", "name"), [(CosineAnnealingLR, "T_max"), (warmup_cosine, "total_steps")])


@SCHEDULES
def test_b66_the_total_is_the_total_and_the_curve_the_same(tmp_path, schedule, name):
    whole = rates(tmp_path / "whole", 10, schedule=schedule, name=name)
    first = rates(tmp_path / "broken", 10, stop_at=6, schedule=schedule, name=name)
    assert first == whole[:6]
    rest = rates(tmp_path / "broken", 10, schedule=schedule, name=name)
    assert len(rest) == 4 and rest == whole[6:]


@SCHEDULES
def test_b66_a_longer_run_takes_the_steps_that_are_left_on_the_schedule_that_the_code_declares(tmp_path, schedule, name):
    """The first of them with the rate that was saved; then by the new curve, or from that rate where a rate is made from the one before."""
    short = rates(tmp_path / "short", 10, schedule=schedule, name=name)
    rates(tmp_path / "broken", 10, stop_at=6, schedule=schedule, name=name)
    rest = rates(tmp_path / "broken", 20, horizon=20, schedule=schedule, name=name)
    whole = rates(tmp_path / "whole", 20, horizon=20, schedule=schedule, name=name)
    assert len(rest) == 14 and rest[0] == short[6]
    if schedule is warmup_cosine:
        assert rest[1:] == whole[7:]
    else:
        assert sorted(rest, reverse=True) == rest and 0 < rest[-1] < 2 * whole[-1]


def scored(folder, scores, **kwargs):
    left = iter(scores)

    @on(TrainingStage.VALIDATED)
    def pretend(ctx):
        ctx.validation = {"loss": next(left)}

    config = ValidationConfig(validation_data=batches(1), every_n_steps=1)
    hook = CheckpointHook(folder, Every(steps=1), keep_last=1, **kwargs)
    return strategy(network(), [pretend, hook], validation_config=config, resume_from="latest", num_steps=0)


def run_scored(folder, scores, steps, **kwargs):
    from dataclasses import replace

    replace(scored(folder, scores, **kwargs), num_steps=steps).run(batches())
    return {c.step: c.metric("loss") for c in layout.list_checkpoints(folder)}


def test_b68_the_best_stay_the_best_over_a_resume(tmp_path):
    assert run_scored(tmp_path, [0.5, 0.4], 2, keep_best=2) == {1: 0.5, 2: 0.4}
    assert run_scored(tmp_path, [0.9], 3, keep_best=2) == {1: 0.5, 2: 0.4, 3: 0.9}
    assert run_scored(tmp_path, [0.45], 4, keep_best=2) == {2: 0.4, 4: 0.45}
    assert layout.best(tmp_path, "loss").step == 2


def test_one_validation_makes_one_checkpoint_the_best(tmp_path):
    left = iter([0.5, 0.4, 0.9])

    @on(TrainingStage.VALIDATED)
    def pretend(ctx):
        ctx.validation = {"loss": next(left)}

    config = ValidationConfig(validation_data=batches(1), every_n_steps=2)
    hook = CheckpointHook(tmp_path, Every(steps=1), keep_last=1, keep_best=2)
    strategy(network(), [pretend, hook], validation_config=config, num_steps=6).run(batches())
    assert {c.step: c.metric("loss") for c in layout.list_checkpoints(tmp_path)} == {2: 0.5, 4: 0.4, 6: 0.9}


def test_more_may_be_better(tmp_path):
    assert run_scored(tmp_path, [0.5, 0.9, 0.4, 0.3], 4, keep_best=1, mode="max") == {2: 0.9, 4: 0.3}


def test_the_last_validation_counts_for_the_last_checkpoint(tmp_path):
    """A validation at the very end comes after the step's save: the end is saved with it."""
    config = ValidationConfig(validation_data=batches(1), every_n_steps=4)
    hook = CheckpointHook(tmp_path, Every(steps=3), keep_last=None)
    ctx = strategy(network(), [hook], validation_config=config, num_steps=6).run(batches())
    saved = layout.latest(tmp_path)
    assert saved.step == 6 and saved.manifest["metrics"] == ctx.validation


def test_a_metric_that_there_is_not(tmp_path):
    with pytest.raises(ConfigError, match=r"forces_mae.*loss"):
        run_scored(tmp_path, [0.5], 1, keep_best=1, metric="forces_mae")


def test_another_runs_checkpoints_are_neither_mixed_nor_deleted(tmp_path):
    strategy(network(), [CheckpointHook(tmp_path, Every(steps=2))]).run(batches())
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=r"another run.*step-00000004.*resume_from="):
        strategy(network(), [CheckpointHook(tmp_path, Every(steps=1), keep_last=1)]).run(batches())
    assert names(tmp_path) == before


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_two_runs_in_one_folder_are_told(tmp_path, behind, resumes):
    """A resume would take up whichever saved last, and each would delete the other's."""

    def run(*hooks, steps, **settings):
        hook = CheckpointHook(tmp_path, Every(steps=1), keep_last=1, async_save=behind)
        return strategy(network(), [*hooks, hook], num_steps=steps, **settings).run(batches())

    begin = {}
    if resumes:  # both take up the same checkpoint: a job that was submitted twice
        run(steps=2)
        begin = {"resume_from": "latest"}
    first = names(tmp_path)

    started = []

    @on(TrainingStage.STEP_START)
    def meanwhile(ctx):
        if not started:
            started.append(True)
            run(steps=3, **begin)

    with pytest.raises(
        CheckpointError, match=r"another run saves .*, too; found: step-00000003, which appeared.*folder of its own"
    ):
        run(meanwhile, steps=6, **begin)
    assert "step-00000003" in names(tmp_path) and names(tmp_path) != first


def test_what_is_no_checkpoint_is_named_once_a_save(tmp_path, caplog):
    (tmp_path / "run").mkdir()

    @on(TrainingStage.STEP_START)
    def put(ctx):
        (tmp_path / "run" / "step-by-step").mkdir(exist_ok=True)

    strategy(network(), [put, CheckpointHook(tmp_path / "run", Every(steps=1))], num_steps=3).run(batches())
    assert caplog.text.count("ignored: ") == 3


@pytest.mark.parametrize("behind", [False, True])
def test_a_program_that_goes_to_another_folder_saves_where_it_began(tmp_path, monkeypatch, behind):
    """As calculators do that run a program of their own."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    @on(TrainingStage.STEP_START)
    def leave(ctx):
        os.chdir(tmp_path / ("other" if ctx.progress.step % 2 else "."))

    strategy(network(), [leave, CheckpointHook("runs", Every(steps=1), async_save=behind)]).run(batches())
    assert names(tmp_path / "runs") == ["step-00000002", "step-00000003", "step-00000004"]
    assert list((tmp_path / "other").iterdir()) == []


def test_old_checkpoints_that_cannot_be_deleted_are_told(tmp_path, monkeypatch):
    def refuse(store, folder):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Disk, "remove", refuse)
    with pytest.raises(CheckpointError, match=r"could not be deleted; found: .*Permission denied.*keep_last=None"):
        strategy(network(), [CheckpointHook(tmp_path, Every(steps=1), keep_last=1)]).run(batches())
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_b76_latest_where_all_are_damaged_does_not_start_over_them(tmp_path):
    strategy(network(), [CheckpointHook(tmp_path, Every(steps=4))]).run(batches())
    for path in tmp_path.glob("step-*/shared.pt"):
        path.write_bytes(b"")
    with pytest.raises((ConfigError, CheckpointError)):
        strategy(network(), [CheckpointHook(tmp_path, Every(steps=4))], resume_from="latest").run(batches())


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"keep_best": 0}, {"mode": "least"}])
def test_impossible_settings(tmp_path, settings):
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointHook(tmp_path, Every(steps=1), **settings)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        strategy(network(), [CheckpointHook(tmp_path / "file" / "runs", Every(steps=1))]).run(batches())


def test_a_full_disk_is_told_as_such_and_leaves_the_earlier_ones(tmp_path, monkeypatch):
    strategy(network(), [CheckpointHook(tmp_path)], num_steps=4).run(batches())

    def full(*args):
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 19328 vs 19280\nand a trace")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"could not be written.*unexpected pos 19328 vs 19280; do this: free space"):
        strategy(network(), [CheckpointHook(tmp_path)], num_steps=6, resume_from="latest").run(batches())
    assert names(tmp_path) == [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_the_middle_of_an_epoch_belongs_to_its_loader(tmp_path):
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))

    def run(steps, **loader):
        return strategy(network(), [CheckpointHook(tmp_path)], num_steps=steps, resume_from="latest").run(
            DataLoader(data, **({"batch_size": 4, "shuffle": True} | loader))
        )

    run(8)  # six batches an epoch
    words = "in the middle of an epoch of another loader.*found: order of the data set; needed: order shuffled by seed 0"
    with pytest.raises(CheckpointError, match=words):
        run(9, shuffle=False)
    ctx = run(10, batch_size=5)  # 8 samples are used, 16 are left
    assert (ctx.progress.epoch_samples, ctx.progress.divided_at, ctx.progress.batch) == (18, 8, 2)
    run(12)  # 6 samples are left, in batches of 4
    assert run(20, batch_size=3).progress.epoch == 3  # an epoch's end is a place in any loader


def test_the_middle_of_an_epoch_of_batches_without_an_order_stays(tmp_path):
    def run(steps, count):
        return strategy(network(), [CheckpointHook(tmp_path)], num_steps=steps, resume_from="latest").run(batches()[:count])

    run(2, 4)
    with pytest.raises(
        CheckpointError, match=r"in the middle of an epoch of another loader.*found: batches 3; needed: batches 4"
    ):
        run(3, 3)
    assert run(3, 4).progress.batch == 3


def test_another_kind_of_optimizer_is_refused(tmp_path):
    strategy(network(), [CheckpointHook(tmp_path)], num_steps=4).run(batches())
    sgd = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(CheckpointError, match=r"another kind of optimizer for 'model'; found: AdamW; needed: SGD"):
        strategy(network(), [CheckpointHook(tmp_path)], optimizer_configs=sgd, num_steps=6, resume_from="latest").run(batches())


def test_settings_of_the_optimizer_that_stay_are_told(tmp_path, caplog):
    def run(steps, **settings):
        config = OptimizerConfig(torch.optim.AdamW, {"lr": 0.01, **settings})
        return strategy(
            network(), [CheckpointHook(tmp_path)], optimizer_configs=config, num_steps=steps, resume_from="latest"
        ).run(batches())

    run(2)
    run(4)
    assert "goes on with its settings" not in caplog.text
    ctx = run(6, weight_decay=0.5)
    assert "optimizer 'model' goes on with its settings in" in caplog.text and "weight_decay 0.01 (declared: 0.5)" in caplog.text
    assert ctx.optimizers["model"].param_groups[0]["weight_decay"] == 0.01


def test_a_scheduler_may_be_left_out_of_a_resume(tmp_path, caplog):
    step = OptimizerConfig(torch.optim.SGD, {"lr": 0.1}, torch.optim.lr_scheduler.StepLR, {"step_size": 2})
    strategy(network(), [CheckpointHook(tmp_path)], optimizer_configs=step, num_steps=4).run(batches())
    plain = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})
    ctx = strategy(network(), [CheckpointHook(tmp_path)], optimizer_configs=plain, num_steps=6, resume_from="latest").run(
        batches()
    )
    assert ctx.optimizers["model"].param_groups[0]["lr"] == pytest.approx(0.001)
    assert "the state of scheduler 'model' is left out" in caplog.text

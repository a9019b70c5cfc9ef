from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nvalchemi.distributed import single_process
from nvalchemi.errors import CheckpointError, ConfigError, TrainingError
from nvalchemi.objective import LossOutput, LossPart
from nvalchemi.training import EnergyMSELoss, Hook, OptimizerConfig, TrainingSpan, TrainingStage, TrainingStrategy, around, on
from nvalchemi.training.hooks import DDPHook, FSDP2Hook
from nvalchemi.training.objectives import PredictionObjective

SGD = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})


def line(value=0.0):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, value)
    return model


def predict(model, batch):
    return model(batch[0])


def squared(prediction, batch):
    return (prediction - batch[1]).square().mean()


def batches(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 1, generator=generator, dtype=torch.float64),
            torch.randn(n, 1, generator=generator, dtype=torch.float64),
        )
        for n in sizes
    ]


def strategy(model=None, **kwargs):
    settings = {
        "models": line() if model is None else model,
        "optimizer_configs": SGD,
        "loss_fn": squared,
        "training_fn": predict,
    }
    if not {"num_epochs", "num_steps"} & kwargs.keys():
        settings["num_epochs"] = 1
    return TrainingStrategy(**{**settings, **kwargs})


def listener(seen, *stages):
    class Listener(Hook):
        @around(TrainingSpan.RUN)
        def run(self, ctx):
            seen.append("run[")
            yield
            seen.append("]run")

        @around(TrainingSpan.FORWARD)
        def forward(self, ctx):
            seen.append("forward[")
            yield
            seen.append("]forward")

        @around(TrainingSpan.MICROBATCH)
        def microbatch(self, ctx):
            seen.append("micro[")
            yield
            seen.append("]micro")

    for stage in TrainingStage:

        def listen(self, ctx, stage=stage):
            seen.append(stage.name)

        setattr(Listener, f"at_{stage.value}", on(stage)(listen))
    Listener.__init_subclass__()
    return Listener


def test_the_loop_is_as_drawn():
    seen = []
    strategy(hooks=[listener(seen)()], accumulate=2).run(batches(1, 1, 1))
    micro = ["micro[", "forward[", "]forward", "LOSS_READY", "]micro"]
    step = ["GRADIENTS_READY", "OPTIMIZER_STEPPED", "STEP_END"]
    assert seen == [
        *("run[", "SETUP", "BUILT", "TRAINING_START", "EPOCH_START"),
        *("STEP_START", *micro, *micro, *step),
        *("STEP_START", *micro, *step),
        *("EPOCH_END", "TRAINING_END", "]run"),
    ]


@pytest.mark.parametrize("accumulate", [1, 2, 4, 10])
def test_b40_micro_batches_of_any_size_give_the_gradient_of_the_whole(accumulate):
    data = batches(3, 1, 5, 2, 7, 1)
    grouped = [data[i : i + accumulate] for i in range(0, len(data), accumulate)]
    whole = [(torch.cat([x for x, _ in g]), torch.cat([y for _, y in g])) for g in grouped]
    one, other = line(0.3), line(0.3)
    strategy(one, accumulate=accumulate).run(data)
    strategy(other).run(whole)
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-12, atol=0)


def test_b38_a_short_last_window_is_divided_by_its_own_size():
    data = batches(2, 2, 2, 2, 2, 2)
    one, other = line(0.3), line(0.3)
    strategy(one, accumulate=4).run(data)
    strategy(other, accumulate=4).run(data[:4])
    strategy(other, accumulate=2).run(data[4:])
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-12, atol=0)


def test_each_part_is_divided_by_its_own_count():
    def loss(prediction, batch):
        labelled = batch[1] > 0
        error = (prediction - batch[1]).square()
        parts = {
            "all": LossPart(error.sum(), error.numel()),
            "some": LossPart(error[labelled].sum(), labelled.sum(), weight=2.0),
        }
        return LossOutput.from_parts(parts, len(error))

    class Objective(PredictionObjective):
        def counts(self, batch):
            return {"all": batch[1].numel(), "some": (batch[1] > 0).sum()}

    data = batches(3, 4, 6)
    whole = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    one, other = line(0.3), line(0.3)
    strategy(one, loss_fn=Objective(loss, predict), training_fn=None, accumulate=3).run(data)
    strategy(other, loss_fn=Objective(loss, predict), training_fn=None).run(whole)
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-12, atol=0)


def test_parts_that_nobody_counts_cannot_be_accumulated():
    def loss(prediction, batch):
        error = (prediction - batch[1]).square()
        return LossOutput.from_parts({"own": LossPart(error.sum(), error.numel())}, len(error))

    assert strategy(loss_fn=loss).run(batches(2)).progress.step == 1
    with pytest.raises(ConfigError, match=r"nobody counts.*parts own.*counts\(batch\)"):
        strategy(loss_fn=loss, accumulate=2).run(batches(2, 2))


def test_micro_batches_with_different_parts_are_told():
    class Objective(PredictionObjective):
        def counts(self, batch):
            return {"one": 1, "two": 1}

    names = iter(["one", "two"])

    def loss(prediction, batch):
        return LossOutput.from_parts({next(names): LossPart(prediction.sum(), 1)}, 1)

    with pytest.raises(ConfigError, match=r"different parts.*one and two"):
        strategy(loss_fn=Objective(loss, predict), training_fn=None, accumulate=2).run(batches(1, 1))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_b48_the_loss_seen_is_the_true_one(accumulate):
    seen = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        seen.append((ctx.loss.total.item(), ctx.loss.parts["loss"].value.item(), ctx.loss.total.requires_grad))

    constant = lambda prediction, batch: 0 * prediction.sum() + 2.0  # noqa: E731
    strategy(loss_fn=constant, hooks=[look], accumulate=accumulate).run(batches(1, 2, 3, 4))
    assert seen == [(2.0, 2.0, False)] * (4 // accumulate)


def test_steps_and_epochs_end_a_run():
    assert strategy(num_steps=5).run(batches(1, 1)).progress.state_dict() == {
        "epoch": 2,
        "batch": 1,
        "step": 5,
        "samples": 5,
        "epoch_samples": 1,
        "divided_at": 0,
        "skipped": 0,
        "consecutive_skips": 0,
    }
    ctx = strategy(num_epochs=3, num_steps=100).run(batches(1, 1))
    assert (ctx.progress.epoch, ctx.progress.step) == (3, 6)
    assert strategy(num_steps=0).run(batches(1)).progress.step == 0


def test_an_epoch_that_ends_with_the_run_is_an_epoch():
    seen = []

    @on(TrainingStage.EPOCH_END)
    def look(ctx):
        seen.append(ctx.progress.epoch)

    strategy(num_steps=4, hooks=[look]).run(batches(1, 1))
    strategy(num_steps=4, hooks=[look]).run(x for x in batches(1, 1, 1, 1, 1))
    assert seen == [1, 2]


def test_a_hook_may_stop_the_run_and_the_first_reason_stays():
    @on(TrainingStage.STEP_END)
    def stop(ctx):
        ctx.stop("enough")
        ctx.stop("really")

    ctx = strategy(num_epochs=10, hooks=[stop]).run(batches(1, 1))
    assert (ctx.progress.step, ctx.stop_reason) == (1, "enough")


def test_a_skipped_step_moves_on_in_the_data_and_nothing_else():
    seen = []

    class SkipSecond(Hook):
        @on(TrainingStage.GRADIENTS_READY)
        def guard(self, ctx):
            if ctx.progress.batch == 1:
                ctx.skip_step("because")

        @on(TrainingStage.OPTIMIZER_SKIPPED)
        def skipped(self, ctx):
            seen.append((ctx.skip_reason, ctx.step_taken))

    config = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
    model, data = line(0.3), batches(1, 1, 1)
    ctx = strategy(model, optimizer_configs=config, hooks=[SkipSecond()]).run(data)
    other = line(0.3)
    strategy(other, optimizer_configs=config).run([data[0], data[2]])
    assert seen == [("because", False)]
    assert (ctx.progress.step, ctx.progress.batch, ctx.progress.samples, ctx.progress.skipped) == (2, 0, 3, 1)
    assert torch.equal(model.weight, other.weight)
    assert ctx.optimizers["model"].param_groups[0]["lr"] == 0.25


def test_too_many_skips_in_a_row_end_the_run():
    @on(TrainingStage.GRADIENTS_READY)
    def guard(ctx):
        ctx.skip_step("never good")

    with pytest.raises(TrainingError, match=r"4 steps in a row.*never good.*at most 3"):
        strategy(num_steps=10, hooks=[guard], max_consecutive_skips=3).run(batches(1, 1))


def test_modes_and_flags_are_put_back_also_after_an_error():
    student, teacher = line(1.0).eval(), line(2.0)
    teacher.weight.requires_grad_(True)

    def distil(models, batch):
        assert models["student"].training
        assert not models["teacher"].training
        assert not models["teacher"].weight.requires_grad
        return models["student"](batch[0]), models["teacher"](batch[0]).detach()

    def loss(prediction, batch):
        return (prediction[0] - prediction[1]).square().mean()

    models = {"teacher": teacher, "student": student}
    settings = {"training_fn": distil, "loss_fn": loss, "optimizer_configs": {"student": SGD}, "num_epochs": 50}
    ctx = strategy(models, **settings).run(batches(8, 8))
    assert student.weight.item() == pytest.approx(2.0, abs=1e-3)
    assert teacher.weight.item() == 2.0
    assert not student.training
    assert teacher.training
    assert teacher.weight.requires_grad
    assert ctx.main == "student"
    with pytest.raises(ZeroDivisionError):
        strategy(models, **{**settings, "loss_fn": lambda p, b: 1 / 0}).run(batches(1))
    assert not student.training
    assert teacher.weight.requires_grad


def test_several_optimizers():
    model = nn.Sequential(line(0.5), line(0.5))
    configs = [
        OptimizerConfig(torch.optim.SGD, {"lr": 0.0}, parameters=lambda m: m[0].parameters()),
        OptimizerConfig(torch.optim.SGD, {"lr": 0.1}, parameters=lambda m: m[1].parameters()),
    ]
    strategy(model, optimizer_configs=configs).run(batches(4))
    assert model[0].weight.item() == 0.5
    assert model[1].weight.item() != 0.5
    with pytest.raises(ConfigError, match="a parameter has two optimizers"):
        strategy(model, optimizer_configs=[SGD, SGD]).run(batches(4))


def test_a_loss_that_holds_its_model_gets_the_batch_and_the_generator():
    model = line(1.0)

    def loss(x, generator=None):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return model(x + noise).square().mean(), noise

    draws = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        draws.append(ctx.loss.extra)

    rows = [x for x, _ in batches(3, 3)]
    for _ in range(2):
        strategy(model, loss_fn=loss, training_fn=None, hooks=[look], seed=4).run(rows)
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_any_torch_loader_will_do():
    data = TensorDataset(*batches(6)[0])
    assert strategy().run(DataLoader(data, batch_size=4)).progress.step == 2

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    assert strategy().run(DataLoader(Stream(), batch_size=4)).progress.step == 2


def test_an_error_says_where_it_came_from():
    @on(TrainingStage.STEP_END)
    def broken(ctx):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        strategy(hooks=[broken]).run(batches(1))
    assert caught.value.__notes__ == ["raised in hook 'broken' (FunctionHook) at STEP_END, step 1"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": 3}, "models is no module"),
        ({"models": {"a": 3}}, "model 'a' is no torch module"),
        ({"num_epochs": None}, "the run has no end"),
        ({"num_epochs": 1.5}, "num_epochs is wrong"),
        ({"accumulate": 0}, "accumulate is wrong"),
        ({"loss_fn": 3}, "loss_fn is no loss"),
        (
            {"loss_fn": nn.MSELoss(), "training_fn": None},
            r"no training_fn beside it.*MSELoss\(\): missing a required argument: 'target'",
        ),
        ({"loss_fn": lambda predicted, x: 0.0, "training_fn": None}, "no training_fn beside it"),
        (
            {
                "models": {"a": line(), "b": line()},
                "optimizer_configs": {"a": SGD},
                "loss_fn": EnergyMSELoss(),
                "training_fn": None,
            },
            "several models and no training_fn; found: models a, b",
        ),
        ({"optimizer_configs": torch.optim.SGD}, "holds no OptimizerConfig"),
        ({"models": {}}, "found: an empty dict"),
        ({"loss_fn": EnergyMSELoss}, "loss_fn is no loss"),
        ({"training_fn": "predict"}, "training_fn cannot be called"),
        ({"hooks": Hook()}, "hooks is no list"),
        ({"hooks": iter([])}, "hooks is no list"),
        ({"validation_config": [1]}, "validation_config is none; found: list"),
        ({"distributed_manager": "cpu"}, "distributed_manager is none"),
        ({"seed": "a"}, "seed is wrong"),
        ({"resume_from": True}, "resume_from is no path"),
        ({"resume_from": "somewhere", "init_from": "elsewhere"}, "exclude each other"),
    ],
)
def test_a_wrong_declaration_fails_when_it_is_made(settings, words):
    with pytest.raises(ConfigError, match=words):
        strategy(**settings)


def test_settings_that_only_the_optimizer_knows_to_be_wrong():
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        strategy(optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": -1.0})).run(batches(1))
    plateau = OptimizerConfig(
        torch.optim.SGD, {"lr": 0.1}, torch.optim.lr_scheduler.ReduceLROnPlateau, scheduler_metric="forces_mae"
    )
    with pytest.raises(ConfigError, match=r"nothing is validated; found: model \(forces_mae\)"):
        strategy(optimizer_configs=plateau).run(batches(1))


def test_a_run_that_cannot_begin_leaves_the_models_as_they_were(tmp_path):
    models = {"a": line().eval(), "b": line()}
    for wrong in ({"init_from": tmp_path / "nowhere"}, {"hooks": [Hook(), Hook()]}):
        with pytest.raises((ConfigError, CheckpointError)):
            strategy(models, optimizer_configs={"a": SGD}, **wrong).run(batches(1))
        assert not models["a"].training
        assert models["b"].training and models["b"].weight.requires_grad


def test_a_loss_without_a_graph_is_an_error():
    with pytest.raises(TrainingError, match="does not depend on any weight"):
        strategy(training_fn=lambda model, batch: model(batch[0]).detach()).run(batches(2))


def test_a_loss_that_is_no_scalar_is_an_error():
    with pytest.raises(ConfigError, match=r"no scalar.*shape \(2, 1\)"):
        strategy(loss_fn=lambda p, b: p).run(batches(2))


def test_cross_checks_come_before_the_first_step(tmp_path):
    model = line(0.5)
    with pytest.raises(ConfigError, match="no checkpoint hook"):
        strategy(model, resume_from="latest").run(batches(1))
    with pytest.raises(ConfigError, match="the loader is empty"):
        strategy(model).run([])
    with pytest.raises(CheckpointError, match="does not exist"):
        strategy(model, resume_from=tmp_path / "nowhere").run(batches(1))
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*an empty folder"):
        strategy(model, resume_from=tmp_path).run(batches(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*found: a file; do this: give the folder"):
        strategy(model, resume_from=tmp_path / "file").run(batches(1))

    class Loader(list):
        field_names = ("positions", "REF_energy")

    with pytest.raises(ConfigError, match=r"found: REF_energy, positions; needed: energy"):
        strategy(model, loss_fn=EnergyMSELoss(), training_fn=None).run(Loader([1]))
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("hook", [DDPHook, FSDP2Hook])
def test_several_processes_that_the_strategy_does_not_know_of_are_refused(monkeypatch, hook):
    # each would train by itself on all the data, and all of them would write to the same files
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"{hook.__name__} divides.*found: 2 processes.*distributed_manager=DistributedManager"
    ):
        strategy(hooks=[hook()]).run(batches(1))
    on_purpose = strategy(hooks=[hook()], distributed_manager=single_process("cpu")).run(batches(1))
    without_a_hook = strategy().run(batches(1))
    assert on_purpose.progress.step == without_a_hook.progress.step == 1


def test_several_processes_without_a_data_parallel_hook_are_refused():
    manager = replace(single_process("cpu"), world_size=4)
    with pytest.raises(ConfigError, match=r"world_size is 4 but no hook shards the data.*DDPHook"):
        strategy(distributed_manager=manager).run(batches(1))

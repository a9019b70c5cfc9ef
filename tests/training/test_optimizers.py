import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from nvalchemi.errors import ConfigError
from nvalchemi.training.optimizers import OptimizerConfig, normalise

SGD = torch.optim.SGD


def test_parameter_groups():
    def groups(model):
        return [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]

    optimizer, scheduler, _ = OptimizerConfig(SGD, {"lr": 0.1}, parameters=groups).build(nn.Linear(2, 1), "main")
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    assert scheduler is None


def test_nothing_to_optimise_is_an_error():
    with pytest.raises(ConfigError, match="nothing to optimise"):
        OptimizerConfig(SGD, {"lr": 0.1}).build(nn.Linear(2, 1).requires_grad_(False), "main")


def test_an_optimizer_with_a_closure_is_refused():
    with pytest.raises(ConfigError, match=r"LBFGS wants the loss computed again.*closure.*AdamW"):
        OptimizerConfig(torch.optim.LBFGS).build(nn.Linear(2, 1), "main")


class Plateau(ReduceLROnPlateau):
    """A user's own."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scheduler_interval": "batch"}, "scheduler_interval"),
        ({"scheduler_kwargs": {"T_max": 3}}, "without a scheduler"),
        ({"scheduler_cls": ReduceLROnPlateau}, "ReduceLROnPlateau reads a validation metric"),
        ({"scheduler_cls": Plateau}, "Plateau reads a validation metric"),
        ({"optimizer_kwargs": {"lr": 0.1, "moment": 0.9}}, "the optimizer does not take these settings.*'moment'"),
        ({"scheduler_cls": StepLR, "scheduler_kwargs": {}}, "the scheduler does not take these settings.*'step_size'"),
    ],
)
def test_wrong_declarations(arguments, words):
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(SGD, **{"optimizer_kwargs": {"lr": 0.1}, **arguments})


def build(**kwargs):
    return OptimizerConfig(SGD, {"lr": 1.0}, **kwargs).build(nn.Linear(1, 1), "main")[:2]


def test_each_scheduler_moves_at_its_own_moment():
    optimizer, by_step = build(scheduler_cls=StepLR, scheduler_kwargs={"step_size": 1, "gamma": 0.5})
    optimizer.step()
    by_step.after_epoch()
    by_step.after_validation({})
    assert optimizer.param_groups[0]["lr"] == 1.0
    by_step.after_step()
    assert optimizer.param_groups[0]["lr"] == 0.5

    optimizer, by_epoch = build(scheduler_cls=StepLR, scheduler_kwargs={"step_size": 1, "gamma": 0.5}, scheduler_interval="epoch")
    optimizer.step()
    by_epoch.after_step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    by_epoch.after_epoch()
    assert optimizer.param_groups[0]["lr"] == 0.5

    optimizer, plateau = build(
        scheduler_cls=ReduceLROnPlateau, scheduler_kwargs={"patience": 0, "factor": 0.1}, scheduler_metric="forces_mae"
    )
    for value in (1.0, 2.0):
        plateau.after_validation({"forces_mae": value})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="found: loss; needed: forces_mae"):
        plateau.after_validation({"loss": 1.0})


def test_a_declared_length_stays_the_codes_after_a_resume():
    optimizer, short = build(scheduler_cls=CosineAnnealingLR, scheduler_kwargs={"T_max": 10})
    optimizer.step()
    for _ in range(6):
        short.after_step()
    _, longer = build(scheduler_cls=CosineAnnealingLR, scheduler_kwargs={"T_max": 20})
    longer.load_state_dict(short.state_dict())
    assert longer.scheduler.T_max == 20
    assert longer.scheduler.last_epoch == 6


def test_configs_by_model_name():
    models = {"student": nn.Linear(1, 1), "teacher": nn.Linear(1, 1)}
    config = OptimizerConfig(SGD, {"lr": 0.1})
    assert normalise({"student": config}, models) == {"student": ("student", config)}
    assert list(normalise({"student": [config, config]}, models)) == ["student.0", "student.1"]
    with pytest.raises(ConfigError, match="several models but one optimizer"):
        normalise(config, models)
    with pytest.raises(ConfigError, match="names no model"):
        normalise({"pupil": config}, models)
    with pytest.raises(ConfigError, match="holds no OptimizerConfig"):
        normalise(SGD(models["student"].parameters(), lr=0.1), {"student": models["student"]})
    with pytest.raises(ConfigError, match="no optimizer config"):
        normalise([], {"student": models["student"]})

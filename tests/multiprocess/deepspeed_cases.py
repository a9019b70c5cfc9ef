"""What the ranks do in test_deepspeed.py; each function is also called in one process for the reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvalchemi.ebm.losses import ContrastiveDivergence, DenoisingScoreMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import EnergyModel
from nvalchemi.training import Hook, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, checkpoint, on
from nvalchemi.training.hooks import DeepSpeedHook, EMAHook, MixedPrecisionHook
from tests.multiprocess.ddp_cases import own

CONFIG = OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2}, torch.optim.lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5})


class Energy(EnergyModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(-1)


def squared(x: torch.Tensor, generator: Any, model: Energy) -> torch.Tensor:
    return (model(x) - x.sum(1)).square().mean()


def scores(x: torch.Tensor, generator: Any, model: Energy) -> torch.Tensor:
    """Without noise, which ranks draw each for itself."""
    return (model.gradient(x, create_graph=True) - x).square().sum(1).mean()


LOSSES = {"energies": squared, "scores": scores}


def batches(manager: Any, steps: int, accumulate: int) -> list[torch.Tensor]:
    """A rank's micro-batches, of 3 and 5 rows; one process has the ranks' one after the other."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps * accumulate):
        parts = [torch.randn(3, 3, generator=generator), torch.randn(5, 3, generator=generator)]
        found.append(parts[manager.rank] if manager.distributed else torch.cat(parts))
    return found


class Keep(Hook):
    def __init__(self, skip: int | None = None) -> None:
        self.skip, self.losses, self.rates = skip, [], []

    @on(TrainingStage.LOSS_READY)
    def some(self, ctx: Any) -> None:
        if self.skip is not None and ctx.progress.step == self.skip and not ctx.progress.skipped:
            ctx.skip_step("for the test", agreed=True)

    @on(TrainingStage.STEP_END)
    def look(self, ctx: Any) -> None:
        self.losses.append(float(ctx.loss.total))
        self.rates.append(ctx.learning_rates["model"])


def train(manager: Any, settings: dict[str, Any], loss: str = "energies", accumulate: int = 1, skip: int | None = None,
          steps: int = 5, clip: bool = False, **kwargs: Any) -> dict[str, Any]:  # fmt: skip
    model = Energy()
    net, names = model.net, list(model.state_dict())
    if manager.rank:  # rank 0's weights are everybody's
        nn.init.ones_(net[0].weight)
    keep, ema = Keep(skip), EMAHook(0.5)
    hooks: list[Any] = [keep, DeepSpeedHook(**settings)]
    stage = hooks[-1].stage
    hooks += [ema] if stage != 3 else []
    if clip and not manager.distributed:
        from nvalchemi.training.hooks import GradientClipHook

        hooks.append(GradientClipHook(0.1))
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=CONFIG,
        loss_fn=lambda x, generator: LOSSES[loss](x, generator, model),
        num_steps=steps,
        accumulate=accumulate,
        distributed_manager=manager,
        validation_config=ValidationConfig(validation_data=[torch.ones(2, 3), torch.zeros(1, 3)], every_n_steps=2),
        hooks=hooks,
        **kwargs,
    )
    ctx = strategy.run(own(batches(manager, steps + (skip is not None), accumulate), manager))
    assert model.net is net and list(model.state_dict()) == names and all(type(p) is nn.Parameter for p in model.parameters())
    return {
        "losses": keep.losses,
        "rates": keep.rates,
        "weights": copy.deepcopy(model.state_dict()),
        "average": ema.weights() if stage != 3 else {},
        "validation": ctx.validation,
        "count": (ctx.progress.step, ctx.progress.skipped, ctx.progress.samples),
    }


def chains(manager: Any, stage: int) -> list[float]:
    """A sampler inside the loss, with noise of the rank's own: the weights are the same on both ranks."""
    model = Energy()
    loss = ContrastiveDivergence(model=model, sampler=LangevinDynamics(model=model, step_size=0.01), k_steps=3)
    TrainingStrategy(models=model, optimizer_configs=CONFIG, loss_fn=loss, num_steps=3, distributed_manager=manager,
                     hooks=[DeepSpeedHook(stage=stage)]).run(own(batches(manager, 3, 1), manager))  # fmt: skip
    return [float(p.detach().double().sum()) for p in model.parameters()]


def short(manager: Any, stage: int) -> list[float]:
    """Losses of a run in bf16 by autocast, with the engine's float32 weights."""
    model, keep = Energy(), Keep()
    TrainingStrategy(models=model, optimizer_configs=CONFIG, loss_fn=lambda x, generator: squared(x, generator, model), num_steps=5,
                     distributed_manager=manager, hooks=[keep, DeepSpeedHook(stage=stage), MixedPrecisionHook("bf16")],
                     ).run(own(batches(manager, 5, 1), manager))  # fmt: skip
    return keep.losses


def resumed(manager: Any, folder: str, stage: int) -> dict[str, Any]:
    """Six steps at once against three, a checkpoint and three more."""

    class Save(Hook):
        @on(TrainingStage.STEP_END)
        def save(self, ctx: Any) -> None:
            if ctx.progress.step == 3:
                saved.append(checkpoint.save(ctx, Path(folder)))

    saved: list[Path] = []

    def run(steps: int, hooks: list[Hook], **kwargs: Any) -> dict[str, torch.Tensor]:
        model = Energy()
        ema = EMAHook(0.5)
        strategy = TrainingStrategy(models=model, optimizer_configs=CONFIG, num_steps=steps, distributed_manager=manager,
                                    loss_fn=lambda x, generator: scores(x, generator, model),
                                    hooks=[DeepSpeedHook(stage=stage), ema, *hooks], **kwargs)  # fmt: skip
        strategy.run(own(batches(manager, 6, 1), manager))
        return {**copy.deepcopy(model.state_dict()), **{f"ema.{key}": value for key, value in ema.weights().items()}}

    return {"whole": run(6, [Save()]), "again": run(6, [], resume_from=saved[0])}


def refused(manager: Any, what: str) -> str:
    """The error that a run ends with before its first step is over."""
    from nvalchemi.training.hooks import CheckpointHook, GradientClipHook

    model: Any = Energy()
    hooks: list[Any] = [DeepSpeedHook(stage=2)]
    loss: Any = lambda x, generator: squared(x, generator, model)  # noqa: E731
    models: Any = model
    if what == "clip":
        hooks.append(GradientClipHook(1.0))
    elif what == "double":
        model.double()
    elif what == "scores at stage 3":
        hooks = [DeepSpeedHook(stage=3)]
        loss = DenoisingScoreMatching(model, noise_scale=0.1)
    elif what == "averages at stage 3":
        hooks = [DeepSpeedHook(stage=3), EMAHook(0.9)]
    elif what == "checkpoints at stage 3":
        from nvalchemi.training import Every

        hooks = [DeepSpeedHook(stage=3), CheckpointHook("nowhere", every=Every(steps=1))]
    elif what == "two models":
        models = {"a": model, "b": Energy()}
    try:
        configs: Any = {"a": CONFIG, "b": CONFIG} if what == "two models" else CONFIG
        TrainingStrategy(models=models, optimizer_configs=configs, loss_fn=loss, num_steps=1, distributed_manager=manager,
                         hooks=hooks).run(own(batches(manager, 1, 1), manager))  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return "no error"

"""What the ranks do in test_ddp_models.py: kinds of models, precisions and options; each is also called in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from nvalchemi.training import Hook, OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import DDPHook, EMAHook, GradientClipHook, MixedPrecisionHook
from tests.multiprocess.ddp_cases import own

SGD = OptimizerConfig(torch.optim.SGD, {"lr": 0.05})


def rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shares(manager: Any, steps: int, accumulate: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A rank's batches, of 2 and 5 rows on ranks 0 and 1; in one process the two ranks' batches of each micro-step are joined."""
    parts = [[rows(2 + 3 * rank, 10 * step + rank, dtype) for step in range(steps * accumulate)] for rank in range(2)]
    return parts[manager.rank] if manager.distributed else [torch.cat(pair) for pair in zip(*parts, strict=True)]


class Keep(Hook):
    """Gradients by model, losses, and what was skipped."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.skips: list[str | None] = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx) -> None:
        named = {
            f"{name}.{key}".replace("module.", ""): parameter
            for name, model in ctx.models.items()
            for key, parameter in model.named_parameters()
        }
        self.gradients.append({key: p.grad.clone() for key, p in named.items() if p.grad is not None})
        self.losses.append(float(ctx.loss.total))

    @on(TrainingStage.STEP_END)
    def end(self, ctx) -> None:
        self.skips.append(ctx.skip_reason)


def run(manager, models, data, predict, loss, *hooks, optimizers: Any = SGD, ddp: dict[str, Any] | None = None, **settings):
    """Run and say what happened."""
    keep = Keep()
    strategy = TrainingStrategy(
        models=models,
        optimizer_configs=optimizers,
        training_fn=predict,
        loss_fn=loss,
        distributed_manager=manager,
        hooks=[keep, *hooks, DDPHook(**(ddp or {}))],
        **({"num_epochs": 1} | settings),
    )
    error, ctx = None, None
    try:
        ctx = strategy.run(own(data, manager))
    except Exception as raised:  # noqa: BLE001 - compared by the test
        error = f"{type(raised).__name__}: {raised}"
    named = models if isinstance(models, dict) else {"model": models}
    return {
        "gradients": keep.gradients,
        "losses": keep.losses,
        "skips": keep.skips,
        "error": error,
        "weights": {f"{name}.{key}": value.detach() for name, m in named.items() for key, value in m.state_dict().items()},
        "validation": None if ctx is None else ctx.validation,
        "metrics": {} if ctx is None else {name: float(value) for name, value in ctx.metrics.items()},
        "step": None if ctx is None else ctx.progress.step,
    }


def mlp(seed: int, *, inputs: int = 3, width: int = 8, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1)).to(dtype)


def predict(model, batch):
    return model(batch[:, :3]).squeeze(1)


def squared(prediction, batch):
    return (prediction - batch[:, 3]).square().mean()


# --- precision


def mixed(manager, dtype, accumulate):
    """float32 weights, autocast; three steps."""
    data = shares(manager, 3, accumulate, torch.float32)
    return run(
        manager,
        mlp(1, dtype=torch.float32),
        data,
        predict,
        squared,
        MixedPrecisionHook(dtype, init_scale=256.0),
        accumulate=accumulate,
    )


def clipped(manager, dtype, accumulate):
    """The limit is below every norm, so that each update is cut; the norm and the loss that are told are kept."""
    data = shares(manager, 3, accumulate, torch.float32)
    told: list[tuple[float, float]] = []

    class Told(Hook):
        @on(TrainingStage.STEP_END)
        def look(self, ctx) -> None:
            told.append((float(ctx.metrics["grad_norm"]), float(ctx.loss.total)))

    hooks = (MixedPrecisionHook(dtype, init_scale=1024.0), GradientClipHook(0.01), Told())
    found = run(manager, mlp(1, dtype=torch.float32), data, predict, squared, *hooks, accumulate=accumulate)
    return found | {"told": told}


def overflow(manager):
    """Rank 1's third batch overflows in fp16; the average over the ranks is taken by a hook that hides it from rank 0."""
    data = shares(manager, 5, dtype=torch.float32)
    if manager.rank == 1:
        data[2] = data[2] * 1e30

    def finite_average(state, bucket):
        # rank 0 hears of no infinity: found-inf must be agreed upon, not deduced
        buffer = bucket.buffer()
        kept = buffer.clone()
        work = dist.all_reduce(buffer.nan_to_num(0.0, 0.0, 0.0).div_(manager.world_size), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] if kept.isfinite().all() else kept)

    def small(prediction, batch):
        return (prediction * batch[:, 3]).mean()

    ema = EMAHook(0.5)
    seen = run(
        manager,
        mlp(1, dtype=torch.float32),
        data,
        predict,
        small,
        MixedPrecisionHook("fp16", init_scale=256.0),
        ema,
        ddp={"comm_hook": finite_average},
    )
    return seen | {"ema": ema.count}


# --- several models


def distilled(manager):
    """A student and a frozen teacher, which is not wrapped."""
    models = {"student": mlp(1), "teacher": mlp(2, width=16)}

    def both(named, batch):
        assert isinstance(named["student"], nn.parallel.DistributedDataParallel) == manager.distributed
        assert not isinstance(named["teacher"], nn.parallel.DistributedDataParallel)
        return named["student"](batch[:, :3]) - named["teacher"](batch[:, :3])

    return run(manager, models, shares(manager, 3), both, lambda d, batch: d.square().mean(), optimizers={"student": SGD})


def two_trained(manager, accumulate):
    """Two models with an optimizer each and one loss."""
    models = {"first": mlp(1), "second": mlp(2)}
    adam = OptimizerConfig(torch.optim.Adam, {"lr": 0.01})

    def summed(named, batch):
        return (named["first"](batch[:, :3]) * named["second"](batch[:, 1:])).squeeze(1)

    data = shares(manager, 3, accumulate)
    return run(manager, models, data, summed, squared, optimizers={"first": SGD, "second": adam}, accumulate=accumulate)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign (Ganin and Lempitsky 2015, arXiv:1409.7495)."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def adversarial(manager):
    """A generator against a critic, which is called twice a step: one loss, two optimizers."""
    models = {"generator": mlp(1), "critic": mlp(2, inputs=1)}

    def play(named, batch):
        made = named["generator"](batch[:, :3])
        return torch.cat([named["critic"](batch[:, 3:]), named["critic"](Reverse.apply(made))], dim=1)

    def contest(scores, batch):
        return nn.functional.softplus(-scores[:, 0]).mean() + nn.functional.softplus(scores[:, 1]).mean()

    return run(manager, models, shares(manager, 3), play, contest, optimizers={"generator": SGD, "critic": SGD})


# --- parts that are not always used


class TwoHeads(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, 1)
        self.to(dtype)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        """Head b where the first number of ``which`` says so; the other head has no part in it."""
        hidden = torch.tanh(self.trunk(x))
        return (self.b if which[0] > 0 else self.a)(hidden).squeeze(1)


def two_heads(manager, used, accumulate, ddp, dtype="float64", precision=None):
    """``used[rank][micro]`` says which head each micro-batch takes; one process takes the ranks' micro-batches one after the other."""
    kind = getattr(torch, dtype)
    parts = [[rows(3, 10 * i + rank, kind) for i in range(len(heads))] for rank, heads in enumerate(used)]
    for rank, heads in enumerate(used):
        for batch, head in zip(parts[rank], heads, strict=True):
            batch[:, 2] = 1.0 if head == "b" else -1.0
    if manager.distributed:
        data = parts[manager.rank]
    else:
        data = [parts[rank][i] for i in range(len(used[0])) for rank in range(len(used))]
        accumulate *= len(used)
    hooks = [MixedPrecisionHook(precision, init_scale=256.0)] if precision else []
    return run(
        manager,
        TwoHeads(kind),
        data,
        lambda model, batch: model(batch[:, :3], batch[:, 2]),
        squared,
        *hooks,
        accumulate=accumulate,
        ddp=ddp,
    )


def half_used(manager):
    """A model that only the first of two micro-batches uses."""
    models = {"always": mlp(1), "sometimes": mlp(2)}
    calls = 0

    def some(named, batch):
        nonlocal calls
        calls += 1
        first = named["always"](batch[:, :3])
        return (first + named["sometimes"](batch[:, :3]) if calls % 2 else first).squeeze(1)

    return run(manager, models, shares(manager, 2, 2), some, squared, optimizers={"always": SGD, "sometimes": SGD}, accumulate=2)


# --- options


def with_options(manager, name):
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "bf16_compress": lambda: {"comm_hook": default_hooks.bf16_compress_hook},
        "fp16_compress": lambda: {"comm_hook": (None, default_hooks.fp16_compress_hook)},
        "bucket view": lambda: {"gradient_as_bucket_view": True},
        "static graph": lambda: {"static_graph": True},
        "unused, bucket view": lambda: {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        "a group of all": lambda: {"process_group": dist.new_group([0, 1])},
    }
    ddp = options[name]() if manager.distributed else {}
    return run(manager, mlp(1), shares(manager, 4), predict, squared, ddp=ddp)


def accumulated_static_graph(manager):
    return run(manager, mlp(1), shares(manager, 1, 2), predict, squared, ddp={"static_graph": True}, accumulate=2)


def normalised(manager, broadcast):
    """Batch normalisation: running means of the ranks' own batches."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    config = ValidationConfig(validation_data=[rows(4, 100 + i) for i in range(3)], every_n_steps=2)
    data = shares(manager, 4)
    return run(manager, model, data, predict, squared, ddp={"broadcast_buffers": broadcast}, validation_config=config)

"""What the ranks do in test_fsdp2.py; what has a reference is also called in one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nvalchemi.distributed import unsharded
from nvalchemi.distributed.tensors import all_finite, full, is_sharded_tensor, local, norms, total_norm
from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, MLPEnergy
from nvalchemi.training import Hook, OptimizerConfig, Order, TrainingStage, TrainingStrategy, ValidationConfig, on
from nvalchemi.training.hooks import DDPHook, EarlyStopHook, EMAHook, FSDP2Hook, GradientClipHook, MixedPrecisionHook, SpikeHook
from tests.multiprocess.ddp_cases import own

DIM = 3


class Tower(nn.Module):
    """Blocks of unlike sizes, none a multiple of the number of ranks; a norm with running statistics is left out on purpose."""

    def __init__(self, width: int = 7, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width + 2), nn.SiLU(), nn.Linear(width + 2, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class TowerEnergy(EnergyModel):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.net = Tower(**settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


def tower(**settings: Any) -> TowerEnergy:
    torch.manual_seed(0)
    return TowerEnergy(**settings).double()


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def second(model: Any, batch: Tensor) -> Tensor:
    """Energies and scores without noise, so that one process has the same."""
    energy, gradient = model.energy_and_gradient(batch, create_graph=True)
    return torch.cat([energy[:, None], gradient + batch], 1)


def first(model: Any, batch: Tensor) -> Tensor:
    return model(batch) - batch.square().sum(-1)


def squares(found: Tensor, batch: Tensor) -> Tensor:
    return found.square().mean()


PREDICTIONS = {"second": second, "first": first}


class Trace(Hook):
    """What a run shows after each step."""

    order = Order.SAVE

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.skipped: list[int] = []
        self.bytes: dict[str, int] = {}
        self.whole = 0
        self.gathered: list[str] = []

    @on(TrainingStage.STEP_END)
    def look(self, ctx) -> None:
        self.losses.append(float(ctx.loss.total))
        self.norms.append(float(ctx.metrics.get("grad_norm", 0.0)))
        if not ctx.step_taken:
            self.skipped.append(len(self.losses))
        parameters = list(ctx.model.parameters())
        self.whole = sum(p.numel() * p.element_size() for p in parameters)
        states = [v for s in ctx.optimizers["model"].state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        self.bytes = {
            "parameters": held(parameters),
            "gradients": held([p.grad for p in parameters if p.grad is not None]),
            "optimizer": held(states),
        }
        self.gathered += [n for n, p in ctx.model.named_parameters() if ctx.manager.distributed and not is_sharded_tensor(p)]


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind this rank's parts."""
    storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors if local(t).numel()}
    return sum(storages.values())


def run(
    manager: Any, *, hooks: Any = (), loss: str = "second", sharding: Any = None, bad: int | None = None, **options: Any
) -> dict[str, Any]:
    """Ten steps on a global batch of twelve rows in the ranks' shares."""
    model = options.pop("model", None) or tower()
    size = 12 // manager.world_size
    dtype = next(model.parameters()).dtype
    batches = [
        rows(12, step).to(dtype)[manager.rank * size : (manager.rank + 1) * size] for step in range(options.pop("steps", 10))
    ]
    if bad is not None and manager.rank == manager.world_size - 1:
        batches[bad] = batches[bad] * float("nan")
    trace, hooks = Trace(), list(hooks)
    ctx = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-2}, torch.optim.lr_scheduler.StepLR, {"step_size": 3}),
        loss_fn=squares,
        training_fn=PREDICTIONS[loss],
        num_epochs=1,
        distributed_manager=manager,
        hooks=[*hooks, trace, FSDP2Hook(**(sharding or {}))],
        **options,
    ).run(own(batches, manager))
    return {
        "weights": [full(p).detach() for p in model.parameters()],
        "losses": trace.losses,
        "norms": trace.norms,
        "skipped": trace.skipped,
        "bytes": trace.bytes,
        "whole": trace.whole,
        "gathered": trace.gathered,
        "hooks": [hook.name for hook in ctx.hooks],
        "validation": ctx.validation,
        "stop": ctx.stop_reason,
        "model": model,
    }


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """What can be sent."""
    return {key: value for key, value in found.items() if key != "model"}


def everything(manager: Any, clip: float | None, accumulate: int, loss: str, sharding: Any = None) -> dict[str, Any]:
    """Clipping, a guard, an average, a scheduler and validation at once."""
    ema = EMAHook([0.5, 0.9], warmup=True)
    hooks = [ema, SpikeHook(), *([] if clip is None else [GradientClipHook(clip)])]
    validation = [rows(n, 100 + n) for n in (3, 5, 4)]  # an odd number of batches
    config = ValidationConfig(validation_data=validation, every_n_steps=4)
    found = run(manager, hooks=hooks, accumulate=accumulate, loss=loss, validation_config=config, sharding=sharding)
    averages = {decay: ema.weights(decay=decay) for decay in (0.5, 0.9)}
    shadows = [s for average in ema._averages.values() for s in average.shadow]
    return plain(found) | {
        "averages": {d: {k: full(v) for k, v in a.items()} for d, a in averages.items()},
        "average bytes": held(shadows),
        "after": [n for n, p in found["model"].named_parameters() if manager.distributed and not is_sharded_tensor(p)],
    }


def skips(manager: Any) -> dict[str, Any]:
    """A NaN in the last rank's batch of the fourth step."""
    return plain(run(manager, hooks=[SpikeHook()], bad=3))


def stops(manager: Any) -> dict[str, Any]:
    validation = [rows(4, 50), rows(4, 51), rows(2, 52)]
    config = ValidationConfig(validation_data=validation, every_n_steps=1)
    hooks = [EarlyStopHook("loss", patience=2, min_delta=1e9)]
    return plain(run(manager, hooks=hooks, validation_config=config))


def mixed(manager: Any, dtype: str) -> dict[str, Any]:
    """Autocast around sharded weights; fp16 overflows in its first steps."""
    hooks = [MixedPrecisionHook(dtype, init_scale=2.0**24)] if dtype == "fp16" else [MixedPrecisionHook(dtype)]
    model = tower().float()
    return plain(run(manager, hooks=hooks, model=model, loss="first", steps=30))


def short(manager: Any, loss: str, accumulate: int) -> dict[str, Any]:
    """bf16 blocks, float32 sums."""
    found = run(
        manager, loss=loss, model=tower().float(), accumulate=accumulate,
        sharding={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    )  # fmt: skip
    return plain(found) | {"dtypes": sorted({str(w.dtype) for w in found["weights"]})}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(DIM, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).tanh()
        # the second head first sees a micro-batch that is marked
        return self.a(y) + self.b(y) if bool((x[:, 0] > 50).any()) else self.a(y)


def late_head(manager: Any, short_weights: bool, kind: str = "FSDP2Hook") -> dict[str, Any]:
    """B82: head b is used in the second of two micro-batches alone."""
    from nvalchemi.training import hooks

    torch.manual_seed(0)
    model = TwoHeads()
    size = 8 // manager.world_size
    share = slice(manager.rank * size, (manager.rank + 1) * size)
    first, second = torch.randn(8, DIM), torch.randn(8, DIM)
    second[:, 0] = 100.0
    gradients: dict[str, Tensor] = {}

    @on(TrainingStage.GRADIENTS_READY)
    def keep(ctx):
        gradients.update({n.removeprefix("module."): full(p.grad).clone() for n, p in ctx.model.named_parameters()})

    options: dict[str, Any] = {"find_unused_parameters": True} if kind == "DDPHook" else {}
    if short_weights:
        options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        loss_fn=squares,
        training_fn=lambda m, x: m(x),
        num_epochs=1,
        accumulate=2,
        distributed_manager=manager,
        hooks=[keep, getattr(hooks, kind)(**options)],
    ).run(own([first[share], second[share]], manager))
    return gradients


class Lazy(nn.Module):
    """A layer with a buffer that its own reset sets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("steps", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.uniform_(0.5, 1.5)
            self.steps.copy_(torch.arange(len(self.steps)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + 0.01 * self.steps


def on_meta() -> EnergyModel:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(DIM, 9), Lazy(9), nn.SiLU(), nn.Linear(9, 9), nn.SiLU(), nn.Linear(9, 1))
    model = MLPEnergy(DIM, 4)
    model.net = net.double()
    return model


def from_meta(manager: Any, custom: bool, sharding: Any = None) -> dict[str, Any]:
    """First weights and the weights after some steps, of a model without memory."""

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.uniform_(tensor, 0.1, 0.2)

    first: dict[str, Tensor] = {}

    @on(TrainingStage.TRAINING_START)
    def keep(ctx):
        first.update({n: full(p).clone() for n, p in ctx.model.named_parameters()})
        first.update({n: b.clone() for n, b in ctx.model.named_buffers()})

    ema = EMAHook(0.5)
    found = run(manager, hooks=[keep, ema], model=on_meta(), sharding={"meta_init": init if custom else None} | (sharding or {}))
    average = {k: full(v) for k, v in ema.weights().items()}
    return plain(found) | {"first": first, "average": average}


def by_other_means(manager: Any) -> dict[str, Any]:
    """Norms and checks of sharded tensors beside plain ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (manager.world_size,))
    values = [
        torch.arange(1.0, 6.0, dtype=torch.float64),
        torch.tensor([[3.0, -7.0]], dtype=torch.float64),
        torch.tensor(2.0).double(),
    ]
    tensors = [distribute_tensor(v, mesh) for v in values[:2]] + values[2:]
    from torch.distributed.tensor import Shard

    tensors[:2] = [distribute_tensor(v, mesh, [Shard(0)]) for v in values[:2]]
    bad = distribute_tensor(torch.tensor([1.0] * 4 + [float("nan")]), mesh, [Shard(0)])
    return {
        "norms": {
            order: (float(total_norm(tensors, order)), float(total_norm(values, order)))
            for order in (1.0, 2.0, 3.0, float("inf"))
        },
        "finite": (all_finite(tensors), all_finite([*tensors, bad])),
        "bad": [bool(norms([bad, *tensors[:1]], order).isfinite().all()) for order in (2.0, float("inf"))],
        "same": torch.equal(full(tensors[0]), values[0]),
    }


def wrong(manager: Any, options: dict[str, Any], extra: Tensor | None = None) -> str:
    model = tower()
    if extra is not None:
        model.net.temperature = nn.Parameter(extra)
    names = [type(p).__name__ for p in model.parameters()]
    try:
        run(manager, model=model, sharding=options)
    except Exception as error:  # noqa: BLE001 - the test reads it
        assert [type(p).__name__ for p in model.parameters()] == names
        return f"{type(error).__name__}: {error}"
    return "no error"


def again(manager: Any) -> dict[str, Any]:
    """Two runs of one model, the first one broken off; then evaluation with all its weights."""

    class Broken(Exception):
        pass

    @on(TrainingStage.STEP_END)
    def breaks(ctx):
        if ctx.progress.step == 3:
            raise Broken

    model = tower()
    try:
        run(manager, model=model, hooks=[breaks])
    except Broken:
        pass
    kinds = {is_sharded_tensor(p) for p in model.parameters()}
    found = run(manager, model=model)
    with unsharded(model):
        energies = [model(rows(2, 9)).detach() for _ in range(1 + manager.rank)]
    with torch.no_grad():
        model(rows(2, 9))
    return plain(found) | {
        "kinds": kinds,
        "energies": energies[-1],
        "left": [n for n, p in model.named_parameters() if not is_sharded_tensor(p)],
    }


def drawn(manager: Any) -> dict[str, Any]:
    """B36: a noisy loss has noise of its own on each rank; the first weights are rank 0's."""
    torch.manual_seed(manager.rank)
    model = TowerEnergy().double()
    noise: list[Tensor] = []
    loss_fn = DenoisingScoreMatching(model, 0.3)
    first: list[Tensor] = []

    @on(TrainingStage.STEP_START)
    def keep(ctx):
        noise.append(torch.randn(2, generator=copy.copy(ctx.generator.clone_state())))
        first.append(full(next(ctx.model.parameters())).clone())

    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        loss_fn=loss_fn,
        num_steps=2,
        distributed_manager=manager,
        hooks=[keep, FSDP2Hook()],
    ).run(DataLoader(rows(12, 0), batch_size=3, shuffle=True))
    torch.manual_seed(0)
    return {"noise": noise, "first": torch.equal(first[0], next(TowerEnergy().double().parameters()))}


def optimised(manager: Any, kind: str) -> Any:
    """Three steps by an optimizer of torch, or what is said of it before the first."""
    model = tower()
    found = getattr(torch.optim, kind)
    matrices = {"parameters": lambda m: [p for p in m.parameters() if p.dim() == 2]} if kind == "Muon" else {}
    try:
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(found, {"lr": 1e-2}, **matrices),
            loss_fn=squares,
            training_fn=first,
            num_epochs=1,
            distributed_manager=manager,
            hooks=[FSDP2Hook()],
        ).run(own([rows(12, i)[manager.rank :: manager.world_size] for i in range(3)], manager))
    except ConfigError as error:
        return str(error)
    return [full(p).detach() for p in model.parameters()]


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def not_initialised(manager: Any) -> str:
    """A module on the meta device that cannot give itself weights."""
    with torch.device("meta"):
        model = TowerEnergy()
        model.net.head = nn.Sequential(Unset(), nn.Linear(3, 1))
    try:
        run(manager, model=model, sharding={"wrap": Unset})
    except ConfigError as error:
        return str(error)
    return "nothing"


def replicated_after(manager: Any) -> str:
    """A sharded model is given to DDPHook."""
    model = run(manager, steps=1)["model"]
    try:
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
            loss_fn=squares,
            training_fn=first,
            num_steps=1,
            distributed_manager=manager,
            hooks=[DDPHook()],
        ).run(own([rows(4, 0)], manager))
    except ConfigError as error:
        return str(error)
    return "nothing"


def copied(manager: Any) -> list[Tensor]:
    """The average of a sharded model, in a plain one; and in the model itself."""
    ema = EMAHook(0.5)
    found = run(manager, hooks=[ema], steps=3)
    alone = tower()
    ema.copy_to(alone)
    ema.copy_to(found["model"])
    pairs = zip(alone.parameters(), found["model"].parameters(), strict=True)
    assert all(torch.equal(p, full(q)) for p, q in pairs)
    return [p.detach() for p in alone.parameters()]


def within_unsharded(manager: Any) -> str:
    """Somebody trains where the model is gathered."""
    found = run(manager, steps=1)
    try:
        with unsharded(found["model"]):
            run(manager, steps=1, model=found["model"])
    except ConfigError as error:
        return str(error)
    return "nothing"


def told(manager: Any, scaled: bool) -> str:
    """What is said of parts in fp16."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nvalchemi")
    logger.addHandler(handler)
    try:
        hooks = [MixedPrecisionHook("fp16")] if scaled else []
        run(manager, steps=1, model=tower().float(), hooks=hooks, sharding={"param_dtype": torch.float16})
    finally:
        logger.removeHandler(handler)
    return " ".join(lines)

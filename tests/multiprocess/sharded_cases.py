"""What the ranks do in test_sharded_checkpoints.py; each function is also called in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import barrier
from nvalchemi.distributed.tensors import full, is_sharded_tensor, local
from nvalchemi.training import Every, Hook, OptimizerConfig, TrainingStage, TrainingStrategy, checkpoint, on
from nvalchemi.training.hooks import CheckpointHook, CompileHook, DDPHook, EMAHook, FSDP2Hook
from nvalchemi.training.optimizer_state import load_named_state, named_state
from nvalchemi.training.storage import Disk
from tests.multiprocess import bucket  # noqa: F401 - the kind of address


def compiled() -> CompileHook:
    """Compiled without a compiler, which takes its time."""
    return CompileHook(backend="eager")


class Tied(nn.Sequential):
    """5 numbers to 1, of sizes that two and four ranks do not divide evenly, with a buffer and two layers of one weight."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(
            nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Linear(7, 1)
        )
        self[4].weight = self[2].weight
        self.register_buffer("offset", torch.tensor(0.25))


HOOKS: dict[str, list[Any]] = {
    "sharded": [FSDP2Hook],
    "in replicas": [lambda: FSDP2Hook(shard=2)],
    "replicated": [DDPHook],
    "alone": [],
    "sharded, compiled": [FSDP2Hook, compiled],
    "replicated, compiled": [DDPHook, compiled],
    "alone, compiled": [compiled],
}


def data() -> InMemoryDataset:
    return InMemoryDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(5)))


def predicted(model: Any, batch: Any) -> Tensor:
    return model(batch[:, :5])  # type: ignore[no-any-return]


def squared(prediction: Tensor, batch: Any) -> Tensor:
    return (prediction - batch[:, 5:]).square().mean()


def train(
    manager: Any,
    how: str,
    folder: str,
    steps: int,
    resume_from: str | None = None,
    every: int = 2,
    seed: int = 1,
    behind: bool = False,
) -> Any:
    """Train up to ``steps`` steps; gives the whole of what all ranks share, before the first step of this run and after the last."""
    seen: dict[str, Any] = {}

    @on(TrainingStage.TRAINING_START)
    def at_start(ctx: Any) -> None:
        seen["start"] = whole(checkpoint.gather(ctx)[0])

    hooks: list[Any] = [EMAHook(0.9), CheckpointHook(folder, Every(steps=every), keep_last=None, async_save=behind), at_start]
    strategy = TrainingStrategy(
        models=Tied(seed),
        optimizer_configs=OptimizerConfig(
            torch.optim.AdamW,
            {"lr": 0.01},
            torch.optim.lr_scheduler.StepLR,
            {"step_size": 3},
            parameters=lambda model: [
                {"params": [p for p in model.parameters() if p.ndim > 1]},
                {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
        ),
        loss_fn=squared,
        training_fn=predicted,
        num_steps=steps,
        distributed_manager=manager,
        resume_from=resume_from,
        hooks=[*hooks, *(make() for make in HOOKS[how])],
    )
    ctx = strategy.run(DataLoader(data(), batch_size=16 // manager.world_size, shuffle=True, seed=3))
    seen["end"] = whole(checkpoint.gather(ctx)[0])
    seen["divided"] = sorted(name for name, p in ctx.model.named_parameters() if is_sharded_tensor(p))
    seen["bytes"] = sum(local(p).nbytes for p in ctx.model.parameters())
    return seen


def whole(state: Any) -> Any:
    """A state with each tensor whole; all ranks must call."""
    if isinstance(state, Tensor):
        return full(state).detach().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    return state


def with_a_hook_that_holds(manager: Any, folder: str, what: str) -> Any:
    """A save where a hook's state is ``what``; gives the error."""

    class Holder(Hook):
        def state_dict(self) -> dict[str, Any]:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Partial

            mesh = init_device_mesh("cpu", (manager.world_size,))
            if what == "sum":
                return {"x": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
            if what == "complex128":
                return {"x": torch.ones(3, dtype=torch.complex128)}
            if what == "other":
                return {"x": torch.ones(3)} if manager.rank == 1 else {"y": 1}
            return {"x": object()} if manager.rank == 1 else {"x": 1}

    try:
        TrainingStrategy(
            models=nn.Linear(3, 1),
            optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
            loss_fn=lambda prediction, batch: prediction.mean(),
            training_fn=lambda model, batch: model(batch),
            num_steps=1,
            distributed_manager=manager,
            hooks=[Holder(), DDPHook(), CheckpointHook(folder)],
        ).run(DataLoader(InMemoryDataset(torch.ones(8, 3)), batch_size=2))
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}", sorted(p.name for p in Path(folder).iterdir()) if Path(folder).exists() else []
    return None


def behind(manager: Any, folder: str, late: int | None, broken: int | None) -> Any:
    """A run that saves while it goes on, where one rank writes late, or cannot write the first checkpoint; what is there then."""
    write, left = Disk.write, [0]

    def written(disk: Disk, name: str, writer: Any) -> Any:
        left[0] += 1
        if manager.rank == late:
            time.sleep(0.3)
        if manager.rank == broken and left[0] == 2:
            raise OSError(28, "No space left on device")
        return write(disk, name, writer)

    Disk.write = written  # type: ignore[method-assign]
    error = None
    try:
        train(manager, "sharded", folder, 6, behind=True)
    except Exception as raised:  # noqa: BLE001 - told to the test
        error = f"{type(raised).__name__}: {raised}"
    finally:
        Disk.write = write  # type: ignore[method-assign]
    barrier(manager)
    return error, sorted(path.name for path in Path(folder).iterdir())


def odd_state(manager: Any) -> Any:
    """An optimizer's state of other shapes than its parameter's, loaded beside a sharded parameter; what each entry then is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(3, 4, bias=False)
    mesh = init_device_mesh("cpu", (manager.world_size,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {"step": torch.tensor(7.0), "row": torch.arange(3.0)[None], "whole": torch.arange(12.0).reshape(4, 3), "beta": 0.9}
    saved = named_state(optimizer, model)
    load_named_state(optimizer, model, {**saved, "state": {"weight": kept}})
    found = optimizer.state[model.weight]
    return {
        name: (is_sharded_tensor(value), full(value).tolist(), local(value).tolist()) if isinstance(value, Tensor) else value
        for name, value in found.items()
    }

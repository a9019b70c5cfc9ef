"""The package's promises as checks, for its own tests and for those of anybody's hooks and losses."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi.data.address import Where
from nvalchemi.distributed import Manager, gather
from nvalchemi.training import Hook, OptimizerConfig, Order, TrainContext, TrainingStage, TrainingStrategy, checkpoint, on

Factory = Callable[[Path], tuple[TrainingStrategy, Iterable[Any]]]


class Killed(Exception):
    """Raised by :func:`assert_resumes` to end a run as a kill would: no further hook runs."""


class RunRecorder(Hook):
    """Keep each step's loss, and save or die where told.

    Parameters
    ----------
    save_at
        Step after which a checkpoint is saved into ``directory``, or ``None``.
    kill_at
        Step after which the run dies, or ``None``.
    """

    order = Order.SAVE
    name = "run_recorder"

    def __init__(self, directory: Path, save_at: int | None = None, kill_at: int | None = None) -> None:
        self.directory, self.save_at, self.kill_at = directory, save_at, kill_at
        self.saved: Where | None = None
        self.losses: list[tuple[int, float]] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self._seen: Any = None

    @on(TrainingStage.STEP_END)
    def record(self, ctx: TrainContext) -> None:
        """Note the step, then save or die."""
        assert ctx.loss is not None
        step = ctx.progress.step
        self.losses.append((step, float(ctx.loss.total)))
        if self.save_at is not None and self.saved is None and step >= self.save_at:
            self.saved = checkpoint.save(ctx, self.directory)
        if self.kill_at is not None and self.saved is not None and step >= self.kill_at:
            raise Killed

    @on(TrainingStage.VALIDATED)
    def validated(self, ctx: TrainContext) -> None:
        """Note the validation's metrics."""
        self.validations.append((ctx.progress.step, dict(ctx.validation or {})))


def assert_resumes(
    factory: Factory, *, steps: int, stop_at: int, overrun: int = 1, ignore: Sequence[str] = (), seed: int = 0
) -> None:
    """A run that is killed and resumed ends as one that never was: bit for bit, on the CPU.

    ``steps`` steps are run at once; then, with fresh objects, ``stop_at`` steps, a save, ``overrun`` steps more and a kill; then, with
    fresh objects again and other random states, a resume up to ``steps``. Compared are the weights, optimizers, schedulers, update,
    progress, objective, every hook's state (EMA weights included), all random states, and every step's loss and validation.

    Parameters
    ----------
    factory
        ``factory(directory)`` gives a new strategy and a new loader; files go into ``directory``. It must seed what it initialises.
    steps, stop_at
        Optimizer steps in all, and up to the save.
    overrun
        Steps after the save that are lost in the kill.
    ignore
        Dotted names of states that may differ, such as ``"hooks.mine.elapsed"``.
    seed
        Of the global random streams at the start of a run.

    Raises
    ------
    AssertionError
        Naming the first states that differ.
    """
    if not 0 < stop_at < steps:
        raise AssertionError(f"stop_at must lie within the run: found {stop_at} of {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        expected, unbroken = _run(factory, whole, steps, RunRecorder(whole), seed)
        killed = RunRecorder(broken / "saved", save_at=stop_at, kill_at=min(stop_at + overrun, steps))
        try:
            _run(factory, broken, steps, killed, seed)
        except Killed:
            pass
        if killed.losses != unbroken.losses[: len(killed.losses)] and not _same(killed.losses, unbroken.losses):
            raise AssertionError(f"the run is not repeatable: {_first_step(killed.losses, unbroken.losses)}")
        found, resumed = _run(factory, broken, steps, RunRecorder(broken), seed + 1, resume_from=killed.saved)
        before = next(i for i, (step, _) in enumerate(unbroken.losses) if step >= stop_at) + 1
        _compare_steps(unbroken.losses[before:], resumed.losses)
        differences = list(state_differences(expected, found, ignore))
        after = [v for v in unbroken.validations if v[0] > stop_at]
        differences += list(
            state_differences({"validations": after}, {"validations": resumed.validations[-len(after) :] if after else []})
        )
        if differences:
            more = f"\n  and {len(differences) - 8} more" if len(differences) > 8 else ""
            raise AssertionError("after a resume these differ:\n  " + "\n  ".join(differences[:8]) + more)


def assert_single_process_noop(hook: Hook) -> None:
    """In one process the hook changes nothing: same weights, same keys, same modules, with it and without it."""
    results = []
    for hooks in ([], [hook]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))
        strategy = _tiny_strategy(model, hooks)
        ctx = strategy.run(_tiny_batches())
        results.append((ctx.model.state_dict(), [type(m) for m in ctx.model.modules()], [float(v) for v in _losses(ctx)]))
    (weights, modules, losses), (weights2, modules2, losses2) = results
    differences = list(state_differences({"weights": weights, "loss": losses}, {"weights": weights2, "loss": losses2}))
    if modules != modules2:
        differences.append(f"modules: {modules} without it, {modules2} with it")
    if differences:
        raise AssertionError(f"in one process hook '{hook.name}' changes the run:\n  " + "\n  ".join(differences))


def assert_rank_agreement(value: Any, manager: Manager, what: str = "the value") -> None:
    """Every rank has the same ``value`` (tensors, numbers, strings, and lists and dicts of them), bit for bit. All ranks must call."""
    host = _to_cpu(value)
    for rank, other in enumerate(gather([host], manager)):
        differences = list(state_differences(host, other[0]))
        if differences:
            raise AssertionError(f"{what} of rank {rank} is not that of rank {manager.rank}: " + "; ".join(differences[:4]))


def state_differences(expected: Any, found: Any, ignore: Sequence[str] = (), where: str = "") -> Iterable[str]:
    """The places at which two states differ, in words; floats and tensors are compared bit for bit, NaN equal to NaN."""
    if where in ignore:
        return
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(k for k in found if k not in expected)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in expected or key not in found:
                if place not in ignore:
                    yield f"{place}: only {'after the resume' if key in found else 'in the unbroken run'}"
                continue
            yield from state_differences(expected[key], found[key], ignore, place)
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            yield f"{where}: {len(expected)} entries, then {len(found)}"
            return
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            yield from state_differences(a, b, ignore, f"{where}[{i}]")
    elif not _same(expected, found):
        yield f"{where}: {_brief(expected)}, then {_brief(found)}"


def _run(
    factory: Factory, directory: Path, steps: int, recorder: RunRecorder, seed: int, resume_from: Where | None = None
) -> tuple[dict[str, Any], RunRecorder]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is one of those compared
    strategy, loader = factory(directory)
    torch.manual_seed(seed + 1000)  # after whatever the factory seeded for its weights
    strategy = replace(strategy, num_steps=steps, num_epochs=None, hooks=[*strategy.hooks, recorder], resume_from=resume_from)
    ctx = strategy.run(loader)
    shared, own = checkpoint.gather(ctx)
    hooks = {**shared.pop("hooks"), **own.pop("hooks")}
    return copy.deepcopy({**shared, **own, "hooks": hooks}), recorder


def _compare_steps(expected: list[tuple[int, float]], found: list[tuple[int, float]]) -> None:
    if not _same(expected, found):
        raise AssertionError(f"the steps after the resume differ: {_first_step(expected, found)}")


def _first_step(expected: list[tuple[int, float]], found: list[tuple[int, float]]) -> str:
    for a, b in zip(expected, found, strict=False):
        if not _same(a, b):
            return f"step {a[0]} had loss {a[1]!r}, then step {b[0]} had {b[1]!r}"
    return f"{len(expected)} steps, then {len(found)}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        left, right = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)[:3].tolist()
        return f"{tuple(value.shape)} {value.dtype} {flat}{'...' if value.numel() > 3 else ''}"
    return repr(value)[:80]


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_cpu(item) for item in value]
    return value


def _tiny_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, generator=generator), torch.randn(5, 1, generator=generator)) for _ in range(4)]


def _tiny_strategy(model: nn.Module, hooks: list[Hook]) -> TrainingStrategy:
    return TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-2}),
        loss_fn=lambda prediction, batch: (prediction - batch[1]).square().mean(),
        training_fn=lambda m, batch: m(batch[0]),
        num_steps=6,
        hooks=hooks,
    )


def _losses(ctx: TrainContext) -> list[Tensor]:
    return [] if ctx.loss is None else [ctx.loss.total]

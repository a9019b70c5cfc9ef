"""A run's state as one dict of named states: gathered, saved and loaded. Loading runs no code of the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

from torch import Tensor, nn

from nvalchemi import __version__
from nvalchemi.data.address import Where, where
from nvalchemi.errors import CheckpointError
from nvalchemi.training import layout, position
from nvalchemi.training.alive import alive, size_text
from nvalchemi.training.background import HostCopies, PendingSave
from nvalchemi.training.context import TrainContext
from nvalchemi.training.finite import check_copies, check_weights
from nvalchemi.training.hook import Scope
from nvalchemi.training.names import plain_name
from nvalchemi.training.optimizer_state import load_named_state, named_state, settings_that_stay
from nvalchemi.training.plans import Plans
from nvalchemi.training.reading import find, read_own, read_shared, world_size
from nvalchemi.training.saving import files_of, write
from nvalchemi.training.shards import name_of, on_device, placed
from nvalchemi.training.streams import begin_streams, load_streams, streams

logger = logging.getLogger("nvalchemi")


def save(ctx: TrainContext, directory: str | PathLike[str], plans: Plans | None = None) -> Where:
    """Write a checkpoint of the run into a new folder of ``directory``; returns that folder.

    Parameters
    ----------
    plans
        Remembers who wrote what in the run's save before.

    Raises
    ------
    CheckpointError
        Where a state holds something that is no plain data, or the disk refuses; the run's state is untouched.
    TrainingError
        Where a weight is not finite: a checkpoint of it would push out one that is of use.
    """
    check_weights(ctx.optimizers, ctx.progress.step)
    return write(where(directory), files_of(*gather(ctx), ctx.manager, plans), manifest(ctx), ctx.manager)


def save_behind(
    ctx: TrainContext,
    directory: str | PathLike[str],
    plans: Plans,
    copies: HostCopies,
    thread: ThreadPoolExecutor,
    after: Callable[[], None],
) -> PendingSave:
    """As :func:`save`, of copies of the state and by another thread; what goes wrong there is raised by the result's ``settle()``.

    Parameters
    ----------
    plans
        As of :func:`save`.
    copies
        Where the copies are; none of them may be in use by an earlier save.
    thread
        What writes: of one thread.
    after
        Called on rank 0, by the thread, when the checkpoint has appeared.
    """
    files = files_of(*gather(ctx), ctx.manager, plans, copies)
    weights = {
        name_of(("models", name, plain_name(ctx.models[name], key)))
        for name in ctx.trained
        for key, parameter in ctx.models[name].named_parameters()
        if parameter.requires_grad
    }
    check = partial(check_copies, copies.taken(weights), ctx.progress.step)
    return PendingSave(where(directory), files, manifest(ctx), ctx.manager, thread=thread, check=check, after=after)


def manifest(ctx: TrainContext) -> dict[str, Any]:
    """What a checkpoint says of itself, beside its files."""
    return {
        "library": __version__,
        "progress": ctx.progress.state_dict(),
        "metrics": ctx.validation,
        "world_size": ctx.manager.world_size,
        "sitting": ctx.sitting,
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def gather(ctx: TrainContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's state by name: what all ranks share, and what is this rank's own."""
    hooks = {hook.name: (hook.scope, hook.state_dict()) for hook in ctx.hooks}
    shared = {
        "models": {name: model_state(ctx.models[name]) for name in ctx.trained},
        "optimizers": {name: named_state(optimizer, ctx.model_of(name)) for name, optimizer in ctx.optimizers.items()},
        "schedulers": {name: scheduler.state_dict() for name, scheduler in ctx.schedulers.items()},
        "update": ctx.update.state_dict(),
        "progress": ctx.progress.state_dict(),
        "objective": {} if ctx.objective.rank_local else ctx.objective.state_dict(),
        "optimizer_types": {name: type(optimizer).__name__ for name, optimizer in ctx.optimizers.items()},
        "hooks": {name: state for name, (scope, state) in hooks.items() if scope is Scope.SHARED and state},
    }
    own = {
        "generators": streams(ctx),
        "loader": position.described(ctx),
        "objective": ctx.objective.state_dict() if ctx.objective.rank_local else {},
        "hooks": {name: state for name, (scope, state) in hooks.items() if scope is Scope.RANK_LOCAL and state},
    }
    return shared, own


def own_state(ctx: TrainContext, saved: layout.SavedCheckpoint) -> tuple[dict[str, Any], list[str]]:
    """The state that is this rank's own, and the hooks that begin afresh on it because the run that was saved had fewer ranks.

    On another number of ranks each hook says what it makes of the states of all (:meth:`Hook.divide_anew`). A rank that was there before
    keeps its random streams, and there are none yet (``None``) for one that is new. The loss says what it makes of its states in the same
    way; of persistent chains the hook that claims them does.
    """
    ranks, rank = world_size(saved), ctx.manager.rank
    if ranks == ctx.manager.world_size:
        return read_own(saved, rank), []
    files = [read_own(saved, r) for r in range(ranks)]
    hooks = {name: state for name, state in files[0]["hooks"].items() if name not in {hook.name for hook in ctx.hooks}}
    afresh = []
    for hook in ctx.hooks:
        states = [file["hooks"].get(hook.name, {}) for file in files]
        state = hook.divide_anew(states, rank, ctx.manager.world_size) if any(states) else {}
        if state:
            hooks[hook.name] = state
        elif state is None:
            afresh.append(hook.name)
    if rank == 0:
        logger.info(
            "%s was saved on %d processes and goes on with %d: ranks that were there keep what is their own; new ones begin afresh, "
            "with random streams from seed, rank and step",
            saved.path, ranks, ctx.manager.world_size,
        )  # fmt: skip
    there = files[rank] if rank < ranks else {"generators": None, "loader": files[0]["loader"]}
    objective = objective_anew(ctx, [file["objective"] for file in files], saved.path) if ctx.objective.rank_local else {}
    return {**there, "hooks": hooks, "objective": objective}, afresh


def objective_anew(ctx: TrainContext, states: Sequence[dict[str, Any]], path: Where) -> Mapping[str, Any] | None:
    """The state of this rank's loss from those of another number of ranks; ``None`` to begin afresh. Of chains a hook decides."""
    rank, ranks = ctx.manager.rank, ctx.manager.world_size
    keeper = next((hook for hook in ctx.hooks if "chains" in hook.claims), None)
    if keeper is not None:
        return keeper.divide_anew(states, rank, ranks)
    if ctx.objective.chains is not None:
        raise CheckpointError(
            f"{path} has the chains of another number of ranks, and nothing says what becomes of them",
            found=f"{ranks} now",
            needed=str(len(states)),
            fix="add PCDCheckpointHook() to hooks, which deals them out anew",
        )
    return ctx.objective.divide_anew(states, rank, ranks)


def load(ctx: TrainContext, source: str | PathLike[str], fresh: Sequence[str] = ()) -> None:
    """Put the state of a checkpoint into a run that is set up.

    Parameters
    ----------
    source
        ``"latest"`` for the newest whole one of the checkpoint hook's folder (nothing happens where there is none yet), or the
        path of a checkpoint or of a folder of them.
    fresh
        Hooks whose state may be missing.

    Raises
    ------
    CheckpointError
        Where nothing whole is found, a file is damaged or unsafe, or the state does not fit the run.
    """
    with _reading(source, ctx) as found:
        saved = find(source, ctx.hooks.checkpoint_dir, ctx.manager)
        if saved is None:
            logger.info("nothing to resume from yet: starting afresh")
            return
        found.append(saved)
        restore(ctx, saved, fresh)
    logger.info("resumed from %s at step %d, epoch %d", saved.path, ctx.progress.step, ctx.progress.epoch)


def restore(ctx: TrainContext, saved: layout.SavedCheckpoint, fresh: Sequence[str] = ()) -> None:
    """As :func:`load`, of a checkpoint that was found and is whole."""
    shared = read_shared(saved)
    own, afresh = own_state(ctx, saved)
    states = {**shared["hooks"], **own["hooks"]}
    check_fit(ctx, shared, states, saved.path, [*fresh, *afresh])
    check_same_kind(ctx, shared, saved.path)
    ctx.progress.load_state_dict(shared["progress"])
    position.take_up(ctx, own.get("loader", {}), world_size(saved), saved.path)
    for name, state in shared["models"].items():
        _apply(f"model '{name}'", saved.path, lambda n=name, s=state: load_model_state(ctx.models[n], s))
    for name, state in shared["optimizers"].items():
        if ctx.manager.rank == 0 and (stay := settings_that_stay(ctx.optimizers[name], state)):
            logger.warning("optimizer '%s' goes on with its settings in %s: %s", name, saved.path, ", ".join(stay))
        load_optimizer = partial(load_named_state, ctx.optimizers[name], ctx.model_of(name), state)
        _apply(f"optimizer '{name}'", saved.path, load_optimizer)
    for name in shared["schedulers"].keys() & ctx.schedulers.keys():
        state = placed(shared["schedulers"][name])
        _apply(f"scheduler '{name}'", saved.path, lambda n=name, s=state: ctx.schedulers[n].load_state_dict(s))
    ctx.update.load_state_dict(placed(shared["update"]))
    if own["objective"] is not None:
        # Chains lie where the run does, unless their buffer says where: that is not known before the first of them.
        if ctx.objective.rank_local:
            objective = on_device(own["objective"], ctx.device)
        else:
            objective = placed(shared["objective"], ctx.objective.state_dict())
        _apply("the loss", saved.path, lambda: ctx.objective.load_state_dict(objective))
    ctx.validation = saved.manifest.get("metrics")
    for hook in ctx.hooks:
        if hook.name in states:
            state = placed(states[hook.name], hook.state_dict())
            _apply(f"hook '{hook.name}'", saved.path, lambda h=hook, s=state: h.load_state_dict(s))
    if own["generators"] is None:
        begin_streams(ctx)
    else:
        load_streams(ctx, own["generators"])


@contextmanager
def _reading(source: str | PathLike[str], ctx: TrainContext) -> Iterator[list[layout.SavedCheckpoint]]:
    """Says in the log that reading takes long; the checkpoint goes into the list when it is known."""
    found: list[layout.SavedCheckpoint] = []
    place = ctx.hooks.checkpoint_dir if source == "latest" else source

    def amount() -> str:
        return f"{size_text(found[0].bytes)} in {found[0].path}" if found else "every file is checked"

    with alive(f"reading a checkpoint of {place}", amount, here=ctx.manager.rank == 0):
        yield found


def load_weights(ctx: TrainContext, source: str | PathLike[str]) -> None:
    """Take the models' weights, and nothing else, from a checkpoint; says in the log what matched.

    Raises
    ------
    CheckpointError
        Where no tensor of a model has a counterpart of the same name and shape.
    """
    with _reading(source, ctx) as found:
        saved = find(source, None, ctx.manager)
        if saved is None:
            raise CheckpointError("there is no checkpoint to take weights from", found=str(source))
        found.append(saved)
        for name, state in read_shared(saved)["models"].items():
            if name in ctx.models:
                _take_weights(name, ctx.models[name], state, saved.path)
            else:
                logger.warning("%s: no model '%s' in this run, its weights are left out", saved.path, name)


def _take_weights(name: str, model: nn.Module, state: Mapping[str, Any], path: Where) -> None:
    target = model_state(model)
    fitting = {k: v for k, v in state.items() if k in target and target[k].shape == v.shape}
    if not fitting:
        raise CheckpointError(f"no weight of model '{name}' in {path} fits this model")
    load_model_state(model, {**target, **fitting})
    logger.info(
        "model '%s': %d of %d tensors from %s; kept as initialised: %s; left out: %s",
        name, len(fitting), len(target), path, sorted(target.keys() - fitting.keys()), sorted(state.keys() - fitting.keys()),
    )  # fmt: skip


def check_fit(ctx: TrainContext, shared: Mapping[str, Any], states: Mapping[str, Any], path: Where, fresh: Sequence[str]) -> None:
    """Everything that training changes must have its state in the checkpoint; what is left over is named in the log."""
    wanted = {
        "models": set(ctx.trained),
        "optimizers": set(ctx.optimizers),
        "schedulers": {n for n, s in ctx.schedulers.items() if s.state_dict()},
        "hooks": {hook.name for hook in ctx.hooks if hook.state_dict() and hook.name not in fresh},
    }
    present = {**{k: set(shared[k]) for k in ("models", "optimizers", "schedulers")}, "hooks": set(states)}
    for kind, names in wanted.items():
        missing = sorted(names - present[kind])
        if missing:
            raise CheckpointError(
                f"{path} has no state of {kind[:-1]} {', '.join(missing)}",
                found=", ".join(sorted(present[kind])) or "none",
                fix="resume with what the checkpoint was made with"
                + (f"; or let it start anew with fresh={missing!r}" if kind == "hooks" else ""),
            )
    active = {"models": set(ctx.trained), "optimizers": set(ctx.optimizers), "schedulers": set(ctx.schedulers),
              "hooks": {hook.name for hook in ctx.hooks}}  # fmt: skip
    for kind in ("models", "optimizers"):
        extra = sorted(present[kind] - active[kind])
        if extra:
            raise CheckpointError(
                f"{path} has a {kind[:-1]} that this run lacks", found=", ".join(extra), needed=", ".join(sorted(active[kind]))
            )
    for name in sorted(present["schedulers"] - active["schedulers"]):
        logger.warning("%s: the state of scheduler '%s' is left out, its optimizer goes on with the rate that it had", path, name)
    for name in sorted(present["hooks"] - active["hooks"]):
        logger.warning("%s: the state of hook '%s' is left out, no such hook is active", path, name)


def check_same_kind(ctx: TrainContext, shared: Mapping[str, Any], path: Where) -> None:
    """An optimizer's state is for its own kind."""
    for name, kind in shared.get("optimizer_types", {}).items():
        own = type(ctx.optimizers[name]).__name__
        if own != kind:
            raise CheckpointError(
                f"{path} has the state of another kind of optimizer for '{name}'",
                found=kind,
                needed=own,
                fix="resume with what the checkpoint was made with, or take its weights alone with init_from",
            )


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under its plain names: wrappers (data parallel, compiled) leave no prefix."""
    return {plain_name(model, key): value for key, value in model.state_dict().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take back what :func:`model_state` gave, or :func:`nvalchemi.training.reading.read_shared` read of it, strictly."""
    now = model.state_dict()
    wrapped = {plain_name(model, key): key for key in now}
    model.load_state_dict({(own := wrapped.get(key, key)): placed(value, now.get(own)) for key, value in state.items()})


def _apply(what: str, path: Where, action: Any) -> None:
    try:
        action()
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the state of {what} in {path} does not fit", found=str(error).strip()[:500]) from error

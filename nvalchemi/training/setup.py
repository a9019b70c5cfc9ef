"""Before the first step: the run's context, its optimizers, and every cross-check there is, once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from nvalchemi.data.datapipes.rest import in_one_order
from nvalchemi.distributed import gather, single_process, started_together
from nvalchemi.distributed.blocks import is_sharded
from nvalchemi.distributed.meta import is_on_meta, materialise
from nvalchemi.errors import ConfigError
from nvalchemi.objective import ModelLoss, SupervisedLoss
from nvalchemi.training import checkpoint
from nvalchemi.training.context import Progress, TrainContext
from nvalchemi.training.cursor import Cursor
from nvalchemi.training.hook import Hook
from nvalchemi.training.objectives import as_objective, held_model, only_model
from nvalchemi.training.optimizers import normalise
from nvalchemi.training.seeds import derive_seed
from nvalchemi.training.validation import ValidationConfig

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy

logger = logging.getLogger("nvalchemi")


@dataclass(frozen=True, slots=True)
class _Flags:
    """A module's mode and its parameters' flags, to be put back after the run."""

    modes: tuple[tuple[nn.Module, bool], ...]
    requires_grad: tuple[tuple[nn.Parameter, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> _Flags:
        return cls(tuple((m, m.training) for m in model.modules()), tuple((p, p.requires_grad) for p in model.parameters()))

    def restore(self) -> None:
        for module, training in self.modes:
            module.training = training
        for parameter, requires_grad in self.requires_grad:
            parameter.requires_grad_(requires_grad)


def named_models(models: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """One model is named ``"model"``; a dict keeps its names."""
    return {"model": models} if isinstance(models, nn.Module) else dict(models)


def check_declaration(strategy: TrainingStrategy) -> None:
    """What can be known to be wrong before there is a loader."""
    models: Any = strategy.models
    if not isinstance(models, (nn.Module, Mapping)) or models == {}:
        found = "an empty dict" if models == {} else type(models).__name__
        raise ConfigError("models is no module and no dict of modules", found=found)
    for name, model in named_models(strategy.models).items():
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model '{name}' is no torch module", found=type(model).__name__)
    normalise(strategy.optimizer_configs, named_models(strategy.models))
    as_objective(strategy.loss_fn, strategy.training_fn)
    if isinstance(strategy.loss_fn, ModelLoss):
        held_model(strategy.loss_fn, strategy.models)
    if strategy.training_fn is None and isinstance(strategy.loss_fn, SupervisedLoss):
        only_model(strategy.models)
    check_kinds(strategy)
    ends = any("end" in hook.claims for hook in strategy.hooks if isinstance(hook, Hook))
    if strategy.num_epochs is None and strategy.num_steps is None and not ends:
        raise ConfigError("the run has no end", fix="give num_epochs= or num_steps=, or a hook such as TimeBudgetHook")
    for name in ("num_epochs", "num_steps", "accumulate", "max_consecutive_skips"):
        value = getattr(strategy, name)
        lowest = 1 if name == "accumulate" else 0
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
            raise ConfigError(f"{name} is wrong", found=repr(value), needed=f"a whole number of at least {lowest}")
    if strategy.resume_from is not None and strategy.init_from is not None and strategy.resume_from != "latest":
        raise ConfigError(
            "resume_from and init_from exclude each other", fix="resume_from goes on; init_from takes weights alone"
        )


def check_kinds(strategy: TrainingStrategy) -> None:
    """Whatever else is given is of the kind that is taken."""
    hooks: Any = strategy.hooks
    seed: Any = strategy.seed
    training_fn: Any = strategy.training_fn
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):  # an iterator would be empty at the second run
        raise ConfigError("hooks is no list of hooks", found=repr(hooks), fix="write hooks=[...]")
    if not isinstance(strategy.validation_config, ValidationConfig | None):
        found = type(strategy.validation_config).__name__
        raise ConfigError(
            "validation_config is none", found=found, fix="write validation_config=ValidationConfig(validation_data=loader)"
        )
    if not (training_fn is None or callable(training_fn)):
        raise ConfigError("training_fn cannot be called", found=repr(training_fn), needed="training_fn(model, batch)")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError("seed is wrong", found=repr(seed), needed="a whole number")
    if strategy.distributed_manager is not None and not hasattr(strategy.distributed_manager, "world_size"):
        raise ConfigError(
            "distributed_manager is none", found=repr(strategy.distributed_manager), fix="give DistributedManager(), or None"
        )
    for name in ("resume_from", "init_from"):
        path = getattr(strategy, name)
        if not isinstance(path, str | PathLike | None):
            raise ConfigError(f"{name} is no path", found=repr(path), needed="'latest' or a path")


def begin(strategy: TrainingStrategy, loader: Iterable[Any]) -> TrainContext:
    """The context of a new run: manager, models on the device and in their modes, this rank's generator, zero progress.

    Raises
    ------
    ConfigError
        Where a hook divides the work between processes, and the strategy was not told that there are several.
    """
    if strategy.distributed_manager is None:
        check_alone(strategy.hooks)
    manager = strategy.distributed_manager if strategy.distributed_manager is not None else single_process()
    models = named_models(strategy.models)
    trained = {model for model, _ in normalise(strategy.optimizer_configs, models).values()}
    before = {name: _Flags.of(model) for name, model in models.items()}
    for model in models.values():
        if not (is_on_meta(model) or is_sharded(model)):
            model.to(manager.device)
    ctx = TrainContext(
        manager=manager,
        models=models,
        main=next(name for name in models if name in trained),
        objective=as_objective(strategy.loss_fn, strategy.training_fn),
        progress=Progress(),
        generator=torch.Generator(manager.device).manual_seed(derive_seed(strategy.seed, "rank", manager.rank)),
        several_models=not isinstance(strategy.models, nn.Module),
        num_epochs=strategy.num_epochs,
        num_steps=strategy.num_steps,
        accumulate=strategy.accumulate,
        cursor=Cursor(in_one_order(loader, strategy.seed), manager.device, strategy.seed),
    )
    ctx.flags_before = before
    if strategy.validation_config is not None:
        ctx.validation_data = strategy.validation_config.validation_data
    for name, model in models.items():
        model.train(name in trained)
        if name not in trained:
            model.requires_grad_(False)
    return ctx


def check_alone(hooks: Sequence[Any]) -> None:
    """Without a manager each process would train by itself on all the data, and all would write to the same files."""
    dividing = [type(hook).__name__ for hook in hooks if isinstance(hook, Hook) and "data_parallel" in hook.claims]
    if dividing and (processes := started_together()) > 1:
        raise ConfigError(
            f"{dividing[0]} divides the work between processes, and the strategy does not know of them",
            found=f"{processes} processes, and no distributed_manager",
            fix="call DistributedManager.initialize() first and give the strategy distributed_manager=DistributedManager(); "
            "or distributed_manager=single_process(), for runs of one process each",
        )


def first_weights(ctx: TrainContext, strategy: TrainingStrategy) -> None:
    """Give models on the meta device that no hook has sharded their memory and weights; take weights from a checkpoint where asked to."""
    for model in ctx.models.values():
        if is_on_meta(model):
            chosen = [h.meta_init for h in strategy.hooks if isinstance(h, Hook) and h.meta_init is not None]
            materialise(model, ctx.device, derive_seed(strategy.seed, "weights"), chosen[0] if chosen else None)
    if strategy.init_from is not None:
        checkpoint.load_weights(ctx, strategy.init_from)


def build_optimizers(ctx: TrainContext, configs: Any) -> None:
    """Optimizers and schedulers, over the parameters as the hooks of SETUP left them."""
    for name, (model, config) in normalise(configs, ctx.models).items():
        built = config.build(ctx.models[model], name, ctx.manager.world_size)
        ctx.optimizers[name] = built.optimizer
        ctx.trained.setdefault(model, []).append(name)
        if built.scheduler is not None:
            ctx.schedulers[name] = built.scheduler
        if built.scaled is not None:
            ctx.scaled_rates[name] = built.scaled
            if ctx.manager.rank == 0:
                logger.info("%s", built.scaled)
        elif ctx.manager.world_size > 1 and ctx.manager.rank == 0:
            logger.info(
                "optimizer '%s': the batch of a step is that of %d processes, the rate is as declared; OptimizerConfig(lr_scaling=...) moves it",
                name, ctx.manager.world_size,
            )  # fmt: skip
    owners: dict[int, str] = {}
    for name, optimizer in ctx.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in owners:
                    raise ConfigError("a parameter has two optimizers", found=f"{owners[id(parameter)]} and {name}")
                owners[id(parameter)] = name


def check_run(ctx: TrainContext, strategy: TrainingStrategy) -> None:
    """Every cross-check between data, loss, models and hooks, before the first step.

    Raises
    ------
    ConfigError
        Naming what does not fit and what to do.
    """
    if ctx.manager.world_size > 1 and not any("data_parallel" in hook.claims for hook in ctx.hooks):
        raise ConfigError(
            f"world_size is {ctx.manager.world_size} but no hook shards the data", fix="add DDPHook() or FSDP2Hook() to hooks"
        )
    if not ctx.update.gives_gradients:
        needing = [hook.name for hook in ctx.hooks if hook.needs_gradients]
        if needing:
            raise ConfigError(
                "hooks need gradients, which the engine keeps for itself",
                found=", ".join(needing),
                fix='leave them out; the engine clips where its configuration says "gradient_clipping"',
            )
    check_labels(ctx.objective.labels, ctx.cursor.loader, "the training loader")
    if strategy.validation_config is not None:
        check_labels(ctx.objective.labels, strategy.validation_config.validation_data, "the validation data")
    if ctx.num_steps is None and ctx.cursor.num_batches == 0:
        raise ConfigError("the loader is empty", fix="check the dataset's size, batch_size and drop_last")
    watched = [f"{name} ({s.metric})" for name, s in ctx.schedulers.items() if s.metric is not None]
    if watched and strategy.validation_config is None:
        raise ConfigError(
            "schedulers look at a validation metric, and nothing is validated",
            found=", ".join(watched),
            fix="give validation_config",
        )
    check_chains(ctx)
    check_alike(ctx)
    if strategy.resume_from == "latest" and ctx.hooks.checkpoint_dir is None:
        raise ConfigError('resume_from="latest" and no checkpoint hook', fix="add CheckpointHook(DIR, every=...) to hooks")


def check_alike(ctx: TrainContext) -> None:
    """Ranks that were declared unlike ends or orders would wait for each other in vain, or train on the same samples."""
    if ctx.manager.world_size == 1:
        return
    declared = {"num_epochs": ctx.num_epochs, "num_steps": ctx.num_steps, "accumulate": ctx.accumulate}
    ranks = gather({**declared, **ctx.cursor.described()["order"]}, ctx.manager)
    names = dict.fromkeys(name for facts in ranks for name in facts)
    unlike = [name for name in names if any(facts.get(name) != ranks[0].get(name) for facts in ranks)]
    if unlike:
        of_rank = (", ".join(f"{name} {facts.get(name)}" for name in unlike) for facts in ranks)
        raise ConfigError(
            "the ranks were declared unlike runs",
            found="; ".join(f"rank {rank}: {said}" for rank, said in enumerate(of_rank)),
            needed="the same strategy, the same data and the same order on all ranks, among which the hook divides it",
            fix="declare nothing by the rank, and no seed by the clock; data that lie divided already take PreShardedSampler",
        )


def check_chains(ctx: TrainContext) -> None:
    """Persistent chains of many ranks have a hook that keeps them, which has something to keep and somebody to save it."""
    keeper = next((hook for hook in ctx.hooks if "chains" in hook.claims), None)
    if keeper is None:
        if ctx.objective.chains is not None and ctx.manager.world_size > 1 and ctx.hooks.checkpoint_dir is not None:
            raise ConfigError(
                "each rank has persistent chains, and nothing says what becomes of them on another number of ranks",
                fix="add PCDCheckpointHook() to hooks",
            )
        return
    if ctx.objective.chains is None:
        raise ConfigError(
            f"hook '{keeper.name}' keeps persistent chains, and the loss has none",
            fix="give ContrastiveDivergence(persistent=True), or leave the hook out",
        )
    if ctx.hooks.checkpoint_dir is None:
        raise ConfigError(
            f"hook '{keeper.name}' keeps persistent chains, and nothing saves them",
            fix="add CheckpointHook(DIR, every=...) to hooks",
        )


@runtime_checkable
class NamesFields(Protocol):
    """A loader that knows which fields its batches can have; torch's, or a list of batches, does not."""

    @property
    def field_names(self) -> Iterable[str]:
        """Names of the fields."""


def check_labels(labels: frozenset[str], loader: Any, what: str) -> None:
    """A label that no structure of the data can have is an error now, not a term that is silently zero."""
    if not isinstance(loader, NamesFields):
        return
    names = loader.field_names
    missing = sorted(labels - set(names))
    if missing:
        raise ConfigError(
            f"{what} lacks labels that the loss compares with",
            found=", ".join(sorted(names)),
            needed=", ".join(missing),
            fix="convert the data with the right --energy-key/--forces-key/--stress-key, or leave the term out of the loss",
        )


def end(ctx: TrainContext) -> None:
    """After the run, also a broken one: the loader is let go, the models' modes and flags are as they were."""
    ctx.cursor.close()
    for flags in ctx.flags_before.values():
        flags.restore()

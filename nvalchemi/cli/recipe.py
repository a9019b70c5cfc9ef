"""From a checked configuration to data, model, loss and strategy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvalchemi.cli.config import TermSection, TrainConfig
from nvalchemi.cli.console import err
from nvalchemi.cli.processes import joined
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.cli.threads import cpu_threads
from nvalchemi.data.datapipes import AtomicDataZarrReader, DataLoader, Dataset, InMemoryDataset
from nvalchemi.data.datapipes.sharding import shard_loader
from nvalchemi.data.transforms import NeighborList
from nvalchemi.distributed import Manager, launched_by
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, InteratomicPotential, PaiNN, build_model, build_net
from nvalchemi.training import Every, OptimizerConfig, TrainContext, TrainingStrategy, ValidationConfig
from nvalchemi.training import losses as terms
from nvalchemi.training.agreement import first_rank
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.hooks import (
    CheckpointHook,
    DDPHook,
    EarlyStopHook,
    EMAHook,
    GradientClipHook,
    MetricsHook,
    MixedPrecisionHook,
    ProgressHook,
    SpikeHook,
    StopOnSignalHook,
    TensorBoardHook,
    TimeBudgetHook,
)
from nvalchemi.training.schedules import Shape
from nvalchemi.training.stages import TrainingStage

_LOSSES: dict[str, dict[str, Callable[..., terms.Loss]]] = {
    "energy": {"mse": terms.EnergyMSELoss, "mae": terms.EnergyMAELoss, "huber": terms.EnergyHuberLoss},
    "forces": {
        "mse": terms.ForceMSELoss,
        "mae": terms.ForceMAELoss,
        "huber": terms.ForceHuberLoss,
        "l2norm": terms.ForceL2NormLoss,
    },
    "stress": {"mse": terms.StressMSELoss, "mae": terms.StressMAELoss, "huber": terms.StressHuberLoss},
}


def train(config: TrainConfig, run: RunDir, *, resume: bool = False) -> TrainContext:
    """Train in a run folder, on all processes that were started together; with ``resume``, go on from its latest checkpoint."""
    with joined() as manager:
        return _train(config, run, manager, resume=resume)


def _train(config: TrainConfig, run: RunDir, manager: Manager, *, resume: bool) -> TrainContext:
    torch.manual_seed(config.training.seed)
    training = make_dataset(config, config.data.train, manager.device)
    validation = None if config.data.validation is None else make_dataset(config, config.data.validation, manager.device)
    model = build_model(run.model_config()) if resume else new_model(config, training, manager)
    model = in_precision(model, config)
    loader = DataLoader(
        training,
        batch_size=config.data.batch_size,
        shuffle=True,
        drop_last=config.data.drop_last,
        prefetch_factor=config.data.prefetch_factor,
        pin_memory=manager.device.type == "cuda",
        seed=config.training.seed,
    )
    batches = len(shard_loader(loader, manager.rank, manager.world_size))
    if batches == 0:
        raise ConfigError(
            "the training data give no batch",
            found=f"{len(training)} structures, data.batch_size={config.data.batch_size}, data.drop_last=true, processes: {manager.world_size}",
            fix="lower data.batch_size or set data.drop_last=false",
        )
    strategy = make_strategy(config, run, model, loader, validation, manager, total_steps(config, batches), resume=resume)
    if not resume:
        first_rank(lambda: keep(config, run, model), manager)
    with cpu_threads(config.training.threads):
        return strategy.run(loader)


def keep(config: TrainConfig, run: RunDir, model: EnergyModel) -> None:
    """Write what a run was started with into its folder."""
    run.write_config(config)
    run.write_model_config(model.config())
    run.write_launch(launched_by())


def new_model(config: TrainConfig, training: Dataset | InMemoryDataset, manager: Manager) -> EnergyModel:
    """A new model that is the same on all processes: rank 0 makes it, and the others are told its settings.

    What is fitted to the data lies outside the network, of which alone the weights are sent to all when it is wrapped.
    """
    made: list[EnergyModel] = []

    def settings() -> dict[str, Any]:
        made.append(make_model(config, training))
        return made[0].config()

    told = first_rank(settings, manager)
    return made[0] if made else build_model(told)


def in_precision(model: EnergyModel, config: TrainConfig) -> EnergyModel:
    """The model, its network computing in the dtype of the data."""
    return model.to(getattr(torch, config.data.dtype))


def make_dataset(config: TrainConfig, store: str, device: torch.device) -> Dataset | InMemoryDataset:
    """A store with neighbour lists, resident or read as needed."""
    kind = InMemoryDataset if config.data.in_memory else Dataset
    dtype = getattr(torch, config.data.dtype)
    transforms = [NeighborList(config.model.cutoff)]
    return kind(AtomicDataZarrReader(store), device, transforms, dtype=dtype, seed=config.training.seed)


def make_model(config: TrainConfig, training: Dataset | InMemoryDataset) -> InteratomicPotential:
    """A new potential, with reference energies and the force scale of the training data."""
    section = config.model
    settings = dict(section.net)
    if section.name == "painn":
        check_names("model.net of painn", settings, PaiNN)
        settings.setdefault("elements", elements(training))
    net = build_net({"net": section.name, "cutoff": section.cutoff, **settings})
    model = InteratomicPotential(net, cutoff=section.cutoff)
    if isinstance(section.reference_energies, dict):
        model.set_reference_energies(section.reference_energies)
    elif section.reference_energies == "fit":
        model.fit_reference_energies(training)
    if isinstance(section.energy_scale, float):
        model.set_energy_scale(section.energy_scale)
    elif "forces" in training.field_names:
        model.fit_energy_scale(training)
    return model


def elements(dataset: Dataset | InMemoryDataset) -> list[int]:
    """The atomic numbers that occur in a data set."""
    found: set[int] = set()
    for start in range(0, len(dataset), 4096):
        batch = dataset.read_many(range(start, min(start + 4096, len(dataset))))
        found.update(batch.atomic_numbers.unique().tolist())
    return sorted(found)


def make_loss(config: TrainConfig) -> terms.ComposedLoss:
    """The sum of the configured terms."""
    sections = {"energy": config.loss.energy, "forces": config.loss.forces, "stress": config.loss.stress}
    return terms.ComposedLoss([(s.weight, _term(key, s)) for key, s in sections.items() if s is not None])


def _term(key: str, section: TermSection) -> terms.Loss:
    settings = section.model_dump(exclude={"kind", "weight"}, exclude_none=True)
    return _LOSSES[key][section.kind](**settings)


def make_optimizer(config: TrainConfig, total_steps: int | None) -> OptimizerConfig:
    """The optimizer, and its schedule where the run's length in steps is all there is to it."""
    section = config.optimizer
    kind = getattr(torch.optim, section.name)
    settings = {"lr": section.lr, "weight_decay": section.weight_decay, **section.options}
    if section.name in ("Adam", "AdamW", "SGD"):
        settings.setdefault("fused", True)  # one kernel instead of five operations a parameter: a tenth of the time on the CPU
    check_names(f"optimizer.options of {section.name}", section.options, kind)
    if config.training.max_time is not None or total_steps is None:  # the time budget sets the rate
        return OptimizerConfig(kind, settings, lr_scaling=section.lr_scaling)
    factor = make_shape(config).over_steps(total_steps)
    return OptimizerConfig(
        kind, settings, torch.optim.lr_scheduler.LambdaLR, {"lr_lambda": factor}, lr_scaling=section.lr_scaling
    )


def make_shape(config: TrainConfig) -> Shape:
    """The learning rate over the run."""
    return Shape(**config.schedule.model_dump())


def make_strategy(
    config: TrainConfig,
    run: RunDir,
    model: EnergyModel,
    loader: DataLoader,
    validation: Dataset | InMemoryDataset | None,
    manager: Manager,
    steps: int | None,
    *,
    resume: bool,
) -> TrainingStrategy:
    """The strategy with all its hooks, for a run of so many steps at most."""
    section = config.training
    hooks: list[Any] = make_hooks(config, run, validated=validation is not None)
    fresh = added(hooks, run) if resume else []
    if resume:
        # Only once the checkpoint was found to fit: a change that cannot be must not stand in the way of the next try.
        hooks.append(on(TrainingStage.TRAINING_START)(config_keeper(config, run)))
    if config.optimizer.lr_scaling is not None:
        hooks.append(on(TrainingStage.BUILT)(tell_rates))
    return TrainingStrategy(
        models=model,
        optimizer_configs=make_optimizer(config, steps),
        loss_fn=make_loss(config),
        num_epochs=section.epochs,
        num_steps=section.steps,
        accumulate=section.accumulate,
        seed=section.seed,
        distributed_manager=manager,
        validation_config=None if validation is None else make_validation(config, validation),
        hooks=hooks,
        fresh=fresh,
        resume_from=run.checkpoints_of(config) if resume else None,
    )


def added(hooks: list[Hook], run: RunDir) -> list[str]:
    """Names of the hooks that the run did not have so far: no checkpoint has a state of theirs."""
    before = run.config()
    known = {hook.name for hook in make_hooks(before, run, validated=before.data.validation is not None)}
    return [hook.name for hook in hooks if hook.name not in known]


def config_keeper(config: TrainConfig, run: RunDir) -> Callable[[TrainContext], None]:
    """A hook's function that keeps the settings."""

    def keep_config(ctx: TrainContext) -> None:
        first_rank(lambda: run.write_config(config), ctx.manager)

    return keep_config


def tell_rates(ctx: TrainContext) -> None:
    """Say what the learning rate was scaled by, where it was."""
    for rates in ctx.scaled_rates.values():
        err().print(str(rates), soft_wrap=True)


def total_steps(config: TrainConfig, batches: int) -> int | None:
    """Optimizer steps after which the run ends, of so many batches an epoch and process; ``None`` where only the time ends it."""
    section = config.training
    by_epochs = None if section.epochs is None else section.epochs * -(-batches // section.accumulate)
    return min((n for n in (section.steps, by_epochs) if n is not None), default=None)


def make_validation(config: TrainConfig, validation: Dataset | InMemoryDataset) -> ValidationConfig:
    """When to validate, and on what."""
    loader = DataLoader(validation, batch_size=config.data.validation_batch_size)
    section = config.validation
    return ValidationConfig(validation_data=loader, every_n_epochs=section.every_n_epochs, every_n_steps=section.every_n_steps)


def make_hooks(config: TrainConfig, run: RunDir, *, validated: bool) -> list[Hook]:
    """The hooks that the configuration asks for."""
    section, saving = config.training, config.checkpoint
    hooks: list[Hook] = [DDPHook(), StopOnSignalHook(), SpikeHook(section.spike_factor)]
    if section.mixed_precision is not None:
        hooks.append(MixedPrecisionHook({"bf16": torch.bfloat16, "fp16": torch.float16}[section.mixed_precision]))
    if section.clip_norm is not None:
        hooks.append(GradientClipHook(section.clip_norm))
    if section.max_time is not None:
        hooks.append(TimeBudgetHook(section.max_time, make_shape(config)))
    if section.ema_decay is not None:
        # Corrected: in a short run the untrained weights would otherwise still be in the average.
        hooks.append(EMAHook(section.ema_decay, bias_corrected=True))
    if section.early_stop is not None:
        hooks.append(EarlyStopHook(**section.early_stop.model_dump()))
    reported = Every(steps=config.report_every_n_steps)
    hooks += [ProgressHook(), MetricsHook(run.path, reported)]
    if config.tensorboard:
        hooks.append(TensorBoardHook(run.path / "tensorboard", reported))
    often = saving if saving.every_n_epochs or saving.every_n_steps else config.validation
    every = Every(steps=often.every_n_steps) if often.every_n_steps else Every(epochs=often.every_n_epochs or 1)
    keep_best = saving.keep_best if validated else None
    place = run.checkpoints_of(config)
    hooks.append(CheckpointHook(place, every, keep_last=saving.keep_last, keep_best=keep_best, metric=saving.metric))
    return hooks


def check_names(what: str, given: dict[str, Any], target: Any) -> None:
    """Refuse settings that ``target`` does not take, naming the nearest that it does."""
    known = [p.name for p in inspect.signature(target).parameters.values() if p.name not in ("self", "params")]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            raise ConfigError(
                f"{what} has an unknown setting",
                found=f"{name}={given[name]!r}",
                needed=f"{' or '.join(near)}" if near else f"one of {', '.join(known)}",
            )


def absolute(config: TrainConfig) -> TrainConfig:
    """The configuration with whole paths: a run can then be resumed from another folder."""

    def whole(section: Any, *keys: str) -> Any:
        given = {key: getattr(section, key) for key in keys}
        paths = {key: str(Path(path).absolute()) for key, path in given.items() if path is not None and "://" not in path}
        return section.model_copy(update=paths)

    saving = whole(config.checkpoint, "directory")
    return config.model_copy(update={"data": whole(config.data, "train", "validation"), "checkpoint": saving})

"""Optimizers and schedulers, declared: they are built once the models are wrapped, because sharding replaces parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nvalchemi.errors import ConfigError
from nvalchemi.training.rates import KEY, Rule, ScaledRates, check_rule, lr_factor, rescaled, scale_rates
from nvalchemi.training.signatures import misfit


@dataclass(slots=True)
class OptimizerConfig:
    """An optimizer and its scheduler, not built yet.

    Parameters
    ----------
    optimizer_cls, optimizer_kwargs
        Such as ``torch.optim.AdamW`` and ``{"lr": 1e-3}``.
    scheduler_cls, scheduler_kwargs
        Such as ``torch.optim.lr_scheduler.CosineAnnealingLR`` and ``{"T_max": 1000}``.
    scheduler_interval
        ``"step"`` moves the scheduler after each optimizer step taken, ``"epoch"`` after each epoch.
    scheduler_metric
        Name of a validation metric (``"forces_mae"``) for a scheduler that reads one, such as ``ReduceLROnPlateau``; it then
        moves after each validation.
    parameters
        ``parameters(model)`` gives the parameters, or parameter groups as torch takes them; by default all that require a
        gradient.
    lr_scaling
        ``"linear"`` or ``"sqrt"``: every rate is multiplied by the number of processes or its square root, since the batch of a step
        grows with it; see :mod:`nvalchemi.training.rates`. What was scaled is logged, and kept in ``ctx.scaled_rates``. Rates that a
        scheduler's settings name (``eta_min``, ``min_lr``) stay as they are.

    Raises
    ------
    ConfigError
        For settings that the class does not take, and for a scheduler's settings that cannot work.
    """

    optimizer_cls: Callable[..., torch.optim.Optimizer]
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    scheduler_cls: Callable[..., Any] | None = None
    scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    scheduler_interval: Literal["step", "epoch"] = "step"
    scheduler_metric: str | None = None
    parameters: Callable[[nn.Module], Iterable[Any]] | None = None
    lr_scaling: Rule | None = None

    def __post_init__(self) -> None:
        if self.scheduler_interval not in ("step", "epoch"):
            raise ConfigError("unknown scheduler_interval", found=repr(self.scheduler_interval), needed="'step' or 'epoch'")
        check_rule(self.lr_scaling)
        if self.scheduler_cls is None and (self.scheduler_kwargs or self.scheduler_metric):
            raise ConfigError("settings of a scheduler without a scheduler", fix="give scheduler_cls as well")
        for what, made, settings in (
            ("optimizer", self.optimizer_cls, self.optimizer_kwargs),
            ("scheduler", self.scheduler_cls, self.scheduler_kwargs),
        ):
            if not callable(made) and made is not None:
                raise ConfigError(f"the {what} is no class", found=repr(made), needed="such as torch.optim.AdamW")
            if not isinstance(settings, Mapping):
                raise ConfigError(f"the {what}'s settings are no dict", found=repr(settings), needed="such as {'lr': 1e-3}")
            problem = None if made is None else misfit(made, None, **settings)
            if problem is not None:
                raise ConfigError(f"the {what} does not take these settings", found=f"{made!r}: {problem}")
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if isinstance(self.scheduler_cls, type) and issubclass(self.scheduler_cls, plateau) and self.scheduler_metric is None:
            raise ConfigError(
                f"{self.scheduler_cls.__name__} reads a validation metric", fix='give scheduler_metric, such as "loss"'
            )

    def build(self, model: nn.Module, name: str, world_size: int = 1) -> Built:
        """The optimizer over ``model``'s parameters, its scheduler where one is declared, and what was done to its rates.

        Raises
        ------
        ConfigError
            Where there is nothing to optimise, for values that the classes refuse, and for a scheduler that sets rates of its own
            where they are to be scaled.
        """
        given = self.parameters(model) if self.parameters is not None else (p for p in model.parameters() if p.requires_grad)
        parameters = list(given)
        if not parameters:
            raise ConfigError(
                f"optimizer '{name}' has nothing to optimise", fix="unfreeze a parameter or drop its OptimizerConfig"
            )
        optimizer = _made("optimizer", self.optimizer_cls, parameters, self.optimizer_kwargs)
        if misfit(optimizer.step) is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} wants the loss computed again and again within a step, by a closure",
                needed="an optimizer whose step() takes gradients that are there, such as torch.optim.AdamW",
                fix="take another one, or write a loop of your own around the model and the loss",
            )
        scaled = scale_rates(optimizer, self.lr_scaling, world_size)  # before the scheduler, which starts from these rates
        if self.scheduler_cls is None:
            return Built(optimizer, None, scaled)
        before = [group.get("lr") for group in optimizer.param_groups]
        scheduler = _made("scheduler", self.scheduler_cls, optimizer, self.scheduler_kwargs)
        after = [group.get("initial_lr", rate) for group, rate in zip(optimizer.param_groups, before, strict=True)]
        if self.lr_scaling is not None and list(map(float, after)) != list(map(float, before)):
            raise ConfigError(
                f"{type(scheduler).__name__} sets rates of its own: nothing is left of lr_scaling",
                fix="leave lr_scaling out and multiply the scheduler's own rates, or take another scheduler",
            )
        factor = lr_factor(self.lr_scaling, world_size)
        return Built(optimizer, Scheduler(scheduler, self.scheduler_interval, self.scheduler_metric, factor), scaled)


OptimizerConfigs = OptimizerConfig | Sequence[OptimizerConfig] | Mapping[str, OptimizerConfig | Sequence[OptimizerConfig]]
"""One config, several over one model, or either by model name."""


class Built(NamedTuple):
    """What an :class:`OptimizerConfig` gives for a model; ``scaled`` is none where the rates are as declared."""

    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    scaled: ScaledRates | None


def _made(what: str, made: Callable[..., Any], over: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return made(over, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the {what} does not take these settings", found=f"{made!r}: {error}") from error


class Scheduler:
    """A torch scheduler with the moment at which it moves: each step taken, each epoch or each validation.

    ``factor`` is what the rates that it starts from were scaled by.
    """

    def __init__(self, scheduler: Any, interval: str = "step", metric: str | None = None, factor: float = 1.0) -> None:
        self.scheduler, self.interval, self.metric, self.factor = scheduler, interval, metric, factor
        self._moves_by_step = metric is None and interval == "step"
        self._declared = copy.deepcopy(scheduler.state_dict())

    def after_step(self) -> None:
        """An optimizer step was taken."""
        if self._moves_by_step:
            self.scheduler.step()

    def after_epoch(self) -> None:
        """An epoch is over."""
        if self.metric is None and self.interval == "epoch":
            self.scheduler.step()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """A validation gave ``metrics``."""
        if self.metric is None:
            return
        if self.metric not in metrics:
            raise ConfigError(
                "the scheduler's metric is not among the validation's", found=", ".join(sorted(metrics)), needed=self.metric
            )
        self.scheduler.step(metrics[self.metric])

    def state_dict(self) -> dict[str, Any]:
        """What training changed; a length or a factor that the code declares stays the code's after a resume."""
        changed = {k: v for k, v in self.scheduler.state_dict().items() if not _same(v, self._declared.get(k, _same))}
        return {**changed, KEY: self.factor} if changed and self.factor != 1.0 else changed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, over what the code declares."""
        ratio = self.factor / state.get(KEY, 1.0)
        kept = {k: v for k, v in state.items() if k != KEY}
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **(kept if ratio == 1.0 else rescaled(kept, ratio))})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def normalise(configs: Any, models: Mapping[str, nn.Module]) -> dict[str, tuple[str, OptimizerConfig]]:
    """Optimizer name -> (model name, config), from one config, a list of them, or a mapping by model name.

    Raises
    ------
    ConfigError
        For a model that does not exist, or something that is no config.
    """
    if isinstance(configs, OptimizerConfig) or not isinstance(configs, Mapping):
        if len(models) > 1:
            raise ConfigError(
                "several models but one optimizer config",
                found=f"models {', '.join(models)}",
                fix="give optimizer_configs={'<model name>': OptimizerConfig(...)}; models without one are frozen",
            )
        configs = {next(iter(models)): configs}
    named: dict[str, tuple[str, OptimizerConfig]] = {}
    for model, entry in configs.items():
        if model not in models:
            raise ConfigError("an optimizer config names no model", found=repr(model), needed=f"one of {', '.join(models)}")
        entries = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        for i, config in enumerate(entries):
            if not isinstance(config, OptimizerConfig):
                raise ConfigError(
                    "optimizer_configs holds no OptimizerConfig",
                    found=repr(config),
                    fix="write OptimizerConfig(torch.optim.AdamW, {'lr': 1e-3}): optimizers are built after the models are wrapped",
                )
            named[model if len(entries) == 1 else f"{model}.{i}"] = (model, config)
    if not named:
        raise ConfigError("no optimizer config", fix="give optimizer_configs=OptimizerConfig(torch.optim.AdamW, {'lr': 1e-3})")
    return named

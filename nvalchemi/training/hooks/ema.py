"""An exponential moving average of the weights: used for validation, saved, and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed.tensors import full, is_sharded_tensor, local
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training.chosen import chosen_models
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.names import plain_name
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class EMAHook(Hook):
    """Keep an exponential moving average of the weights, ``average = decay * average + (1 - decay) * weights``.

    It moves once per optimizer step taken: not per micro-batch, and not on a skipped step. Parameters are averaged (those of bf16
    and fp16 in float32, where small changes would be lost otherwise); whole numbers and buffers (running means, counters, reference energies) are
    always the model's own present ones. Validation runs with the averaged weights; the training weights come back after it,
    also after an error, bit for bit.

    Parameters
    ----------
    decay
        Between 0 and 1; about ``1 / (1 - decay)`` steps are averaged over. A list of decays keeps one average for each.
    bias_corrected
        ``False`` starts from the initial weights, which fade away like ``decay**steps``. ``True`` gives them no weight at all: the
        average of the first steps is then nearly a plain mean (Kingma and Ba 2015, arXiv:1412.6980, section 3).
    warmup
        ``True`` uses ``min(decay, (1 + t) / (10 + t))`` for the update after ``t`` others, so that the initial weights fade away in the
        first tens of steps whatever the decay: the rule of TensorFlow's ``tf.train.ExponentialMovingAverage(num_updates=t)``.
    models
        Names of the models to average; by default all that are trained.
    use_for_validation
        Whether validation runs with the averaged weights.
    validation_decay
        Of several decays the one to validate with, and what :meth:`weights` gives by default: the first unless said.
    name
        Needed where there are several such hooks.

    Raises
    ------
    ConfigError
        For a decay outside [0, 1), decays given twice or not at all, ``warmup`` beside ``bias_corrected``, a ``validation_decay`` that is
        not among the decays, and at start for a model that does not exist.
    """

    order = Order.OBSERVE
    agreed = True

    def __init__(
        self,
        decay: float | Sequence[float] = 0.999,
        *,
        bias_corrected: bool = False,
        warmup: bool = False,
        models: Sequence[str] | None = None,
        use_for_validation: bool = True,
        validation_decay: float | None = None,
        name: str = "ema",
    ) -> None:
        self.decays = _checked_decays(decay)
        self.decay = self.decays[0] if validation_decay is None else float(validation_decay)
        if self.decay not in self.decays:
            raise ConfigError("EMAHook keeps no average to validate with", found=validation_decay, needed=f"one of {self.decays}")
        if bias_corrected and warmup:
            raise ConfigError("bias_corrected and warmup are two cures of one trouble", fix="give one of them")
        self.bias_corrected, self.warmup = bool(bias_corrected), bool(warmup)
        self.models, self.use_for_validation, self.name = models, use_for_validation, name
        self.count = 0
        self._models: dict[str, nn.Module] = {}
        self._weights: list[Tensor] = []
        self._averages: dict[float, _Average] = {}
        self._empty: dict[str, set[str]] = {}
        self._low, self._all_move = False, True

    @on(TrainingStage.SETUP)
    def look(self, ctx: TrainContext) -> None:
        """Note which weights have no entries from the start."""
        self._empty = {name: _empty(model) for name, model in ctx.models.items()}

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """Clone the weights, as wrapping and sharding left them."""
        names = chosen_models(ctx, self.models, "EMAHook averages")
        empty = [f"{name}.{key}" for name in names for key in _empty(ctx.models[name]) - self._empty[name]]
        if empty:
            raise ConfigError(
                "there is nothing to average: weights are empty on this rank",
                found=", ".join(sorted(empty)[:5]),
                fix="an engine has divided them where no hook sees it; FSDP2Hook() divides weights that can be averaged",
            )
        self.count = 0
        self._models = {name: ctx.models[name] for name in names}
        self._weights = [parameter for model in self._models.values() for parameter in model.parameters()]
        self._averages = {decay: _Average(self._models) for decay in self.decays}
        self._all_move = _all_move(self._weights)
        self._low = any(w.dtype != _wide(w.dtype) for w in self._weights)

    @on(TrainingStage.TRAINING_START)
    @torch.no_grad()
    def follow(self, ctx: TrainContext) -> None:
        """An average that starts anew in a resumed run starts from the weights that were loaded."""
        if self.count == 0 and self._weights:
            for average in self._averages.values():
                torch._foreach_copy_(average.shadow, self._own())

    @property
    def effective_decay(self) -> float:
        """The decay of the latest update: ``decay``, or less in the first steps of an average that warms up or is bias-corrected."""
        return self._effective(self.decay)

    def _effective(self, decay: float) -> float:
        if self.count == 0:
            return decay
        if self.warmup:
            return min(decay, self.count / (self.count + 9))  # the latest update came after count - 1 others
        return 1.0 - (1.0 - decay) / (1.0 - decay**self.count) if self.bias_corrected else decay

    @on(TrainingStage.OPTIMIZER_STEPPED)
    @torch.no_grad()
    def move(self, ctx: TrainContext) -> None:
        """Move the averages towards the new weights."""
        self.count += 1
        weights = self._own()
        if self._low:
            weights = [w.to(_wide(w.dtype)) for w in weights]
        for decay, average in self._averages.items():
            _move(average.shadow, weights, 1.0 - self._effective(decay), self._all_move)

    @around(TrainingSpan.VALIDATION)
    def swap(self, ctx: TrainContext) -> Iterator[None]:
        """Validate with the averaged weights. Values are copied: the parameters stay the optimizer's own."""
        if not self.use_for_validation:
            yield
            return
        weights = self._own()
        kept = [w.detach().clone() for w in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, self._averages[self.decay].shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)

    def _own(self) -> list[Tensor]:
        """The weights, of sharded ones this rank's part: averages need no other rank."""
        return [local(w) for w in self._weights]

    def weights(self, name: str | None = None, decay: float | None = None) -> dict[str, Any]:
        """A copy of a model's state dict with the averaged parameters in it, under the plain model's keys.

        Parameters
        ----------
        name
            Of the model; by default the only one that is averaged.
        decay
            Which average, where there are several; by default the one that is validated with.
        """
        averaged = self._of(self._single() if name is None else name, self.decay if decay is None else decay)
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in averaged.items()}

    def copy_to(self, model: nn.Module, name: str | None = None, decay: float | None = None) -> None:
        """Load the averaged weights of model ``name`` into ``model``, of the same kind: one that is sharded like it, or a plain one.

        Sharded averages are gathered for a plain model, so all ranks must call.
        """
        sharded = any(map(is_sharded_tensor, model.state_dict().values()))
        weights = self.weights(name, decay)
        model.load_state_dict(weights if sharded else {k: full(v) if isinstance(v, Tensor) else v for k, v in weights.items()})

    def _single(self) -> str:
        if len(self._models) != 1:
            raise ConfigError(
                "EMAHook averages no model yet, or several" if self._models else "EMAHook averages no model yet",
                found=", ".join(self._models) or "no run has begun",
                fix="name the model" if self._models else "ask after the run has begun",
            )
        return next(iter(self._models))

    def _of(self, name: str, decay: float) -> dict[str, Any]:
        if decay not in self.decays:
            raise ConfigError("EMAHook keeps no average of this decay", found=decay, needed=f"one of {self.decays}")
        if name not in self._models:
            raise ConfigError("EMAHook does not average this model", found=name, needed=f"one of {list(self._models)}")
        model, averages = self._models[name], self._averages[decay].named[name]
        # Tied parameters have one average and several keys in the state dict.
        shadow_of = {id(p): averages[plain_name(model, key)] for key, p in model.named_parameters()}
        state: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            shadow = shadow_of.get(id(value))
            if shadow is not None:
                state[plain_name(model, key)] = shadow.to(value.dtype)
            else:
                state[plain_name(model, key)] = value.detach() if isinstance(value, Tensor) else value
        return state

    def state_dict(self) -> dict[str, Any]:
        """The count and, for each model, a whole state dict with the averaged parameters in it: it loads into a plain model.

        Where there are several decays these are of the one that is validated with (``decay``); the parameters of the others follow
        (``others``), each under its decay.
        """
        own = self._averages[self.decay].named if self._averages else {}
        state = {"count": self.count, "models": {name: {**self._of(name, self.decay), **own[name]} for name in self._models}}
        if len(self.decays) == 1:
            return state
        others = {repr(decay): average.named for decay, average in self._averages.items() if decay != self.decay}
        return state | {"decay": repr(self.decay), "others": others}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        several = {state["decay"]: state["models"], **state["others"]} if "decay" in state else {}
        for decay, average in self._averages.items():
            # A single average has no decay written: as every setting, it may be changed.
            saved = state["models"] if not several and len(self.decays) == 1 else several.get(repr(decay))
            if saved is None:
                raise CheckpointError(
                    f"there is no saved average of decay {decay}",
                    found=", ".join(several) or "a single average",
                    needed=", ".join(map(repr, self.decays)),
                    fix=f"give the decays that were saved, or start all averages anew with fresh=['{self.name}']",
                )
            average.load(saved, self.name)
        self.count = int(state["count"])


class _Average:
    """The average of one decay.

    Attributes
    ----------
    shadow
        The averaged tensors, in the order of the models' parameters; of sharded ones this rank's part.
    named
        The same by model and plain name, sharded like the parameters.
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self.named: dict[str, dict[str, Tensor]] = {}
        self.shadow: list[Tensor] = []
        for name, model in models.items():
            self.named[name] = {
                plain_name(model, key): parameter.detach().to(_wide(parameter.dtype), copy=True)
                for key, parameter in model.named_parameters()
            }
            self.shadow += map(local, self.named[name].values())

    def load(self, saved: dict[str, Any], hook: str) -> None:
        """Take back saved tensors; those of buffers are left out."""
        for name, averages in self.named.items():
            missing = sorted(set(averages) - set(saved.get(name, {})))
            if missing:
                raise CheckpointError(
                    f"the saved average of model '{name}' lacks parameters",
                    found=", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
                    needed="the same model as the one that was saved",
                    fix=f"make the model as it was, or start the average anew with fresh=['{hook}']",
                )
            for key, average in averages.items():
                if saved[name][key].shape != average.shape:
                    raise CheckpointError(
                        f"the saved average of '{name}.{key}' has another shape",
                        found=tuple(saved[name][key].shape),
                        needed=tuple(average.shape),
                    )
                average.copy_(saved[name][key])


def _checked_decays(decay: float | Sequence[float]) -> tuple[float, ...]:
    given = list(decay) if isinstance(decay, (list, tuple)) else [decay]
    numbers = [d for d in given if isinstance(d, (int, float)) and 0 <= d < 1]
    if not given or len(numbers) != len(given):
        raise ConfigError(
            "the decay of an average is out of range", found=repr(decay), needed="0 <= decay < 1, or a list of such"
        )
    if len(set(numbers)) != len(numbers):
        raise ConfigError("a decay is given twice", found=repr(decay))
    return tuple(float(d) for d in numbers)


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float) -> None:
    """Move ``ema_model``'s parameters towards ``model``'s, in a loop of one's own; buffers are copied.

    Parameters
    ----------
    ema_model
        A copy of the model (``copy.deepcopy(model)`` before sharding), sharded like it if it is sharded.
    model
        The model that was trained.
    decay
        ``average = decay * average + (1 - decay) * weights``.

    Raises
    ------
    ConfigError
        Where the two models differ in parameters or buffers, or are not sharded alike.
    """
    if not 0 <= decay <= 1:
        raise ConfigError("the decay of an average is out of range", found=repr(decay), needed="0 <= decay <= 1")
    averages, weights = _named(ema_model, ema_model.named_parameters()), _named(model, model.named_parameters())
    kept, buffers = _named(ema_model, ema_model.named_buffers()), _named(model, model.named_buffers())
    if averages.keys() != weights.keys() or kept.keys() != buffers.keys():
        other = sorted((averages.keys() ^ weights.keys()) | (kept.keys() ^ buffers.keys()))
        raise ConfigError("the two models differ", found=", ".join(other[:5]), fix="make the average with copy.deepcopy(model)")
    for key, average in averages.items():
        if is_sharded_tensor(average) != is_sharded_tensor(weights[key]) or local(average).shape != local(weights[key]).shape:
            raise ConfigError(
                "the two models are not sharded alike",
                found=f"'{key}': {tuple(local(average).shape)} and {tuple(local(weights[key]).shape)} on this rank",
                fix="shard the average as the model is, in the same parts; and call it outside unsharded(...)",
            )
    if averages:  # parts of a rank are averaged there: no collective
        parts = [local(a) for a in averages.values()]
        _move(parts, [local(weights[key]) for key in averages], 1.0 - decay, _all_move(parts))
    for key, buffer in kept.items():
        buffer.copy_(buffers[key])


def _all_move(tensors: Sequence[Tensor]) -> bool:
    """Whether there is a way between two values of each of them, as there is none between whole numbers."""
    return all(t.is_floating_point() or t.is_complex() for t in tensors)


def _move(averages: list[Tensor], weights: list[Tensor], share: float, all_move: bool) -> None:
    """Move averages towards weights; whole numbers are copied."""
    if all_move:
        torch._foreach_lerp_(averages, weights, share)
        return
    for average, weight in zip(averages, weights, strict=True):
        if _all_move([average]):
            average.lerp_(weight, share)
        else:
            average.copy_(weight)


def _named(model: nn.Module, tensors: Any) -> dict[str, Tensor]:
    return {plain_name(model, key): tensor.detach() for key, tensor in tensors}


def _empty(model: nn.Module) -> set[str]:
    return {plain_name(model, key) for key, parameter in model.named_parameters() if parameter.numel() == 0}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

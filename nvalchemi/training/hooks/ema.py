"""An exponential moving average of the weights: used for validation, saved, and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.names import plain_name
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class EMAHook(Hook):
    """Keep an exponential moving average of the weights, ``average = decay * average + (1 - decay) * weights``.

    It moves once per optimizer step taken: not per micro-batch, and not on a skipped step. Parameters are averaged (those of bf16
    and fp16 in float32, where small changes would be lost otherwise); buffers (running means, counters, reference energies) are
    always the model's own present ones. Validation runs with the averaged weights; the training weights come back after it,
    also after an error, bit for bit.

    Parameters
    ----------
    decay
        Between 0 and 1; about ``1 / (1 - decay)`` steps are averaged over.
    bias_corrected
        ``False`` starts from the initial weights, which fade away like ``decay**steps``. ``True`` gives them no weight at all: the
        average of the first steps is then nearly a plain mean (Kingma and Ba 2015, arXiv:1412.6980, section 3).
    models
        Names of the models to average; by default all that are trained.
    use_for_validation
        Whether validation runs with the averaged weights.
    name
        Needed where there are several such hooks, with different decays.

    Raises
    ------
    ConfigError
        For a decay outside [0, 1), and at start for a model that does not exist.
    """

    order = Order.OBSERVE

    def __init__(
        self,
        decay: float = 0.999,
        *,
        bias_corrected: bool = False,
        models: Sequence[str] | None = None,
        use_for_validation: bool = True,
        name: str = "ema",
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError("the decay of an average is out of range", found=repr(decay), needed="0 <= decay < 1")
        self.decay, self.bias_corrected = float(decay), bias_corrected
        self.models, self.use_for_validation, self.name = models, use_for_validation, name
        self.count = 0
        self._models: dict[str, nn.Module] = {}
        self._averages: dict[str, dict[str, Tensor]] = {}
        self._weights: list[Tensor] = []
        self._shadow: list[Tensor] = []
        self._low: bool = False

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """Clone the weights, as wrapping and sharding left them."""
        names = list(ctx.trained) if self.models is None else list(self.models)
        unknown = [name for name in names if name not in ctx.models]
        if unknown:
            raise ConfigError("EMAHook averages models that there are not", found=unknown, needed=f"some of {list(ctx.models)}")
        self.count = 0
        self._models = {name: ctx.models[name] for name in names}
        self._averages, self._weights, self._shadow = {}, [], []
        for name, model in self._models.items():
            own: dict[str, Tensor] = {}
            for key, parameter in model.named_parameters():
                shadow = parameter.detach().to(_wide(parameter.dtype), copy=True)
                own[plain_name(model, key)] = shadow
                self._weights.append(parameter)
                self._shadow.append(shadow)
            self._averages[name] = own
        self._low = any(w.dtype != s.dtype for w, s in zip(self._weights, self._shadow, strict=True))

    @on(TrainingStage.TRAINING_START)
    @torch.no_grad()
    def follow(self, ctx: TrainContext) -> None:
        """An average that starts anew in a resumed run starts from the weights that were loaded."""
        if self.count == 0 and self._weights:
            torch._foreach_copy_(self._shadow, self._weights)

    @property
    def effective_decay(self) -> float:
        """The decay of the latest update: ``decay``, or less in the first steps of a bias-corrected average."""
        if not self.bias_corrected or self.count == 0:
            return self.decay
        return 1.0 - (1.0 - self.decay) / (1.0 - self.decay**self.count)

    @on(TrainingStage.OPTIMIZER_STEPPED)
    @torch.no_grad()
    def move(self, ctx: TrainContext) -> None:
        """Move the average towards the new weights."""
        self.count += 1
        weights = self._weights
        if self._low:
            weights = [w.to(s.dtype) for w, s in zip(self._weights, self._shadow, strict=True)]
        torch._foreach_lerp_(self._shadow, weights, 1.0 - self.effective_decay)

    @around(TrainingSpan.VALIDATION)
    def swap(self, ctx: TrainContext) -> Iterator[None]:
        """Validate with the averaged weights. Values are copied: the parameters stay the optimizer's own."""
        if not self.use_for_validation:
            yield
            return
        kept = [w.detach().clone() for w in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, kept)

    def weights(self, name: str | None = None) -> dict[str, Any]:
        """A copy of a model's state dict with the averaged parameters in it, under the plain model's keys.

        Parameters
        ----------
        name
            Of the model; by default the only one that is averaged.
        """
        averaged = self._of(self._single() if name is None else name)
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in averaged.items()}

    def copy_to(self, model: nn.Module, name: str | None = None) -> None:
        """Load the averaged weights of model ``name`` into ``model``, a plain model of the same kind."""
        model.load_state_dict(self.weights(name))

    def _single(self) -> str:
        if len(self._models) != 1:
            raise ConfigError(
                "EMAHook averages no model yet, or several" if self._models else "EMAHook averages no model yet",
                found=", ".join(self._models) or "no run has begun",
                fix="name the model" if self._models else "ask after the run has begun",
            )
        return next(iter(self._models))

    def _of(self, name: str) -> dict[str, Any]:
        if name not in self._models:
            raise ConfigError("EMAHook does not average this model", found=name, needed=f"one of {list(self._models)}")
        model, averages = self._models[name], self._averages[name]
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
        """The count and, for each model, a whole state dict with the averaged parameters in it: it loads into a plain model."""
        return {"count": self.count, "models": {name: {**self._of(name), **self._averages[name]} for name in self._models}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["models"]
        for name, averages in self._averages.items():
            missing = sorted(set(averages) - set(saved.get(name, {})))
            if missing:
                raise CheckpointError(
                    f"the saved average of model '{name}' lacks parameters",
                    found=", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
                    needed="the same model as the one that was saved",
                    fix=f"make the model as it was, or start the average anew with fresh=['{self.name}']",
                )
            for key, average in averages.items():
                if saved[name][key].shape != average.shape:
                    raise CheckpointError(
                        f"the saved average of '{name}.{key}' has another shape",
                        found=tuple(saved[name][key].shape),
                        needed=tuple(average.shape),
                    )
                average.copy_(saved[name][key])
        self.count = int(state["count"])


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float) -> None:
    """Move ``ema_model``'s parameters towards ``model``'s, in a loop of one's own; buffers are copied.

    Parameters
    ----------
    ema_model
        A copy of the model (``copy.deepcopy(model)``), sharded like it if it is sharded.
    model
        The model that was trained.
    decay
        ``average = decay * average + (1 - decay) * weights``.

    Raises
    ------
    ConfigError
        Where the two models differ in parameters or buffers.
    """
    if not 0 <= decay <= 1:
        raise ConfigError("the decay of an average is out of range", found=repr(decay), needed="0 <= decay <= 1")
    averages, weights = _named(ema_model, ema_model.named_parameters()), _named(model, model.named_parameters())
    kept, buffers = _named(ema_model, ema_model.named_buffers()), _named(model, model.named_buffers())
    if averages.keys() != weights.keys() or kept.keys() != buffers.keys():
        other = sorted((averages.keys() ^ weights.keys()) | (kept.keys() ^ buffers.keys()))
        raise ConfigError("the two models differ", found=", ".join(other[:5]), fix="make the average with copy.deepcopy(model)")
    if averages:
        torch._foreach_lerp_(list(averages.values()), [weights[key] for key in averages], 1.0 - decay)
    for key, buffer in kept.items():
        buffer.copy_(buffers[key])


def _named(model: nn.Module, tensors: Any) -> dict[str, Tensor]:
    return {plain_name(model, key): tensor.detach() for key, tensor in tensors}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

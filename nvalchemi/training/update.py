"""The owners of ``backward`` and ``step``: nothing else in the package calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi.distributed.tensors import local
from nvalchemi.errors import ConfigError, TrainingError


class Update:
    """Backward and step in the models' own precision.

    Parameters
    ----------
    optimizers
        The optimizers by name.
    """

    gives_gradients: ClassVar[bool] = True
    """Whether :meth:`gradients` can be had, for hooks that need them."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._in_order = tuple(self.optimizers.values())

    def zero_grad(self) -> None:
        """Let go of the gradients of the step before."""
        for optimizer in self._in_order:
            optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of one micro-batch's share of the step's loss; ``last`` says that it completes the step."""
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any weight that is trained",
                found="a tensor without a graph",
                fix="look for detach() or no_grad() in the model, training_fn or loss, and for labels that no prediction answers",
            )
        self.differentiate(loss, last)

    def differentiate(self, loss: Tensor, last: bool) -> None:
        """Run the backward pass of a loss that has a graph."""
        loss.backward()

    def unscale(self) -> bool:
        """Bring the gradients to their true size; ``False`` where they overflowed and the step cannot be taken."""
        return True

    def step(self) -> bool:
        """Take the step; ``True`` where it was taken."""
        for optimizer in self._in_order:
            optimizer.step()
        return True

    def discard(self) -> bool:
        """Do not take the step; always ``False``, as :meth:`step` of a step that was not taken."""
        self.zero_grad()
        return False

    def gradients(self) -> list[Tensor]:
        """The gradients of every parameter that has one, optimizer by optimizer."""
        return [p.grad for o in self._in_order for group in o.param_groups for p in group["params"] if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """What training changed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""


class ScaledUpdate(Update):
    """Backward of a scaled loss, for gradients in fp16 (Micikevicius et al. 2018, arXiv:1710.03740).

    Gradients are unscaled before any hook sees them. A step with a non-finite gradient is not taken and the scale is
    lowered; after ``growth_interval`` steps taken in a row it is raised.

    Parameters
    ----------
    optimizers
        The optimizers by name.
    init_scale
        The first loss scale.
    growth_factor, backoff_factor, growth_interval
        How the scale moves.
    any_rank
        ``any_rank(flag) -> bool``: whether the flag is set on any rank, so that all ranks skip together.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        any_rank: Any = bool,
    ) -> None:
        super().__init__(optimizers)
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ConfigError(
                "the loss scale cannot move like this",
                found=f"init_scale={init_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}",
                needed="init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1",
            )
        self.scale = float(init_scale)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.steps_since_change = 0
        self._any_rank = any_rank
        self._overflowed = False

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss * self.scale, last)

    def unscale(self) -> bool:
        gradients = [local(g) for g in self.gradients()]
        finite = True
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
            # A sum of absolute values is finite only if every entry is; one number to fetch, which the decision needs anyway.
            finite = bool(torch.stack([n.double() for n in torch._foreach_norm(gradients, 1)]).sum().isfinite())
        self._overflowed = bool(self._any_rank(not finite))
        return not self._overflowed

    def step(self) -> bool:
        super().step()
        self.steps_since_change += 1
        if self.steps_since_change >= self.growth_interval:
            self.scale *= self.growth_factor
            self.steps_since_change = 0
        return True

    def discard(self) -> bool:
        if self._overflowed:
            self.scale *= self.backoff_factor
            self.steps_since_change = 0
            self._overflowed = False
        return super().discard()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_change = int(state["steps_since_change"])


class EngineUpdate(Update):
    """Backward and step by DeepSpeed's engine, which clips and adds up by itself.

    Parameters
    ----------
    engine
        The engine.
    optimizers
        The run's, one.
    carries
        Whether losses pass through the engine's module.
    """

    gives_gradients = False

    def __init__(self, engine: Any, optimizers: Mapping[str, Any], carries: bool) -> None:
        super().__init__(optimizers)
        self.engine, self.carries = engine, carries

    def zero_grad(self) -> None:
        """Nothing: the engine does, after each step."""

    def differentiate(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(self.engine(loss) if self.carries else loss, scale_wrt_gas=False)

    def step(self) -> bool:
        self.engine.step()
        return bool(self.engine.was_step_applied())

    def discard(self) -> bool:
        # as the engine itself does after an overflow
        optimizer = self.engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            if hasattr(optimizer, name):
                setattr(optimizer, name, {})
        return False

    def gradients(self) -> list[Tensor]:
        raise ConfigError("gradients are the engine's", fix='set "gradient_clipping" in its configuration to clip them')

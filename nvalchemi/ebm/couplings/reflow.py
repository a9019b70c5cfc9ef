"""Targets made from the sources, by a flow that was trained before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.ebm.couplings.base import Coupling, CouplingResult, check_conditions
from nvalchemi.errors import ConfigError, DataError


@runtime_checkable
class SamplesFrom(Protocol):
    """A sampler that takes its start, as all of `nvalchemi.ebm.samplers` do."""

    def sample(self, *, x: Tensor, n_steps: int, generator: torch.Generator | None, **conditions: Any) -> Tensor:
        """The samples at which ``n_steps`` steps from ``x`` end."""


class ReflowCoupling(Coupling):
    """Pairs each source with where a flow takes it: training on such pairs straightens the flow (X. Liu et al., ICLR 2023, arXiv:2209.03003).

    An ``x1`` that is given is not looked at.

    Parameters
    ----------
    flow
        A sampler, such as `nvalchemi.ebm.samplers.FlowSampler`, of which ``sample(x=x0, n_steps=...)`` is taken; or any function
        ``x0 -> x1``. Conditions are those of the sources: a mapping, which goes to either by name.
    n_steps
        Steps of the sampler.
    """

    def __init__(self, flow: SamplesFrom | Callable[..., Tensor], n_steps: int = 50) -> None:
        if n_steps < 1:
            raise ConfigError("a flow takes at least one step", found=n_steps)
        self.flow, self.n_steps = flow, n_steps

    def couple(self, x0: Tensor, x1: Tensor | None, *, generator: torch.Generator | None, conditions: Any) -> CouplingResult:
        check_conditions(conditions, x0.shape[0])
        if not isinstance(conditions, (Mapping, type(None))):
            raise DataError("a flow takes its conditions by name", found=type(conditions).__name__, needed="a mapping")
        by_name = conditions or {}
        if isinstance(self.flow, SamplesFrom):
            made = self.flow.sample(x=x0, n_steps=self.n_steps, generator=generator, **by_name)
        else:
            made = self.flow(x0, **by_name)
        if made.shape != x0.shape:
            raise DataError("a flow moves each sample to one of the same shape", found=tuple(made.shape), needed=tuple(x0.shape))
        return CouplingResult(x0, made.detach(), conditions)

    def __repr__(self) -> str:
        return f"ReflowCoupling({type(self.flow).__name__}, n_steps={self.n_steps})"

"""What all samplers share: the call, the loop, and what comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from nvalchemi.distributed import unsharded
from nvalchemi.ebm.chains import Chains, chains_of
from nvalchemi.ebm.record import CHECK_EVERY, Progress, Record, check_finite, quiet, shown
from nvalchemi.ebm.samplers.compiled import CompiledEnergy
from nvalchemi.ebm.settings import Setting, checked
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import EnergyModel
from nvalchemi.objective import by_name

NOTHING: Mapping[str, Tensor] = {}


@dataclass(slots=True)
class Run:
    """One call of ``sample()``.

    Parameters
    ----------
    chains
        What is moved.
    n_steps
        How often.
    generator
        Where random numbers come from; None is torch's default generator of the device.
    diagnostics
        Whether somebody wants the numbers that a sampler adds.
    watched
        Whether somebody looks at the states on the way.
    options
        What one kind of sampler takes beyond the common call.
    """

    chains: Chains
    n_steps: int
    generator: torch.Generator | None
    diagnostics: bool = False
    watched: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers in a new tensor like ``like``."""
        return torch.empty_like(like).normal_(generator=self.generator)

    def refill_(self, noise: Tensor) -> Tensor:
        """The same tensor, filled with standard normal numbers."""
        return noise.normal_(generator=self.generator)

    def uniform(self, count: int | None = None) -> Tensor:
        """``count`` numbers uniform in [0, 1), one a chain if not given, at least float32."""
        start = self.chains.start
        dtype = torch.promote_types(start.dtype, torch.float32)
        return torch.empty(self.chains.size if count is None else count, device=start.device, dtype=dtype).uniform_(
            generator=self.generator
        )


def check_start(energy: Tensor, sampler: str) -> None:
    """Refuse chains that begin where the energy is not finite: no test of acceptance could ever move them.

    Raises
    ------
    TrainingError
        Naming how many chains it were.
    """
    finite = torch.isfinite(energy)
    if not finite.all():
        raise TrainingError(
            f"chains of {sampler} begin where the energy is not finite",
            found=f"{int((~finite).sum())} of {len(energy)} chains with energy NaN or infinite",
            fix="begin elsewhere",
        )


class Sampler(ABC):
    """Draws samples by moving many chains at once.

    A sampler holds its model and never wraps, trains or saves it. It has no random state of its own: all random numbers come from the
    ``generator`` of the call. With none given they come from torch's default generator of the samples' device, the stream that
    ``torch.manual_seed`` seeds. While it samples, the model is in evaluation mode and no graph is kept; afterwards modes are as they
    were and no parameter has got a gradient.

    Parameters
    ----------
    model
        What gives the energy, or the field that the samples follow.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def even_calls(self) -> bool:
        """Whether the model is called as often whatever the samples are.

        Otherwise a sharded one is gathered as a whole while it samples: ranks whose samples differ must not wait for each other's calls.
        """
        return True

    @property
    def energy_model(self) -> EnergyModel | None:
        """The energy that the diagnostics are about; None where there is none."""
        return self.model if isinstance(self.model, EnergyModel) and self.model.has_energy else None

    @abstractmethod
    def step_named(self, step: int) -> object:
        """The step size at a step, for messages."""

    @abstractmethod
    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Yield the positions after each step, ``run.n_steps`` times, and numbers for the diagnostics.

        The tensor may be changed in place afterwards; what is kept of it is copied.
        """

    def sample(
        self,
        x: Any = None,
        dim: int | tuple[int, ...] | None = None,
        n_steps: int = 100,
        n_samples: int = 1,
        thin: int = 1,
        return_trajectory: bool = False,
        return_diagnostics: bool = False,
        *,
        generator: torch.Generator | None = None,
        progress: bool | Progress = False,
        **conditions: Any,
    ) -> Any:
        """Move the chains.

        Parameters
        ----------
        x
            Where the chains begin, (batch, ...) of a floating dtype, or the structures of a `nvalchemi.data.Batch`, whose atoms are
            moved (see `nvalchemi.ebm.structures`); it is not changed.
        dim, n_samples
            Without ``x``: ``n_samples`` chains of length (or shape) ``dim`` that begin at standard normal numbers, on the device and in
            the dtype of the energy's parameters.
        n_steps
            Steps a chain.
        thin
            Of trajectory and diagnostics, keep every ``thin``-th state: ``n_steps // thin`` of them.
        return_trajectory
            Give the states kept on the way, (batch, n_steps // thin, ...), instead of the last state.
        return_diagnostics
            Also give numbers about the states kept, a dict of tensors whose first length is ``n_steps // thin``: ``"mean"`` and
            ``"var"`` over the chains, ``"energy"`` (its mean), and what the sampler adds (``"acceptance_rate"``).
        generator
            Where random numbers come from, on the device of the samples. None: torch's default generator of that device.
        progress
            True for a bar in the terminal, or a function that is called with (steps done, steps in all) after each step.
        **conditions
            Handed to the model by name, such as labels ``y``: tensors (batch, ...) with a row a chain, or what is the same for all.

        Returns
        -------
        Tensor or (Tensor, dict)
            The last states, of the shape, dtype and device of ``x``, or what was asked for instead. Of structures a batch without
            labels, or a list of as many batches as there are states kept.

        Raises
        ------
        ConfigError
            Settings that do not fit the samples.
        DataError
            Conditions that do not.
        TrainingError
            Positions that are no longer finite.
        """
        return self._sample(
            x,
            dim,
            n_steps,
            n_samples,
            thin,
            return_trajectory,
            return_diagnostics,
            generator=generator,
            progress=progress,
            conditions=conditions,
        )

    def _sample(
        self,
        x: Any,
        dim: int | tuple[int, ...] | None,
        n_steps: int,
        n_samples: int,
        thin: int,
        return_trajectory: bool,
        return_diagnostics: bool,
        *,
        generator: torch.Generator | None,
        progress: bool | Progress,
        conditions: Mapping[str, Any],
        options: Mapping[str, Any] = NOTHING,
    ) -> Any:
        """What `sample` does, with the options of a kind of sampler."""
        by_name(conditions)
        with quiet(self.model), self._gathered():
            chains = chains_of(x, dim, n_samples, self.model, generator).told(conditions)
            watched = return_trajectory or return_diagnostics or progress is not False
            run = Run(chains, n_steps, generator, return_diagnostics, watched, options)
            record = Record(run.chains, self.energy_model, n_steps, thin, return_trajectory, return_diagnostics)
            state, seen, name = run.chains.start, 0, type(self).__name__
            with shown(progress, name) as report:
                for step, (state, extra) in enumerate(self.moves(run)):
                    if record.needed:
                        record.keep(step, state, extra)
                    if report is not None:
                        report(step + 1, n_steps)
                    if (step + 1) % CHECK_EVERY == 0:
                        check_finite(run.chains, state, name, seen, step + 1, self.step_named(step))
                        seen = step + 1
                if seen < n_steps:
                    check_finite(run.chains, state, name, seen, n_steps, self.step_named(n_steps - 1))
            return record.result(state)

    def _gathered(self) -> AbstractContextManager[None]:
        uneven = not self.even_calls and isinstance(self.model, nn.Module)
        return unsharded(self.model) if uneven else nullcontext()


class EnergySampler(Sampler):
    """A sampler of exp(-E / T) whose steps have a size.

    Parameters
    ----------
    model
        The energy.
    step_size
        A number, one number a chain (batch,), or a function of the step (from 0) that gives either; see `nvalchemi.ebm.schedules`.
    """

    model: EnergyModel
    step_size: Setting

    def __init__(self, model: EnergyModel, step_size: Setting) -> None:
        if not isinstance(model, EnergyModel):
            raise ConfigError(
                f"{type(self).__name__} samples an energy",
                found=type(model).__name__,
                needed="a nvalchemi.models.EnergyModel",
                fix="derive the energy from EnergyModel and put its network into self.net",
            )
        super().__init__(model)
        self.step_size = checked("step_size", step_size)
        self._compiled: CompiledEnergy | None = None

    @property
    def energy(self) -> EnergyModel:
        """Where energies and gradients come from: the model, or its compiled form after `compile`."""
        return self.model if self._compiled is None else self._compiled

    def compile(self, **options: Any) -> Self:
        """Take energy and gradient from one compiled graph from now on; ``options`` are those of `torch.compile`.

        It is worth the compilation, seconds to a minute, where the energy is made of many small operations or the samples are few: then
        the time goes into Python and autograd, which a compiled graph leaves out. Only for samples that are tensors. Returns the
        sampler itself.
        """
        self._compiled = CompiledEnergy(self.model, **options)
        return self

    def step_named(self, step: int) -> object:
        """See `Sampler.step_named`."""
        setting = self.step_size
        return setting(step) if not isinstance(setting, Tensor) and callable(setting) else setting

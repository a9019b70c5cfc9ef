"""What a sampler moves: positions, and how one number a chain goes together with them.

A sampler works on one tensor of positions and never asks what they belong to. Vectors, images and fields are a dense tensor
(batch, ...); structures are the atoms of a `nvalchemi.data.Batch`, (N, 3), with as many atoms as each structure has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.ebm.conditions import check_rows, rows_of
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models import EnergyModel
from nvalchemi.models.gradient import all_plain, check_energy, plain


class Chains(ABC):
    """A set of Markov chains whose positions are one tensor.

    Attributes
    ----------
    start
        The positions at the beginning, a copy that the sampler may change in place.
    size
        How many chains there are.
    conditions
        What the energy is told beside the positions, by name: tensors (size, ...) with a row a chain, and what is the same for all.
    """

    start: Tensor
    size: int
    conditions: Mapping[str, Any] = {}

    def told(self, conditions: Mapping[str, Any]) -> Self:
        """These chains, whose energy is told ``conditions``.

        Raises
        ------
        DataError
            For a tensor that has not a row for each chain: it would be broadcast without notice.
        """
        check_rows(conditions, self.size)
        self.conditions = all_plain(conditions)
        return self

    def conditions_of(self, index: Tensor) -> dict[str, Any]:
        """The conditions of the chains ``index`` alone."""
        return rows_of(self.conditions, index)

    @abstractmethod
    def spread(self, values: Tensor) -> Tensor:
        """One value a chain, (size,), as a tensor that broadcasts against the positions."""

    @abstractmethod
    def coordinates(self, values: Tensor) -> Tensor:
        """One value a coordinate, the same in all chains, as a tensor that broadcasts against the positions.

        Raises
        ------
        ConfigError
            Where the shape is not that of one chain.
        """

    def masses(self, name: str) -> Tensor:
        """Masses that have a name, as a tensor that broadcasts against the positions.

        Raises
        ------
        ConfigError
            For a name that means nothing here.
        """
        raise ConfigError("no such mass", found=repr(name), needed='numbers; of the atoms of a Batch also "atomic"')

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """The sum over each chain, (size,), of a tensor of the positions' shape."""

    @abstractmethod
    def subset(self, index: Tensor) -> Chains:
        """The chains ``index`` alone, without a copy of `start` that anybody may change."""

    def narrowed(self, values: Tensor, index: Tensor) -> Tensor:
        """What `coordinates` or `masses` gave, for the chains ``index`` alone."""
        return values

    @abstractmethod
    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """The positions of the chains ``index``, a copy."""

    @abstractmethod
    def put_(self, x: Tensor, index: Tensor, values: Tensor) -> None:
        """Replace the positions of the chains ``index``, in place."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Any:
        """What the energy takes where the positions are ``x``; also what a user gets back."""

    @abstractmethod
    def trajectory(self, kept: Tensor) -> Any:
        """What a user gets back of the positions kept on the way, (n_kept, *shape of the positions)."""

    @abstractmethod
    def moments(self, x: Tensor) -> dict[str, Tensor]:
        """Mean and variance over the chains, where they have a meaning."""

    def energy(self, model: EnergyModel, x: Tensor) -> Tensor:
        """Energies (size,)."""
        return check_energy(model(self.inputs(x), **self.conditions), self.size)

    def gradient(self, model: EnergyModel, x: Tensor) -> Tensor:
        """The gradient of the energy, of the positions' shape."""
        return model.gradient(self.inputs(x), **self.conditions)

    def energy_and_gradient(self, model: EnergyModel, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both of them by one pass."""
        return model.energy_and_gradient(self.inputs(x), **self.conditions)

    def choose(self, which: Tensor, there: Tensor, here: Tensor) -> Tensor:
        """Positions ``there`` for the chains where ``which`` (size,) is true, ``here`` for the others."""
        return torch.where(self.spread(which), there, here)


class DenseChains(Chains):
    """Chains whose positions are a tensor (batch, ...): every row is a chain."""

    def __init__(self, x: Tensor, copy: bool = True) -> None:
        if x.ndim < 1 or not x.is_floating_point():
            raise ConfigError(
                "a sampler moves samples of a floating dtype, one a row",
                found=f"{tuple(x.shape)} {x.dtype}",
                needed="(batch, ...) of a floating dtype",
            )
        self.start = x.detach().clone(memory_format=torch.contiguous_format) if copy else x
        self.size = x.shape[0]
        self._column = (-1, *[1] * (x.ndim - 1))

    def spread(self, values: Tensor) -> Tensor:
        """See `Chains.spread`."""
        return values.view(self._column)

    def coordinates(self, values: Tensor) -> Tensor:
        """See `Chains.coordinates`."""
        if values.shape != self.start.shape[1:]:
            raise ConfigError(
                "one value a coordinate is needed", found=f"shape {tuple(values.shape)}", needed=str(tuple(self.start.shape[1:]))
            )
        return values.to(self.start)

    def total(self, values: Tensor) -> Tensor:
        """See `Chains.total`."""
        return values if values.ndim == 1 else values.flatten(1).sum(1)

    def subset(self, index: Tensor) -> DenseChains:
        """See `Chains.subset`."""
        return DenseChains(self.start[index], copy=False).told(self.conditions_of(index))

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """See `Chains.take`."""
        return x.index_select(0, index)

    def put_(self, x: Tensor, index: Tensor, values: Tensor) -> None:
        """See `Chains.put_`."""
        x.index_copy_(0, index, values)

    def inputs(self, x: Tensor) -> Tensor:
        """See `Chains.inputs`."""
        return x

    def trajectory(self, kept: Tensor) -> Tensor:
        """(batch, n_kept, ...)."""
        return kept.transpose(0, 1)

    def moments(self, x: Tensor) -> dict[str, Tensor]:
        """See `Chains.moments`."""
        variance, mean = torch.var_mean(x, 0, correction=0)
        return {"mean": mean, "var": variance}


def chains_of(x: Any, dim: int | tuple[int, ...] | None, n_samples: int, model: Any, generator: torch.Generator | None) -> Chains:
    """The chains that begin at ``x``, or at standard normal positions (n_samples, dim) where there is no ``x``.

    Raises
    ------
    ConfigError
        Neither ``x`` nor ``dim``, or a generator of another device than the chains.
    """
    if x is None:
        if dim is None:
            raise ConfigError(
                "a sampler needs a beginning", found="neither x nor dim", fix="give sample() x, or dim and n_samples"
            )
        device, dtype = place_of(model)
        check_device(generator, device)
        shape = (n_samples, dim) if isinstance(dim, int) else (n_samples, *dim)
        return DenseChains(torch.randn(shape, device=device, dtype=dtype, generator=generator))
    if isinstance(x, Batch):
        from nvalchemi.ebm.structures import AtomChains  # which is made of what is above

        check_device(generator, x.device)
        return AtomChains.of(x, model)
    if not isinstance(x, Tensor):
        raise DataError("a sampler cannot move that", found=type(x).__name__, needed="a tensor (batch, ...) or a Batch")
    check_device(generator, x.device)
    return DenseChains(plain(x))


def check_device(generator: torch.Generator | None, device: torch.device) -> None:
    """Refuse a generator that cannot draw where the chains are."""
    if generator is not None and generator.device.type != device.type:
        raise ConfigError(
            "the generator draws on another device than that of the samples",
            found=f"{generator.device} and {device}",
            fix=f"torch.Generator({str(device)!r}).manual_seed(seed)",
        )


def place_of(model: Any) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a module's first floating parameter (sharded or not) or buffer; the CPU and torch's default without any."""
    if isinstance(model, torch.nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()

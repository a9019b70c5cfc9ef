"""What a coupling is: a rule that pairs noise with data before a path is laid between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import DataError


@dataclass(frozen=True)
class CouplingResult:
    """Pairs. It unpacks as ``x0, x1 = coupling(x0, x1)``; the rest is there by name.

    Parameters
    ----------
    x0, x1
        (n, ...): row i of one belongs to row i of the other.
    conditions
        What was given with the rows of ``x1``, in the order of the pairs.
    weights
        (n,) with mean 1, of couplings that do not count every pair alike; none means that all count alike.
    """

    x0: Tensor
    x1: Tensor
    conditions: Any = None
    weights: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x0, self.x1))


class Coupling(ABC):
    """Pairs samples ``x0``, usually noise, with samples ``x1``, usually data.

    ``x0`` stays as it is, in its order; each of its rows gets a row of ``x1``, together with whatever belongs to that row. No coupling
    keeps a graph.
    """

    def __call__(
        self, x0: Tensor, x1: Tensor | None = None, *, generator: torch.Generator | None = None, conditions: Any = None
    ) -> CouplingResult:
        """Pair the rows.

        Parameters
        ----------
        x0
            (n, ...).
        x1
            (m, ...), which couplings that make their own targets do without.
        generator
            Of couplings that draw; none is torch's own.
        conditions
            What belongs to the rows of ``x1`` (labels, conditions): a tensor with m rows, or any nest of mappings, lists and tuples of
            such tensors.

        Returns
        -------
        CouplingResult
            Unpacks as ``x0, x1``; has ``conditions`` and ``weights``.

        Raises
        ------
        DataError
            For samples or conditions that do not fit together, or are not finite where distances are needed.
        """
        with torch.no_grad():
            return self.couple(x0.detach(), None if x1 is None else x1.detach(), generator=generator, conditions=conditions)

    @abstractmethod
    def couple(self, x0: Tensor, x1: Tensor | None, *, generator: torch.Generator | None, conditions: Any) -> CouplingResult:
        """What a call does, without a graph; defined by every coupling."""

    def on_this_rank(self) -> Coupling:
        """The same rule for the rows of this rank alone: one that waits for no other rank."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class CostCoupling(Coupling):
    """Pairs by a cost: the squared distance, in units of the largest one of the two batches (so that ``reg`` has a meaning of its own)."""

    def couple(self, x0: Tensor, x1: Tensor | None, *, generator: torch.Generator | None, conditions: Any) -> CouplingResult:
        x1 = needed(self, x0, x1)
        check_conditions(conditions, x1.shape[0])
        with in_full(x0):
            chosen, weights = self.choose(x0, x1, generator)
        return CouplingResult(x0, x1[chosen], take_rows(conditions, chosen), weights)

    @abstractmethod
    def choose(self, x0: Tensor, x1: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """The row of ``x1`` for each row of ``x0``, (n,) int64, and the pairs' weights where they have any."""


def in_full(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast inside: distances of bf16 products would pair other rows than the nearest, without notice."""
    return torch.autocast(x.device.type, enabled=False)


def needed(coupling: Coupling, x0: Tensor, x1: Tensor | None) -> Tensor:
    """The targets, once it is sure that they are there and alike to the sources."""
    if x1 is None:
        raise DataError(f"{type(coupling).__name__} pairs with targets", found="no x1", needed="coupling(x0, x1)")
    if x0.shape[1:] != x1.shape[1:] or not x0.shape[0] or not x1.shape[0]:
        raise DataError("samples that cannot be paired", found=f"{tuple(x0.shape)} and {tuple(x1.shape)}")
    return x1


def squared_distances(x0: Tensor, x1: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Squared distances of all pairs over the largest of them, (n, m), in ``dtype``, or at least float32.

    Raises
    ------
    DataError
        Where a sample is not finite, or the distances are not.
    """
    if dtype is None:
        dtype = torch.promote_types(torch.float32, x0.dtype)
    a, b = x0.flatten(1).to(dtype), x1.flatten(1).to(dtype)
    # distances do not know the origin, but the rounding of |a|^2 + |b|^2 - 2ab does
    middle = b.mean(0)
    a, b = a - middle, b - middle
    cost = torch.addmm((b * b).sum(1), a, b.T, alpha=-2)
    cost += (a * a).sum(1)[:, None]
    largest = float(cost.max())
    if not largest < float("inf"):
        raise DataError("samples or their distances are not finite, so nothing can be coupled", found=f"a distance of {largest}")
    return cost.div_(largest if largest > 0 else 1.0).clamp_(min=0)


def rows_mapped(conditions: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of mappings, lists and tuples with every tensor replaced."""
    if conditions is None:
        return None
    if isinstance(conditions, Tensor):
        return function(conditions)
    if isinstance(conditions, Mapping):
        return {name: rows_mapped(value, function) for name, value in conditions.items()}
    if isinstance(conditions, (list, tuple)):
        mapped = [rows_mapped(value, function) for value in conditions]
        if hasattr(conditions, "_fields"):  # a named tuple, which is made of arguments
            return type(conditions)(*mapped)
        return type(conditions)(mapped)
    raise DataError(
        "conditions travel with their samples as tensors",
        found=type(conditions).__name__,
        needed="a tensor with a row for each sample, or a mapping, list or tuple of such",
    )


def check_conditions(conditions: Any, rows: int) -> None:
    """Refuse conditions of another number of rows, or of what has no rows."""

    def check(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise DataError("conditions do not fit the samples", found=f"shape {tuple(tensor.shape)}", needed=f"({rows}, ...)")
        return tensor

    rows_mapped(conditions, check)


def take_rows(conditions: Any, chosen: Tensor) -> Any:
    """The rows ``chosen`` of every tensor."""
    return rows_mapped(conditions, lambda tensor: tensor.detach()[chosen.to(tensor.device)])

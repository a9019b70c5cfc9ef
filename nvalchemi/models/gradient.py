"""The gradient of an energy with respect to its input: the only caller of ``torch.autograd.grad`` in the package.

Two traps are closed here, once for scores and forces alike.

- A gradient does not depend on a constant in the energy, so a network's output bias gets no gradient from it. Under
  ``DistributedDataParallel`` such a parameter makes the next forward raise. Zero times the energy, added where the graph is kept,
  gives every parameter of the energy a gradient (`anchor`); or the backward pass visits them all with nothing to add (`attach`), which
  costs a fifth of it.
- Validation runs under ``torch.no_grad`` or ``torch.inference_mode``, and a force needs the graph of the energy all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError, DataError


def check_energy(energy: Tensor, samples: int) -> Tensor:
    """The energies, if they are one number a sample: anything else would be broadcast, or summed twice, without notice.

    Raises
    ------
    ConfigError
        Otherwise.
    """
    if energy.shape != (samples,):
        raise ConfigError(
            "the energy is not one number a sample",
            found=tuple(energy.shape),
            needed=f"({samples},)",
            fix="in forward, sum over all but the first dimension, or squeeze(-1) the network's last one",
        )
    return energy


def input_gradient(energy: Tensor, inputs: Tensor, *, create_graph: bool = False, anchored: bool = True) -> Tensor:
    """Give the gradient of the summed energy with respect to ``inputs``.

    Parameters
    ----------
    energy
        One energy a sample, (B,), or their sum, computed from ``inputs`` while these required a gradient.
    inputs
        Any shape.
    create_graph
        Keep the graph, so that the gradient can be differentiated again, to any order.
    anchored
        Where the graph is kept, add zero times the energy. What differentiates the gradient by the inputs again does better without:
        every pass would follow the zero. It must then say `anchor` or `attach` itself, once.

    Returns
    -------
    Tensor
        Of the shape of ``inputs``; zeros where the energy does not depend on them.
    """
    if not energy.requires_grad:
        return torch.zeros_like(inputs)
    total = _summed(energy)
    # a sampler comes here at every step, and `materialize_grads` costs a percent of a small network's
    gradient: Tensor | None = torch.autograd.grad(total, inputs, create_graph=create_graph, allow_unused=True)[0]
    if gradient is None:
        gradient = torch.zeros_like(inputs)
    return anchor(gradient, total) if create_graph and anchored else gradient


def _summed(energy: Tensor) -> Tensor:
    """The energy of all samples: not ones for grad_outputs, for which torch imports sympy, seconds, and checks shapes by it every time."""
    return energy.sum() if energy.ndim else energy


def input_gradients(
    energy: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False, anchored: bool = True
) -> tuple[Tensor, ...]:
    """Give the gradients with respect to several inputs in one pass; otherwise as `input_gradient`."""
    if not energy.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    total = _summed(energy)
    gradients = torch.autograd.grad(total, inputs, create_graph=create_graph, materialize_grads=True)
    if create_graph and anchored:
        return tuple(anchor(g, total) for g in gradients)
    return gradients


def anchor(values: Tensor, energy: Tensor) -> Tensor:
    """Add zero times the energy, which broadcasts against ``values``, so that every parameter of the energy gets a gradient."""
    return torch.add(values, energy if energy.dtype == values.dtype else energy.to(values.dtype), alpha=0)


def attach(values: Tensor, energy: Tensor) -> Tensor:
    """Let the backward pass of ``values`` visit every parameter of ``energy``, and leave those that ``values`` do not depend on alone.

    Wrappers of distributed training wait for every parameter to be visited, and put zeros where there was nothing; without one the
    gradient stays None. ``values`` may have any shape.
    """
    # Of several tensors treated as one each has a gradient of its own: that of the energy is never defined, so no node on its way works.
    return torch._foreach_add((values, energy), 0.0)[0]


def second_gradient(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Give the gradient of the summed ``outputs`` with respect to ``inputs``, with its graph; zeros where they do not depend on them.

    For outputs that are v·∇E, one a sample, it is the Hessian of the energy times v.
    """
    if not outputs.requires_grad:
        return torch.zeros_like(inputs)
    gradient: Tensor | None = torch.autograd.grad(outputs.sum(), inputs, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(inputs) if gradient is None else gradient


def compiled_gradient(energy: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Give a function from ``x`` to the energies (B,) and their gradient that is one compiled graph, without autograd's own walk.

    ``options`` are those of `torch.compile`. The function takes tensors that need no graph, and gives none.
    """

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        found = energy(x)
        return found.sum(), found

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        gradient, (_, energies) = torch.func.grad_and_value(total, has_aux=True)(x)
        return energies, gradient

    return torch.compile(both, **options)


def differentiable() -> AbstractContextManager[Any]:
    """Let graphs be built inside, whatever the mode outside (``no_grad`` or ``inference_mode``)."""
    return _out_of_inference() if torch.is_inference_mode_enabled() else torch.enable_grad()


@contextmanager
def _out_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where it was made under ``inference_mode`` and so cannot enter a graph."""
    return tensor.clone() if tensor.is_inference() else tensor


def all_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, tensors as `plain` gives them; call it inside `differentiable`."""
    return {name: plain(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def leaf(tensor: Tensor) -> Tensor:
    """The tensor cut from its history, requiring a gradient.

    Raises
    ------
    DataError
        For a tensor of whole numbers.
    """
    if not tensor.is_floating_point():
        raise DataError("no derivative is taken by whole numbers", found=tensor.dtype, needed="x.float(), for instance")
    return plain(tensor).detach().requires_grad_()

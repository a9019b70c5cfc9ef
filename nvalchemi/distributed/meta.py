"""Models built on the meta device: shapes without memory, given their first weights part by part, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed.bare import class_name
from nvalchemi.distributed.tensors import is_sharded_tensor, local
from nvalchemi.errors import ConfigError

Initialise = Callable[[nn.Module], None]
"""Gives one module its own first parameters and buffers, in place; those of modules inside it are not its business."""


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    initialise: Initialise | None = None,
    *,
    keep_on: torch.device | None = None,
) -> None:
    """Give a model that was built on the meta device its memory and first weights; what has some keeps it.

    One module after the other is made whole, initialised and, where it is sharded, cut to this rank's part, so no more than one
    module's parameters are whole at a time. Random numbers follow from ``seed`` alone: all ranks draw the same, and so does one process.
    Torch's random stream is left as it was.

    Parameters
    ----------
    model
        With parameters on the meta device, sharded or not.
    device
        Where the whole parameters are made.
    seed
        Of the weights.
    initialise
        ``initialise(module)`` for each module with parameters or buffers of its own; by default its ``reset_parameters()``.
    keep_on
        Where this rank's parts stay; by default on ``device``.

    Raises
    ------
    ConfigError
        Naming the modules that cannot be initialised.
    """
    owners = [(name, module) for name, module in model.named_modules() if any(t.is_meta for t in _own(module).values())]
    if initialise is None:
        without = [f"{name or 'the model'} ({class_name(m)})" for name, m in owners if not _can_reset(m)]
        if without:
            raise ConfigError(
                "modules on the meta device cannot be given their first weights",
                found=", ".join(without),
                needed="a method reset_parameters() that sets the module's own parameters and buffers",
                fix="add it, give FSDP2Hook(meta_init=function of a module), or build that module on a real device",
            )
    shared: dict[int, Tensor] = {}
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        torch.manual_seed(seed)
        for _, module in owners:
            _materialise(module, device, initialise or _reset, shared, keep_on or device)


def _materialise(
    module: nn.Module, device: torch.device, initialise: Initialise, shared: dict[int, Tensor], keep_on: torch.device
) -> None:
    before = _own(module)
    whole = {name: _like(tensor, device) for name, tensor in before.items() if tensor.is_meta}
    for name, tensor in whole.items():
        _place(module, name, tensor)
    initialise(module)
    for name, meta in before.items():
        if meta.is_meta:
            filled = _own(module)[name]
            known = shared.get(id(meta))  # tied: the first module that holds it decides
            if known is None:
                known = shared[id(meta)] = _cut(filled, meta, keep_on)
            _place(module, name, known)


def _own(module: nn.Module) -> dict[str, Tensor]:
    held = chain(module._parameters.items(), module._buffers.items())
    return {name: tensor for name, tensor in held if tensor is not None}


def _can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _reset(module: Any) -> None:
    module.reset_parameters()


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    # NaN, so that what an initialisation forgets is seen in the first loss
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    whole = torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
    return nn.Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


def _place(module: nn.Module, name: str, tensor: Tensor) -> None:
    held: Any = module._parameters if name in module._parameters else module._buffers
    held[name] = tensor


def _cut(filled: Tensor, meta: Tensor, keep_on: torch.device) -> Tensor:
    """Cut this rank's part of a whole parameter, as the sharded one on the meta device is; a whole one where that is not sharded."""
    if not is_sharded_tensor(meta):
        return filled
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = meta.device_mesh, meta.placements  # type: ignore[attr-defined]
    view = local(distribute_tensor(filled.detach(), mesh, placements, src_data_rank=None))
    part = view.to(keep_on, copy=True)  # a view would keep the whole
    made = DTensor.from_local(part, mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride())
    return nn.Parameter(made, requires_grad=meta.requires_grad)

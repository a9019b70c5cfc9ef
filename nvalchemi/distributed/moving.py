"""Buffers that a module's forward moves (running means, counters), where one call is computed several times: they move once."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

_Held = tuple[nn.Module, str, Tensor]


class MovingBuffers:
    """The buffers of one module through one call of it.

    What is computed again sees those that the call moved as they were before it, and leaves none moved.

    Parameters
    ----------
    module
        The module.

    Attributes
    ----------
    first
        A context for the call.
    again
        A context for each time that it is computed again.
    """

    def __init__(self, module: nn.Module) -> None:
        moved: dict[tuple[int, str], Tensor] = {}
        self.first: AbstractContextManager[None] = _First(module, moved)
        self.again: AbstractContextManager[None] = _Again(module, moved)


class AsBefore:
    """Random streams and buffers before a call that may turn out to be for nothing.

    Parameters
    ----------
    module
        What is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(b, b.clone()) for b in module.buffers()]
        self._stream = torch.get_rng_state()
        device = next((t.device for t in (*module.parameters(), *module.buffers()) if t.device.type != "cpu"), None)
        self._device = device
        self._other = None if device is None else torch.get_device_module(device).get_rng_state(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        torch.set_rng_state(self._stream)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._other, self._device)


class _First(AbstractContextManager[None]):
    def __init__(self, module: nn.Module, moved: dict[tuple[int, str], Tensor]) -> None:
        self._module, self._moved = module, moved
        self._copies: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []

    def __enter__(self) -> None:
        self._copies = [(m, name, b, _version(b), b.clone()) for m, name, b in _held(self._module)]

    def __exit__(self, *_: object) -> None:
        for module, name, buffer, version, copy in self._copies:
            if module._buffers.get(name) is not buffer or _version(buffer) != version:
                self._moved[id(module), name] = copy
        self._copies = []


class _Again(AbstractContextManager[None]):
    """It can be entered several times, one after the other."""

    def __init__(self, module: nn.Module, moved: dict[tuple[int, str], Tensor]) -> None:
        self._module, self._moved = module, moved
        self._before: list[_Held] = []

    def __enter__(self) -> None:
        self._before = _held(self._module)
        for module, name, buffer in self._before:
            module._buffers[name] = self._moved.get((id(module), name), buffer).clone()

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._before:
            module._buffers[name] = buffer
        self._before = []


def _held(module: nn.Module) -> list[_Held]:
    return [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

"""A module's own call: its class's, its user's hooks and forward, without what sharding and this package put in their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SHARDING = ("torch.distributed.fsdp.", "nvalchemi.distributed.shard")  # where the hooks come from that are left out
_DETOUR = "_is_a_detour"


class StandIn:
    """Base of what stands for a module's ``forward`` for a while.

    Attributes
    ----------
    before
        What stood there; ``None`` for the forward of the class.
    """

    before: Callable[..., Any] | None


def call_bare(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` as if it had neither been sharded nor changed by this package; hooks of its user's run."""
    with _bare(module):
        return own_class(module).__call__(module, *args, **kwargs)


def own_class(module: nn.Module) -> Any:
    """The class of ``module`` below those that `detour` has put on it."""
    return next(cls for cls in type(module).__mro__ if _DETOUR not in cls.__dict__)


def class_name(module: nn.Module) -> str:
    """Name of the class that its author gave ``module``: sharding makes another of it."""
    cls = own_class(module)
    sharded = any(base.__name__ == "FSDPModule" for base in cls.__bases__)
    return str((cls.__bases__[-1] if sharded else cls).__name__)


def detour(cls: type, call: Callable[..., Any], *more: type) -> type:
    """A class like ``cls`` with another ``__call__``."""
    members: dict[str, Any] = {"__call__": call, _DETOUR: True}
    if hasattr(cls, "_orig_cls_mro_index"):
        # torch finds the class from before sharding by its place in the list of ancestors, which is now one further
        members["_orig_cls_mro_index"] = cls._orig_cls_mro_index + 1
    return type(cls.__name__, (cls, *more), members)


@contextmanager
def _bare(module: nn.Module) -> Iterator[None]:
    own = module.__dict__
    before = {}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if any(map(_is_of_sharding, own[name].values())):
            before[name] = own[name]
            own[name] = OrderedDict((key, hook) for key, hook in own[name].items() if not _is_of_sharding(hook))
    forward = given = own.get("forward")
    while isinstance(forward, StandIn):
        forward = forward.before
    if forward is not given:
        before["forward"] = own.pop("forward")
        if forward is not None:
            own["forward"] = forward
    try:
        yield
    finally:
        own.update(before)


def _is_of_sharding(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_SHARDING)

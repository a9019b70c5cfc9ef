"""What torch's errors mean where weights of a shard are used as if they were whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from nvalchemi.distributed.bare import class_name
from nvalchemi.distributed.blocks import MIXED, is_unit
from nvalchemi.errors import ConfigError

_FREED = "of size 0"  # a storage that the hooks of a sharding have freed


@contextmanager
def whole_reads(nets: Mapping[str, nn.Module]) -> Iterator[None]:
    """Name the reader, where inside torch finds a shard among whole tensors, or one that was freed.

    Parameters
    ----------
    nets
        The sharded networks by the name of their model.

    Raises
    ------
    ConfigError
        In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if MIXED in str(error):
            raise _reader(error, nets) from error
        if "setStorage" in str(error) and _FREED in str(error):
            raise ConfigError(
                "a sharded model was called where it could not be seen that its gradient is differentiated again",
                found=f"model '{next(iter(nets))}'" if len(nets) == 1 else f"one of the models {', '.join(nets)}",
                needed="calls of the model itself, model(...), whose forward calls its parts; and tensors as arguments, not inside objects",
                fix="write what is computed into the model's forward, and hand it the tensors alone, or in tuples, lists and dicts",
            ) from error
        raise


def _reader(error: RuntimeError, nets: Mapping[str, nn.Module]) -> ConfigError:
    for module in reversed(_callers(error.__traceback__)):
        for model, net in nets.items():
            path = next((name for name, m in net.named_modules() if m is module), None)
            if path is None:
                continue
            parts = [name for name, m in module.named_modules() if m is not module and is_unit(m)]
            reader = f"'{path}' ({class_name(module)})" if path else "the network itself"
            return ConfigError(
                f"model '{model}': weights of a sharded part are read outside a call of it, where each rank has its share of them",
                found=f"read by {reader}, whose parts are {', '.join(parts[:8]) or 'none'}",
                needed="parts that are called as modules",
                fix="call the part, net(x) and no other method, or choose one that holds both what is read and its reader: FSDP2Hook(wrap=...)",
            )
    return ConfigError(
        "weights of a sharded model are read outside its forward, where each rank has its share of them",
        found=f"in {_place(error.__traceback__)}",
        fix="read them in the network's forward and give the result as an output; for a penalty on weights use the optimizer's weight_decay",
    )


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _callers(trace: TracebackType | None) -> list[nn.Module]:
    found = [frame.tb_frame.f_locals.get("self") for frame in _frames(trace)]
    return [owner for owner in found if isinstance(owner, nn.Module)]


def _place(trace: TracebackType | None) -> str:
    ours = [
        t
        for t in _frames(trace)
        if not t.tb_frame.f_globals.get("__name__", "").startswith(("torch.", "nvalchemi.", "contextlib"))
    ]
    last = ours[-1] if ours else trace
    return "?" if last is None else f"{last.tb_frame.f_code.co_name}, line {last.tb_lineno} of {last.tb_frame.f_code.co_filename}"

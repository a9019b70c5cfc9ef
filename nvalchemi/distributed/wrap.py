"""Which parts of a network are sharded each by itself: what is gathered at once, and freed again, is one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from nvalchemi.errors import ConfigError

Wrap = int | type[nn.Module] | Sequence[type[nn.Module]] | Callable[[nn.Module], bool] | None
"""How a network is divided: see `units`."""

SHARE = 0.25  # by default a part that holds more of all parameters than this is divided further, where it can be
LEAST = 0.001  # and one that holds less stays with what is around it: a collective of its own would cost more than it saves


def units(net: nn.Module, wrap: Wrap = None) -> list[nn.Module]:
    """The parts of ``net`` to shard each by itself, inner ones first, without ``net`` itself.

    Parameters
    ----------
    net
        The network.
    wrap
        A class or several: each module of such a class. A whole number: the smallest parts with at least so many parameters outside the
        parts within. A function: each module for which it is true. ``None``: the largest parts that hold at most a quarter of all
        parameters, or cannot be divided, and at least a thousandth. Parameters outside all parts are the network's own, which is a part
        as well. What is inside an ``nn.MultiheadAttention``, or a layer with a parametrization (such as spectral norm), is never a part by itself:
        weights in there are read without a call.

    Raises
    ------
    ConfigError
        For a ``wrap`` that is none of these or finds nothing, and for a part that shares a parameter with what is outside: it could not be
        freed with its own part.
    """
    if wrap is None:
        chosen = {id(module) for module in _divided(net) if not _shares(module, net)}
        found = [module for module in _inner_first(net) if id(module) in chosen]  # a module in several places is one part
    elif isinstance(wrap, bool):
        raise ConfigError("wrap is wrong", found=repr(wrap), needed="a class, a number of parameters or a function")
    elif isinstance(wrap, int):
        found = _at_least(net, wrap)
    else:
        choose = _chosen_by(wrap)
        closed = _closed(net)
        found = [m for m in _inner_first(net) if m is not net and id(m) not in closed and choose(m) and _holds(m)]
        if not found:
            raise ConfigError(
                "wrap finds no part of the network to shard by itself",
                found=", ".join(sorted({type(m).__name__ for m in net.modules()})),
                fix="name a class of these, or leave wrap out",
            )
    for module in found:
        _check(module, net)
    return found


def _chosen_by(wrap: object) -> Callable[[nn.Module], bool]:
    if isinstance(wrap, type) and issubclass(wrap, nn.Module):
        return lambda module: isinstance(module, wrap)
    if isinstance(wrap, Sequence) and wrap and all(isinstance(c, type) and issubclass(c, nn.Module) for c in wrap):
        classes = tuple(wrap)
        return lambda module: isinstance(module, classes)
    if callable(wrap) and not isinstance(wrap, type):
        return wrap
    raise ConfigError(
        "wrap is wrong",
        found=repr(wrap),
        needed="a class of modules or several, a number of parameters, or a function of a module",
    )


def _divided(net: nn.Module) -> Iterator[nn.Module]:
    total = count(net)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            share = count(child) / max(total, 1)
            inside = any(_holds(part) for part in child.children()) and not _reads(child)
            if inside and (share > SHARE or not _is_called(child)):
                yield from visit(child)
            elif share >= LEAST and _is_called(child) and not (inside is False and share > 1 - LEAST):
                yield child

    return iter(()) if _reads(net) else visit(net)


def _at_least(net: nn.Module, least: int) -> list[nn.Module]:
    if least < 1:
        raise ConfigError("wrap is wrong", found=least, needed="a positive number of parameters")
    found: list[nn.Module] = []
    closed = _closed(net)
    for module in _inner_first(net):
        inside = {id(p) for unit in found for p in unit.parameters()}
        own = sum(p.numel() for p in module.parameters() if id(p) not in inside)
        if module is not net and id(module) not in closed and _is_called(module) and own >= least and not _shares(module, net):
            found.append(module)
    return found


def _inner_first(net: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(net)


def count(module: nn.Module) -> int:
    """The number of parameters, entries of all of them."""
    return sum(p.numel() for p in module.parameters())


def _reads(module: nn.Module) -> bool:
    """Whether it reads weights of what is inside it without calling that: no part can begin there."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


def _closed(net: nn.Module) -> set[int]:
    """What lies inside modules that read the weights of their layers."""
    return {id(m) for reader in net.modules() if _reads(reader) for m in reader.modules() if m is not reader}


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_called(module: nn.Module) -> bool:
    # a ModuleList or ModuleDict has no forward, so nothing would gather its parameters
    return type(module).forward is not nn.Module.forward


def _shares(module: nn.Module, net: nn.Module) -> list[str]:
    """Names of the parameters that some module outside holds as well."""
    inside = {id(m) for m in module.modules()}
    outside = {id(p) for m in net.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    return [name for name, p in module.named_parameters() if id(p) in outside]


def _check(module: nn.Module, net: nn.Module) -> None:
    name = next(name for name, m in net.named_modules() if m is module)
    if not _is_called(module):
        raise ConfigError(
            f"wrap chooses '{name}', which is never called",
            found=type(module).__name__,
            fix="choose the modules inside, or the one that holds it",
        )
    shared = _shares(module, net)
    if shared:
        raise ConfigError(
            f"wrap chooses '{name}', which shares parameters with another part of the network",
            found=", ".join(shared),
            fix="choose a module that holds both, or leave it to the network's own part",
        )

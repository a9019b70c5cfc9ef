"""A sharded network without its hooks: block by block through gathered calls, or with all its weights at once.

Both ways put other classes on the network's modules for a while, which is how ``fully_shard`` itself works: a call then skips the hooks
that gather and free weights. What a network's forward does, and hooks of its user's, is left as it is; those of a block run each time that
it is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nvalchemi.distributed.bare import call_bare, class_name, detour
from nvalchemi.distributed.moving import AsBefore
from nvalchemi.distributed.tensors import is_sharded_tensor
from nvalchemi.errors import ConfigError

if TYPE_CHECKING:
    from nvalchemi.distributed.gathered import Place

_CALL = "_redirected_call"
_READABLE = "_holds_parameters_outside_blocks"
_READ_OUTSIDE = "_parameters_are_read_outside"
MIXED = "mixed torch.Tensor and DTensor"
"""What torch says of a shard that is used as if it were whole."""


def may_be_sharded() -> bool:
    """Whether this process has sharded anything yet: this is asked in every call of an energy, where a walk through a network is not for free."""
    # Where nobody imported it nothing is sharded; the import itself takes half a second. Nor is anything where no class was made for it. Older
    # torch cannot compile that question.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and (torch.compiler.is_compiling() or bool(fsdp.FSDPModule.__subclasses__()))


def is_sharded(module: nn.Module) -> bool:
    """Whether some part of ``module`` went through ``fully_shard``."""
    return may_be_sharded() and any(isinstance(m, sys.modules["torch.distributed.fsdp"].FSDPModule) for m in module.modules())


def is_sharded_in_blocks(module: nn.Module) -> bool:
    """Whether a part of ``module`` went through ``fully_shard`` by itself, so that its weights are never there all at once."""
    return is_sharded(module) and any(is_unit(m) for m in _below(module))


def holds_shards(module: nn.Module) -> bool:
    """Whether some parameters of ``module`` are shards now, or come and go with the units within."""
    return is_sharded_in_blocks(module) or (is_sharded(module) and any(is_sharded_tensor(p) for p in module.parameters()))


def lowest_units(net: nn.Module) -> list[nn.Module]:
    """The parts of ``net`` that went through ``fully_shard`` and hold no other such part."""
    return [module for module in net.modules() if is_unit(module) and not any(is_unit(m) for m in _below(module))]


def is_redirected(module: nn.Module) -> bool:
    """Whether a call of ``module`` is at present one of `gathered` or `unsharded`."""
    return _CALL in module.__dict__


def follow_gradients(net: nn.Module) -> bool:
    """Let calls of a sharded network with an input that requires a gradient be differentiable to any order, from now on.

    Such a call goes through `gathered`; every other one through the hooks of ``fully_shard``. Nothing is done to a network that is not
    sharded, and nothing the second time; what is given says whether something was.
    """
    if isinstance(net, _Follows) or _CALL in net.__dict__ or not is_sharded(net):
        return False
    cls: Any = type(net)
    net.__class__ = _following(cls)
    around = (module for module, _ in Walk(net, opened=True).through)
    net.__dict__[_READABLE] = any(next(m.parameters(recurse=False), None) is not None for m in around)
    return True


def following(net: nn.Module, inputs: Any, call: Callable[[], Any]) -> Any:
    """Make a ``call`` that takes ``inputs`` and uses ``net``, its parts or its methods, with `follow_gradients` of the network.

    Where parameters are read outside a call of what holds them, as in another method of the network, the call is made again with
    these gathered for all of it; and so is every later one.
    """
    follow_gradients(net)
    if not isinstance(net, _Follows) or _CALL in net.__dict__:
        return call()
    own = net.__dict__
    if not own.get(_READ_OUTSIDE):
        block_by_block = gathered(net) if _may_be_differentiated(inputs) else nullcontext()
        before = AsBefore(net) if own[_READABLE] else None
        try:
            with block_by_block:
                return call()
        except RuntimeError as error:
            if before is None or MIXED not in str(error):
                raise
        before.restore()
        own[_READ_OUTSIDE] = True
    with gathered(net, opened=True):
        return call()


def _may_be_differentiated(inputs: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs))


def reshard(net: nn.Module) -> None:
    """Free whatever a sharded network has gathered; nothing where it is not sharded."""
    for module in net.modules():
        if is_unit(module):
            module.reshard()  # type: ignore[operator]


class _Follows:
    """Mark of the networks that `follow_gradients` has changed."""


@dataclass(slots=True)
class Unit:
    """The settings of the nearest ``fully_shard`` around a module."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_inputs: bool

    @classmethod
    def of(cls, module: Any) -> Unit:
        """Those of a module that went through ``fully_shard``."""
        policy = module._get_fsdp_state()._mp_policy
        return cls(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)

    def cast(self, tree: Any) -> Any:
        """Inputs as the unit takes them."""
        return _cast(tree, self.param_dtype) if self.cast_inputs else tree


class Walk:
    """How a network divides into blocks: the largest parts that hold no sharded unit within.

    Parameters
    ----------
    net
        The network.
    opened
        Whether the network itself is none, though it holds no unit within: somebody uses its inside.

    Attributes
    ----------
    blocks
        Modules that are called as one operation each, with their unit.
    through
        Modules that are run as they are, with their unit (None outside any): they hold blocks.
    direct
        Modules that are run as they are and hold sharded parameters of their own.
    """

    def __init__(self, net: nn.Module, opened: bool = False) -> None:
        self._opened = net if opened else None
        self.blocks: list[tuple[nn.Module, Unit]] = []
        self.through: list[tuple[nn.Module, Unit | None]] = []
        self.direct: list[tuple[nn.Module, Unit]] = []
        self.units: list[Any] = []
        self._seen: set[int] = set()
        self._visit(net, None)

    def _visit(self, module: nn.Module, unit: Unit | None) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if is_unit(module):
            unit = Unit.of(module)
            self.units.append(module)
        closed = module is not self._opened
        if closed and unit is not None and _can_be_called(module) and not any(is_unit(m) for m in _below(module)):
            if any(is_sharded_tensor(p) for p in module.parameters()):
                self.blocks.append((module, unit))
            return
        self.through.append((module, unit))
        if unit is not None and any(is_sharded_tensor(p) for p in module.parameters(recurse=False)):
            self.direct.append((module, unit))
        for child in module.children():
            self._visit(child, unit)


@contextmanager
def gathered(net: nn.Module, opened: bool = False) -> Iterator[None]:
    """Inside, calls of ``net``, and with ``opened`` of its methods, gather one block at a time; what they give can be differentiated to any order."""
    walk = _walk(net, opened)
    with ExitStack() as stack:
        for module, unit in walk.direct:
            stack.enter_context(with_parameters(module, *_whole(module, unit, recurse=False)))
        for module, unit in walk.blocks:
            stack.enter_context(_called(module, partial(_call_block, module, unit)))
        stack.enter_context(_without_hooks(walk, net))
        yield


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Gather all parameters of ``module`` once, for any number of calls inside; they are constants there.

    For sampling and evaluation: nothing is communicated after the start, so ranks may call as often as each likes. At the end the shards
    are back as they were; what an optimizer changes meanwhile is seen from then on. A module that is not sharded is left as it is.

    Parameters
    ----------
    module
        A network, or an energy around one.
    """
    if not is_sharded(module):
        yield
        return
    from nvalchemi.distributed.gathered import gather  # with torch's tensors of many devices, which are slow to import

    walk = _walk(module)
    with ExitStack() as stack:
        for part, unit in walk.blocks + walk.direct:
            holders = part.modules() if (part, unit) in walk.blocks else [part]
            for holder in holders:
                names, places, shards = _sharded_parameters(holder, unit, recurse=False)
                with torch.no_grad():
                    whole = gather(places, shards)
                stack.enter_context(with_parameters(holder, names, whole))
        for part, unit in walk.blocks:
            if is_unit(part):
                stack.enter_context(_called(part, partial(_call_through, part, unit)))
        stack.enter_context(_without_hooks(walk, module))
        yield


@contextmanager
def _without_hooks(walk: Walk, net: nn.Module) -> Iterator[None]:
    """Run the units around blocks without the hooks of their sharding, and ``net`` as it is."""
    with ExitStack() as stack:
        for module, unit in walk.through:
            if unit is not None and is_unit(module):
                stack.enter_context(_called(module, partial(_call_through, module, unit)))
            elif isinstance(module, _Follows):
                stack.enter_context(_called(module, partial(call_bare, module)))
        yield


def _walk(net: nn.Module, opened: bool = False) -> Walk:
    # A forward whose backward is still to come may have left weights gathered; its hooks gather them again when they are needed.
    reshard(net)
    return Walk(net, opened)


def _call_block(module: nn.Module, unit: Unit, *args: Any, **kwargs: Any) -> Any:
    """The block as one operation on its shards."""
    if is_unit(module):
        args, kwargs = unit.cast((args, kwargs))
    from nvalchemi.distributed.gathered import gathered_call

    names, places, shards = _sharded_parameters(module, unit, recurse=True)
    empty = {name: p.detach() for name, p in module.named_parameters() if not p.numel() and name not in names}
    flat, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    shape: list[Any] = []

    def block(parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        if shape:
            return run(parameters, inputs)
        with torch.enable_grad():  # nothing given requires a gradient, so whatever comes out with one read something else
            tensors = run(parameters, [x.detach() for x in inputs])
        if any(y.requires_grad for y in tensors):
            raise ConfigError(
                f"{class_name(module)} reads a tensor that requires a gradient and is no argument of it, where it is sharded by itself",
                found="an attribute, the inside of an object, or a parameter that is not sharded",
                fix="give it as an argument, or choose parts that hold both what sets it and what reads it",
            )
        return tensors

    def run(parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        values = list(flat)
        for i, tensor in zip(where, inputs, strict=True):
            values[i] = tensor
        given, named = pytree.tree_unflatten(values, spec)
        with with_parameters(module, [*names, *empty], [*parameters, *empty.values()]):
            result = call_bare(module, *given, **named)
        leaves, form = pytree.tree_flatten(result)
        places_of = [i for i, value in enumerate(leaves) if isinstance(value, Tensor)]
        shape[:] = [leaves, form, places_of]
        tensors = [leaves[i] for i in places_of]
        for i in places_of:
            leaves[i] = None
        return tensors

    inputs = [flat[i] for i in where]
    for i in where:
        flat[i] = None  # the operation keeps the tensors
    outputs = gathered_call(block, places, shards, inputs, module=module)
    leaves, form, places_of = shape
    leaves = list(leaves)
    for i, tensor in zip(places_of, outputs, strict=True):
        leaves[i] = tensor
    result = pytree.tree_unflatten(leaves, form)
    return _cast(result, unit.output_dtype) if is_unit(module) else result


def _call_through(module: nn.Module, unit: Unit, *args: Any, **kwargs: Any) -> Any:
    """The call of a unit alone, with its casts and without the hooks of its sharding."""
    args, kwargs = unit.cast((args, kwargs))
    return _cast(call_bare(module, *args, **kwargs), unit.output_dtype)


def _sharded_parameters(module: nn.Module, unit: Unit, recurse: bool) -> tuple[list[str], list[Place], list[Tensor]]:
    """Names, places and this rank's parts of the sharded parameters of a module; the parts pass gradients on to them."""
    from nvalchemi.distributed.gathered import Place  # with torch's tensors of many devices, which are slow to import

    names: list[str] = []
    places: list[Place] = []
    shards: list[Tensor] = []
    for name, parameter in module.named_parameters(recurse=recurse):
        if is_sharded_tensor(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            places.append(
                Place(
                    mesh,
                    tuple(parameter.placements),  # type: ignore[attr-defined]
                    parameter.shape,
                    parameter.stride(),
                    _compute_device(mesh),
                    unit.param_dtype if parameter.is_floating_point() else None,
                    None if parameter.is_complex() else unit.reduce_dtype,
                )
            )
            names.append(name)
            shards.append(parameter.to_local())  # type: ignore[attr-defined]
    return names, places, shards


def _whole(module: nn.Module, unit: Unit, recurse: bool) -> tuple[list[str], Sequence[Tensor]]:
    from nvalchemi.distributed.gathered import gathered_call

    names, places, shards = _sharded_parameters(module, unit, recurse)
    return names, gathered_call(lambda parameters, _: list(parameters), places, shards, [])


@contextmanager
def with_parameters(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let tensors stand in the places of parameters."""
    before = []
    for name, tensor in zip(names, tensors, strict=True):
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path) if path else module
        before.append((holder, last, holder._parameters[last]))
        holder._parameters[last] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for holder, last, parameter in before:
            holder._parameters[last] = parameter


@contextmanager
def _called(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Let a call of ``module`` be ``call``: neither its hooks nor those of its sharding run."""
    before: Any = type(module)
    outer = module.__dict__.get(_CALL)
    module.__class__ = _redirected(before)
    module.__dict__[_CALL] = call
    try:
        yield
    finally:
        module.__class__ = before
        if outer is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = outer


@cache
def _redirected(cls: Any) -> type:
    return detour(cls, lambda self, *args, **kwargs: self.__dict__[_CALL](*args, **kwargs))


@cache
def _following(cls: Any) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _may_be_differentiated((args, kwargs)):
            with gathered(self):
                return self(*args, **kwargs)
        result = cls.__call__(self, *args, **kwargs)
        if not torch.is_grad_enabled():  # no backward will free what the forward left gathered
            reshard(self)
        return result

    return detour(cls, call, _Follows)


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` went through ``fully_shard`` itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in module.modules() if m is not module)


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _compute_device(mesh: Any) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors of a tree in ``dtype``."""
    if dtype is None:
        return tree
    return pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree)

"""Modules whose activations are not kept: every backward that needs them computes them again.

Torch's ``checkpoint`` does that for one backward. A loss that contains a gradient, of forces or scores, has a graph of the first backward
too, and that graph keeps whatever was computed again: nearly nothing is saved. Here a module is a function of its parameters and inputs,
called by the operation of `nvalchemi.distributed.gathered`, whose backward is the same operation once more; so a loss of any order keeps
the inputs of each module and no more.

What a function does not take as a tensor it cannot differentiate by: a module that reads such a tensor elsewhere (inside an object, or
from an attribute) is left to torch's ``checkpoint``, which gives the right gradients to any order as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nvalchemi.distributed.bare import StandIn, class_name
from nvalchemi.distributed.blocks import holds_shards, is_redirected, with_parameters
from nvalchemi.distributed.moving import AsBefore, MovingBuffers
from nvalchemi.errors import TrainingError


def recompute(module: nn.Module) -> None:
    """Keep no activations of ``module`` from now on, in training; names in the state dict stay as they are."""
    if not isinstance(module.__dict__.get("forward"), Recomputed):
        module.__dict__["forward"] = Recomputed(module)


def keep(module: nn.Module) -> None:
    """Undo `recompute`."""
    own = module.__dict__.get("forward")
    if isinstance(own, Recomputed):
        del module.__dict__["forward"]
        if own.before is not None:
            module.__dict__["forward"] = own.before


def is_recomputed(module: nn.Module) -> bool:
    """Whether some part of ``module`` went through `recompute`."""
    return any(isinstance(m.__dict__.get("forward"), Recomputed) for m in module.modules())


class Recomputed(StandIn):
    """Stands for the ``forward`` of a module.

    Parameters
    ----------
    module
        Which; copied along with it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        self._hides = False  # whether it reads tensors that are no arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not (torch.is_grad_enabled() and module.training) or _is_transformed():
            return self._forward(*args, **kwargs)
        if holds_shards(module):
            # Gathered calls within compute again themselves, and their time is over when the backward comes.
            within = any(is_redirected(m) for m in module.modules())
            return self._forward(*args, **kwargs) if within else self._left_to_torch(args, kwargs)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [x._version for x in given]
        result = self._computed_again(args, kwargs)
        if versions != [x._version for x in given]:
            raise TrainingError(
                f"{type(module).__name__} changes its input in place, so that it cannot be computed again from it",
                fix="leave it out of what is computed again, or let it work on a copy",
            )
        return result

    def _computed_again(self, args: Any, kwargs: Any) -> Any:
        if not self._hides:
            tried = AsBefore(self.module)
            try:
                return self._operation(args, kwargs)
            except _Hidden:
                self._hides = True
                tried.restore()
        return self._left_to_torch(args, kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _operation(self, args: Any, kwargs: Any) -> Any:
        """The module as one operation on its parameters and inputs."""
        from nvalchemi.distributed.gathered import gathered_call

        flat, spec = pytree.tree_flatten((args, kwargs))
        where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
        slots = dict(self.module.named_parameters(remove_duplicate=False))
        names = list(slots)
        call = _Call(self, flat, spec, where, names)
        # a view of a leaf, for of leaves the engine does not tell whether their gradient is wanted
        tensors = [t.view_as(t) if t.requires_grad else t for t in (*slots.values(), *(flat[i] for i in where))]
        if not any(t.requires_grad for t in tensors):
            return self._forward(*args, **kwargs)
        for i in where:
            flat[i] = None  # the operation keeps the tensors
        return call.result(gathered_call(call, [], [], tensors, module=self.module))

    def _left_to_torch(self, args: Any, kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        # whoever calls the module as a function has put other tensors in the parameters' places, for this call alone
        held: dict[str, Any] = dict(self.module.named_parameters(remove_duplicate=False))
        given = {name: p for name, p in held.items() if not isinstance(p, nn.Parameter)}
        calls = iter([True])

        def forward(*args: Any) -> Any:
            if next(calls, False):
                return self._forward(*args, **kwargs)
            with with_parameters(self.module, list(given), list(given.values())), _explained(self.module):
                return self._forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            buffers = MovingBuffers(self.module)
            return buffers.first, buffers.again

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _explained(module: nn.Module) -> Iterator[None]:
    """Say what it means that a network met its own shards: torch before 2.15 may not gather it again for a loss of both orders."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TrainingError(
            f"{class_name(module)} cannot be computed again around parts that are sharded by themselves",
            found=f"torch {torch.__version__}, and a loss of an energy and of its gradients in one backward",
            fix="compute the parts again, or what is within them; or take torch 2.15 or newer",
        ) from error


def _is_transformed() -> bool:
    """Whether a call is traced, or one of ``torch.func``: both know no operation with a backward of its own making."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class _Hidden(Exception):
    """A module reads a tensor that requires a gradient and is no argument."""


class _Call:
    """One call of a module, as a function of tensors: its parameters' and its arguments'."""

    def __init__(self, owner: Recomputed, flat: list[Any], spec: Any, where: list[int], names: list[str]) -> None:
        self._owner, self._flat, self._spec, self._where, self._names = owner, flat, spec, where, names
        self._first = True
        self._leaves: list[Any] = []
        self._form: Any = None

    def __call__(self, _: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._first:
            return self._run(tensors)
        self._first = False
        with torch.enable_grad():  # nothing given requires a gradient, so whatever comes out with one read something else
            found = self._run([t.detach() for t in tensors])
        if any(y.requires_grad for y in found):
            raise _Hidden
        return found

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        values = list(self._flat)
        for i, tensor in zip(self._where, tensors[len(self._names) :], strict=True):
            values[i] = tensor
        args, kwargs = pytree.tree_unflatten(values, self._spec)
        with with_parameters(self._owner.module, self._names, tensors[: len(self._names)]):
            result = self._owner._forward(*args, **kwargs)
        leaves, form = pytree.tree_flatten(result)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves, self._form = [_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
        return found

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the module gives, with these tensors in it."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is _HERE else leaf for leaf in self._leaves], self._form)


_HERE = object()

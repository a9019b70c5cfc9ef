"""Networks compiled by ``torch.compile`` for the time of a run, where torch can differentiate what it compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from nvalchemi.distributed.bare import StandIn
from nvalchemi.distributed.blocks import lowest_units
from nvalchemi.distributed.recompute import is_recomputed
from nvalchemi.distributed.targets import Target
from nvalchemi.errors import ConfigError
from nvalchemi.training.chosen import check_model_keys, chosen_models
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")

REFUSED = "torch refuses to differentiate a compiled graph twice"


class CompileHook(Hook):
    """Compile the networks that are trained: of an energy its ``net``, of a sharded network each part that is gathered by itself.

    Torch cannot differentiate a compiled graph twice, as losses of forces and scores do. A call with an input that requires a gradient is
    where that comes from, and is not compiled; all others are, in training and validation: energies without forces, contrastive terms,
    flows, and potentials with a derivative of their own such as PaiNN. Where the first step has no call that can be compiled, the log says so
    once, and ``strict`` makes it an error. Samplers have a ``compile`` of their own.

    Modules are replaced by nothing, so names in the state dict stay; they are as they were when the run ends. Under ``DDPHook`` gradients
    are sent when the backward of the whole graph is over.

    Parameters
    ----------
    model_keys
        Names of the models; by default all that are trained.
    strict
        Whether a network that cannot be compiled is an error.
    **options
        Of ``torch.compile``: ``backend``, ``mode``, ``dynamic``, ``fullgraph``. Batches of ever changing sizes compile less often with
        ``dynamic=True``.

    Raises
    ------
    ConfigError
        For a model that does not exist; with ``strict`` for one that cannot be compiled; and where a loss contains a gradient of
        the network by something that is no input of it.
    """

    order = Order.COMPUTE
    agreed = True

    def __init__(self, model_keys: Sequence[str] | None = None, *, strict: bool = False, **options: Any) -> None:
        check_model_keys(model_keys)
        self.model_keys, self.strict, self.options = model_keys, strict, options
        self._compiled: dict[str, list[Compiled]] = {}
        self._watched: set[str] = set()  # names of which it is not known yet whether they can be compiled

    @around(TrainingSpan.RUN)
    def undo(self, ctx: TrainContext) -> Iterator[None]:
        """Leave the modules as they were."""
        try:
            yield
        finally:
            for parts in self._compiled.values():
                for part in parts:
                    part.undo()
            self._compiled, self._watched = {}, set()

    @on(TrainingStage.TRAINING_START)
    def start(self, ctx: TrainContext) -> None:
        """Compile, when all else has been done to the networks."""
        for name in chosen_models(ctx, self.model_keys, "CompileHook is given"):
            net = Target(ctx.models, name).present
            net = net.module if isinstance(net, DistributedDataParallel) else net
            if is_recomputed(net):
                self._cannot(
                    name, "its activations are computed again, which compiled graphs do by themselves", "leave one of the two out"
                )
                continue
            # a sharded network's call with such an input goes another way, in which nothing is compiled
            units = lowest_units(net)
            self._compiled[name] = [Compiled(part, self.options, always=bool(units)) for part in units or [net]]
            self._watched.add(name)

    @around(TrainingSpan.MICROBATCH)
    def explain(self, ctx: TrainContext) -> Iterator[None]:
        """Say what torch's error means."""
        try:
            yield
        except RuntimeError as error:
            if "does not currently support double backward" not in str(error):
                raise
            raise ConfigError(
                "the loss contains a gradient of a compiled network by something that is no input of it, such as a parameter",
                found=REFUSED,
                fix="leave CompileHook out",
            ) from error

    @on(TrainingStage.STEP_END)
    def look(self, ctx: TrainContext) -> None:
        """Tell, after the first step in which a network had a part, that none of its calls could be compiled."""
        for name in list(self._watched):
            parts = self._compiled[name]
            if any(part.calls for part in parts):
                self._watched.remove(name)
            elif any(p.grad is not None for p in ctx.models[name].parameters()):
                self._watched.remove(name)
                for part in self._compiled.pop(name):
                    part.undo()
                self._cannot(name, f"the loss differentiates it by its inputs, and {REFUSED}", "leave CompileHook out")

    def _cannot(self, name: str, reason: str, fix: str) -> None:
        if self.strict:
            raise ConfigError(f"model '{name}' cannot be compiled", found=reason, fix=f"{fix}, or drop strict=True")
        logger.warning("model '%s' is not compiled: %s", name, reason)


class Compiled(StandIn):
    """Stands for the ``forward`` of a module: compiled, but for calls that may be differentiated twice.

    Parameters
    ----------
    module
        Which; copied along with it, and then compiled anew.
    options
        Of ``torch.compile``.
    always
        Compile those calls as well.

    Attributes
    ----------
    calls
        How many were compiled in training.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any], always: bool = False) -> None:
        self.module, self.options, self.always = module, options, always
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        self.calls = 0
        self._function: Callable[..., Any] | None = None
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = torch.is_grad_enabled()
        # traced already, as by a sampler's own compile()
        if torch.compiler.is_compiling() or (graph and not self.always and _requires_gradient(args, kwargs)):
            return self._plain()(*args, **kwargs)
        self.calls += graph and self.module.training
        if self._function is None:
            cls: Any = type(self.module)
            if self.before is None and cls.forward.__module__.startswith("torch."):
                self._function = partial(torch.compile(_forward_of(cls), **self.options), self.module)
            else:
                self._function = torch.compile(self._plain(), **self.options)
        return self._function(*args, **kwargs)

    def _plain(self) -> Callable[..., Any]:
        return self.before if self.before is not None else type(self.module).forward.__get__(self.module)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_function": None}

    def undo(self) -> None:
        """Put the module's own forward back."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.before is not None:
                self.module.__dict__["forward"] = self.before


@cache
def _forward_of(cls: Any) -> Callable[..., Any]:
    """``cls.forward`` as a function of ours: older versions of torch leave their own alone, without a word, where they come first."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(module, *args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=cls.__name__)  # what was compiled is kept, up to a limit, with the code
    return forward


def _requires_gradient(*tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(tree))

"""Activation checkpointing: less memory for the activations of chosen modules, which are computed again in the backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from nvalchemi.distributed.bare import class_name
from nvalchemi.distributed.recompute import keep, recompute
from nvalchemi.distributed.targets import Facade
from nvalchemi.errors import ConfigError
from nvalchemi.training.chosen import check_model_keys, chosen_models
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.names import plain_name
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")

Wrap = type[nn.Module] | str | Callable[[nn.Module], bool] | Sequence[type[nn.Module] | str] | None


class ActivationCheckpointHook(Hook):
    """Keep the inputs of chosen modules in place of all their activations, which are computed again in the backward.

    Gradients are the same, to rounding, of losses of any order: for forces and scores each module's second backward computes again too
    (see `nvalchemi.distributed.recompute`), where torch's own checkpointing would keep nearly everything. The price is about one more
    forward, or at second order two. Dropout draws the same numbers again; running means move once. Only training is concerned: in eval
    mode and without gradients the modules run as they are. It works with ``DDPHook``, sharded networks and mixed precision. Names in
    the state dict stay, and the modules are as they were when the run ends.

    A module that reads tensors which require a gradient otherwise than as arguments (inside an object, from an attribute) is left to
    ``torch.utils.checkpoint`` (non-reentrant): right to any order as well, and of full use to a loss of first order.

    Parameters
    ----------
    wrap
        What to choose: a class of modules; a pattern of names such as ``"net.blocks.*"``, as in the state dict; a list of these; or a
        function that is true for a module. Modules inside a chosen one go with it. ``None``: the members of each ``ModuleList``, and those
        members of a ``Sequential`` that consist of several modules.
    model_keys
        Names of the models; by default all that are trained.

    Raises
    ------
    ConfigError
        Where ``wrap`` finds nothing, or a model does not exist.
    """

    order = Order.COMPUTE  # after what wraps and shards
    agreed = True

    def __init__(self, wrap: Wrap = None, *, model_keys: Sequence[str] | None = None) -> None:
        self.wrap = wrap
        self._choose = None if wrap is None else _chooser(wrap)
        check_model_keys(model_keys)
        self.model_keys = model_keys
        self._modules: list[nn.Module] = []

    @around(TrainingSpan.RUN)
    def undo(self, ctx: TrainContext) -> Iterator[None]:
        """Leave the modules as they were."""
        try:
            yield
        finally:
            for module in self._modules:
                keep(module)
            self._modules = []

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """Choose the modules."""
        names = chosen_models(ctx, self.model_keys, "ActivationCheckpointHook is given")
        found = {name: list(self._chosen(ctx.models[name])) for name in names}
        if not any(found.values()):
            inside = {key: class_name(m) for name in names for key, m in _parts(ctx.models[name])}
            raise ConfigError(
                "ActivationCheckpointHook finds no module to compute again",
                found=", ".join(f"{key} ({kind})" for key, kind in list(inside.items())[:12]) or "a network without parts",
                needed="modules whose activations are many and whose inputs are few" if self.wrap is None else repr(self.wrap),
                fix="give wrap=, a class or pattern of these",
            )
        for modules in found.values():
            for key, module in modules:
                recompute(module)
                self._modules.append(module)
                logger.debug("activations of %s are computed again", key)

    def _chosen(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        within: set[int] = set()
        choose = self._choose or _blocks(model)
        for key, module in _parts(model):
            if id(module) not in within and choose(key, module) and type(module).forward is not nn.Module.forward:
                within.update(id(m) for m in module.modules())
                yield key, module


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules below the network itself, outer ones first: of an energy, below its ``net``."""
    start = f"{model.distributed_part}." if isinstance(model, Facade) else ""
    for key, module in model.named_modules():
        name = plain_name(model, key)
        if name.startswith(start) and name != start.rstrip("."):
            yield name, module


def _chooser(wrap: Wrap) -> Callable[[str, nn.Module], bool]:
    several = wrap if isinstance(wrap, Sequence) and not isinstance(wrap, str) else [wrap]
    classes = tuple(w for w in several if isinstance(w, type) and issubclass(w, nn.Module))
    patterns = [w for w in several if isinstance(w, str)]
    if several and len(classes) + len(patterns) == len(several):
        return lambda key, module: isinstance(module, classes) or any(fnmatchcase(key, pattern) for pattern in patterns)
    if callable(wrap) and not isinstance(wrap, type | nn.Module):
        return lambda key, module: bool(wrap(module))
    raise ConfigError(
        "wrap is wrong",
        found=repr(wrap),
        needed="a class of modules, a pattern of names, a list of these, or a function of a module",
    )


def _blocks(model: nn.Module) -> Callable[[str, nn.Module], bool]:
    """The default: what is repeated, and what a chain consists of."""
    chosen: set[int] = set()
    for _, module in _parts(model):
        if isinstance(module, nn.ModuleList):
            chosen.update(id(m) for m in module)
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            chosen.update(id(m) for m in module if len(list(m.modules())) > 1)
    return lambda key, module: id(module) in chosen and next(module.parameters(), None) is not None

"""Zeros for parameters that a backward pass visits and gives nothing: a run on one process then steps as replicas on several do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nvalchemi.distributed.tensors import local
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.update import ScaledUpdate, Update

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class ZeroWhereVisited(Hook):
    """Part of every run: the output bias of an energy under a loss of scores, for one, has the gradient zero and not none.

    ``DistributedDataParallel`` has zeros there, and an optimizer that decays weights moves a parameter of gradient zero. What no backward
    pass visits keeps none.
    """

    order = Order.WRAP
    name = "zero_where_visited"
    agreed = True

    def __init__(self) -> None:
        self._watched: list[tuple[nn.Parameter, Any, Any]] = []
        self._seen = False

    @around(TrainingSpan.RUN)
    def unwatch(self, ctx: TrainContext) -> Iterator[None]:
        """Let go of the parameters when the run ends."""
        try:
            yield
        finally:
            self._keep(lambda parameter: False)

    @on(TrainingStage.TRAINING_START)
    def watch(self, ctx: TrainContext) -> None:
        """Ask each parameter's node to tell when it is visited; an engine that has its own update sees to its gradients itself."""
        self._seen = False
        if type(ctx.update) not in (Update, ScaledUpdate):
            return
        for optimizer in ctx.optimizers.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()):
                with torch.enable_grad():
                    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                # the node lives as long as somebody holds it
                self._watched.append((parameter, node, node.register_hook(partial(_fill, parameter))))

    @on(TrainingStage.GRADIENTS_READY)
    def first(self, ctx: TrainContext) -> None:
        """Most parameters get something, and need not be asked again."""
        if not self._seen:
            self._seen = True
            self._keep(lambda parameter: parameter.grad is None or not bool(local(parameter.grad).any()))

    def _keep(self, wanted: Any) -> None:
        kept = []
        for entry in self._watched:
            if wanted(entry[0]):
                kept.append(entry)
            else:
                entry[2].remove()
        self._watched = kept


def _fill(parameter: nn.Parameter, *given: Any) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)

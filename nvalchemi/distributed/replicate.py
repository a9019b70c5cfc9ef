"""Replicas of a model, one a rank: torch's ``DistributedDataParallel`` around a target."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nvalchemi.distributed.alike import give_to_all
from nvalchemi.distributed.blocks import is_sharded
from nvalchemi.distributed.ranks import Manager
from nvalchemi.distributed.targets import Target
from nvalchemi.errors import ConfigError, TrainingError

CommHook = Callable[[Any, Any], Any]


class Replicas:
    """The models of a run, each replicated on every rank; gradients are averaged over the ranks in the backward that asks for it.

    Attributes
    ----------
    names
        Which models are wrapped.

    Parameters
    ----------
    models
        The models of a run by name, changed in place.
    names
        Which to wrap.
    comm_hook
        ``hook(state, bucket)``, or ``(state, hook)``, in place of the plain average: see torch's ``register_comm_hook``.
    broadcast_buffers
        Whether rank 0's buffers are sent to all ranks at each forward; they are at the start in any case where torch can tell the two
        apart.
    **options
        Of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        names: Sequence[str],
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        options |= {} if broadcast_buffers else _without_broadcast()
        self.names = list(names)
        self._sends_buffers = broadcast_buffers
        self._called: set[nn.Module] = set()
        self.targets: list[Target] = []
        self.wrapped: list[DistributedDataParallel] = []
        self._watched: list[Any] = []
        state, hook = comm_hook if isinstance(comm_hook, tuple) else (None, comm_hook)
        for target in [_whole(Target(models, name), name) for name in names]:  # all are checked before the first is wrapped
            replica = DistributedDataParallel(target.original, **options)
            if hook is not None:
                replica.register_comm_hook(state, hook)
            replica.register_forward_pre_hook(self._note)
            self._watched += [_in_layout(p) for p in replica.parameters() if p.requires_grad and p.dim() > 1 and 1 in p.shape]
            target.put(replica)
            self.targets.append(target)
            self.wrapped.append(replica)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of what runs inside, forward and backward, on this rank: the next backward outside sends them too."""
        with ExitStack() as stack:
            for replica in self.wrapped:
                stack.enter_context(replica.no_sync())
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Send, in the backward of what runs inside, the gradients of the whole step.

        Raises
        ------
        TrainingError
            Where some could not be sent. Torch alone would let each rank go on with its own, and say so at the next forward, if any.
        """
        self._called.clear()
        yield
        for name, replica in zip(self.names, self.wrapped, strict=True):
            if replica in self._called:
                self._check_sent(name, replica)
            elif any(p.grad is not None for p in replica.parameters()):
                raise TrainingError(
                    f"model '{name}' was used in earlier micro-batches of the step and not in its last, which sends the gradients",
                    fix="use it in every micro-batch, or accumulate=1",
                )

    def _note(self, replica: nn.Module, arguments: Any) -> None:
        self._called.add(replica)

    def _check_sent(self, name: str, replica: DistributedDataParallel) -> None:
        try:
            replica._check_reducer_finalized()
        except RuntimeError as error:
            raise TrainingError(
                f"parameters of model '{name}' had no part in the loss of the step's last micro-batch, so that no gradient was sent",
                found=", ".join(_without_gradient(replica, str(error))),
                fix="DDPHook(find_unused_parameters=True), requires_grad_(False) for parameters that are never used, or a loss with "
                "all of them in it",
            ) from error

    def align_buffers(self, manager: Manager) -> None:
        """Give every rank the buffers (running means, counters) of rank 0, where they are rank 0's at each forward."""
        if self._sends_buffers:
            give_to_all((buffer for target in self.targets for buffer in target.original.buffers()), manager)

    @contextmanager
    def bare(self) -> Iterator[None]:
        """The plain models inside, which talk to no other rank: ranks may call them as often as each likes."""
        self.restore()
        try:
            yield
        finally:
            for target, replica in zip(self.targets, self.wrapped, strict=True):
                target.put(replica)

    def restore(self) -> None:
        """Put the plain models back."""
        for target in self.targets:
            target.restore()

    def close(self) -> None:
        """Put the plain models back and let go of the process group: a trace or a cycle may keep the wrappers, and they the connections."""
        self.restore()
        for handle in self._watched:
            handle.remove()
        for replica in self.wrapped:
            for name in ("logger", "reducer", "process_group"):
                replica.__dict__.pop(name, None)


def _in_layout(parameter: nn.Parameter) -> Any:
    """Have gradients of ``parameter`` in its own strides, which torch's replicas insist on with a warning.

    Second derivatives of a weight of one row come with other strides that mean the same numbers, for a dimension of one has no step.
    """
    sizes, wanted = parameter.size(), parameter.stride()

    def turn(gradient: Tensor) -> Tensor | None:
        if gradient.layout != torch.strided or gradient.stride() == wanted:
            return None
        same = all(size == 1 or a == b for size, a, b in zip(sizes, gradient.stride(), wanted, strict=True))
        return gradient.as_strided(sizes, wanted) if same else None

    return parameter.register_hook(turn)


def _without_broadcast() -> dict[str, Any]:
    # newer torch has another name for it and warns of the old one
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _without_gradient(replica: DistributedDataParallel, said: str) -> list[str]:
    # torch names parameters by their number; a gradient of an earlier micro-batch may be there
    names = [name for name, parameter in replica.module.named_parameters() if parameter.requires_grad]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
    return [names[int(number)] for number in numbers[1].split()] if numbers else [said]


def _whole(target: Target, name: str) -> Target:
    if is_sharded(target.original):
        raise ConfigError(
            f"model '{name}' is sharded, so it cannot be replicated",
            fix="go on with FSDP2Hook(), or load full_state(model, manager) of rank 0, or a checkpoint, into a model made anew",
        )
    return target

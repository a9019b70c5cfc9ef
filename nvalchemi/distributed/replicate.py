"""Replicas of a model, one a rank: torch's ``DistributedDataParallel`` around a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvalchemi.distributed.targets import Target

CommHook = Callable[[Any, Any], Any]


class Replicas:
    """The models of a run, each replicated on every rank; gradients are averaged over the ranks in the backward that asks for it.

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
        self.targets: list[Target] = []
        self.wrapped: list[DistributedDataParallel] = []
        state, hook = comm_hook if isinstance(comm_hook, tuple) else (None, comm_hook)
        for target in [Target(models, name) for name in names]:  # all are checked before the first is wrapped
            replica = DistributedDataParallel(target.original, **options)
            if hook is not None:
                replica.register_comm_hook(state, hook)
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


def _without_broadcast() -> dict[str, Any]:
    # newer torch has another name for it and warns of the old one
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}

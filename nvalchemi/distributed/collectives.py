"""The collectives of the package: each is the identity where there is one process.

Whoever calls one need not ask how many processes there are. All ranks must call, in the same order; nothing here waits on a rank
that has no reason to come. Tensors stay on their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi.distributed.forks import hold
from nvalchemi.distributed.ranks import Manager
from nvalchemi.errors import ConfigError

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, manager: Manager, op: str = "sum") -> Tensor:
    """Sum, maximum or minimum of a tensor over the ranks, on every rank.

    Parameters
    ----------
    tensor
        Same shape and dtype on all ranks; not changed and cut from its graph where there are several ranks.
    manager
        Who the ranks are.
    op
        ``"sum"``, ``"max"`` or ``"min"``.

    Returns
    -------
    Tensor
        The reduced tensor; ``tensor`` itself in one process.

    Raises
    ------
    ConfigError
        For another ``op``.
    """
    if op not in _OPERATIONS:
        raise ConfigError("unknown reduction", found=op, needed=", ".join(_OPERATIONS))
    if not manager.distributed:
        return tensor
    return Reduction(tensor, manager, op).result()


class Reduction:
    """An all-reduce on its way while this rank does something else; :meth:`result` waits for it.

    All ranks must begin it at the same place among their collectives. Arguments are those of :func:`all_reduce`.
    """

    def __init__(self, tensor: Tensor, manager: Manager, op: str = "sum") -> None:
        self._tensor, self._work = tensor, None
        if manager.distributed:
            self._tensor = tensor.detach().clone().contiguous()
            self._work = dist.all_reduce(self._tensor, op=_OPERATIONS[op], group=manager.group(), async_op=True)

    def result(self) -> Tensor:
        """The reduced tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            hold(self._tensor)
        return self._tensor


def gather(value: Any, manager: Manager) -> list[Any]:
    """The value of every rank, in rank order, on every rank.

    Parameters
    ----------
    value
        A tensor, whose first dimension may differ between ranks, or any small plain object.
    manager
        Who the ranks are.
    """
    if not manager.distributed:
        return [value]
    if not isinstance(value, Tensor):
        objects: list[Any] = [None] * manager.world_size
        dist.all_gather_object(objects, value, group=manager.group())
        return objects
    if value.dim() == 0:
        return [row[0] for row in gather(value[None], manager)]
    value = value.detach().contiguous()
    length = torch.tensor([value.shape[0]], dtype=torch.int64, device=value.device)
    lengths = [torch.empty_like(length) for _ in range(manager.world_size)]
    dist.all_gather(lengths, length, group=manager.group())
    rows = [int(n) for n in lengths]
    padded = value.new_zeros((max(rows), *value.shape[1:]))
    padded[: value.shape[0]] = value
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=manager.group())
    return [part[:n] for part, n in zip(parts, rows, strict=True)]


def broadcast(value: Any, manager: Manager, source: int = 0) -> Any:
    """One rank's value on every rank.

    Parameters
    ----------
    value
        A tensor (same shape and dtype everywhere; not changed) or any small plain object, read on ``source`` only.
    manager
        Who the ranks are.
    source
        The rank that has the value.
    """
    if not manager.distributed:
        return value
    if isinstance(value, Tensor):
        result = value.detach().clone().contiguous()
        dist.broadcast(result, group=manager.group(), group_src=source)
        return result
    objects = [value]
    dist.broadcast_object_list(objects, group=manager.group(), group_src=source)
    return objects[0]


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], manager: Manager) -> Tensor:
    """Rows from every rank to every rank, in one all-to-all.

    Parameters
    ----------
    rows
        (sum of ``send``, ...): first the rows for rank 0, then those for rank 1, and so on. Not changed, and cut from its graph where
        there are several ranks.
    send, receive
        Rows for each rank, and rows from each rank; what one sends, the other must receive.
    manager
        Who the ranks are.

    Returns
    -------
    Tensor
        (sum of ``receive``, ...), in the order of the ranks that sent them; ``rows`` itself in one process.
    """
    if not manager.distributed:
        return rows
    result = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.detach().contiguous(), list(receive), list(send), group=manager.group())
    return result


def agree(numbers: Sequence[float], manager: Manager) -> list[float]:
    """Sums over the ranks of a few numbers of the host, the same on every rank: for decisions, not for data.

    They go over the CPU where the process group can, so that no accelerator is waited for.
    """
    return list(numbers) if not manager.distributed else Agreement(numbers, manager).result()


class Agreement:
    """As :func:`agree`, on its way while this rank does something else; :meth:`result` waits for it."""

    def __init__(self, numbers: Sequence[float], manager: Manager) -> None:
        apart = manager.distributed and manager.cuda and not _talks_on_cpu(manager.group())
        table = torch.tensor(numbers, dtype=torch.float64, device=manager.device if apart else torch.device("cpu"))
        self._reduction = Reduction(table, manager)

    def result(self) -> list[float]:
        """The sums."""
        return self._reduction.result().tolist()  # type: ignore[no-any-return]


def _talks_on_cpu(group: dist.ProcessGroup | None) -> bool:
    return "cpu" in dist.get_backend_config(group)


def any_rank(flag: bool, manager: Manager) -> bool:
    """Whether the flag is up on any rank: the same answer on all of them."""
    if not manager.distributed:
        return bool(flag)
    return agree([float(flag)], manager)[0] > 0


def barrier(manager: Manager) -> None:
    """Wait until every rank has come here."""
    if manager.distributed:
        dist.barrier(group=manager.group())

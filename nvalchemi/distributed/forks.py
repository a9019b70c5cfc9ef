"""Processes that are forked beside gloo, such as a loader's workers.

Gloo's threads let go of a tensor when its collective is over for everybody else. Where theirs is the last hold, they need the interpreter for it. In
Python 3.11 a process that is forked in that moment waits for ever: the interpreter's list of threads is locked in it, by a thread that it
does not have. So small tensors are held a little longer, and a process rests before it forks.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

_held: deque[Tensor] = deque(maxlen=8)
_SMALL = 4096  # bytes
_REST = 0.02  # seconds in which gloo's threads come to an end with what is over for everybody else
_forked_at = -1.0
_rests = False


def hold(tensor: Tensor) -> None:
    """Hold a tensor that went round, if it is small, beyond the end of its collective."""
    if not tensor.is_cuda and tensor.nbytes <= _SMALL:
        _held.append(tensor)


def rest_before_forks() -> None:
    """Have this process wait a moment before it forks, where that is needed."""
    global _rests
    if not _rests and sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork)
        _rests = True


def _before_fork() -> None:
    global _forked_at
    if dist.is_initialized() and time.monotonic() > _forked_at + 1.0:  # once for all workers of a loader
        time.sleep(_REST)
        _forked_at = time.monotonic()

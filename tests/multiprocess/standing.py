"""A standing group of ranks: real processes that talk through gloo and run one case after another, so that each test starts none."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest


class Ranks:
    """``size`` processes in one group; ``call("module:function", ...)`` runs a function on all of them.

    ``device`` is that of ``pytest --device``: with ``"cuda"`` each process has a GPU of its own and talks through NCCL, and what a case gives
    comes back on the CPU.
    """

    device = "cpu"

    def __init__(self, size: int = 2) -> None:
        if self.device == "cuda" and _gpus() < size:
            pytest.skip(f"{size} ranks need as many GPUs, and there are {_gpus()}")
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.device, self._meeting(), theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def call(self, case: str, *arguments: Any, limit: float = 100.0, breaks: bool = False) -> list[Any]:
        """What ``case(manager, *arguments)`` gives on each rank, in order; an error of a rank is an AssertionError with its trace.

        A case that ``breaks`` the group is run in a new one and leaves the ranks in another: meshes of earlier cases hold the old one,
        and its connections stay open as long as anything does.
        """
        self._groups += breaks
        meeting = self._meeting()
        self._groups += breaks
        for pipe in self._pipes:
            pipe.send((case, arguments, meeting, self._meeting()))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit):
                self.close()
                raise AssertionError(f"{case}: rank {rank} hangs")
            good, value = pipe.recv()
            results.append((good, value))
        bad = [f"rank {rank}:\n{value}" for rank, (good, value) in enumerate(results) if not good]
        if bad:
            self._groups += 1  # a rank that failed may have left the group: those that come next meet anew
            raise AssertionError("\n".join(bad))
        return [value for _, value in results]

    def _meeting(self) -> str:
        """Where the ranks of the present group find each other."""
        return str(Path(self._folder.name) / f"meeting-{self._groups}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join(10)
        self._folder.cleanup()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _serve(rank: int, size: int, kind: str, meeting: str, pipe: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank) if kind == "cuda" else ""
    import torch
    import torch.distributed as dist

    # Its functions have the group of the moment of their import as a default: a later import would hold the first group's connections,
    # so that nobody hears when a rank leaves it. Under the real manager it is there before the group, PhysicsNeMo brings it.
    import torch.distributed.nn.functional

    from nvalchemi.distributed import SingleProcess

    def join() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=50)
        # also under NCCL a case may send what lies on the host
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit)

    torch.set_num_threads(1)
    join()
    # the light manager: the real one is tried under torchrun
    manager = SingleProcess(torch.device(kind), rank=rank, local_rank=rank, world_size=size, distributed=True)
    while True:
        try:
            case, arguments, group, after = pipe.recv()
        except EOFError:
            return
        module, _, function = case.partition(":")
        if group != meeting:
            meeting = group
            join()
        try:
            torch.manual_seed(0)
            found = getattr(importlib.import_module(module), function)(manager, *arguments)
            answer = (True, _on_host(found) if kind == "cuda" else found)
        except BaseException:  # noqa: BLE001 - told to the test
            answer = (False, traceback.format_exc())
        if after != meeting:
            meeting = after
            join()
        pipe.send(answer)


def _on_host(value: Any) -> Any:
    """Tensors on the CPU, wherever they are in what a case gives."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, value)

"""The process manager: PhysicsNeMo's, sharing its state, with the start-up mended.

This is the only file of the package that reads the environment. PhysicsNeMo takes seconds to import, so it is brought in when the
manager is first used; a run in one process that asks for no manager never pays for it
(:func:`~nvalchemi.distributed.ranks.single_process`).
"""

from __future__ import annotations

import atexit
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from nvalchemi.distributed.forks import rest_before_forks
from nvalchemi.distributed.meeting import fresh_store
from nvalchemi.distributed.ranks import Manager, single_process
from nvalchemi.errors import ConfigError

METHOD_VARIABLE = "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"
DEFAULT_PORT = 12355
Backend = Literal["auto", "gloo", "nccl"]


def launched_as() -> tuple[int, int] | None:
    """Rank and world size of this process where a launcher started it with others, ``None`` where it is alone. Starts nothing.

    Raises
    ------
    ConfigError
        As :meth:`DistributedManager.initialize`.
    """
    place = _find_place(os.environ)
    return None if place is None or place.world_size == 1 else (place.rank, place.world_size)


def launched_by(again: bool = False) -> set[str]:
    """What started this process and may start it again, by names that are then the same: torchrun's launch, the job of SLURM.

    Parameters
    ----------
    again
        Only those that may have started it before. A job of SLURM has where it was queued again: by hand, several programs may be started in one.
    """
    environment, found = os.environ, set()
    launch = environment.get("TORCHELASTIC_RUN_ID")
    if launch == "none":  # torchrun without a rendezvous of its own keeps to its nodes, and to one process on each
        found.add(f"torchrun {socket.gethostname()} {os.getppid()}")
    elif launch is not None:
        found.add(f"torchrun {launch}")
    if "SLURM_JOB_ID" in environment and (not again or environment.get("SLURM_RESTART_COUNT", "0") != "0"):
        found.add(f"slurm {environment['SLURM_JOB_ID']}")
    return found


def started_together() -> int:
    """How many processes a launcher has started with this one, or a process group has: 1 for a plain process. Starts nothing.

    Raises
    ------
    ConfigError
        As :meth:`DistributedManager.initialize`.
    """
    place = _find_place(os.environ)
    grouped = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return max(grouped, 1 if place is None else place.world_size)


def join() -> Manager:
    """Join the processes that a launcher started this one with: their manager, initialised; the light stand-in in a plain process.

    For programs that should start quickly where they are alone: PhysicsNeMo, and with it :class:`DistributedManager`, comes in only
    where there is somebody to join.

    Raises
    ------
    ConfigError
        As :meth:`DistributedManager.initialize`.
    """
    if _find_place(os.environ) is None and not (dist.is_available() and dist.is_initialized()):
        return single_process()
    DistributedManager.initialize()
    return DistributedManager()


class _Forwarding(type):
    """Lets the class answer for what PhysicsNeMo's class has besides: its static methods."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # what copying, pickling and help() look for is no reason to import PhysicsNeMo
            raise AttributeError(name)
        return getattr(_physicsnemo(), name)


class DistributedManager(metaclass=_Forwarding):
    """PhysicsNeMo's ``DistributedManager``, sharing its state, started so that it works with and without GPUs.

    Both classes are windows on one state: initialise either, and the other knows rank, device and named groups. All further
    attributes and methods (``group``, ``initialize_mesh``, ``create_process_subgroup``, ...) are PhysicsNeMo's own.

    Three things differ from PhysicsNeMo's start-up. The CPU is never handed to the process group as a ``device_id``, which newer
    torch refuses. NCCL's asynchronous error handling stays on, so that a lost rank is an error and not a hang. Nothing global is
    changed: no environment variable, no seed of numpy, no warning where there is one plain process.

    Raises
    ------
    ConfigError
        When made before :meth:`initialize`.
    """

    def __init__(self) -> None:
        if not self.is_initialized():
            raise ConfigError(
                "DistributedManager was made before it was initialised",
                fix="call DistributedManager.initialize() first, once, at the start of the program",
            )
        self.__dict__ = _physicsnemo()._shared_state

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether this process knows its place, through either class."""
        return bool(_physicsnemo().is_initialized())

    @classmethod
    def initialize(cls, *, backend: Backend = "auto", timeout: timedelta | None = None) -> None:
        """Find this process's place from torchrun's, SLURM's or Open MPI's variables and join the process group; once is enough.

        A plain process (none of those variables) gets rank 0 of 1 and no process group. Where a process group exists already, its
        rank and size are taken.

        Parameters
        ----------
        backend
            ``"nccl"``: a GPU each, which talk through NCCL. ``"gloo"``: compute on the CPU and talk through gloo, also where there are
            GPUs. ``"auto"``: NCCL where there are GPUs, gloo otherwise.
        timeout
            How long to wait for the other ranks, here and in each collective; none means torch's own limit.

        Raises
        ------
        ConfigError
            When the launcher's variables are incomplete or contradict each other, the machine has fewer GPUs than local ranks, or there
            is no such backend.
        """
        if cls.is_initialized():
            return
        gpus = _gpus(backend)
        place = _find_place(os.environ, gpus)
        if place is None and not (dist.is_available() and dist.is_initialized()):
            _remember(_Place(0, 1, 0, "None"), gpus, distributed=False)
            return
        if place is None:
            # somebody else has made the group; the ranks of one machine are taken to be neighbours, as launchers number them
            place = _Place(dist.get_rank(), dist.get_world_size(), dist.get_rank() % max(gpus, 1), "group")
        _join(place, place.device(gpus), timeout)
        # said only now: PhysicsNeMo's exit handler destroys the group of an initialised manager, and would bury a failed start
        _remember(place, gpus, distributed=True)
        atexit.register(cls.cleanup)

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leave the process group and forget this process's place; does nothing where there is nothing to leave."""
        state = _physicsnemo()._shared_state
        if state.get("_distributed", False) and dist.is_initialized():
            if barrier:
                dist.barrier()
            dist.destroy_process_group()
        _physicsnemo()._shared_state = {}

    @property
    def rank(self) -> int:
        """Number of this process among all of the run."""
        return int(self.__dict__["_rank"])

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return int(self.__dict__["_local_rank"])

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return int(self.__dict__["_world_size"])

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device(self.__dict__["_device"])

    @property
    def distributed(self) -> bool:
        """Whether there is a process group to talk through."""
        return bool(self.__dict__["_distributed"])

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """The process group of a name that PhysicsNeMo made; none, which is everybody, without a name."""
        return _physicsnemo()().group(name)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Everything else is PhysicsNeMo's manager, over the same state."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_physicsnemo()(), name)

    def __repr__(self) -> str:
        return f"DistributedManager(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"


@dataclass(frozen=True)
class _Place:
    """What a launcher tells one process.

    ``address`` is none where torch finds the others by itself (``env://``). ``alone`` says that the launcher shows each process its own
    GPU and no other, which is then number 0 for all of them. ``restarts`` says that the launcher keeps a store over its attempts.
    """

    rank: int
    world_size: int
    local_rank: int
    method: str
    address: str | None = None
    alone: bool = False
    restarts: bool = False

    def device(self, gpus: int) -> torch.device:
        """The GPU of this process where it sees any, the CPU otherwise."""
        return torch.device("cuda", 0 if self.alone else self.local_rank) if gpus else torch.device("cpu")


def _gpus(backend: Backend) -> int:
    """How many GPUs of this machine a backend uses; starts no CUDA context."""
    if backend not in get_args(Backend):
        raise ConfigError("unknown backend", found=repr(backend), needed=", ".join(get_args(Backend)))
    gpus = torch.cuda.device_count() if backend != "gloo" and torch.cuda.is_available() else 0
    if backend == "nccl" and not gpus:
        raise ConfigError("NCCL talks between GPUs, and this process sees none", fix='backend="gloo" or "auto"')
    return gpus


def _find_place(environment: Mapping[str, str], gpus: int = 0) -> _Place | None:
    """Read the launcher's variables; none means one plain process."""
    wanted = environment.get(METHOD_VARIABLE)
    if wanted not in (None, "ENV", "SLURM", "OPENMPI"):
        raise ConfigError(
            f"unknown {METHOD_VARIABLE}", found=wanted, needed="ENV, SLURM or OPENMPI", fix="correct it or unset it"
        )
    port = environment.get("MASTER_PORT", str(DEFAULT_PORT))
    if wanted == "ENV" or (wanted is None and "RANK" in environment and "WORLD_SIZE" in environment):
        rank, size = _integers(environment, "RANK", "WORLD_SIZE")
        local = _integers(environment, "LOCAL_RANK")[0] if "LOCAL_RANK" in environment else rank % max(gpus, 1)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(
                "RANK and WORLD_SIZE are set but the meeting point is not",
                found=f"no {' and no '.join(missing)}",
                fix="start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE for one process",
            )
        restarts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _checked(_Place(rank, size, local, "env", restarts=restarts), gpus)
    if wanted == "SLURM" or (wanted is None and "SLURM_PROCID" in environment):
        if wanted is None and environment.get("SLURM_NPROCS", environment.get("SLURM_NTASKS", "1")) == "1":
            return None
        size_name = "SLURM_NPROCS" if "SLURM_NPROCS" in environment else "SLURM_NTASKS"
        rank, size, local_rank = _integers(environment, "SLURM_PROCID", size_name, "SLURM_LOCALID")
        address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR") or "localhost"
        alone = gpus == 1 and "SLURM_GPUS_PER_TASK" in environment
        return _checked(_Place(rank, size, local_rank, "slurm", f"tcp://{address}:{port}", alone), gpus)
    if wanted == "OPENMPI" or (wanted is None and "OMPI_COMM_WORLD_RANK" in environment):
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        rank, size, local_rank = _integers(environment, *names)
        address = environment.get("MASTER_ADDR", "localhost")
        return _checked(_Place(rank, size, local_rank, "openmpi", f"tcp://{address}:{port}"), gpus)
    return None


def _integers(environment: Mapping[str, str], *names: str) -> list[int]:
    """The whole numbers that some variables hold."""
    values = []
    for name in names:
        text = environment.get(name)
        if text is None or not text.isdecimal():
            raise ConfigError(
                f"the launcher's variable {name} is no whole number", found=text, fix="start with torchrun, srun or mpirun"
            )
        values.append(int(text))
    return values


def _checked(place: _Place, gpus: int) -> _Place:
    """Refuse a place that cannot exist, before any process waits for another."""
    if place.rank >= place.world_size:
        raise ConfigError(
            "a rank outside the world",
            found=f"rank {place.rank} of {place.world_size}",
            fix="correct the launcher's variables",
        )
    if 0 < gpus <= place.local_rank and not place.alone:
        raise ConfigError(
            "more processes on this machine than GPUs",
            found=f"local rank {place.local_rank}, {gpus} GPUs",
            fix=f"start at most {gpus} processes here, or initialize(backend='gloo') to run on the CPU",
        )
    return place


def _join(place: _Place, device: torch.device, timeout: timedelta | None) -> None:
    """Make the process group that a place asks for, unless there is one already."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rest_before_forks()
    if dist.is_initialized():
        return
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device.type == "cuda":
        # counts and object gathers live on the CPU, so gloo stands beside NCCL
        options |= {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    else:
        options |= {"backend": "gloo"}
    if place.restarts:
        limit = dist.default_pg_timeout if timeout is None else timeout
        shared, rank, size = next(dist.rendezvous("env://", timeout=limit))
        shared.set_timeout(limit)
        dist.init_process_group(store=fresh_store(shared, rank, size, limit), rank=rank, world_size=size, **options)
    elif place.address is None:
        dist.init_process_group(init_method="env://", **options)
    else:
        dist.init_process_group(init_method=place.address, rank=place.rank, world_size=place.world_size, **options)


def _remember(place: _Place, gpus: int, *, distributed: bool) -> None:
    """Write a place into the state that both manager classes share."""
    state = _physicsnemo()._shared_state
    device = place.device(gpus)
    state.update(
        _rank=place.rank,
        _world_size=place.world_size,
        _local_rank=place.local_rank,
        _distributed=distributed,
        _device=device,
        _cuda=device.type == "cuda",
        _initialization_method=place.method,
        _is_initialized=True,
    )
    _physicsnemo()()  # fills in the defaults that other versions of PhysicsNeMo may hold besides


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of this process for a child, with some variables set for the child alone."""
    return {**os.environ, **changes}


@contextmanager
def as_launched(manager: Manager) -> Iterator[None]:
    """Let the environment say who this process is, as torchrun would, for libraries that ask it, however it was started."""
    wanted = {"RANK": manager.rank, "WORLD_SIZE": manager.world_size, "LOCAL_RANK": manager.local_rank}
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: str(wanted[name]) for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a child that is to be one rank of several on this machine, as torchrun would set it.

    Parameters
    ----------
    rank, world_size
        Which of how many.
    port
        Of a store that this process holds on the loopback address.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    # torch's words for a store that is there already: rank 0 would otherwise open one on a port that may be taken meanwhile
    store = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_ATTEMPT": "0"}
    own = {name: str(value) for name, value in place.items()} | store | {METHOD_VARIABLE: "ENV"}
    return {"OMP_NUM_THREADS": "1", **child_environment(**own)}


_class: Any = None


def _physicsnemo() -> Any:
    """PhysicsNeMo's manager class, imported at the first call with nothing left behind in environment and warning filters."""
    global _class
    if _class is None:
        before = set(os.environ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from physicsnemo.distributed.manager import DistributedManager as physicsnemo_manager
        for name in set(os.environ) - before:
            del os.environ[name]
        _class = physicsnemo_manager
    return _class

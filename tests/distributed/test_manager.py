"""The manager in one plain process: what it finds, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.distributed.manager import METHOD_VARIABLE, _find_place, _gpus
from nvalchemi.errors import ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NPROCS": "8", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.2"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


def test_a_plain_environment_has_no_place():
    assert _find_place({"HOME": "/home/somebody", "MASTER_ADDR": "10.0.0.1"}, 0) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (1, 4, 1, "env", None)),
        (SLURM, (3, 8, 1, "slurm", "tcp://10.0.0.2:12355")),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}, (3, 8, 1, "slurm", "tcp://head:1234")),
        (OPENMPI, (2, 3, 2, "openmpi", "tcp://localhost:12355")),
        (TORCHRUN | SLURM, (1, 4, 1, "env", None)),
        (TORCHRUN | SLURM | {METHOD_VARIABLE: "SLURM"}, (3, 8, 1, "slurm", "tcp://10.0.0.1:29500")),
    ],
)
def test_launchers_are_understood(environment, expected):
    place = _find_place(environment, 0)
    assert (place.rank, place.world_size, place.local_rank, place.method, place.address) == expected


def test_a_store_that_torchrun_keeps_is_known():
    assert _find_place(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, 0).restarts
    assert not _find_place(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0).restarts
    assert not _find_place(TORCHRUN, 0).restarts


def test_one_task_of_slurm_is_a_plain_process():
    assert _find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, 0) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({METHOD_VARIABLE: "ENV"}, "RANK"),
        ({METHOD_VARIABLE: "MAGIC"}, "MAGIC"),
        ({"SLURM_PROCID": "0", "SLURM_NPROCS": "2"}, "SLURM_LOCALID"),
    ],
)
def test_broken_launchers_are_refused(environment, words):
    with pytest.raises(ConfigError, match=words):
        _find_place(environment, 0)


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM, OPENMPI])
def test_more_processes_than_gpus_are_refused(environment):
    with pytest.raises(ConfigError, match="1 GPUs"):
        _find_place(environment, 1)


def test_slurm_may_show_each_task_its_own_gpu_only():
    place = _find_place(SLURM | {"SLURM_GPUS_PER_TASK": "1"}, 1)
    assert (place.local_rank, place.device(1)) == (1, torch.device("cuda", 0))
    place = _find_place(SLURM | {"SLURM_GPUS_PER_TASK": "1"}, 4)  # --gpu-bind=none shows all
    assert (place.local_rank, place.device(4)) == (1, torch.device("cuda", 1))
    assert place.device(0) == torch.device("cpu")


def test_local_rank_is_guessed_from_the_number_of_gpus():
    without = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"} | {"RANK": "3"}
    assert _find_place(without, 2).local_rank == 1
    assert _find_place(without, 0).local_rank == 0


def test_backends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (_gpus("auto"), _gpus("nccl"), _gpus("gloo")) == (2, 2, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (_gpus("auto"), _gpus("gloo")) == (0, 0)
    with pytest.raises(ConfigError, match="sees none"):
        _gpus("nccl")
    with pytest.raises(ConfigError, match="auto, gloo, nccl"):
        _gpus("mpi")


def test_single_process_stands_in():
    manager = single_process("cpu")
    assert (manager.rank, manager.local_rank, manager.world_size, manager.distributed) == (0, 0, 1, False)
    assert manager.device == torch.device("cpu")
    assert not manager.cuda
    assert manager.group("anything") is None


PLAIN = """
import json, os, sys, warnings
import numpy, torch
from nvalchemi.distributed import DistributedManager
from nvalchemi.errors import ConfigError
assert not any(name.startswith("physicsnemo") for name in sys.modules)
environment, filters, seed = dict(os.environ), list(warnings.filters), numpy.random.get_state()[1][:8].tolist()
try:
    DistributedManager()
except ConfigError as error:
    early = str(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    DistributedManager.initialize()
    DistributedManager.initialize()
manager = DistributedManager()
from physicsnemo.distributed import DistributedManager as Theirs
print(json.dumps({
    "early": early, "warnings": [str(w.message) for w in caught], "environment": dict(os.environ) == environment,
    "filters": list(warnings.filters) == filters, "seed": numpy.random.get_state()[1][:8].tolist() == seed,
    "ours": [manager.rank, manager.world_size, manager.local_rank, manager.distributed, str(manager.device)],
    "theirs": [Theirs().rank, Theirs().world_size, Theirs().local_rank, Theirs().distributed, str(Theirs().device)],
    "shared": Theirs.is_initialized() and manager.group() is None and manager._initialization_method == "None",
    "group": torch.distributed.is_initialized(),
    "static": DistributedManager.create_process_subgroup is Theirs.create_process_subgroup,
}))
"""


@pytest.fixture(scope="module")
def plain():
    """What one fresh process says after starting a manager; PhysicsNeMo's import makes this slow, so it is done once."""
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def test_plain_process_shares_state_with_physicsnemo(plain):
    assert plain["ours"][:4] == [0, 1, 0, False]
    assert plain["theirs"] == plain["ours"]
    assert plain["shared"]
    assert plain["static"]


def test_plain_process_is_silent_and_changes_nothing(plain):
    assert plain["warnings"] == []
    assert plain["stderr"] == ""
    assert plain["environment"]
    assert plain["filters"]
    assert plain["seed"]
    assert not plain["group"]


def test_manager_before_initialize_says_what_to_do(plain):
    assert "DistributedManager.initialize()" in plain["early"]

"""What it costs to start two gloo ranks through the manager, over torch.distributed's own start and PhysicsNeMo's import.

    python benchmarks/startup.py [--rounds 5] [--where]

Prints one JSON line a figure. The ways to start take turns, and each has the minimum of its rounds: a machine that others use is never
faster than it is. Times are from the start of the processes to the first all-reduce, and so are CPU times (of the slower rank).

- ``torch_s``: torch.distributed alone; ``torch_and_physicsnemo_s``: and the import of PhysicsNeMo's manager;
- ``manager_s``: ``DistributedManager.initialize()``, which does both;
- ``manager_extra_s``, ``manager_extra_cpu_s``: the last over the second, which is to be at most 0.3 s;
- ``manager_own_s``: the same difference within one process each: what our import and ``initialize()`` take where PhysicsNeMo is imported
  already, less the time inside torch's ``init_process_group``. It is exact also where the machine is busy.

``--where`` prints instead what the imports of one rank cost, the most expensive first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time

OWN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
"""
WAYS = {
    "torch": OWN,
    "torch_and_physicsnemo": OWN + "from physicsnemo.distributed.manager import DistributedManager\n",
    "manager": "from nvalchemi.distributed import DistributedManager\nDistributedManager.initialize(backend='gloo')\n",
}
INSIDE = """
import time, torch, torch.distributed as dist
from physicsnemo.distributed.manager import DistributedManager as Theirs
inside, join = 0.0, dist.init_process_group
def timed(*args, **kwargs):
    global inside
    begun = time.perf_counter()
    join(*args, **kwargs)
    inside += time.perf_counter() - begun
dist.init_process_group = timed
begun = time.perf_counter()
from nvalchemi.distributed import DistributedManager
DistributedManager.initialize(backend='gloo')
own = time.perf_counter() - begun - inside
"""
END = """
import os, sys, time, torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
print(time.time(), time.process_time(), globals().get("own", 0.0), flush=True)
sys.stdin.read()
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(code: str) -> tuple[float, float, float]:
    """Wall and CPU seconds until both ranks have reduced, and what the ranks measured themselves."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    begun = time.time()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code + END],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    for rank in ranks:
        assert rank.stdout is not None
        said.append([float(word) for word in rank.stdout.readline().split()])
    for rank in ranks:  # none leaves while another still starts
        rank.communicate(timeout=100)
    ready, cpu, own = (max(column) for column in zip(*said, strict=True))
    return ready - begun, cpu, own


def where() -> None:
    """Own and cumulated milliseconds of the most expensive imports."""
    code = "from nvalchemi.distributed import DistributedManager\nDistributedManager.initialize()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    rows = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", done.stderr)
    for own, total, name in sorted(rows, key=lambda row: -int(row[1]))[:40]:
        print(json.dumps({"name": "import_ms", "module": name, "own": int(own) / 1e3, "total": int(total) / 1e3}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", action="store_true", help="what the imports cost")
    options = parser.parse_args()
    if options.where:
        where()
        return
    best = dict.fromkeys(WAYS, (float("inf"), float("inf")))
    own = float("inf")
    for _ in range(options.rounds):
        for name, code in WAYS.items():
            wall, cpu, _ = start(code)
            best[name] = (min(best[name][0], wall), min(best[name][1], cpu))
        own = min(own, start(INSIDE)[2])

    def report(name: str, value: float) -> None:
        print(json.dumps({"name": name, "value": round(value, 3), "unit": "s", "rounds": options.rounds}), flush=True)

    for name, (wall, cpu) in best.items():
        report(f"{name}_s", wall)
        report(f"{name}_cpu_s", cpu)
    for index, name in enumerate(("manager_extra_s", "manager_extra_cpu_s")):
        report(name, best["manager"][index] - best["torch_and_physicsnemo"][index])
    report("manager_own_s", own)


if __name__ == "__main__":
    main()

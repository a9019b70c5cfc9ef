"""The house holds: arrows, one owner per verb, and imports that change nothing (B118)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nvalchemi
from tests.architecture import faults

PACKAGE = Path(nvalchemi.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_module_keeps_the_rules(path):
    assert faults(path, (PACKAGE / path).read_text(encoding="utf-8")) == []


BAD = {
    "data imports distributed": ("data/batch.py", "from nvalchemi.distributed import all_reduce"),
    "data imports distributed inside a function": ("data/x.py", "def f():\n    import nvalchemi.distributed.manager"),
    "data imports distributed from the root": ("data/x.py", "from nvalchemi import distributed"),
    "data imports models relatively": ("data/datapipes/x.py", "from ...models import energy"),
    "errors import something": ("errors.py", "import nvalchemi.data"),
    "models import training": ("models/energy.py", "from nvalchemi.training.losses import EnergyMSELoss"),
    "ebm imports training": ("ebm/losses/x.py", "from nvalchemi.training import TrainingStrategy"),
    "core imports hooks": ("training/checkpoint.py", "from nvalchemi.training.hooks.ema import EMAHook"),
    "core imports hooks from the parent": ("training/setup.py", "from nvalchemi.training import hooks"),
    "hooks import the command line": ("training/hooks/progress.py", "from nvalchemi.cli import console"),
    "a part without a place": ("newpart/x.py", "import torch"),
    "strategy imports a hook": ("training/strategy.py", "from nvalchemi.training.hooks.ddp import DDPHook"),
    "environment read": ("models/painn.py", "import os\nDEBUG = os.environ.get('DEBUG')"),
    "environment read by getenv": ("cli/train.py", "import os\nprint(os.getenv('RANK'))"),
    "environment imported": ("data/x.py", "from os import environ"),
    "rank asked of torch": ("training/hooks/x.py", "import torch.distributed as dist\nif dist.get_rank() == 0: pass"),
    "world of one": ("training/hooks/x.py", "def f(manager):\n    return manager.world_size == 1"),
    "world over one": ("training/x.py", "def f(world_size):\n    return 1 < world_size"),
    "gradient taken": ("ebm/scores.py", "import torch\ng = torch.autograd.grad(e.sum(), x)"),
    "gradient taken under another name": ("ebm/scores.py", "from torch.autograd import grad"),
    "backward called": ("ebm/losses/x.py", "def f(loss):\n    loss.backward()"),
    "backward called on a sum": ("training/strategy.py", "(loss.total * 2).backward(retain_graph=True)"),
    "an archive unpacked": ("data/x.py", "import zipfile\nwith zipfile.ZipFile(p) as a:\n    a.extractall(folder)"),
    "an archive unpacked by another name": ("data/x.py", "from shutil import unpack_archive\nunpack_archive(p)"),
    "a tape archive": ("data/x.py", "from tarfile import open"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_checker_sees(name):
    path, source = BAD[name]
    assert faults(path, source), f"not noticed: {source}"


GOOD = {
    "the loop asks the update": (
        "training/strategy.py",
        "ctx.update.backward(loss, last)\nfrom nvalchemi.training.hook import Hook",
    ),
    "hooks use the core": ("training/hooks/ema.py", "from nvalchemi.training.hook import Hook, on"),
    "models use data": ("models/energy.py", "from nvalchemi.data import Batch\nfrom nvalchemi.errors import DataError"),
    "the owner differentiates": ("models/gradient.py", "import torch\ntorch.autograd.grad(e, x)"),
    "the owner goes backward": ("training/update.py", "loss.backward()"),
    "the command line uses everything": ("cli/train.py", "from nvalchemi.training.hooks import EMAHook"),
    "a gradient field": ("training/hooks/clip.py", "p.grad.norm()"),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_checker_lets_pass(name):
    assert faults(*GOOD[name]) == []


def fresh(code: str, folder: Path) -> dict:
    """Run code in a new process whose home and working directory are an empty folder; it prints one JSON object."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPLCONFIG"))}
    settings |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    settings["PYTHONPATH"] = str(PACKAGE.parent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=folder, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def test_importing_the_package_brings_in_nothing(tmp_path):
    seen = fresh(
        "import sys; before = set(sys.modules); import nvalchemi, json;"
        "print(json.dumps({'new': sorted({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names))}))",
        tmp_path,
    )
    assert seen["new"] == ["nvalchemi"]


def test_importing_the_training_side_brings_in_nothing_slow(tmp_path):
    """Half a second over torch is the limit; these are the imports that break it."""
    seen = fresh(
        "import sys, json, torch; before = set(sys.modules); import nvalchemi.training, nvalchemi.training.hooks;"
        "print(json.dumps({'new': sorted(set(sys.modules) - before)}))",
        tmp_path,
    )
    slow = [
        "physicsnemo",
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "scipy",
        "matplotlib",
        "pandas",
        "ase",
        "tblite",
        "pydantic",
    ]
    slow += ["mkdocs", "tensorboard", "wandb", "deepspeed", "mace", "e3nn", "requests", "zarr", "rich", "typer"]
    assert [name for name in seen["new"] if any(name == bad or name.startswith(bad + ".") for bad in slow)] == []


EFFECTS = """
import importlib, json, os, random, sys, threading, warnings
import numpy, torch
def state():
    return {
        "default dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(), "workers": threading.active_count(),
        "torch seed": torch.random.get_rng_state().tolist(), "numpy seed": repr(numpy.random.get_state()), "seed": repr(random.getstate()),
        "filters": [repr(f) for f in warnings.filters], "environment": dict(os.environ), "cuda": torch.cuda.is_initialized(),
        "group": torch.distributed.is_available() and torch.distributed.is_initialized(), "grad": torch.is_grad_enabled(),
        "matmul": torch.get_float32_matmul_precision(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cudnn.allow_tf32, "benchmark": torch.backends.cudnn.benchmark, "path": list(sys.path),
        "hook": sys.excepthook is sys.__excepthook__, "errors": repr(numpy.geterr()), "files": os.listdir("."),
    }
before = state()
modules = MODULES_HERE
for module in modules:
    importlib.import_module(module)
after = state()
print(json.dumps({"changed": {k: [before[k], after[k]] for k in before if before[k] != after[k]},
                  "physicsnemo": any(n.split(".")[0] == "physicsnemo" for n in sys.modules)}))
"""


def dotted_name(path: str) -> str:
    return ".".join(["nvalchemi", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).strip(".")


def test_importing_every_module_changes_nothing(tmp_path):
    """B118: no device taken, no group, seed, dtype, thread, filter, variable or file, whichever module is imported.

    The program's own modules are left out: rich draws a random number and matplotlib makes a folder when they are imported.
    """
    modules = [dotted_name(path) for path in MODULES if not path.startswith(("cli/", "demo/"))]
    seen = fresh(EFFECTS.replace("MODULES_HERE", repr(modules)), tmp_path)
    assert seen["changed"] == {}
    assert not seen["physicsnemo"]
    assert seen["stderr"] == ""


CHANGES = [
    "torch.manual_seed(0)",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_num_threads(torch.get_num_threads() + 1)",
    "os.environ['X'] = '1'",
    "warnings.simplefilter('ignore')",
    "open('file', 'w').close()",
    "torch.set_float32_matmul_precision('high')",
    "numpy.random.seed(1)",
]


def test_the_effects_check_sees(tmp_path):
    head = EFFECTS.split("before = state()")[0]
    tries = (
        f"seen = {{}}\nfor change in {CHANGES!r}:\n    before = state()\n    exec(change)\n    seen[change] = state() != before\n"
    )
    assert fresh(head + tries + "print(json.dumps(seen))", tmp_path) == dict.fromkeys(CHANGES, True) | {"stderr": ""}

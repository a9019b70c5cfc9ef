"""What all tests share."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the ranks of tests/multiprocess compute: ``pytest tests/multiprocess --device cuda`` takes NCCL and one process a GPU."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where ranks compute: cpu (gloo) or cuda (NCCL)")


def pytest_configure(config: pytest.Config) -> None:
    """Say to groups of ranks where to compute; compile what is imported once for all processes that the tests start.

    Where ``PYTHONDONTWRITEBYTECODE`` is set and the environment was installed without byte code, each of them would compile torch and
    PhysicsNeMo again, 15 seconds a time. Their byte code then goes to a folder that is gone with this session.
    """
    from tests.multiprocess.standing import Ranks

    Ranks.device = config.getoption("--device")
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).exists():
        return
    sys.pycache_prefix = tempfile.mkdtemp(prefix="byte-code-")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)

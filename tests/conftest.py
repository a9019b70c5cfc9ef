"""What all tests share."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path


def pytest_configure() -> None:
    """Compile what is imported once for all processes that the tests start.

    Where ``PYTHONDONTWRITEBYTECODE`` is set and the environment was installed without byte code, each of them would compile torch and
    PhysicsNeMo again, 15 seconds a time. Their byte code then goes to a folder that is gone with this session.
    """
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).exists():
        return
    sys.pycache_prefix = tempfile.mkdtemp(prefix="byte-code-")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)

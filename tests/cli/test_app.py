"""The program itself: quick help, lazy commands, errors in plain words."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

import nvalchemi
from nvalchemi.cli import COMMANDS, app
from nvalchemi.errors import DataError

runner = CliRunner()


def test_help_lists_every_command():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.stdout


def test_version():
    assert runner.invoke(app, ["--version"]).stdout.strip() == f"nvalchemi {nvalchemi.__version__}"


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom nvalchemi.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'ase', 'zarr', 'physicsnemo'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_unknown_command_is_a_usage_error_with_a_hint():
    result = runner.invoke(app, ["convrt"])
    assert result.exit_code == 2
    assert "convert" in result.output


@pytest.fixture
def failing_command(monkeypatch):
    def command() -> None:
        """Fail."""
        raise DataError(
            "the store [is] damaged",
            found="3 rows",
            needed="4 rows",
            fix="convert again",
        )

    module = types.ModuleType("nvalchemi.cli.info")
    module.command = command
    monkeypatch.setitem(sys.modules, "nvalchemi.cli.info", module)


def test_our_errors_are_told_plainly(failing_command):
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    for words in (
        "error: the store [is] damaged",
        "found: 3 rows",
        "needed: 4 rows",
        "do this: convert again",
    ):
        assert words in result.stderr


def test_debug_lets_the_error_through(failing_command):
    result = runner.invoke(app, ["--debug", "info"])
    assert isinstance(result.exception, DataError)


def test_debug_may_follow_the_command(failing_command):
    result = runner.invoke(app, ["info", "--debug"])
    assert isinstance(result.exception, DataError)

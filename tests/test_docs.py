"""B120: every python block of the README and the documentation runs, on the CPU, in order on its page; every command exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nvalchemi.cli import COMMANDS, app
from nvalchemi.training import stages
from tests.pages import blocks, commands, program

ROOT = Path(__file__).parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]
RESUMED = "docs/guide/training.md"  # runs with more lines behind it, in a test of its own
WITH_CODE = [page for page in PAGES if page != RESUMED and program((ROOT / page).read_text(encoding="utf-8"))]


def run_page(page: str, folder: Path, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Run a page's blocks as one program in a folder, with lines of a test's own behind them."""
    script = folder / (page.replace("/", "_") + ".py")
    script.write_text(program((ROOT / page).read_text(encoding="utf-8")) + extra, encoding="utf-8")
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script.name], cwd=folder, env=settings, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_of_the_page_runs(page, tmp_path):
    done = run_page(page, tmp_path)
    assert done.returncode == 0, f"{page} (line numbers are the page's)\n{done.stderr[-3000:]}"


def test_what_the_page_on_training_saved_can_be_resumed(tmp_path):
    """B120: the checkpoints that the page makes are there, go on, and end as a run that was never interrupted."""
    extra = """
import os
from pathlib import Path
assert [path.name for path in sorted(Path("runs/guide").iterdir())][-1].endswith("12")
third = recipe(15).run(loader)
assert third.progress.step == 15
os.makedirs("elsewhere"), os.chdir("elsewhere")
whole = recipe(15).run(loader)
for name, weight in whole.model.state_dict().items():
    assert torch.equal(weight, third.model.state_dict()[name]), name
"""
    done = run_page(RESUMED, tmp_path, extra)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_exist(page):
    """Every ``nvalchemi`` command shown exists and knows the options shown."""
    for line, text in commands((ROOT / page).read_text(encoding="utf-8")):
        words = [word for word in text.split() if word not in ("\\", "[", "]")]
        name = words[1].strip("[]")
        if name.startswith("-"):
            continue
        assert name in COMMANDS, f"{page}:{line}: no such command: {text}"
        group = typer.main.get_command(app)
        command = group.commands[name].load()
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for option in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", text):
            assert option in known | {"--help", "--debug"}, f"{page}:{line}: {name} has no {option}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page for page in PAGES if page.startswith("docs/") and page.removeprefix("docs/") not in navigation]
    assert missing == []


@pytest.mark.parametrize(
    "package",
    [
        "data",
        "data.datapipes",
        "distributed",
        "ebm.couplings",
        "ebm.integrators",
        "ebm.samplers",
        "ebm.toy",
        "models",
        "training",
        "training.hooks",
        "training.losses",
    ],
)
def test_every_public_name_is_in_the_reference(package):
    """A class or function that can be imported from a package stands on a page of the reference, by itself or with its module."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = dict(re.findall(r"^::: (\S+)\n((?: .*\n?)*)", text + "\n", flags=re.M))
    missing = []
    module = import_module(f"nvalchemi.{package}")
    for name in module.__all__:
        home = getattr(getattr(module, name), "__module__", "")
        members = re.search(r"members: \[(.*)\]", shown.get(home, ""))
        listed = home in shown and (members is None or name in re.findall(r"\w+", members[1]))
        if not listed and f"{home}.{name}" not in shown:
            missing.append(f"{home}.{name}")
    assert missing == []


def test_the_drawn_loop_is_that_of_the_code():
    """The picture of the loop stands in the code and on the page; they are one."""
    page = (ROOT / "docs" / "design" / "loop.md").read_text(encoding="utf-8")
    drawn = next("\n".join(lines) for language, _, lines in blocks(page) if language == "text")
    assert stages.__doc__ is not None
    assert drawn.strip() == cleandoc(stages.__doc__.split("::", 1)[1]).strip()


def test_help_names_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_blocks_are_found_where_they_stand():
    page = "text\n\n```python\nx = 1\n```\n\n=== tab\n\n    ```py\n    assert x == 1\n    if x:\n        y = 2\n    ```\n\n```console\n$ nvalchemi info a.zarr\n```\n"
    assert program(page).splitlines()[3] == "x = 1"
    assert program(page).splitlines()[9] == "assert x == 1"
    assert program(page).splitlines()[11] == "    y = 2"
    exec(program(page), {})
    assert list(commands(page)) == [(16, "nvalchemi info a.zarr")]
    assert program("```text\nnot code\n```\n") == ""
    with pytest.raises(ValueError, match="never closed"):
        list(blocks("```python\nx = 1\n"))

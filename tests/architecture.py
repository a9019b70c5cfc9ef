"""The rules of the house as functions over source text, so that they can be tried on bad code too.

A module is named by its path inside the package, ``"training/strategy.py"``; a rule gives one line a fault.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

#: which parts of the package each part may import; a part may always import itself
ARROWS = {
    "errors": set(),
    "objective": {"errors"},
    "distributed": {"errors", "objective"},
    "data": {"errors"},
    "models": {"errors", "objective", "distributed", "data"},
    "ebm": {"errors", "objective", "distributed", "data", "models"},
    "training": {"errors", "objective", "distributed", "data", "models", "ebm"},
    "training.hooks": {"errors", "objective", "distributed", "data", "models", "ebm", "training"},
    "testing": {"errors", "objective", "distributed", "data", "models", "ebm", "training", "training.hooks"},
}
#: the parts on top of the house, which may use everything
TOP = {"cli", "demo", "__main__"}

ENVIRONMENT_OWNER = "distributed/manager.py"
#: one file differentiates by inputs; the other is a backward pass itself
GRADIENT_OWNERS = {"models/gradient.py", "distributed/gathered.py"}
BACKWARD_OWNER = "training/update.py"
#: setup is the edge where it is decided, once, whether a run fits the number of its processes
RANK_OWNERS = {"distributed/manager.py", "distributed/ranks.py", "distributed/collectives.py", "training/setup.py"}


def part_of(module: str) -> str:
    """The part of the house that a dotted name (without the leading ``nvalchemi.``) belongs to."""
    if module == "training.hooks" or module.startswith("training.hooks."):
        return "training.hooks"
    return module.split(".")[0]


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of the package's own modules, wherever in the file it stands."""
    package = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["nvalchemi", *package[: len(package) - node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def check_arrows(path: str, tree: ast.AST) -> Iterator[str]:
    """No part imports a part above it."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    own = part_of(module)
    if own in TOP or path == "__init__.py":
        return
    if own not in ARROWS:
        yield f"{path}: the part {own!r} has no place in the house; give it one in ARROWS"
        return
    for line, name in imports(tree, module):
        if not name.startswith("nvalchemi."):
            continue
        other = part_of(name.removeprefix("nvalchemi."))
        if other in ARROWS.keys() | TOP and other != own and other not in ARROWS[own]:
            yield f"{path}:{line}: {own} imports {name}"


def check_strategy(path: str, tree: ast.AST) -> Iterator[str]:
    """The loop knows no concrete hook."""
    if path != "training/strategy.py":
        return
    for line, name in imports(tree, "training.strategy"):
        if "nvalchemi.training.hooks" in name:
            yield f"{path}:{line}: the strategy imports the concrete hook {name}"


def check_environment(path: str, tree: ast.AST) -> Iterator[str]:
    """One file reads the environment."""
    if path == ENVIRONMENT_OWNER:
        return
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.environb", "os.getenv", "os.putenv"}
        name = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in {"environ", "getenv", "putenv", "environb"} for alias in node.names)
        )
        if attribute or name:
            yield f"{path}:{node.lineno}: reads the environment; only {ENVIRONMENT_OWNER} may"


def check_ranks(path: str, tree: ast.AST) -> Iterator[str]:
    """Nobody but the manager asks torch for a rank, and nobody branches on a world of one."""
    if path in RANK_OWNERS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"get_rank", "get_world_size"}:
            yield f"{path}:{node.lineno}: asks torch for the rank; take the manager's"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            one = any(isinstance(side, ast.Constant) and side.value == 1 for side in sides)
            if one and any(dotted(side).split(".")[-1] == "world_size" for side in sides):
                yield f"{path}:{node.lineno}: tests the world size for one; decide once, at the edge"


def check_gradient(path: str, tree: ast.AST) -> Iterator[str]:
    """One file differentiates by its input."""
    if path in GRADIENT_OWNERS:
        return
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and dotted(node.func).endswith("autograd.grad")
        name = (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch.autograd"
            and any(alias.name == "grad" for alias in node.names)
        )
        if call or name:
            yield f"{path}:{node.lineno}: calls autograd.grad; only {' and '.join(sorted(GRADIENT_OWNERS))} may"


def check_backward(path: str, tree: ast.AST) -> Iterator[str]:
    """One file goes backward; the loop asks the update to."""
    if path == BACKWARD_OWNER:
        return
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"):
            continue
        if dotted(node.func.value).split(".")[-1] != "update":
            yield f"{path}:{node.lineno}: calls .backward(; only {BACKWARD_OWNER} may, others call update.backward("


def check_archives(path: str, tree: ast.AST) -> Iterator[str]:
    """No archive is unpacked (B116): a member could name a place outside the folder. Members are read by name."""
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"extract", "extractall", "unpack_archive"}
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if call or "tarfile" in names or (isinstance(node, ast.ImportFrom) and node.module == "tarfile"):
            yield f"{path}:{node.lineno}: unpacks an archive"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; the tail alone where it begins with a call or an index."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else node.attr
    return ""


RULES = (check_arrows, check_strategy, check_environment, check_ranks, check_gradient, check_backward, check_archives)


def faults(path: str, source: str) -> list[str]:
    """Every rule that a module's source breaks."""
    tree = ast.parse(source)
    return [fault for rule in RULES for fault in rule(path, tree)]

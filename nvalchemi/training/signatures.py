"""Whether a callable takes certain arguments, asked before it is called: a wrong setting is told where it is declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def misfit(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str | None:
    """Why ``function`` cannot be called like this, in Python's words; ``None`` where it can, or where nobody can know."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # some callables of extension modules have no signature
        return None
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        return str(error)
    return None

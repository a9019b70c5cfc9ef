"""Files of earlier formats, brought to the present one: one function a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

State = dict[str, Any]


def to_2(shared: State, own: State) -> None:
    """Since version 2 an epoch can be divided anew, and each rank's file says what it was divided into; losses can have chains."""
    if "progress" in shared:
        shared["progress"].setdefault("divided_at", 0)
    shared.pop("loader", None)
    own.setdefault("loader", {})
    own.setdefault("objective", {})


def to_3(shared: State, own: State) -> None:
    """Since version 3 an optimizer's state goes by the names of parameters; numbers, as torch counts them, are still taken.

    Tensors may also lie in files of several ranks since then: an index tells, and there is none in earlier ones.
    """


UPGRADES: dict[int, Callable[[State, State], None]] = {1: to_2, 2: to_3}
"""By the version that a function takes, what brings it to the next one: it changes the shared state and a rank's own in place."""


def upgrade(version: int, *, shared: State | None = None, own: State | None = None) -> None:
    """Bring states read from a file of ``version`` to the present format."""
    for before, function in UPGRADES.items():
        if version <= before:
            function({} if shared is None else shared, {} if own is None else own)

"""Ranks for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.multiprocess.standing import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Two ranks that stand ready for the whole session."""
    group = Ranks(2)
    yield group
    group.close()

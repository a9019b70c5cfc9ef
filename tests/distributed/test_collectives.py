"""The collectives are the identity in one process."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import all_reduce, any_rank, barrier, broadcast, gather, single_process
from nvalchemi.errors import ConfigError

MANAGER = single_process("cpu")


def test_identity_in_one_process():
    tensor = torch.arange(3.0, requires_grad=True)
    assert all_reduce(tensor, MANAGER) is tensor
    assert broadcast(tensor, MANAGER) is tensor
    assert gather(tensor, MANAGER)[0] is tensor
    assert gather({"a": 1}, MANAGER) == [{"a": 1}]
    assert any_rank(True, MANAGER) is True
    assert any_rank(False, MANAGER) is False
    barrier(MANAGER)


def test_unknown_reduction_is_refused_in_one_process_too():
    with pytest.raises(ConfigError, match="median"):
        all_reduce(torch.ones(1), MANAGER, op="median")

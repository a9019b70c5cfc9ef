"""What is beside the wrapped networks is rank 0's on all ranks."""

from __future__ import annotations

import pytest
import torch

CASES = "tests.multiprocess.alike_cases"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_buffers_frozen_parameters_and_frozen_models(ranks, kind):
    """They are made by unlike random numbers, as where nobody has set a seed."""
    first, second = ranks.call(f"{CASES}:begun", kind)
    assert len(first) == 4 and all(map(torch.equal, first, second))
    torch.manual_seed(0)
    torch.nn.Linear(3, 1)
    assert torch.equal(first[0], torch.randn(2))


def test_unlike_models_are_refused(ranks):
    for found in ranks.call(f"{CASES}:begun", "ddp", 3):
        assert (
            "the ranks have unlike models; found: student.shift: (3,) torch.float32 on rank 0, (4,) torch.float32 on rank 1"
            in found
        )

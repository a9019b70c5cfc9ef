"""Two ranks train as one process does on the same global batch."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess.ddp_cases import structures, train

CASES = "tests.multiprocess.ddp_cases"
MOLECULES = structures([3, 9, 2, 5, 4, 7, 3, 6, 2, 8, 5, 1])

# by rank and batch; windows of `accumulate` micro-batches are one step
SHARES = {
    "equal": (1, [[MOLECULES[0:3], MOLECULES[3:6]], [MOLECULES[6:9], MOLECULES[9:12]]]),
    "3 and 9 atoms": (1, [[MOLECULES[0:1]], [MOLECULES[1:2]]]),
    "unequal samples": (1, [[MOLECULES[0:1], MOLECULES[1:2]], [MOLECULES[2:8], MOLECULES[8:12]]]),
    "no energy on one rank": (1, [[MOLECULES[2:3]], [MOLECULES[0:2]]]),
    "micro-batches, short last window": (
        2,
        [[MOLECULES[0:1], MOLECULES[1:4], MOLECULES[4:5]], [MOLECULES[5:8], MOLECULES[8:9], MOLECULES[9:12]]],
    ),
    "unequal numbers of micro-batches": (2, [[MOLECULES[0:1]], [MOLECULES[5:8], MOLECULES[8:9]]]),
}


def one_process(accumulate, shares, **kwargs):
    """The same global batches in one process: micro-batch by micro-batch, the ranks' batches one after the other."""
    steps = -(-max(map(len, shares)) // accumulate)
    joined = [
        [s for share in shares for batch in share[step * accumulate : (step + 1) * accumulate] for s in batch]
        for step in range(steps)
    ]
    return train(single_process("cpu"), [joined], **kwargs)


def assert_same(got, wanted):
    for a, b in zip(got["gradients"], wanted["gradients"], strict=True):
        scale = max(float(g.abs().max()) for g in b)
        assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) <= 1e-12 * scale
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
    assert got["samples"] == wanted["samples"]
    for x, y in zip(got["weights"], wanted["weights"], strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("autograd", [False, True], ids=["by hand", "autograd"])
@pytest.mark.parametrize("name", SHARES)
def test_gradients_are_those_of_one_process(ranks, name, autograd):
    """B40, B35: whatever the sizes of ranks and micro-batches, and not larger by the number of ranks."""
    accumulate, shares = SHARES[name]
    wanted = one_process(accumulate, shares, autograd=autograd)
    for got in ranks.call(f"{CASES}:gradients", shares, autograd, accumulate, {}):
        assert_same(got, wanted)


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"broadcast_buffers": False}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_ddp(ranks, options):
    accumulate, shares = SHARES["unequal samples"]
    wanted = one_process(accumulate, shares)
    for got in ranks.call(f"{CASES}:gradients", shares, False, accumulate, options):
        assert_same(got, wanted)


def test_gradients_lie_as_the_weights_do(ranks):
    """Else torch warns once a process. Afterwards the model is the user's again, as torch has it."""
    assert ranks.call(f"{CASES}:layouts") == [[True, False]] * 2


def test_one_synchronisation_a_window(ranks):
    """B42: also in a short last window; weights are the same on all ranks after every step."""
    accumulate, shares = SHARES["micro-batches, short last window"]
    for got in ranks.call(f"{CASES}:counted", shares, accumulate):
        assert got["per_step"] == [1, 1, 1, 1]
        assert got["spread"] == [0.0] * 4

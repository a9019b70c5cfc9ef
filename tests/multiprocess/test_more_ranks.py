"""Three and four ranks: gradients, validation and gathered predictions are those of one process."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import sharing_cases, validation_cases
from tests.multiprocess.ddp_cases import structures
from tests.multiprocess.standing import Ranks
from tests.multiprocess.test_ddp import assert_same, one_process
from tests.multiprocess.test_resplit import by_epoch

ALONE = single_process("cpu")
MOLECULES = structures([3, 9, 2, 5, 4, 7, 3, 6, 2, 8, 5, 1])


@pytest.fixture(scope="module", params=[3, 4])
def group(request):
    several = Ranks(request.param)
    yield request.param, several
    several.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gradients(group):
    """B40: with unequal batches, and a rank that has fewer of them."""
    size, ranks = group
    shares = [[MOLECULES[rank : rank + 1 + rank], *([MOLECULES[rank + 4 : rank + 7]] if rank else [])] for rank in range(size)]
    wanted = one_process(2, shares)
    for got in ranks.call("tests.multiprocess.ddp_cases:gradients", shares, False, 2, {}, limit=200):
        assert_same(got, wanted)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["plain", "torch, shuffled", "several", "dropping", "list"])
def test_validation(group, kind):
    """B27, K03: 11 structures, each once."""
    _, ranks = group
    alone = sharing_cases.validated(ALONE, kind, 11)
    for got in ranks.call("tests.multiprocess.sharing_cases:validated", kind, 11, limit=200):
        assert got["error"] is None and got["n"] == alone["n"]
        assert got["loss"] == pytest.approx(alone["loss"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gathered_predictions(group):
    """K07: 10,000 predictions, each once, in the order of the data set."""
    _, ranks = group
    for got in [
        validation_cases.gathered(ALONE, 100),
        *ranks.call("tests.multiprocess.validation_cases:gathered", 10_000, limit=200),
    ]:
        count = len(got["energy"])
        assert got["n"] == count and count in (100, 10_000)
        assert torch.equal(got["energy"], torch.arange(count, dtype=torch.float64) + 0.25)
        assert got["energy_mae"] == 0.25


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_resume_of_what_two_ranks_saved(ranks, group, tmp_path):
    """K02: 40 rows, batch 4, stop after 3 steps on 2 ranks; the rest and an ordinary epoch on 3 or 4, and back."""
    size, several = group
    case = "tests.multiprocess.resplit_cases:train"
    steps = 3 + {3: 2, 4: 1}[size]  # that use up 16 rows
    first = ranks.call(case, str(tmp_path / "a"), "one", 4, 3, limit=200)
    rest = several.call(case, str(tmp_path / "b"), "one", 4, steps, None, str(tmp_path / "a"), limit=200)
    rows = by_epoch(*first, *rest)
    assert list(rows) == [0] and set(rows[0]) == set(range(40)) and len(rows[0]) == 40 + {3: 2, 4: 0}[size]
    next_ = several.call(case, str(tmp_path / "b"), "one", 4, steps + 2, limit=200)
    last = ranks.call(case, str(tmp_path / "c"), "one", 4, steps + 2 + {3: 2, 4: 1}[size], None, str(tmp_path / "b"), limit=200)
    rows = by_epoch(*next_, *last)
    assert list(rows) == [1] and sorted(rows[1]) == list(range(40))

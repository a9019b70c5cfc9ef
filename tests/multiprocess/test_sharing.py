"""What a page on distributed training shows runs as written on one and two processes, and every kind of loader is divided."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nvalchemi.data.datapipes import AtomicDataZarrReader, Dataset, MultiDataset, MultiDatasetBatchSampler
from nvalchemi.distributed import single_process
from tests.multiprocess import sharing_cases as cases

CASES = "tests.multiprocess.sharing_cases"
ALONE = single_process("cpu")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    cases.write_stores(str(folder))
    return folder


def flat(epochs):
    return [[sample for batch in epoch for sample in batch] for epoch in epochs]


@pytest.mark.parametrize("block", ["basic", "overrides", "sampler class", "several"])
def test_blocks_of_the_page(ranks, stores, block):
    alone = cases.page(ALONE, str(stores), block)
    first, second = ranks.call(f"{CASES}:page", str(stores), block)
    assert "ddp" not in alone["hooks"] and first["hooks"][0] == second["hooks"][0] == "ddp"
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert first["validation"] == second["validation"] and first["validation"]["n"] == alone["validation"]["n"] == 6
    assert len(list(stores.glob(f"runs-{block}-2/step-*"))) == 1
    one, two = flat(first["epochs"]), flat(second["epochs"])
    assert [len(e) for e in one] == [len(e) for e in two]
    together = [Counter(a + b) for a, b in zip(one, two, strict=True)]
    if block == "several":
        assert first["batches"] == "MultiDatasetBatchSampler"
        data = MultiDataset(*(Dataset(AtomicDataZarrReader(stores / f"{name}.zarr")) for name in "ab"))
        for rank, got in enumerate((first, second)):
            sampler = MultiDatasetBatchSampler(
                data, 5, epoch_policy="max_size", replacement=True, seed=1234, num_replicas=2, rank=rank
            )
            for epoch, batches in enumerate(got["epochs"]):
                sampler.set_epoch(epoch)
                assert [[data.to_global_index(*sample) for sample in batch] for batch in batches] == [list(b) for b in sampler]
        assert one[0] != one[1] and first["samples"] == 2 * 18
        assert [Counter(child for child, _ in seen.elements()) for seen in together] == [{0: 12, 1: 6}] * 2
        return
    if block == "overrides":
        assert one == [list(range(0, 12, 2))] * 2 and two == [list(range(1, 12, 2))] * 2
    elif block == "sampler class":
        assert first["sampler"] == "EveryOther"
        assert one[0] == list(range(0, 12, 2)) and one[1] == [(3 + i) % 12 for i in range(0, 12, 2)]
    else:
        assert one[0] != one[1]
        assert flat(alone["epochs"])[0] != flat(alone["epochs"])[1]
    assert together == [Counter(range(12))] * 2
    assert first["samples"] == alone["samples"] == 24


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("aware", None),
        ("torch, aware", None),
        ("shuffled", "own names"),
        ("torch, shuffled", "own names"),
        ("shuffled", "torch's"),
        ("torch", "torch's"),
        ("plain", "function"),
        ("several", None),
        ("several, undivided", None),
        ("plain", None),
        ("shuffled", None),
        ("torch", None),
        ("torch, shuffled", None),
    ],
)
def test_outcomes_for_training_loaders(ranks, kind, sampler):
    """B23, B25: each sample once an epoch on one of the ranks, as many steps on both, another order each epoch if it is shuffled."""
    first, second = ranks.call(f"{CASES}:divided", kind, 12, sampler)
    assert first["error"] is None and second["error"] is None
    one, two = flat(first["epochs"]), flat(second["epochs"])
    assert [len(batch) for e in first["epochs"] for batch in e] == [len(batch) for e in second["epochs"] for batch in e]
    whole = Counter(range(12)) + (Counter(range(4)) if "several" in kind else Counter())
    for a, b in zip(one, two, strict=True):
        assert Counter(a + b) == whole
    assert first["same"] == ("aware" in kind)
    if sampler is None and kind not in ("plain", "torch"):
        assert one[0] != one[1]
    elif sampler == "function" or kind in ("plain", "torch"):
        assert one[0] == one[1]
    # the same again, as a resumed run would see it
    assert ranks.call(f"{CASES}:divided", kind, 12, sampler)[0]["epochs"] == first["epochs"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("iterable", "cannot be divided between ranks, and every rank would train on all of it"),
        ("list", "cannot be divided between ranks"),
        ("stream", "IterableDataset cannot be divided between ranks"),
        ("subset", "SubsetRandomSampler knows of no ranks"),
        ("own batches", "TwoAtATime knows of no ranks"),
    ],
)
def test_training_data_that_cannot_be_divided_are_refused(ranks, kind, words):
    for got in ranks.call(f"{CASES}:divided", kind, 12):
        assert got["error"].startswith("ConfigError") and words in got["error"]


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "torch", "torch, shuffled", "list", "several", "several, undivided"])
def test_validation_counts_every_sample_once(ranks, kind, count):
    """B27, K03: shuffled or dropping the remainder or not; on one rank without data as well."""
    numbers = list(range(count)) + (list(range(4)) if "several" in kind else [])
    for got in ranks.call(f"{CASES}:validated", kind, count):
        assert got["error"] is None, got
        assert got["n"] == len(numbers)
        assert got["loss"] == pytest.approx(sum(numbers) / len(numbers), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "numbers"), [("subset", range(5)), ("own batches", range(11)), ("dropping", range(9)), ("torch, dropping", range(9))]
)
def test_validation_looks_at_what_one_process_looks_at(ranks, kind, numbers):
    """K03: a sampler that takes part of the data set, or makes batches of its own, is divided as it is."""
    alone = cases.validated(ALONE, kind, 11)
    assert alone == {"error": None, "loss": sum(numbers) / len(numbers), "n": len(numbers)}
    for got in ranks.call(f"{CASES}:validated", kind, 11):
        assert got == alone


def test_validation_data_that_cannot_be_divided_or_would_count_twice_are_refused(ranks):
    for got in ranks.call(f"{CASES}:validated", "stream", 12):
        assert got["error"].startswith("ConfigError") and "cannot be divided" in got["error"]
    for got in ranks.call(f"{CASES}:validated", "iterable", 12):
        assert "iterated over only once" in got["error"]
    for got in ranks.call(f"{CASES}:validated", "aware", 11):
        assert "would count twice" in got["error"]
    for got in ranks.call(f"{CASES}:validated", "torch, aware", 12):
        assert got == {"error": None, "loss": 5.5, "n": 12}

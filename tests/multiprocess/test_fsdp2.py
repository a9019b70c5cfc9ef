"""FSDP2Hook on two ranks takes the steps of one process: every loss, first and second order."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.errors import ConfigError
from nvalchemi.models.painn import PaiNNLayer
from nvalchemi.training.hooks import FSDP2Hook
from tests.multiprocess import fsdp_cases as cases
from tests.multiprocess.ddp_cases import crystals
from tests.multiprocess.ebm_loss_cases import ATOMS, SHARES, by_hand
from tests.multiprocess.ebm_loss_cases import CASES as LOSS_CASES
from tests.multiprocess.standing import Ranks
from tests.multiprocess.test_ddp import MOLECULES
from tests.multiprocess.test_ddp import SHARES as FORCES
from tests.multiprocess.test_ddp import assert_same as assert_same_forces
from tests.multiprocess.test_ddp import one_process as forces_of_one_process
from tests.multiprocess.test_ebm_losses import assert_same

LOSSES, CASES = "tests.multiprocess.ebm_loss_cases", "tests.multiprocess.fsdp_cases"
ALONE = single_process("cpu")

#: settings of the hook
WAYS = {
    "as it comes": {},
    "kept after forward": {"reshard_after_forward": False},
    "each layer": {"wrap": [torch.nn.Linear, PaiNNLayer], "reshard_after_forward": True},
}


def assert_close(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*LOSS_CASES, *ATOMS])
def test_sharded_ranks_are_one_process(ranks, name, way):
    """B35, B78: gradients are not larger by the number of ranks, and no second backward misses its storage."""
    accumulate, sizes = SHARES["unequal micro-batches"]
    wanted = by_hand(name, accumulate, sizes)
    for got in ranks.call(f"{LOSSES}:sharded", name, accumulate, sizes, WAYS[way]):
        assert_same(got, wanted)


@pytest.mark.parametrize("autograd", [False, True], ids=["by hand", "autograd"])
@pytest.mark.parametrize("name", FORCES)
def test_energies_and_forces(ranks, name, autograd):
    """B40: whatever the sizes of ranks and micro-batches."""
    accumulate, shares = FORCES[name]
    wanted = forces_of_one_process(accumulate, shares, autograd=autograd)
    for got in ranks.call("tests.multiprocess.ddp_cases:sharded", shares, autograd, accumulate, {}):
        assert_same_forces(got, wanted)


@pytest.mark.parametrize("autograd", [False, True], ids=["by hand", "autograd"])
def test_stress_of_crystals(ranks, autograd):
    data = crystals([2, 3, 1, 4, 2, 3])
    shares = [[data[0:1], data[1:2]], [data[2:5], data[5:6]]]
    wanted = forces_of_one_process(2, shares, autograd=autograd, stress=True)
    assert wanted["losses"] != forces_of_one_process(2, shares, autograd=autograd)["losses"]
    for got in ranks.call("tests.multiprocess.ddp_cases:sharded", shares, autograd, 2, {}, True):
        assert_same_forces(got, wanted)


@pytest.mark.parametrize("loss", ["first", "second"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_other_hook_works_on_shards(ranks, loss, accumulate, clip):
    """B80: one true norm on all ranks; averages, schedulers and validation of shares of unlike sizes are those of one process."""
    wanted = cases.everything(ALONE, clip, 1, loss) if accumulate == 1 else cases.everything(ALONE, clip, accumulate, loss)
    assert "fsdp2" not in wanted["hooks"]
    for got in ranks.call(f"{CASES}:everything", clip, accumulate, loss):
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
        assert got["validation"] == pytest.approx(wanted["validation"], rel=1e-9)
        assert_close(got["weights"], wanted["weights"])
        for decay, average in wanted["averages"].items():
            assert list(got["averages"][decay]) == list(average)
            assert_close(got["averages"][decay].values(), average.values())
        assert got["gathered"] == [] and got["after"] == []


def test_a_rank_holds_its_share(ranks):
    """Parameters, gradients, optimizer state and averages; the padding of small uneven tensors is what is over a half."""
    for got in ranks.call(f"{CASES}:everything", None, 1, "second"):
        for kind, factor in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert got["bytes"][kind] <= 0.62 * factor * got["whole"], kind
        assert got["average bytes"] <= 0.62 * 2 * got["whole"]


def test_a_step_that_is_not_finite_is_skipped_by_all(ranks):
    wanted = cases.skips(ALONE)
    assert wanted["skipped"] == [4]
    for got in ranks.call(f"{CASES}:skips"):
        assert got["skipped"] == [4]
        assert_close(got["weights"], wanted["weights"])


def test_all_stop_early_together(ranks):
    wanted = cases.stops(ALONE)
    assert wanted["stop"]
    for got in ranks.call(f"{CASES}:stops"):
        assert got["stop"] == wanted["stop"] and len(got["losses"]) == len(wanted["losses"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast(ranks, dtype):
    """The scale is found together: all ranks skip the same steps."""
    wanted = cases.mixed(ALONE, dtype)
    first, second = ranks.call(f"{CASES}:mixed", dtype)
    assert first["skipped"] == second["skipped"] and bool(first["skipped"]) == (dtype == "fp16")
    assert first["losses"] == second["losses"]
    assert first["skipped"] == wanted["skipped"] and len(first["skipped"]) < 25
    assert first["losses"] == pytest.approx(wanted["losses"], rel=0.05)


@pytest.mark.parametrize("loss", ["first", "second"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_short_blocks_and_long_sums(ranks, loss, accumulate):
    wanted = cases.run(ALONE, loss=loss, model=cases.tower().float(), accumulate=accumulate)
    for got in ranks.call(f"{CASES}:short", loss, accumulate):
        assert got["dtypes"] == ["torch.float32"]
        assert got["losses"] == pytest.approx(wanted["losses"], rel=0.05)
        for a, b in zip(got["weights"], wanted["weights"], strict=True):
            assert float((a - b).abs().max()) < 0.05


@pytest.mark.parametrize("short", [False, True])
def test_a_head_that_is_first_used_in_the_last_micro_batch(ranks, short):
    """B82."""
    wanted = cases.late_head(ALONE, False)
    for got in ranks.call(f"{CASES}:late_head", short):
        for name, gradient in wanted.items():
            assert torch.allclose(got[name], gradient, rtol=0.03 if short else 1e-5, atol=0.05 if short else 1e-6), name
    for got in ranks.call(f"{CASES}:late_head", False, "DDPHook"):
        for name, gradient in wanted.items():
            assert torch.allclose(got[name], gradient, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("custom", [False, True])
def test_a_model_without_memory_has_the_same_first_weights_on_any_number_of_ranks(ranks, custom):
    wanted = cases.from_meta(ALONE, custom)
    for got in ranks.call(f"{CASES}:from_meta", custom):
        assert all(torch.equal(got["first"][name], tensor) for name, tensor in wanted["first"].items())
        assert got["first"].keys() == wanted["first"].keys()
        assert_close(got["weights"], wanted["weights"])
        assert_close(got["average"].values(), wanted["average"].values())


def test_norms_and_checks_of_shards(ranks):
    first, second = ranks.call(f"{CASES}:by_other_means")
    for got, wanted in first["norms"].values():
        assert got == pytest.approx(wanted, rel=1e-14)
    assert first == second
    assert first["finite"] == (True, False) and first["bad"] == [False, False] and first["same"]


@pytest.mark.parametrize(
    ("options", "extra", "said"),
    [
        ({"shard": 3}, None, "the ranks cannot be divided into replicas; found: shard=3 and 2 ranks"),
        ({"wrap": [torch.nn.Conv2d]}, None, "wrap finds no part of the network to shard by itself"),
        ({"wrap": torch.nn.ModuleList}, None, "wrap chooses 'blocks', which is never called"),
        ({}, torch.ones(()).double(), "model 'model' has parameters that cannot be divided; found: temperature of shape ()"),
        (
            {"reduce_dtype": torch.float32},
            torch.ones(4, dtype=torch.complex64),
            "imaginary part; found: temperature of torch.complex64, and torch.float32 to compute or to sum gradients in",
        ),
    ],
)
def test_what_cannot_be_sharded_is_told_and_nothing_is_changed(ranks, options, extra, said):
    for found in ranks.call(f"{CASES}:wrong", options, extra):
        assert found.startswith("ConfigError: ") and said in found


def test_a_second_run_goes_on_with_the_sharded_model(ranks):
    for got in ranks.call(f"{CASES}:again"):
        assert got["kinds"] == {True} and got["left"] == []
        assert got["losses"][-1] < got["losses"][0]
    first, second = ranks.call(f"{CASES}:again")
    assert torch.equal(first["energies"], second["energies"])


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad", "NAdam", "Adamax", "Rprop"])
def test_optimizers_of_torch_step_on_shards(ranks, kind):
    wanted = cases.optimised(ALONE, kind)
    for got in ranks.call(f"{CASES}:optimised", kind):
        if kind == "Rprop" and isinstance(got, str):  # an older torch
            assert "cannot step on sharded parameters; found: Rprop" in got
        else:
            assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_optimizers_of_whole_matrices_step_rightly_or_are_refused_before_the_first_step(ranks, kind):
    if not hasattr(torch.optim, kind):
        pytest.skip("this torch has none")
    wanted = cases.optimised(ALONE, kind)
    for got in ranks.call(f"{CASES}:optimised", kind):
        if isinstance(got, str):
            assert "cannot step on sharded parameters" in got and kind in got and "AdamW" in got
        else:
            assert_close(got, wanted)


def test_a_module_without_first_weights_is_named_as_its_author_did(ranks):
    for found in ranks.call(f"{CASES}:not_initialised"):
        assert "net.head.0 (Unset)" in found and "meta_init" in found


def test_a_sharded_model_is_not_replicated(ranks):
    for found in ranks.call(f"{CASES}:replicated_after"):
        assert "model 'model' is sharded, so it cannot be replicated" in found and "FSDP2Hook()" in found


def test_an_average_of_shards_is_copied_to_a_plain_model(ranks):
    wanted = cases.copied(ALONE)
    for got in ranks.call(f"{CASES}:copied"):
        assert_close(got, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": 3},
        {"reshard_after_forward": "yes"},
        {"cpu_offload": "yes"},
        {"meta_init": 3},
        {"shard": 0},
        {"param_dtype": "bf16"},
    ],
)
def test_wrong_settings_are_told_where_they_are_given(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is wrong; found: "):
        FSDP2Hook(**options)


def test_training_where_the_model_is_gathered_is_told(ranks):
    for found in ranks.call(f"{CASES}:within_unsharded"):
        assert "gathered by unsharded(...)" in found and "leave the with block" in found


def test_parts_in_fp16_need_a_scaled_loss(ranks):
    assert "MixedPrecisionHook('fp16')" in ranks.call(f"{CASES}:told", False)[0]
    assert "vanish" not in "".join(ranks.call(f"{CASES}:told", True))


def test_ranks_draw_noise_of_their_own_and_have_equal_weights(ranks):
    """B36."""
    first, second = ranks.call(f"{CASES}:drawn")
    assert first["first"] and second["first"]
    assert not torch.equal(first["noise"][0], second["noise"][0])


@pytest.fixture(scope="module")
def four():
    group = Ranks(4)
    yield group
    group.close()


def test_four_ranks(four):
    """Shards of all, and replicas of shards; a rank without validation data; uneven rows."""
    wanted = cases.everything(ALONE, 0.5, 1, "second")
    shares = [[MOLECULES[0:1]], [MOLECULES[1:3]], [MOLECULES[3:5], MOLECULES[5:6]], [MOLECULES[6:9], MOLECULES[9:12]]]
    forces = forces_of_one_process(2, shares)
    for sharding in ({}, {"shard": 2}, {"shard": 2, "reshard_after_forward": False}):
        for got in four.call(f"{CASES}:everything", 0.5, 1, "second", sharding):
            assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
            assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
            assert got["validation"] == pytest.approx(wanted["validation"], rel=1e-9)
            assert_close(got["weights"], wanted["weights"])
    for got in four.call("tests.multiprocess.ddp_cases:sharded", shares, True, 2, {"shard": 2}):
        assert_same_forces(got, forces)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulate"),
    [*((name, 2) for name in [*LOSS_CASES, *ATOMS]), *((name, 1) for name in ("sliced", "energy matching"))],
)
def test_twenty_steps_of_four_ranks(four, name, accumulate):
    """Every loss, on shards of all ranks and on replicas of shards, with unlike batches."""
    sizes = [[1 + (5 * rank + 3 * i) % 4 for i in range(20 * accumulate)] for rank in range(4)]
    rate = 1e-4 if name in ATOMS else 0.05  # forces of atoms that happen to meet are large
    wanted = by_hand(name, accumulate, sizes, rate)
    for options in ({"reshard_after_forward": True}, {"shard": 2, "reshard_after_forward": False}):
        for got in four.call(f"{LOSSES}:sharded", name, accumulate, sizes, options, rate):
            assert len(got["losses"]) == 20
            largest = max(float(b.abs().max()) for b in wanted["weights"])
            for a, b in zip(got["weights"], wanted["weights"], strict=True):
                assert float((a - b).abs().max()) <= 1e-9 * largest

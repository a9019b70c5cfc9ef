"""Sums and weights of losses, and the identity between one batch and its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.errors import ConfigError
from nvalchemi.objective import LossOutput, LossPart, SupervisedLoss
from nvalchemi.training.losses import (
    ComposedLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    StressMSELoss,
)
from tests.training.losses.systems import make_batch, make_predictions, rows_of


def test_weights_are_the_literal_coefficients():
    batch = make_batch()
    predictions = make_predictions(batch)
    loss_fn = EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss() + StressMSELoss() * 0.5
    loss = loss_fn(predictions, batch)
    energy, forces, stress = (loss.parts[k] for k in ("energy", "forces", "stress"))
    assert (energy.weight, forces.weight, stress.weight) == (1.0, 10.0, 0.5)
    torch.testing.assert_close(loss.total, energy.value + 10 * forces.value + 0.5 * stress.value)
    assert loss_fn.requires == loss_fn.labels == {"energy", "forces", "stress"}
    assert loss_fn.part_names == ("energy", "forces", "stress")
    assert loss_fn.targets == {k: k for k in loss_fn.requires}


def test_sums_lie_flat_and_sum_works():
    a, b, c = EnergyMSELoss(), ForceMSELoss(), StressMSELoss()
    nested = 2.0 * (a + 3.0 * (b + c * 0.5))
    assert [(w, t) for w, t in nested.terms] == [(2.0, a), (6.0, b), (3.0, c)]
    assert sum([a, b, c]).part_names == ("energy", "forces", "stress")


def test_weights_that_are_functions_of_the_step():
    batch = make_batch()
    predictions = make_predictions(batch)
    loss_fn = EnergyMSELoss().weighted(LinearWeight(0.0, 1.0, 10)) + (lambda step: 1.0 + step) * ForceMSELoss()
    doubled = 2 * loss_fn
    for step in (0, 5, 10, 100):
        parts = loss_fn(predictions, batch, step).parts
        assert parts["energy"].weight == pytest.approx(min(step / 10, 1.0))
        assert parts["forces"].weight == pytest.approx(1.0 + step)
        assert doubled(predictions, batch, step).total.item() == pytest.approx(2 * loss_fn(predictions, batch, step).total.item())


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two parts of the loss are named 'energy'"):
        EnergyMSELoss() + EnergyMAELoss()
    both = EnergyMSELoss() + EnergyMAELoss(name="energy_mae")
    assert both.part_names == ("energy", "energy_mae")


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "10", None, True])
def test_what_is_no_weight_is_refused(weight):
    with pytest.raises(ConfigError, match="cannot have this weight"):
        weight * EnergyMSELoss() if not isinstance(weight, str) else EnergyMSELoss() * weight


def test_what_is_no_loss_is_refused():
    with pytest.raises(ConfigError, match="a sum of no losses"):
        ComposedLoss([])
    with pytest.raises(ConfigError, match="only losses can be added"):
        EnergyMSELoss() + 3


class Quadratic(SupervisedLoss):
    """A user's loss, on the bare contract."""

    requires = labels = frozenset({"energy"})

    def __call__(self, predictions, batch, step=0):
        d = predictions["energy"] - batch.energy
        return LossOutput.from_parts({"mine": LossPart((d**4).sum(), len(d))}, len(d))

    def counts(self, batch):
        return {"mine": batch.num_graphs}


def test_a_loss_of_ones_own_can_be_added():
    batch = make_batch()
    predictions = make_predictions(batch)
    for loss_fn in (ForceMSELoss() + Quadratic(), Quadratic() + ForceMSELoss()):
        loss = loss_fn(predictions, batch)
        assert set(loss.parts) == {"forces", "mine"} == set(loss_fn.counts(batch))
        torch.testing.assert_close(loss.total, loss.parts["forces"].value + loss.parts["mine"].value)
    with pytest.raises(ConfigError, match="named 'mine'"):
        ComposedLoss([(1.0, Quadratic()), (2.0, Quadratic())])(predictions, batch)


def test_per_sample_of_a_sum():
    batch = make_batch()
    values = (EnergyMSELoss() + ForceMSELoss()).per_sample(make_predictions(batch), batch)
    assert {k: tuple(v.shape) for k, v in values.items()} == {"energy": (4,), "forces": (4,)}


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    cut=st.integers(1, 6),
    lacking=st.fixed_dictionaries({k: st.sets(st.integers(0, 6), max_size=4) for k in ("energy", "forces", "stress")}),
    seed=st.integers(0, 1000),
)
def test_parts_over_the_counts_of_the_whole_add_up_to_the_whole(sizes, cut, lacking, seed):
    cut = min(cut, len(sizes) - 1)
    keep = {k: set(v) - {0} for k, v in lacking.items()}  # one structure has all, so that the batch has the fields
    whole = make_batch(sizes, seed=seed, lacking=keep)
    predictions = make_predictions(whole, seed=seed + 1)
    loss_fn = EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss() + 0.1 * ForceL2NormLoss(name="length") + 3.0 * StressMSELoss()
    total = loss_fn(predictions, whole).total
    expected = torch.autograd.grad(total, list(predictions.values()))

    pieces = [list(range(cut)), list(range(cut, len(sizes)))]
    batches = [whole.index_select(p) for p in pieces]
    counts = {k: sum(loss_fn.counts(b)[k] for b in batches) for k in loss_fn.part_names}
    assert {k: int(v) for k, v in counts.items()} == {k: int(v) for k, v in loss_fn.counts(whole).items()}
    outputs = [loss_fn(rows_of(whole, p, predictions), b) for p, b in zip(pieces, batches, strict=True)]
    shares = sum(o.over(counts) for o in outputs)
    torch.testing.assert_close(shares, total, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(shares, list(predictions.values()))
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)
    merged = outputs[0].detached().merged(outputs[1].detached())
    torch.testing.assert_close(merged.total, total.detach(), rtol=1e-12, atol=1e-12)

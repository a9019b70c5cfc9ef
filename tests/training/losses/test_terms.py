"""Energy, force and stress terms against values worked out by hand; masked labels; errors."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import ConfigError, DataError
from nvalchemi.training.losses import (
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMAELoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMAELoss,
    StressMSELoss,
)
from tests.training.losses.systems import SIZES, make_batch, make_predictions, rows_of

EVERY = [
    EnergyMSELoss(),
    EnergyMSELoss(per_atom=True),
    EnergyMAELoss(),
    EnergyHuberLoss(0.5),
    EnergyHuberLoss(0.5, per_atom=True),
    ForceMSELoss(),
    ForceMAELoss(),
    ForceHuberLoss(0.5),
    ForceL2NormLoss(),
    StressMSELoss(),
    StressMAELoss(),
    StressHuberLoss(0.5),
]
every_term = pytest.mark.parametrize(
    "term", EVERY, ids=lambda t: type(t).__name__ + ("_per_atom" if getattr(t, "per_atom", 0) else "")
)


def huber(d, delta):
    return torch.where(d.abs() <= delta, 0.5 * d**2, delta * (d.abs() - 0.5 * delta))


@pytest.mark.parametrize("per_atom", [False, True])
def test_energy_values(per_atom):
    batch = make_batch()
    predictions = make_predictions(batch)
    d = predictions["energy"] - batch.energy
    if per_atom:
        d = d / torch.tensor(SIZES)
    assert EnergyMSELoss(per_atom=per_atom)(predictions, batch).total.item() == pytest.approx((d**2).mean().item())
    assert EnergyMAELoss(per_atom=per_atom)(predictions, batch).total.item() == pytest.approx(d.abs().mean().item())
    assert EnergyHuberLoss(0.3, per_atom=per_atom)(predictions, batch).total.item() == pytest.approx(huber(d, 0.3).mean().item())


def test_force_values():
    batch = make_batch()
    predictions = make_predictions(batch)
    d = predictions["forces"] - batch.forces
    assert ForceMSELoss()(predictions, batch).total.item() == pytest.approx((d**2).mean().item())
    assert ForceMAELoss()(predictions, batch).total.item() == pytest.approx(d.abs().mean().item())
    assert ForceHuberLoss(0.3)(predictions, batch).total.item() == pytest.approx(huber(d, 0.3).mean().item())
    assert ForceL2NormLoss()(predictions, batch).total.item() == pytest.approx(d.norm(dim=1).mean().item())


def test_stress_values():
    batch = make_batch()
    predictions = make_predictions(batch)
    d = predictions["stress"] - batch.stress
    assert StressMSELoss()(predictions, batch).total.item() == pytest.approx((d**2).mean().item())
    assert StressMAELoss()(predictions, batch).total.item() == pytest.approx(d.abs().mean().item())
    assert StressHuberLoss(0.3)(predictions, batch).total.item() == pytest.approx(huber(d, 0.3).mean().item())


@every_term
@pytest.mark.parametrize("how", ["absent", "nan"])
def test_b13_unlabelled_structures_leave_the_loss_of_the_others(term, how):
    label = next(iter(term.labels))
    lacking, rest = [1, 2], [0, 3]
    if how == "absent":
        batch = make_batch(lacking={label: lacking})
    else:
        batch = make_batch()
        rows = batch.batch_idx if label == "forces" else torch.arange(4)
        batch.fields[label][torch.isin(rows, torch.tensor(lacking))] = float("nan")
    predictions = make_predictions(batch)
    loss = term(predictions, batch)
    alone = term(rows_of(batch, rest, predictions), batch.index_select(rest))
    torch.testing.assert_close(loss.total, alone.total)
    assert int(loss.parts[term.name].count) == int(alone.parts[term.name].count)
    (gradient,) = torch.autograd.grad(loss.total, predictions[label])
    assert gradient.isfinite().all()
    rows = batch.batch_idx if label == "forces" else torch.arange(4)
    masked = torch.isin(rows, torch.tensor(lacking))
    assert (gradient[masked] == 0).all() and (gradient[~masked] != 0).any()


@every_term
def test_b13_no_label_at_all_gives_zero_with_a_usable_graph(term):
    label = next(iter(term.labels))
    batch = make_batch(lacking={label: [0, 1, 2]}).index_select([0, 1, 2])
    predictions = make_predictions(batch)
    loss = term(predictions, batch)
    assert loss.total.item() == 0.0 and int(loss.parts[term.name].count) == 0
    (gradient,) = torch.autograd.grad(loss.total, predictions[label])
    assert (gradient == 0).all()


def test_one_unlabelled_component():
    batch = make_batch()
    batch.forces[2, 1] = float("nan")
    predictions = make_predictions(batch)
    d = (predictions["forces"] - batch.forces).detach()
    assert ForceMSELoss()(predictions, batch).total.item() == pytest.approx((d**2).nanmean().item())
    assert ForceMSELoss().counts(batch) == {"forces": 3 * 11 - 1}
    # a vector without one component has no length
    assert ForceL2NormLoss()(predictions, batch).total.item() == pytest.approx(d.norm(dim=1).nanmean().item())
    assert ForceL2NormLoss().counts(batch) == {"forces": 10}


@every_term
def test_a_non_finite_prediction_stays_non_finite(term):
    batch = make_batch()
    predictions = make_predictions(batch)
    key = next(iter(term.requires))
    predictions[key] = predictions[key].detach().index_fill(0, torch.tensor([0]), float("nan"))
    assert term(predictions, batch).total.isnan()


@every_term
def test_a_prediction_may_be_nan_where_there_is_no_label(term):
    label = next(iter(term.labels))
    batch = make_batch(lacking={label: [1]})
    predictions = make_predictions(batch)
    expected = term(predictions, batch).total
    rows = batch.batch_idx == 1 if label == "forces" else torch.arange(4) == 1
    leaf = predictions[label].detach().clone()
    leaf[rows] = float("nan")
    predictions[label] = leaf.requires_grad_()
    total = term(predictions, batch).total
    torch.testing.assert_close(total, expected)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert gradient.isfinite().all() and (gradient[rows] == 0).all()


@every_term
def test_counts_come_from_the_batch_alone(term):
    batch = make_batch(lacking={"stress": [0], "energy": [2], "forces": [1]})
    loss = term(make_predictions(batch), batch)
    counts = term.counts(batch)
    assert counts.keys() == loss.parts.keys() == set(term.part_names)
    assert all(int(counts[k]) == int(loss.parts[k].count) for k in counts)
    assert loss.samples == 4


@every_term
def test_per_sample_values_are_the_losses_of_each_structure(term):
    label = next(iter(term.labels))
    batch = make_batch(lacking={label: [1]})
    predictions = make_predictions(batch)
    values = term.per_sample(predictions, batch)[term.name]
    assert values.shape == (4,) and not values.requires_grad
    assert values[1].isnan()
    for i in (0, 2, 3):
        alone = term(rows_of(batch, [i], predictions), batch.index_select([i]))
        torch.testing.assert_close(values[i], alone.total.detach(), check_dtype=False)


def test_other_keys():
    batch = make_batch().replace(ref_energy=torch.arange(4.0, dtype=torch.float64), levels={"ref_energy": "system"})
    term = EnergyMAELoss(target_key="ref_energy", prediction_key="e", name="reference")
    loss = term({"e": torch.zeros(4, dtype=torch.float64)}, batch)
    assert loss.total.item() == pytest.approx(1.5)
    assert list(loss.parts) == ["reference"]
    assert term.requires == {"e"} and term.labels == {"ref_energy"} and term.targets == {"e": "ref_energy"}


def test_b11_a_missing_label_names_wanted_and_present():
    batch = make_batch().replace(energy=None)
    with pytest.raises(DataError, match=r"(?s)found: .*forces.*stress.*needed: energy"):
        EnergyMSELoss()(make_predictions(batch), batch)
    with pytest.raises(DataError, match="needed: energy"):
        EnergyMSELoss().counts(batch)


def test_a_missing_prediction_names_wanted_and_given():
    batch = make_batch()
    with pytest.raises(ConfigError, match=r"found: \['energy'\]; needed: forces"):
        ForceMSELoss()({"energy": batch.energy}, batch)


def test_shapes_are_not_broadcast():
    batch = make_batch()
    with pytest.raises(ConfigError, match=r"prediction \(4, 1\), label 'energy' \(4,\)"):
        EnergyMSELoss()({"energy": batch.energy[:, None]}, batch)


def test_low_precision_predictions_are_compared_in_the_precision_of_the_labels():
    batch = make_batch(dtype=torch.float32)
    exact = ForceMSELoss()({"forces": torch.zeros(11, 3)}, batch).total
    assert exact.dtype == torch.float32
    low = ForceMSELoss()({"forces": torch.zeros(11, 3, dtype=torch.bfloat16)}, batch).total
    assert low == exact


@pytest.mark.parametrize("delta", [0.0, -1.0, float("nan")])
def test_huber_needs_a_positive_delta(delta):
    with pytest.raises(ConfigError, match="positive delta"):
        EnergyHuberLoss(delta)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e-12, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l2_norm_has_finite_second_derivatives_near_zero(size, dtype):
    batch = make_batch((1, 3), dtype=dtype)
    step = torch.full((4, 3), size, dtype=dtype)
    predictions = (batch.forces + 0.0).requires_grad_()
    batch.fields["forces"] = batch.forces - step
    if size:  # the labels' own digits would swallow it
        batch.fields["forces"] = torch.zeros_like(batch.forces)
        predictions = step.clone().requires_grad_()
    total = ForceL2NormLoss()({"forces": predictions}, batch).total
    (first,) = torch.autograd.grad(total, predictions, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.randn_like(first)).sum(), predictions)
    assert first.isfinite().all() and second.isfinite().all()
    if size == 0:
        assert (first == 0).all()

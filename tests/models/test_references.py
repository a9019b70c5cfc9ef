"""Reference energies by least squares, given, or wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import InMemoryDataset
from nvalchemi.errors import DataError
from nvalchemi.models.references import (
    atomic_number,
    by_number,
    element_rows,
    fit_counts,
    fit_reference_energies,
    force_rms,
    symbol,
)
from tests.models.samples import molecule


def test_rows_of_elements():
    rows = element_rows((1, 8, 6))
    assert rows.shape == (119,) and rows[[1, 8, 6]].tolist() == [0, 1, 2] and int((rows >= 0).sum()) == 3


def test_exact_where_the_data_fix_them():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (40, 3)) + np.array([1, 0, 0])
    true = np.array([-13.6, -1029.5, -2042.0])
    fit = fit_counts(counts, counts @ true, [1, 6, 8])
    assert fit.determined and fit.structures == 40
    assert fit.residual_rms < 1e-9
    assert fit.energies == pytest.approx({1: -13.6, 6: -1029.5, 8: -2042.0})


def test_one_composition_only_gives_the_smallest_solution_and_says_so():
    """One molecule, as in rMD17: the mean total is exact, single elements mean nothing."""
    counts = np.tile([6, 2, 1], (50, 1))
    energies = -4209.0 + 0.2 * np.random.default_rng(1).standard_normal(50)
    fit = fit_counts(counts, energies, [1, 6, 8])
    assert not fit.determined
    found = np.array([fit.energies[z] for z in (1, 6, 8)])
    assert counts[0] @ found == pytest.approx(energies.mean(), abs=1e-9)
    np.testing.assert_allclose(found, energies.mean() * counts[0] / (counts[0] @ counts[0]))
    assert 0.1 / 9 < fit.residual_rms < 0.3 / 9


def test_elements_in_a_fixed_ratio():
    """Water clusters: hydrogen and oxygen cannot be told apart, other sizes are right all the same."""
    counts = np.array([[2, 1], [4, 2], [6, 3]])
    fit = fit_counts(counts, counts[:, 1] * -2070.0, [1, 8])
    assert not fit.determined
    assert 20 * fit.energies[1] + 10 * fit.energies[8] == pytest.approx(-20700.0)


def test_of_data_sets_lists_and_batches():
    true = {1: -13.0, 6: -1000.0, 8: -2000.0}
    data = []
    for n in range(3, 12):
        d = molecule(n, seed=n)
        forces = torch.full((n, 3), 0.25 * n, dtype=torch.float64)
        data.append(d.replace(energy=sum(true[int(z)] for z in d.atomic_numbers) + 0.0, forces=forces))
    unlabelled = molecule(30, seed=99)  # neither energy nor forces: it counts for nothing
    batch = Batch.from_data_list([*data, unlabelled])
    expected = fit_reference_energies(data)
    assert expected.energies == pytest.approx(true)
    for source in (batch, InMemoryDataset(batch), [batch], [*data, unlabelled], iter(data)):
        found = fit_reference_energies(source)
        assert found.structures == len(data)
        assert found.energies == pytest.approx(true)
    rms = float(torch.cat([d.forces for d in data]).square().mean().sqrt())
    assert force_rms(batch) == pytest.approx(rms) == force_rms(InMemoryDataset(data))


def test_nothing_to_fit():
    with pytest.raises(DataError, match="no energies"):
        fit_reference_energies([molecule()])
    with pytest.raises(DataError, match="empty"):
        fit_reference_energies([])
    with pytest.raises(DataError, match="no structure has an energy"):
        fit_counts([[1]], [float("nan")], [1])
    with pytest.raises(DataError, match="fit together"):
        fit_counts([[1, 2]], [1.0], [1])
    with pytest.raises(DataError, match="no forces"):
        force_rms([molecule()])
    with pytest.raises(DataError, match="no structure"):
        force_rms([torch.zeros(3)])
    taken = AtomicData([[0.0, 0, 0]], [1], energy=1.0, system={"removed_energy": torch.tensor(3.0)})
    with pytest.raises(DataError, match="twice"):
        fit_reference_energies([taken])


def test_names_of_elements():
    assert atomic_number("Cu") == atomic_number(29) == atomic_number("29") == atomic_number(np.int64(29)) == 29
    assert symbol(118) == "Og" and symbol(92) == "U" and symbol(0) == "Z=0"
    from ase.data import chemical_symbols

    assert [symbol(z) for z in range(1, 119)] == chemical_symbols[1:]
    for wrong in ("cu", "Xx", 0, 119, -1, "0", ""):
        with pytest.raises(DataError, match="no such element"):
            atomic_number(wrong)
    assert by_number({"O": 1, 1: 2.0}) == {1: 2.0, 8: 1.0}
    with pytest.raises(DataError, match="two"):
        by_number({"O": 1.0, 8: 2.0})
    with pytest.raises(DataError, match="not finite"):
        by_number({"O": float("nan")})

"""Labels of the demonstration: drawn in another process, the same for the same seed, right when made again."""

from __future__ import annotations

import numpy as np
import pytest

from nvalchemi.demo import labels
from nvalchemi.demo.molecules import SEEN, UNSEEN, Sample
from nvalchemi.errors import ConfigError, DataError

pytest.importorskip("tblite")

SMALL = Sample(molecules=("H2O", "NH3"), frames=2, temperature=300.0, seed=1, stride=2, warmup=2)


def structures(sample, **settings):
    """One sample as a list."""
    [found] = [list(stream) for stream in labels.draw([sample], **settings)]
    return found


@pytest.fixture(scope="module")
def drawn():
    return structures(SMALL)


def test_structures_come_labelled(drawn):
    assert [data.num_atoms for data in drawn] == [3, 3, 4, 4]
    for data in drawn:
        assert float(data.energy) < -100.0
        assert data.forces.shape == (data.num_atoms, 3)
        assert abs(data.forces.sum(dim=0)).max() < 1e-3
    assert not np.allclose(drawn[0].positions, drawn[1].positions)


def test_the_number_of_processes_changes_the_order_only(drawn):
    again = structures(SMALL, processes=2)
    assert sorted(float(data.energy) for data in again) == sorted(float(data.energy) for data in drawn)
    assert [data.num_atoms for data in again] == [3, 4, 3, 4]


def test_labels_can_be_made_again(drawn):
    again = labels.label([data.to_atoms() for data in drawn])
    for old, new in zip(drawn, again, strict=True):
        assert abs(float(old.energy) - float(new.energy)) < 1e-4
        assert abs(old.forces - new.forces).max() < 2e-3


def test_a_failing_process_is_told(monkeypatch):
    with pytest.raises(DataError, match="exit status"):
        structures(Sample(("no such molecule",), 1, 300.0, 0))


def test_leaving_early_leaves_no_process(drawn):
    streams = labels.draw([Sample(("CH4",), 100_000, 300.0, 0)])
    next(next(streams))
    streams.close()


def test_several_samples_come_one_after_the_other(drawn):
    other = Sample(molecules=("CH4",), frames=3, temperature=300.0, seed=1, stride=1, warmup=1)
    sizes = [[data.num_atoms for data in stream] for stream in labels.draw([SMALL, other], processes=2)]
    assert sizes == [[3, 4, 3, 4], [5, 5, 5]]


def test_without_tblite_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(labels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--extra demo"):
        labels.check_available()


def test_the_unseen_molecules_are_unseen():
    assert not SEEN.keys() & UNSEEN.keys()

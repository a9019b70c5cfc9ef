"""What errors are measured of, as the command line writes and reads it: names, words and units, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

MILLI = 1000.0
"""From the units of metrics (eV, Å) to those of reports."""


class Quantity(NamedTuple):
    """A quantity with errors.

    Attributes
    ----------
    name
        As in the metrics: ``name_mae`` and ``name_rmse``, in eV and Å.
    words
        As in a table.
    short
        As in a sentence and on an axis.
    unit
        A thousandth of the metrics' unit.
    suffix
        The unit as part of a key: ``forces_mae_meV_per_A``.
    """

    name: str
    words: str
    short: str
    unit: str
    suffix: str

    def key(self, kind: str) -> str:
        """The key of its ``"mae"`` or ``"rmse"`` in a report in thousandths."""
        return f"{self.name}_{kind}_{self.suffix}"


QUANTITIES = (
    Quantity("energy", "energy", "energy", "meV", "meV"),
    Quantity("energy_per_atom", "energy per atom", "energy", "meV/atom", "meV"),
    Quantity("forces", "force component", "force", "meV/Å", "meV_per_A"),
    Quantity("stress", "stress component", "stress", "meV/Å³", "meV_per_A3"),
)


def maes(metrics: Mapping[str, object]) -> Iterator[tuple[Quantity, str]]:
    """Each quantity whose mean absolute error is among ``metrics``, with that metric's name."""
    for quantity in QUANTITIES:
        metric = f"{quantity.name}_mae"
        if metric in metrics:
            yield quantity, metric

"""Do energies, forces and stresses belong to one another? Neighbouring frames of one system tell.

Between two frames of the same atoms the energy changes by the work of the mean force and the mean stress (trapezoidal
rule, exact for a harmonic solid)::

    E2 - E1 = -(F1 + F2)/2 . (r2 - r1)  +  (V1 s1 + V2 s2)/2 : strain

The slope of the left side over the right one is 1 where units and signs are right, -1 for gradients taken for forces or for
a compression-positive stress, and the ratio of the units where they differ. It speaks only where the two agree in shape:
trajectories, relaxations, volume scans; not a set of random structures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvalchemi.data.convert.plausible import Finding
from nvalchemi.data.units import ENERGY, PRESSURE, Units

_MOVE, _STRAIN = 0.5, 0.2  # Å rms and strain beyond which the trapezoid is no guide
_MIN_PAIRS = 4
_AGREES = (0.5, 2.0)
_CONTRADICTS = 3.0  # times or a third; units that are mixed up differ by more, and a wrong sign is wrong at any size
_ENERGIES = ("eV", "kcal/mol", "kJ/mol", "Hartree")
_STRESSES = {"eV/A^3": 1.0} | {name: PRESSURE[name] for name in ("GPa", "kbar", "bar")}


@dataclass
class Regression:
    """Slope through the origin of y over x, and how well the points lie on it."""

    n: int = 0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Take note of one point."""
        self.n += 1
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y

    @property
    def slope(self) -> float | None:
        """The slope, or None where the points do not show one, or one that is neither right nor wrong."""
        if self.n < _MIN_PAIRS or self.xx == 0 or self.yy == 0:
            return None
        needed = 0.95 if self.n >= 8 else 0.98  # few points lie on a line by chance
        slope = self.xy / self.xx
        if abs(self.xy) < needed * np.sqrt(self.xx * self.yy):
            return None
        return (
            slope if slope < 0 or not (_AGREES[1] <= slope <= _CONTRADICTS or 1 / _CONTRADICTS <= slope <= _AGREES[0]) else None
        )


@dataclass
class ConsistencyCheck:
    """Compares each frame with the one before it, if it has the same atoms."""

    units: Units
    work: Regression = field(default_factory=Regression)
    strain_work: Regression = field(default_factory=Regression)
    _last: tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, dict[str, Any]] | None = None

    def add(
        self, numbers: np.ndarray, positions: np.ndarray, cell: np.ndarray | None, pbc: np.ndarray, labels: dict[str, Any]
    ) -> None:
        """Take note of one frame, in Å and eV."""
        last, self._last = self._last, (numbers, positions, cell, pbc, labels)
        if last is None or not np.array_equal(last[0], numbers) or not np.array_equal(last[3], pbc):
            return
        before = last[4]
        if "energy" not in before or "energy" not in labels:
            return
        change = labels["energy"] - before["energy"]
        if cell is None or last[2] is None or not pbc.all() or np.allclose(cell, last[2], atol=1e-6):
            self._add_moves(change, positions - last[1], cell if pbc.any() else None, pbc, before, labels)
        elif "stress" in before and "stress" in labels:
            self._add_strain(change, last[1], positions, last[2], cell, before, labels)

    def _add_moves(
        self,
        change: float,
        moves: np.ndarray,
        cell: np.ndarray | None,
        pbc: np.ndarray,
        before: dict[str, Any],
        labels: dict[str, Any],
    ) -> None:
        if "forces" not in before or "forces" not in labels:
            return
        if cell is not None:
            fractions = np.linalg.lstsq(cell.T, moves.T, rcond=None)[0].T
            moves = moves - (np.round(fractions) * pbc) @ cell
        if np.sqrt(np.square(moves).sum(1).mean()) < _MOVE:
            self.work.add(_work(before, labels, moves), change)

    def _add_strain(
        self,
        change: float,
        old: np.ndarray,
        new: np.ndarray,
        old_cell: np.ndarray,
        new_cell: np.ndarray,
        before: dict[str, Any],
        labels: dict[str, Any],
    ) -> None:
        middle = 0.5 * (old_cell + new_cell)
        strain = np.linalg.solve(middle, new_cell - old_cell)
        if np.abs(strain).max() > _STRAIN:
            return
        shift = np.linalg.solve(new_cell.T, new.T).T - np.linalg.solve(old_cell.T, old.T).T
        moves = (shift - np.round(shift)) @ middle
        if np.sqrt(np.square(moves).sum(1).mean()) > _MOVE:
            return
        if "forces" in before and "forces" in labels:
            change -= _work(before, labels, moves)
        elif np.abs(moves).max() > 0.01:
            return
        volumes = abs(np.linalg.det(old_cell)), abs(np.linalg.det(new_cell))
        mean = 0.5 * (volumes[0] * before["stress"] + volumes[1] * labels["stress"])
        self.strain_work.add(float((mean * 0.5 * (strain + strain.T)).sum()), change)

    def findings(self, stress_from: str = "stress", stress_sign: str = "tension") -> list[Finding]:
        """What the pairs of frames say so far.

        Parameters
        ----------
        stress_from, stress_sign
            Whether the stress was read as ``stress`` or from a ``virial``, and what a positive one was taken to mean.
        """
        return [*self._forces(), *self._stress(stress_from, stress_sign)]

    def _forces(self) -> list[Finding]:
        slope = self.work.slope
        if slope is None:
            return []
        pairs = f"in {self.work.n} pairs of frames"
        if _AGREES[0] < slope < _AGREES[1]:
            return [Finding("fine", f"the forces agree with the changes of the energy {pairs}", about="forces")]
        if -_AGREES[1] < slope < -_AGREES[0]:
            return [
                Finding(
                    "certain",
                    f"the forces have the wrong sign: {pairs} the energy rises along them, so they are gradients (dE/dx)",
                    "take the forces from another key, or change their sign in the file",
                    "forces",
                )
            ]
        return [
            Finding(
                "certain",
                f"the units of energy and forces contradict each other: {pairs} the energy changes by {slope:.4g} times the work "
                f"of the forces (read as {self.units.energy} and {self.units.forces})",
                "give both: --units energy=...,forces=... (and length=... if positions are not in Å)",
                "forces",
            )
        ]

    def _stress(self, stress_from: str, stress_sign: str) -> list[Finding]:
        slope = self.strain_work.slope
        if slope is None:
            return []
        pairs = f"in {self.strain_work.n} pairs of frames"
        if _AGREES[0] < slope < _AGREES[1]:
            return [Finding("fine", f"the stress agrees with the changes of the energy with the cell {pairs}", about="stress")]
        sign = stress_sign if slope > 0 else {"tension": "compression", "compression": "tension"}[stress_sign]
        read = self.units[stress_from]
        factor = abs(slope) * read.factor
        known = {name: ENERGY[name] for name in _ENERGIES} if stress_from == "virial" else _STRESSES
        unit = min(known, key=lambda name: abs(np.log(known[name] / factor)))
        options = [] if _AGREES[0] < abs(slope) < _AGREES[1] else [f"--units {stress_from}={unit}"]
        options += [] if sign == stress_sign else [f"--stress-sign {sign}"]
        return [
            Finding(
                "certain",
                f"the {stress_from} contradicts the changes of the energy with the cell: {pairs} they are {slope:.3g} times what it "
                f"says, read as {read}, positive under {stress_sign}; {unit}, positive under {sign}, would fit",
                f"pass {' '.join(options)}",
                "stress",
            )
        ]


def _work(before: dict[str, Any], after: dict[str, Any], moves: np.ndarray) -> float:
    """Minus the work of the mean force: the change of the energy. Forces that are not known are those of fixed atoms."""
    return -0.5 * float(np.nansum((before["forces"] + after["forces"]) * moves))

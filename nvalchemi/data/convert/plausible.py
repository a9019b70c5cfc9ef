"""Do the numbers contradict the unit they are read with? Certain verdicts are errors, doubtful ones warnings.

Three kinds of evidence, all from physics and none from the file's name:

- no total energy lies below that of the bare atoms: the Thomas-Fermi energy of a neutral atom, -0.7687 Z^(7/3) Hartree
  (Lieb and Simon, Adv. Math. 23, 22 (1977)), is below the true one for every element;
- all-electron energies of H to Ar (without Li, Be, B) are those of the free atoms but for 3 percent (nonrelativistic values:
  Chakravorty et al., Phys. Rev. A 47, 3649 (1993)), so that a set of molecules shows its unit;
- forces and stresses have a largest plausible size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nvalchemi.data.units import ENERGY, HARTREE, PRESSURE, Units

_FREE_ATOM = {1: -0.500, 2: -2.904, 6: -37.845, 7: -54.589, 8: -75.067, 9: -99.734, 10: -128.938, 11: -162.255, 12: -200.053}
_FREE_ATOM |= {13: -242.346, 14: -289.359, 15: -341.259, 16: -398.110, 17: -460.148, 18: -527.540}
_ALL_ELECTRON = np.full(119, np.nan)
_ALL_ELECTRON[list(_FREE_ATOM)] = HARTREE * np.array(list(_FREE_ATOM.values()))
_THOMAS_FERMI = -0.7687 * HARTREE * np.arange(119.0) ** (7 / 3)

_BOUND = 1.25  # molecules are bound more deeply than their atoms, H2 by 17 percent, others by less
_BINDING = (0.965, 1.01)  # free atoms over molecule
_SPEAKING_UNITS = ("eV", "kcal/mol", "kJ/mol", "Hartree")
_FORCE_WARNING, _FORCE_LIMIT = 20.0, 1000.0  # eV/Å, rms
_STRESS_WARNING, _STRESS_LIMIT = 1.0, 5.0  # eV/Å^3, rms: 160 and 800 GPa


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say. ``certain`` ones stop a conversion unless the units are trusted.

    ``about`` names the label where another check may know better.
    """

    level: Literal["certain", "doubtful", "fine"]
    text: str
    fix: str | None = None
    about: str = ""


@dataclass
class PlausibilityCheck:
    """Watches the converted labels (eV, Å) of all frames and speaks of the units at the end.

    Parameters
    ----------
    units
        The units that the numbers were read with.
    """

    units: Units
    frames: int = 0
    lowest: tuple[float, float] = (0.0, -1.0)  # energy per atom and its bound, eV, of the frame that comes nearest to it
    ratios: list[float] = field(default_factory=lambda: [np.inf, 0.0])  # smallest and largest free atoms over energy
    comparable: int = 0
    squares: dict[str, list[float]] = field(default_factory=lambda: {"forces": [0.0, 0.0], "stress": [0.0, 0.0]})

    def add(self, numbers: np.ndarray, labels: dict[str, Any]) -> None:
        """Take note of one frame."""
        self.frames += 1
        if (energy := labels.get("energy")) is not None:
            self._add_energy(numbers, energy)
        for name, sums in self.squares.items():
            if (value := labels.get(name)) is not None:
                sums[0] += float(np.nansum(np.square(value)))
                sums[1] += int(np.isfinite(value).sum())

    def _add_energy(self, numbers: np.ndarray, energy: float) -> None:
        bound = float(_THOMAS_FERMI[numbers].sum())
        if energy / bound > self.lowest[0] / self.lowest[1]:
            self.lowest = (energy / len(numbers), bound / len(numbers))
        atoms = float(_ALL_ELECTRON[numbers].sum())
        if np.isfinite(atoms) and energy < 0 and numbers.max() >= 6:
            self.comparable += 1
            ratio = atoms / energy
            self.ratios = [min(self.ratios[0], ratio), max(self.ratios[1], ratio)]

    def findings(self) -> list[Finding]:
        """What the numbers say so far."""
        return [*self._energies(), *self._sizes("forces", _FORCE_WARNING, _FORCE_LIMIT), *self._stresses()]

    def _energies(self) -> list[Finding]:
        unit = self.units.energy
        spoken = self._spoken_unit()
        if spoken is not None and spoken != unit.name:
            return [
                Finding(
                    "certain",
                    f"the energies are read as {unit}, but are total energies in {spoken}: in {self.comparable} frames they equal "
                    f"those of the free atoms within 3 percent if they are {spoken}",
                    f"pass --units {spoken}",
                )
            ]
        if spoken is not None:
            return [Finding("fine", f"the energies are all-electron totals in {unit}, as the free atoms confirm")]
        energy, bound = self.lowest
        if energy < _BOUND * bound:
            fitting = [name for name in _SPEAKING_UNITS if energy / unit.factor * ENERGY[name] > _BOUND * bound]
            return [
                Finding(
                    "certain",
                    f"energies of {energy:.6g} eV per atom are impossible: with all its electrons such a structure has about "
                    f"{0.75 * bound:.4g} eV per atom; the unit is not {unit}",
                    f"pass --units with the right one{': ' + ' or '.join(fitting) if fitting else ''}",
                )
            ]
        return []

    def _spoken_unit(self) -> str | None:
        """The unit that the all-electron energies show, if they are such in all frames."""
        if self.comparable < 0.1 * self.frames:  # a few frames among many may agree by chance
            return None
        for name in _SPEAKING_UNITS:
            factors = [ratio * self.units.energy.factor / ENERGY[name] for ratio in self.ratios]
            if factors[0] > _BINDING[0] and factors[1] < _BINDING[1]:
                return name
        return None

    def _rms(self, name: str) -> float:
        total, count = self.squares[name]
        return float(np.sqrt(total / count)) if count else 0.0

    def _sizes(self, name: str, warning: float, limit: float) -> list[Finding]:
        rms = self._rms(name)
        if rms <= warning:
            return []
        text = f"a {name.removesuffix('s')} rms of {rms:.4g} eV/Å is {'impossible' if rms > limit else 'very large'}"
        level: Literal["certain", "doubtful"] = "certain" if rms > limit else "doubtful"
        return [Finding(level, f"{text} if {self.units[name]} is the unit", f"check --units {name}=...", name)]

    def _stresses(self) -> list[Finding]:
        rms = self._rms("stress")
        if rms <= _STRESS_WARNING:
            return []
        raw = rms / self.units.stress.factor
        fitting = [name for name in ("GPa", "kbar", "bar") if 1e-4 < raw * PRESSURE[name] < _STRESS_WARNING]
        certain = rms > _STRESS_LIMIT
        return [
            Finding(
                "certain" if certain else "doubtful",
                f"a stress rms of {rms:.4g} eV/Å^3 ({rms / PRESSURE['GPa']:.4g} GPa) is {'beyond any material' if certain else 'very large'}; "
                f"the unit is {'not' if certain else 'perhaps not'} {self.units.stress}",
                f"pass --units stress={' or '.join(fitting) or '...'} and check the sign (--stress-sign)",
                "stress",
            )
        ]

"""Which key is which label: found by standard names or as asked, converted, and written down for the report.

Nothing is guessed: a key that only looks like a label is never taken, but named as one that was left out.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nvalchemi.data.convert.frames import Frame
from nvalchemi.data.convert.from_ase import full_stress
from nvalchemi.data.units import Units, parse_unit
from nvalchemi.errors import DataError

LABELS = ("energy", "forces", "stress", "virial")
StressSign = Literal["tension", "compression"]

_LOOKS_LIKE = {
    "energy": re.compile(r"energ|toten|etot|^e0?$|^u0?$|^[hg]$", re.I),
    "forces": re.compile(r"forc|grad|^f$", re.I),
    "stress": re.compile(r"stress", re.I),
    "virial": re.compile(r"viri", re.I),
}
_NO_LABEL = re.compile(r"tol|cut|thresh|unit|fermi|gap|kinetic", re.I)
_DECLARED = {
    "energy": re.compile(r"^energ(y|ies)[_-]?units?$", re.I),
    "forces": re.compile(r"^forces?[_-]?units?$", re.I),
    "stress": re.compile(r"^stress[_-]?units?$", re.I),
    "virial": re.compile(r"^virials?[_-]?units?$", re.I),
    "length": re.compile(r"^(length|positions?|coordinates?)[_-]?units?$", re.I),
}


@dataclass
class KeyUse:
    """How often a key was met, and how far it lies from the one that was taken instead.

    ``difference`` is the largest one: eV per atom of energies, eV/Å of force components; None where they cannot be compared.
    """

    frames: int = 0
    difference: float | None = None


@dataclass
class LabelReader:
    """Takes the labels out of frames and remembers what it took, left and missed.

    Parameters
    ----------
    asked
        Label (``energy``, ``forces``, ``stress``, ``virial``) -> the key to take it from; other labels have standard keys.
    units
        The units that the labels are written in.
    stress_sign
        What a positive stress (or virial) means. None: tension for a stress, as ASE has it, compression for a virial.
    mask_fixed
        Take the forces of fixed atoms that are exactly zero for absent (NaN): codes set them, nobody computed them.
    """

    asked: Mapping[str, str]
    units: Units
    stress_sign: StressSign | None = None
    mask_fixed: bool = False
    used: dict[str, Counter[str]] = field(default_factory=lambda: {label: Counter() for label in LABELS})
    left: dict[str, dict[str, KeyUse]] = field(default_factory=lambda: {label: {} for label in LABELS})
    missing: Counter[str] = field(default_factory=Counter)
    keys: dict[str, tuple[str, int]] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    zeroed: int = 0

    def read(self, frame: Frame, standard: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        """The labels of a frame in eV and Å: ``energy``, ``forces``, ``stress``, as far as they are there.

        Raises
        ------
        DataError
            For a value that is no number, has the wrong shape, is infinite, or has another unit than the file declares.
        """
        self._note_keys(frame)
        self._check_declared(frame)
        found = {label: self._key(label, frame, standard) for label in LABELS}
        if found["stress"] and found["virial"]:
            # both describe the same thing; the one asked for, else the stress, which needs no volume
            found["stress" if "virial" in self.asked and "stress" not in self.asked else "virial"] = None
        labels: dict[str, Any] = {}
        for label, key in found.items():
            if key is None:
                continue
            value = self._value(label, key, frame)
            if not np.isnan(value).all():  # a NaN is how some files say "not computed"
                labels["stress" if label == "virial" else label] = value
                self.used[label][key] += 1
        self._note_left(frame, found, labels, standard)
        return labels

    def positive(self, label: str) -> StressSign:
        """What a positive ``stress`` or ``virial`` is taken to mean."""
        return self.stress_sign or ("tension" if label == "stress" else "compression")

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _key(self, label: str, frame: Frame, standard: Mapping[str, tuple[str, ...]]) -> str | None:
        place = _place(label, frame)
        asked = self.asked.get(label)
        if asked is not None:
            if asked in place:
                return asked
            if label != "forces" or len(frame.numbers) > 1:  # an isolated atom has no force to be given
                self.missing[label] += 1
            return None
        if label in ("stress", "virial") and {"stress", "virial"} & self.asked.keys():
            return None  # asked for the one: the other is not wanted
        return next((key for key in standard.get(label, ()) if key in place and _fits(label, place[key], frame)), None)

    def _value(self, label: str, key: str, frame: Frame) -> Any:
        raw = _place(label, frame)[key]
        try:
            array = np.asarray(raw, dtype=np.float64)
        except (TypeError, ValueError):
            raise DataError(f"the {label} {key!r} is no number", found=repr(raw)[:60]) from None
        if not _fits(label, array, frame):
            raise DataError(f"the {label} {key!r} has the wrong shape", found=array.shape, needed=_needed_shape(label, frame))
        if np.isinf(array).any():
            raise DataError(f"the {label} {key!r} is infinite")
        array = array * self.units[label].factor
        if label == "energy":
            return float(array.reshape(()))
        if label == "forces":
            return self._without_zeroed(array, frame)
        array = full_stress(array) if array.size == 6 else array.reshape(3, 3)
        if self.positive(label) == "compression":
            array = -array
        return array / _volume(frame, key, self.units) if label == "virial" else array

    def _without_zeroed(self, forces: np.ndarray, frame: Frame) -> np.ndarray:
        if frame.fixed is None or not forces.any():
            return forces
        zeroed = frame.fixed & ~forces.any(axis=1)
        self.zeroed += int(zeroed.sum())
        return np.where(zeroed[:, None], np.nan, forces) if self.mask_fixed else forces

    # -- remembering -------------------------------------------------------------------------------------------------

    def _note_keys(self, frame: Frame) -> None:
        for level, values in (("system", frame.system), ("atom", frame.atom)):
            for key in values:
                self.keys[key] = (level, self.keys.get(key, (level, 0))[1] + 1)

    def _note_left(
        self, frame: Frame, found: Mapping[str, str | None], labels: Mapping[str, Any], standard: Mapping[str, tuple[str, ...]]
    ) -> None:
        for label in LABELS:
            for key, value in _place(label, frame).items():
                if key == found[label] or not (key in standard.get(label, ()) or looks_like(label, key)):
                    continue
                if not _fits(label, value, frame) or np.asarray(value).dtype.kind not in "fiu":
                    continue
                use = self.left[label].setdefault(key, KeyUse())
                use.frames += 1
                if label in ("energy", "forces") and label in labels:
                    other = np.asarray(value, dtype=np.float64) * self.units[label].factor
                    gap = float(np.nanmax(np.abs(other - labels[label]), initial=0.0)) / (
                        len(frame.numbers) if label == "energy" else 1
                    )
                    use.difference = max(use.difference or 0.0, gap)

    def _check_declared(self, frame: Frame) -> None:
        for key, value in frame.system.items():
            if not isinstance(value, str) or "unit" not in key.lower():
                continue
            for quantity, pattern in _DECLARED.items():
                if pattern.match(key):
                    declared = parse_unit(value, quantity)
                    self.declared[key] = value
                    if not declared.same_as(self.units[quantity]):
                        raise DataError(
                            f"the file declares another unit of {quantity} than it is read with",
                            found=f"{key}={value}",
                            needed=str(self.units[quantity]),
                            fix=f"pass --units {quantity}={value}",
                        )

    # -- telling -----------------------------------------------------------------------------------------------------

    def missing_error(self, frames: int) -> DataError | None:
        """The error for a label that was asked for by its key and that none of the frames has."""
        for label, count in self.missing.items():
            if count and not self.used[label]:
                key = self.asked[label]
                if key in self.keys:
                    level = self.keys[key][0]
                    return DataError(
                        f"the key {key!r} that --{label}-key asks for is no {label}",
                        found="one value an atom" if level == "atom" else "a value of the whole structure",
                        needed="one row an atom" if label == "forces" else "a value of the whole structure",
                        fix=self._suggestion(label, key),
                    )
                return DataError(
                    f"no frame has the key {key!r} that --{label}-key asks for",
                    found=f"in {frames} frames the keys {self.describe_keys()}",
                    fix=self._suggestion(label, key),
                )
        return None

    def candidates(self, label: str) -> list[str]:
        """Keys that were left out and look like the label."""
        return sorted(self.left[label], key=lambda key: -self.left[label][key].frames)

    def describe_keys(self) -> str:
        """All keys that were met, in words."""
        names = [key for key, _ in sorted(self.keys.items(), key=lambda item: (-item[1][1], item[0]))]
        return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "(none)"

    def _suggestion(self, label: str, key: str) -> str | None:
        level = "atom" if label == "forces" else "system"
        possible = [name for name, (there, _) in self.keys.items() if there == level]
        names = difflib.get_close_matches(key, possible, n=1) or self.candidates(label)[:1]
        return f"did you mean --{label}-key {names[0]}?" if names else None


def looks_like(label: str, key: str) -> bool:
    """Whether a key's name is that of a label, by its look."""
    return bool(_LOOKS_LIKE[label].search(key)) and not _NO_LABEL.search(key)


def other_keys(reader: LabelReader, kept: Iterable[str]) -> list[str]:
    """Keys that were neither labels, nor look like one, nor were kept."""
    named = {key for counter in reader.used.values() for key in counter} | {key for left in reader.left.values() for key in left}
    return sorted(reader.keys.keys() - named - reader.declared.keys() - set(kept))


def _place(label: str, frame: Frame) -> Mapping[str, Any]:
    return frame.atom if label == "forces" else frame.system


def _fits(label: str, value: Any, frame: Frame) -> bool:
    shape = np.shape(value)
    if label == "energy":
        return shape == () or shape == (1,)
    if label == "forces":
        return shape == (len(frame.numbers), 3)
    return shape in ((6,), (9,), (3, 3), (1, 3, 3))


def _needed_shape(label: str, frame: Frame) -> str:
    return {"energy": "one number", "forces": f"({len(frame.numbers)}, 3)"}.get(
        label, "(3, 3), (9,) or (6,) as xx yy zz yz xz xy"
    )


def _volume(frame: Frame, key: str, units: Units) -> float:
    volume = 0.0 if frame.cell is None else abs(float(np.linalg.det(frame.cell))) * units.length.factor**3
    if volume == 0.0:
        raise DataError(f"the virial {key!r} cannot be made a stress", found="no cell", needed="a cell with a volume")
    return volume

"""What the demonstration got, in plain words, from its numbers alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHORT = 0.1
"""Picoseconds below which a drift means nothing."""


@dataclass(frozen=True)
class Score:
    """Errors on one set beside those of a model that knows next to nothing.

    Attributes
    ----------
    what
        The set, in words.
    structures
        How many.
    forces, energy
        Mean absolute errors of the model, meV/Å over components and meV a structure.
    trivial_forces
        Of guessing no force at all, meV/Å.
    trivial_energy
        Of summing one energy an element, fitted to the training set, meV a structure.
    """

    what: str
    structures: int
    forces: float
    trivial_forces: float
    energy: float
    trivial_energy: float


@dataclass(frozen=True)
class Motion:
    """The free dynamics of one molecule.

    Attributes
    ----------
    molecule
        Its name.
    picoseconds
        How long.
    drift, ripple, swing
        meV an atom (and picosecond): see `nvalchemi.demo.dynamics.Dynamics`.
    forces
        Mean absolute error of the forces along its own path against labels made afterwards, meV/Å.
    """

    molecule: str
    picoseconds: float
    drift: float
    ripple: float
    swing: float
    forces: float


def listed(names: Iterable[str]) -> str:
    """``"a, b and c"``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def span(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 90 else f"{int(seconds + 0.5) // 60} min {int(seconds + 0.5) % 60} s"


def times_better(model: float, trivial: float) -> str:
    """How a model's error stands to a trivial one's."""
    if not model < trivial:
        return "no better than that: it has learned nothing useful here"
    ratio = trivial / max(model, 1e-12)
    return f"{ratio:.0f} times smaller" if ratio >= 3 else f"{100 * (1 - 1 / ratio):.0f} % smaller"


def score_sentence(score: Score) -> str:
    """One set in words."""
    return (
        f"On {score.what} ({score.structures} structures) its forces are off by {score.forces:.0f} meV/Å, where guessing no force at all is "
        f"off by {score.trivial_forces:.0f}: {times_better(score.forces, score.trivial_forces)}. Its energies are off by "
        f"{score.energy:.0f} meV, where adding up one energy per element is off by {score.trivial_energy:.0f}: "
        f"{times_better(score.energy, score.trivial_energy)}."
    )


def motion_sentence(motion: Motion, seen: bool) -> str:
    """The dynamics in words, with a verdict that its numbers give."""
    calm = max(1.0, 0.1 * motion.swing)
    steady = abs(motion.drift) * motion.picoseconds <= calm and motion.ripple <= max(1.0, 0.25 * motion.swing)
    if motion.picoseconds < SHORT:
        verdict = "that is too short to tell whether the energy is kept"
    elif steady:
        verdict = "the energy is kept"
    else:
        verdict = "the energy is not kept well, and this model needs more training before it is used for dynamics"
    never = "" if seen else ", which it never saw"
    return (
        f"Let loose on {motion.molecule}{never}, for {motion.picoseconds:.2g} ps at constant energy: while {motion.swing:.1f} meV an atom went to and fro "
        f"between motion and bonds, the total stayed within {motion.ripple:.2f} and drifted by {motion.drift:+.2f} meV an atom and ps; {verdict}. "
        f"Labels made afterwards say that its forces were off by {motion.forces:.0f} meV/Å on the path that it took itself."
    )

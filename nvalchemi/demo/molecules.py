"""Which molecules the demonstration learns from, and which it keeps back to be tested on."""

from __future__ import annotations

from dataclasses import dataclass

#: name in ASE's g2 collection -> what people call it; the functional groups of the unseen ones all occur here
SEEN = {
    "CH4": "methane",
    "C2H6": "ethane",
    "C3H8": "propane",
    "isobutane": "isobutane",
    "H2O": "water",
    "CH3OH": "methanol",
    "CH3CH2OH": "ethanol",
    "CH3OCH3": "dimethyl ether",
    "NH3": "ammonia",
    "H3CNH2": "methylamine",
    "C2H6NH": "dimethylamine",
    "H2CO": "formaldehyde",
    "CH3CHO": "acetaldehyde",
    "HCOOH": "formic acid",
    "HCOOCH3": "methyl formate",
    "CH3CONH2": "acetamide",
}

UNSEEN = {
    "trans-butane": "butane",
    "C2H6CHOH": "isopropanol",
    "CH3CH2NH2": "ethylamine",
    "CH3COOH": "acetic acid",
    "CH3COCH3": "acetone",
}


@dataclass(frozen=True)
class Sample:
    """How structures are drawn: frames of a Langevin dynamics of each molecule on the xTB surface.

    Attributes
    ----------
    molecules
        Names in ASE's g2 collection.
    frames
        Structures of each molecule.
    temperature
        Kelvin.
    seed
        Two samples with other seeds come from other trajectories.
    stride, warmup
        Steps of one femtosecond between two frames, and before the first.
    """

    molecules: tuple[str, ...]
    frames: int
    temperature: float
    seed: int
    stride: int = 10
    warmup: int = 100

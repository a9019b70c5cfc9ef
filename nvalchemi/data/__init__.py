"""Structures of atoms, batches of them, and the ways in and out."""

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import Level

__all__ = ["AtomicData", "Batch", "Level"]

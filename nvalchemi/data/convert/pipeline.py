"""Files to a store, in one pass and bounded memory; nothing is committed unless every check passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nvalchemi import __version__
from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.convert.consistent import ConsistencyCheck
from nvalchemi.data.convert.formats import open_source
from nvalchemi.data.convert.frames import Frame, FrameSource, Selection
from nvalchemi.data.convert.labels import LabelReader, other_keys
from nvalchemi.data.convert.plausible import Finding, PlausibilityCheck
from nvalchemi.data.fields import FIELDS, Level
from nvalchemi.data.summary import Summary
from nvalchemi.data.units import Unit
from nvalchemi.errors import DataError

_ROWS, _ATOMS = 256, 65536  # structures, or their atoms, handed to the writer at once
_EARLY = 64  # frames after which a certain verdict need not wait for the end of the file
_EXTRA = ("charge", "dipole", "charges", "magmoms")  # kept under their own names where they have the known shape

Unlabelled = Literal["refuse", "keep", "skip"]


@dataclass
class FileReport:
    """What was read of one file. ``unlabelled`` holds the first indices of frames without any label."""

    name: str
    format: str
    total: int | None
    frames: int = 0
    unlabelled_count: int = 0
    unlabelled: list[int] = field(default_factory=list)

    def where(self) -> str:
        """The frames without labels, in words."""
        more = self.unlabelled_count - len(self.unlabelled)
        return f"frames {', '.join(map(str, self.unlabelled))}" + (f" and {more} more" if more else "")


@dataclass
class Conversion:
    """One conversion: give it files, iterate ``batches``, and read the report from the same object afterwards.

    Parameters
    ----------
    inputs
        The files.
    labels
        Keys, units and signs.
    select
        Which frames of each file.
    dtype
        Of all floating fields but the energy.
    unlabelled
        What to do with frames without energy, forces and stress.
    trust_units
        Report a contradicted unit, but go on.
    progress
        Called with the number of frames read, and with the number there is to read if that is known.
    """

    inputs: Sequence[Path]
    labels: LabelReader
    select: Selection = field(default_factory=Selection)
    dtype: torch.dtype = torch.float64
    unlabelled: Unlabelled = "refuse"
    trust_units: bool = False
    progress: Callable[[int, int | None], None] | None = None
    files: list[FileReport] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)
    extra: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._plausible = PlausibilityCheck(self.labels.units)
        self._consistent = ConsistencyCheck(self.labels.units)
        self._standard: list[tuple[str, ...]] = []
        self._frames = 0

    def batches(self) -> Iterator[Batch]:
        """The structures in batches; ends in an error rather than after the last batch if a check fails."""
        sources = [open_source(path) for path in self.inputs]
        self._standard = [keys for source in sources for keys in source.standard.values()]
        totals = [source.count() for source in sources]
        known = None if None in totals else sum(len(self.select.indices(total)) for total in totals if total is not None)
        rows: list[AtomicData] = []
        atoms = 0
        for source, total in zip(sources, totals, strict=True):
            report = FileReport(source.name, source.format, total)
            self.files.append(report)
            for index, frame in source.read(self.select):
                with _located(source, index):
                    data = self._structure(frame, source, report, index)
                if data is not None:
                    rows.append(data)
                    atoms += data.num_atoms
                if self._frames == _EARLY:
                    self._judge()
                if len(rows) == _ROWS or atoms >= _ATOMS:
                    yield self._batch(rows)
                    rows, atoms = [], 0
                if self.progress is not None and self._frames % 32 == 0:
                    self.progress(self._frames, known)
            if not report.frames:
                raise DataError(
                    f"no frame of {source.name} is selected",
                    found=f"--select {self.select}" + (f" of {total} frames" if total is not None else ""),
                    fix=None if self.select == Selection() else "select fewer or earlier frames",
                )
        self._judge()
        self._judge_unlabelled()
        if rows:
            yield self._batch(rows)

    # -- one frame ---------------------------------------------------------------------------------------------------

    def _structure(self, frame: Frame, source: FrameSource, report: FileReport, index: int) -> AtomicData | None:
        self._frames += 1
        report.frames += 1
        labels = self.labels.read(frame, source.standard)
        if not labels:
            report.unlabelled_count += 1
            if len(report.unlabelled) < 10:
                report.unlabelled.append(index)
            if self.unlabelled == "skip":
                return None
        length = self.labels.units.length.factor
        positions = frame.positions * length
        cell = None if frame.cell is None else frame.cell * length
        data = AtomicData(
            self._floats(positions),
            torch.from_numpy(frame.numbers),
            cell=None if cell is None else self._floats(cell),
            pbc=None if cell is None and not frame.pbc.any() else torch.from_numpy(frame.pbc),
            energy=labels.get("energy"),
            forces=self._floats(labels.get("forces")),
            stress=self._floats(labels.get("stress")),
            **self._extra(frame),
        )
        self._plausible.add(frame.numbers, labels)
        self._consistent.add(frame.numbers, positions, cell, frame.pbc, labels)
        return data

    def _floats(self, values: Any) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(np.array(values, dtype=np.float64)).to(self.dtype)

    def _extra(self, frame: Frame) -> dict[str, Any]:
        """Known further fields; they have no unit option, so they are kept only where lengths are in Å."""
        extra: dict[str, dict[str, Any]] = {"system": {}, "atom": {}}
        if not self.labels.units.length.same_as(Unit("Å", 1.0)):
            return {}
        for name in _EXTRA:
            spec = FIELDS[name]
            place = frame.system if spec.level is Level.SYSTEM else frame.atom
            rows = () if spec.level is Level.SYSTEM else (len(frame.numbers),)
            value = place.get(name)
            if value is not None and np.shape(value) == rows + spec.shape and np.asarray(value).dtype.kind in "fiu":
                extra[str(spec.level)][name] = self._floats(value)
                self.extra.add(name)
        return extra

    def _batch(self, rows: list[AtomicData]) -> Batch:
        batch = Batch.from_data_list(rows)
        self.summary.add(batch)
        return batch

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Raise if the numbers contradict the units or a key that was asked for is nowhere."""
        if (error := self.labels.missing_error(self._frames)) is not None:
            raise error
        stress_from = "virial" if self.labels.used["virial"] and not self.labels.used["stress"] else "stress"
        consistent = self._consistent.findings(stress_from, self.labels.positive(stress_from))
        decided = {finding.about for finding in consistent}  # the energy itself knows better than a usual size
        self.findings = [*(f for f in self._plausible.findings() if f.about not in decided), *consistent]
        if self.labels.declared:
            said = ", ".join(f"{key}={value}" for key, value in self.labels.declared.items())
            self.findings.append(Finding("fine", f"the file itself declares {said}"))
        if self.labels.zeroed:
            text = f"the forces of {self.labels.zeroed:,} atoms that a constraint held are exactly zero: set, not computed"
            was = "and were left out" if self.labels.mask_fixed else "and will be trained on"
            self.findings.append(
                Finding("fine" if self.labels.mask_fixed else "doubtful", f"{text}, {was}", "--mask-fixed takes them for absent")
            )
        for finding in self.findings:
            if finding.level == "certain" and not self.trust_units:
                raise DataError(finding.text, fix=f"{finding.fix}; or --trust-units if you know better")

    def _judge_unlabelled(self) -> None:
        for label, count in self.labels.missing.items():
            if count and self.unlabelled == "refuse":
                raise DataError(
                    f"{count} of {self._frames} frames lack the key {self.labels.asked[label]!r} that --{label}-key asks for",
                    found=f"the keys {self.labels.describe_keys()}",
                    fix="--allow-unlabelled keeps them without this label",
                )
        missing = [report for report in self.files if report.unlabelled_count]
        if not missing or self.unlabelled != "refuse":
            return
        count = sum(report.unlabelled_count for report in missing)
        if count < self._frames:
            raise DataError(
                f"{count} of {self._frames} frames have neither energy nor forces nor stress",
                found="; ".join(f"{report.name}: {report.where()}" for report in missing),
                fix="--skip-unlabelled leaves them out, --allow-unlabelled keeps them without labels",
            )
        options = [f"--{label}-key {key}" for label in self.labels.left for key in self.labels.candidates(label)[:1]]
        raise DataError(
            "no energy, forces or stress was found under the standard keys",
            found=f"in {self._frames} frames the keys {self.labels.describe_keys()}",
            needed=", ".join(sorted({key for source in self._standard for key in source})),
            fix=f"name the keys, perhaps {' '.join(options)}"
            if options
            else "--allow-unlabelled keeps structures without labels",
        )

    def other_keys(self) -> list[str]:
        """Keys of the files that were neither labels nor kept."""
        return other_keys(self.labels, self.extra)

    def metadata(self) -> dict[str, Any]:
        """What the store remembers of where it came from (file names without their folders)."""
        used = {label: dict(counter) for label, counter in self.labels.used.items() if counter}
        units = {name: entry for name, entry in self.labels.units.as_dict().items() if name == "length" or name in used}
        return {
            "created_by": f"nvalchemi {__version__}",
            "files": [{"name": f.name, "format": f.format, "frames": f.frames, "select": str(self.select)} for f in self.files],
            "keys": used,
            "units_as_read": units,
            "positive_means": {label: self.labels.positive(label) for label in ("stress", "virial") if label in used},
        }


@contextmanager
def _located(source: FrameSource, index: int) -> Iterator[None]:
    """Say in which frame of which file an error of the data lies."""
    try:
        yield
    except DataError as error:
        message = f"{source.name}, frame {index}: {error.message}"
        raise DataError(message, found=error.found, needed=error.needed, fix=error.fix) from error

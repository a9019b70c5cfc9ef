"""The demonstration itself: label, store, train, test, move, tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from nvalchemi.cli import plot, recipe
from nvalchemi.cli.config import TrainConfig, check_config
from nvalchemi.cli.describe import print_summary
from nvalchemi.cli.evaluate import measure
from nvalchemi.cli.figures import save
from nvalchemi.cli.progress import counting
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.cli.threads import cpu_threads
from nvalchemi.cli.train import INTERRUPTED
from nvalchemi.cli.trained import load_trained
from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter
from nvalchemi.data.summary import Summary
from nvalchemi.demo.dynamics import constant_energy
from nvalchemi.demo.figures import dynamics_figure
from nvalchemi.demo.labels import check_available, draw, label
from nvalchemi.demo.molecules import SEEN, UNSEEN, Sample
from nvalchemi.demo.plan import Plan
from nvalchemi.demo.report import Motion, Score, listed, motion_sentence, score_sentence, span
from nvalchemi.distributed.launch import launch
from nvalchemi.models import InteratomicPotential
from nvalchemi.models.calculator import NvalchemiCalculator

MINIMUM_TRAINING = 5.0
START_UP = 10.0
"""Seconds until several processes train: each imports all of torch."""
TIMESTEP = 0.5


class Demonstration:
    """One demonstration in one folder.

    Parameters
    ----------
    plan
        How much of everything.
    run
        The folder; a run like any other afterwards, that ``resume``, ``evaluate`` and ``plot`` work on.
    seed
        Of structures, weights and order.
    console
        Where it says what it does.
    processes
        How many train.
    """

    def __init__(self, plan: Plan, run: RunDir, seed: int, console: Console, processes: int = 1) -> None:
        self.plan, self.run, self.seed, self.console, self.processes = plan, run, seed, console, processes
        self.start = perf_counter()
        self.stores = {name: run.path / "data" / f"{name}.zarr" for name in ("train", "valid", "new_motion", "new_molecules")}
        self.seconds: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds that are left of the plan's."""
        return self.plan.seconds - (perf_counter() - self.start)

    def __call__(self) -> dict[str, Any]:
        """Do all of it; returns what was measured, as it is written to ``demo.json``."""
        check_available()
        self._title("1  Labels")
        with self._timed("labels"):
            self.draw_structures()
        with cpu_threads(1):
            self._title("2  Training")
            with self._timed("training"):
                steps = self.train()
            self._title("3  Test and dynamics")
            with self._timed("test"):
                scores = self.test()
            with self._timed("dynamics"):
                motion = self.move()
        with self._timed("plots"):
            plots = [*plot.draw_curves(self.run), *plot.draw_parity(self.run, "new_molecules"), self.path_plot]
        result = {
            "scores": {name: asdict(score) for name, score in scores.items()},
            "dynamics": asdict(motion),
            "structures": {name: len(AtomicDataZarrReader(path)) for name, path in self.stores.items()},
            "steps": steps,
            "seconds": {**self.seconds, "all": perf_counter() - self.start},
            "plots": [str(path) for path in plots],
            "plan": asdict(self.plan),
            "processes": self.processes,
            "seed": self.seed,
        }
        (self.run.path / "demo.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        self.tell(result, scores, motion)
        return result

    def draw_structures(self) -> None:
        """Label structures and write them to the stores as they come."""
        plan = self.plan
        self._say(
            f"Drawing structures of {len(plan.seen)} molecules from dynamics at {plan.temperature:.0f} K and labelling them with GFN2-xTB; "
            f"{len(plan.unseen)} molecules are kept back for the test."
        )
        wanted = {
            "train": (plan.seen, plan.train_frames),
            "valid": (plan.seen, plan.valid_frames),
            "new_motion": (plan.seen, plan.test_frames),
            "new_molecules": (plan.unseen, plan.unseen_frames),
        }
        samples = [
            Sample(molecules, frames, plan.temperature, seed=10 * self.seed + number)
            for number, (molecules, frames) in enumerate(wanted.values())
        ]
        with closing(draw(samples, processes=plan.labellers)) as streams:
            for name, sample, stream in zip(wanted, samples, streams, strict=True):
                metadata = {"method": "GFN2-xTB (tblite)", "sample": asdict(sample)}
                with counting(self.console, f"labelling {name}") as progress:
                    systems = _counted(stream, sample.frames * len(sample.molecules), progress)
                    AtomicDataZarrWriter(self.stores[name], metadata=metadata).write(systems)
        print_summary(self.console, Summary.of(AtomicDataZarrReader(self.stores["train"])))

    def train(self) -> int:
        """Train for what the plan leaves; returns the steps taken."""
        start_up = START_UP if self.processes > 1 else 0.0
        seconds = max(self.left - self.plan.reserve - start_up, MINIMUM_TRAINING)
        config = configuration(self.stores["train"], self.stores["valid"], seconds, self.seed, self.plan.settings)
        self._say(
            f"PaiNN with {config.model.net['n_features']} features, for {span(seconds)}; the learning rate falls to zero by then."
        )
        config = recipe.absolute(config)
        if self.processes > 1:
            return self.train_together(config)
        return recipe.train(config, self.run).progress.step

    def train_together(self, config: TrainConfig) -> int:
        """Train on several processes, which this one starts and waits for; returns the steps taken."""
        self._say(f"{self.processes} processes, each with its share of the structures.")
        self.run.write_config(config)
        words = [sys.executable, "-m", "nvalchemi", "train", str(self.run.config_file), "--run-dir", str(self.run.path)]
        launch(words, self.processes, stopped=INTERRUPTED)
        return load_trained(self.run, which="last").step

    def potential(self) -> InteratomicPotential:
        """The best model of the run, with averaged weights."""
        model = load_trained(self.run).model
        assert isinstance(model, InteratomicPotential)
        return model

    def test(self) -> dict[str, Score]:
        """Measure on new motion of the known molecules, and on molecules that training never saw."""
        references = self.potential().reference_energies or {}
        words = {"new_motion": "new motion of the molecules it learned from", "new_molecules": "molecules it never saw"}
        scores = {}
        for name, what in words.items():
            found = measure(self.run, self.stores[name])
            trivial_forces, trivial_energy = trivial_errors(self.stores[name], references)
            scores[name] = Score(
                what, found["n"], found["forces_mae_meV_per_A"], trivial_forces, found["energy_mae_meV"], trivial_energy
            )
        return scores

    def move(self) -> Motion:
        """Run a short dynamics of an unseen molecule, and label its path afterwards."""
        reader = AtomicDataZarrReader(self.stores["new_molecules"])
        name = self.plan.unseen[-1]
        # molecules come in turn from several processes; the dynamics begins from a frame of the one that is asked for
        atoms = _first_of(reader, name).to_atoms()
        atoms.calc = NvalchemiCalculator(self.potential())
        path = constant_energy(
            atoms, steps=self.plan.dynamics_steps, timestep=TIMESTEP, seed=self.seed, seconds=max(0.5 * self.left, 3.0)
        )
        truth = label(path.frames)
        errors = [
            np.abs(frame.get_forces() - data.forces.numpy()).mean()
            for frame, data in zip(path.frames, truth, strict=True)
            if data.forces is not None
        ]
        self.path_plot = save(dynamics_figure(path, molecule_name(name)), self.run.plots / "dynamics.png")
        forces = 1000.0 * float(np.mean(errors))
        return Motion(molecule_name(name), float(path.time[-1]), path.drift, path.ripple, path.swing, forces)

    def tell(self, result: dict[str, Any], scores: dict[str, Score], motion: Motion) -> None:
        """Say in plain words what came out."""
        self._title("What came out")
        structures, seconds = result["structures"], result["seconds"]
        self._say(
            f"A PaiNN potential learned from {structures['train']:,} structures of {listed(molecule_name(m) for m in self.plan.seen)}, "
            f"labelled with GFN2-xTB in {span(seconds['labels'])}, in {result['steps']:,} steps ({span(seconds['training'])})."
        )
        self._say(f"Kept back from it: {listed(molecule_name(m) for m in self.plan.unseen)}.")
        for score in scores.values():
            self._say(score_sentence(score))
        self._say(motion_sentence(motion, seen=False))
        self._say(f"All of it took {span(seconds['all'])}. Everything is in {self.run.path}:")
        for what, where in (
            ("numbers", self.run.path / "demo.json"),
            ("pictures", self.run.plots),
            ("checkpoints", self.run.checkpoints),
            ("structures", self.run.path / "data"),
        ):
            self.console.print(Text.assemble("    ", (f"{what:12}", "bold"), str(where)), soft_wrap=True)
        launcher = f"torchrun --standalone --nproc-per-node={self.processes} -m " if self.processes > 1 else ""
        self._say(f"Train it further:  {launcher}nvalchemi resume {self.run.path} --max-time 30m")

    def _title(self, text: str) -> None:
        self.console.print(Rule(Text(text, "bold"), align="left"))

    def _say(self, text: str) -> None:
        self.console.print(Padding(Text(text), (0, 2, 0, 2)))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[name] = perf_counter() - start


def configuration(train: Path, valid: Path, seconds: float, seed: int, changes: dict[str, Any]) -> TrainConfig:
    """How the demonstration trains: what ``nvalchemi train`` would read from a file.

    Parameters
    ----------
    train, valid
        Stores.
    seconds
        The budget.
    seed
        Of weights and order.
    changes
        Settings in place of these, by section.
    """
    sections: dict[str, Any] = {
        "data": {"train": str(train), "validation": str(valid), "batch_size": 8},
        "model": {"name": "painn", "cutoff": 5.0, "net": {"n_features": 64, "n_interactions": 3, "n_rbf": 20}},
        "loss": {"energy": {"kind": "mse", "weight": 50.0, "per_atom": True}, "forces": {"kind": "mse", "weight": 10.0}},
        "optimizer": {"name": "AdamW", "lr": 1e-3, "lr_scaling": "sqrt"},
        "schedule": {"kind": "cosine", "hold": 0.2, "warmup_steps": 100},
        "training": {"max_time": seconds, "seed": seed, "ema_decay": 0.995, "threads": 1},
        "validation": {"every_n_epochs": 4},
        "checkpoint": {"metric": "forces_mae"},
    }
    for name, change in changes.items():
        sections[name] = {**sections.get(name, {}), **change}
    return check_config(sections, "the demonstration's settings")


def trivial_errors(store: Path, references: dict[str, float]) -> tuple[float, float]:
    """Mean absolute errors of guessing no force (meV/Å) and of adding up one energy an element (meV)."""
    from ase.data import chemical_symbols

    batch = AtomicDataZarrReader(store).read_many(range(len(AtomicDataZarrReader(store))))
    table = np.array([references.get(symbol, 0.0) for symbol in chemical_symbols])
    sums = np.zeros(batch.num_graphs)
    np.add.at(sums, batch.batch_idx.numpy(), table[batch.atomic_numbers.numpy()])
    energy = np.abs(batch["energy"].numpy() - sums).mean()
    return 1000.0 * float(batch["forces"].abs().mean()), 1000.0 * float(energy)


def molecule_name(name: str) -> str:
    """What people call a molecule of the demonstration."""
    return {**SEEN, **UNSEEN}.get(name, name)


def _first_of(reader: AtomicDataZarrReader, name: str) -> AtomicData:
    """The first structure of a molecule, known by its elements."""
    from ase.build import molecule

    wanted = molecule(name).numbers.tolist()
    found = np.flatnonzero(reader.num_atoms == len(wanted))
    return next(data for data in map(reader.read, found.tolist()) if data.atomic_numbers.tolist() == wanted)


def _counted(systems: Iterator[AtomicData], total: int, progress: Any) -> Iterator[AtomicData]:
    """Hand structures on and count them."""
    for done, data in enumerate(systems, start=1):
        progress(done, total)
        yield data

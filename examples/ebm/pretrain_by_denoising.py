"""Pre-training without labels: PaiNN learns forces from noise, then from 50 labelled structures.

    NVALCHEMI_TEST_DATA=folder python examples/ebm/pretrain_by_denoising.py

Structures that were drawn at a temperature have the density exp(-E / kT), whose score is the force over kT. Denoising score matching learns
the score from the structures alone. Times kT that is a potential, and 50 labels correct it. A network without pre-training gets the same labels
and as many steps. The folder holds rmd17/rmd17_ethanol_{train,test}_01.npz (ethanol at 500 K); without it the program draws
copper crystals at 500 K by molecular dynamics with ASE's EMT.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.md.langevin import Langevin
from matplotlib.figure import Figure

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.distributed import DistributedManager
from nvalchemi.ebm.losses import DenoisingScoreMatching
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import EnergyMSELoss, Every, ForceMSELoss, OptimizerConfig, PeriodicHook, TrainingStrategy, evaluate
from nvalchemi.training.hooks import DDPHook, GradientClipHook, ProgressHook

TEMPERATURE = 500.0  # K, of rMD17
CUTOFF = 4.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("NVALCHEMI_TEST_DATA", "nowhere")))
    parser.add_argument("--noise", type=float, default=0.03, help="Å")
    parser.add_argument("--pretraining", type=int, default=1000, help="steps without labels")
    parser.add_argument("--steps", type=int, default=400, help="with labels")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def ethanol(path: Path) -> list[AtomicData]:
    kcal = units.kcal / units.mol
    with np.load(path) as file:
        rows = zip(file["coords"], kcal * file["energies"], kcal * file["forces"], strict=True)
        numbers = torch.from_numpy(file["nuclear_charges"]).long()
        return [AtomicData(torch.from_numpy(x), numbers, energy=torch.tensor(e), forces=torch.from_numpy(f)) for x, e, f in rows]


def copper(count: int, seed: int) -> list[AtomicData]:
    """One crystal of eight atoms on its way, one state in five."""
    atoms = bulk("Cu").repeat(2)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = EMT()
    rng = np.random.default_rng(seed)
    dynamics = Langevin(atoms, 6 * units.fs, temperature_K=TEMPERATURE, friction=0.02 / units.fs, rng=rng)
    dynamics.run(60)
    states = []
    for _ in range(count):
        dynamics.run(5)
        states.append(AtomicData.from_atoms(atoms))
    return states


class Watch(PeriodicHook):
    """The error of the forces on structures never seen, on the way."""

    def __init__(self, model: InteratomicPotential, test: InMemoryDataset) -> None:
        super().__init__(Every(steps=25))
        self.model, self.loader, self.errors = model, DataLoader(test, batch_size=50), []
        self.act(None)

    def act(self, ctx) -> None:
        self.errors.append(1000 * evaluate(self.model, self.loader)["forces_mae"])


def main() -> None:
    """Pre-train, train twice with labels, and compare."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    folder = args.data / "rmd17"
    real = folder.is_dir()
    if real:
        train, test = (ethanol(folder / f"rmd17_ethanol_{part}_01.npz") for part in ("train", "test"))
    else:
        train, test = copper(200, 0), copper(100, 1)

    def resident(structures: list[AtomicData], *transforms) -> InMemoryDataset:
        return InMemoryDataset(structures, manager.device, transforms, dtype=torch.float32)

    def fit(model, loss_fn, data, steps: int, lr: float, *hooks) -> None:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": lr, "weight_decay": 0.0}, cosine, {"T_max": steps}),
            loss_fn=loss_fn,
            num_steps=steps,
            distributed_manager=manager,
            hooks=[DDPHook(), GradientClipHook(10.0), ProgressHook(), *hooks],
        ).run(DataLoader(data, batch_size=max(1, 10 // manager.world_size), shuffle=True, seed=0))

    test = test[:100]
    labelled, unseen = resident(train[:50], NeighborList(CUTOFF)), resident(test, NeighborList(CUTOFF))
    torch.manual_seed(0)
    scratch = InteratomicPotential(PaiNN(["H", "C", "O"] if real else ["Cu"], n_features=32, n_interactions=2, cutoff=CUTOFF))
    pretrained = copy.deepcopy(scratch)
    bare = resident([s.replace(energy=None, forces=None) for s in train])
    fit(pretrained, DenoisingScoreMatching(pretrained, args.noise), bare, args.pretraining, 3e-3)
    pretrained.set_energy_scale(units.kB * TEMPERATURE)
    scratch.fit_energy_scale(labelled)

    errors = {}
    for name, model in (("pre-trained by denoising", pretrained), ("from the start", scratch)):
        model.to(manager.device).fit_reference_energies(labelled)
        watch = Watch(model, unseen)
        fit(model, EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(), labelled, args.steps, 2e-3, watch)
        errors[name] = watch.errors

    if manager.rank == 0:
        guess = 1000 * float(np.mean([s.forces.abs().mean() for s in test]))
        panel = (figure := Figure(figsize=(6.5, 4.2), layout="constrained")).subplots()
        for (name, found), color in zip(errors.items(), ("tab:blue", "tab:orange"), strict=True):
            panel.plot(
                25 * np.arange(len(found)), found, "o-", color=color, markersize=3, label=f"{name}: {found[-1]:.0f} at last"
            )
        panel.axhline(guess, color="0.6", linestyle=":", label=f"no force at all: {guess:.0f}")
        panel.set(xlabel="steps with labels", ylabel="force error on unseen structures / meV/Å", yscale="log")
        panel.set_title(f"{'ethanol' if real else 'copper'}, 50 labelled structures")
        panel.legend()
        args.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out / "pretrain_by_denoising.png", dpi=110)
        print(
            f"{manager.world_size} process(es): mean absolute error of forces on {len(test)} unseen structures, meV/Å; none: {guess:.0f}"
        )
        for name, found in errors.items():
            print(f"  {name:25s} {found[0]:6.0f} before labels, {found[-1]:6.0f} after {args.steps} steps with 50")
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()

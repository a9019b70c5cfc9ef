"""Equilibrium structures of a trained potential: Metropolis-adjusted Langevin dynamics beside molecular dynamics.

    python examples/ebm/equilibrium_by_mala.py --temperature 400

A PaiNN learns copper from rattled crystals that ASE's EMT has labelled. Then many crystals at once are brought to a temperature by MALA, whose
test of acceptance makes its draws exact for any step, and by molecular dynamics with friction, which moves as atoms do. Both must give the
same potential energies: their means are compared in units of their standard error, which independent crystals tell.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from matplotlib.figure import Figure
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.distributed import DistributedManager, gather
from nvalchemi.ebm.samplers import EnergySampler, MetropolisAdjustedLangevin, UnderdampedLangevin
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import DDPHook, EMAHook, GradientClipHook, ProgressHook

KELVIN = 8.617333e-5  # eV
FEMTOSECOND = 1 / 10.1805  # Å (u/eV)^1/2
CUTOFF = 4.0
THIN = 5
CRYSTAL = bulk("Cu").repeat(2)  # eight atoms, each with its images


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--temperature", type=float, default=400.0, help="K")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--crystals", type=int, default=24, help="drawn by each way, of all processes together")
    parser.add_argument(
        "--steps", type=int, default=300, help="of each crystal and way that are looked at; a half as many before"
    )
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the picture")
    return parser.parse_args()


def labelled(count: int) -> list[AtomicData]:
    """Crystals rattled as far as atoms go below and somewhat above the temperature, with EMT's energies and forces."""
    structures = []
    for i in range(count):
        atoms = CRYSTAL.copy()
        atoms.rattle(0.04 + 0.16 * i / count, seed=i)
        atoms.calc = EMT()
        atoms.get_forces()
        structures.append(AtomicData.from_atoms(atoms))
    return structures


def trained(args: argparse.Namespace, manager: DistributedManager) -> InteratomicPotential:
    data = InMemoryDataset(labelled(240), dtype=torch.float32, transforms=[NeighborList(CUTOFF)], device=manager.device)
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(["Cu"], n_features=16, n_interactions=2, cutoff=CUTOFF, n_rbf=12))
    model.fit_reference_energies(data)
    model.fit_energy_scale(data)
    average = EMAHook(0.98)
    steps = args.epochs * 30
    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            torch.optim.AdamW, {"lr": 5e-3}, torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": steps}
        ),
        loss_fn=EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        num_epochs=args.epochs,
        distributed_manager=manager,
        hooks=[DDPHook(), GradientClipHook(10.0), average, ProgressHook()],
    ).run(DataLoader(data, batch_size=max(1, 8 // manager.world_size), shuffle=True, seed=0))
    average.copy_to(model)
    return model.to(manager.device)


def energies(sampler: EnergySampler, start: Batch, steps: int, generator: torch.Generator) -> Tensor:
    """Potential energies (crystals, states) on the way, in eV above the crystal at rest."""
    path = sampler.sample(x=start, n_steps=steps, thin=THIN, return_trajectory=True, generator=generator)
    model, rest = sampler.model, Batch.from_data_list([AtomicData.from_atoms(CRYSTAL)]).to(start.device)
    with torch.no_grad():
        found = torch.stack([model(batch) for batch in path], 1)
        return (found - model(rest)).cpu()


def mean(values: Tensor) -> tuple[float, float]:
    """Mean energy, and its standard error: crystals are independent, states of one are not."""
    each = values.mean(1)
    return float(each.mean()), float(each.std() / math.sqrt(len(each)))


def draw(found: dict[str, Tensor], thermal: float, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    histogram, ways = figure.subplots(1, 2)
    for (name, values), color in zip(found.items(), ("tab:blue", "tab:orange"), strict=True):
        counts, edges = torch.histogram(values.flatten(), bins=40, range=(0.0, 2.5 * thermal), density=True)
        label = "{}: {:.3f} ± {:.3f} eV".format(name, *mean(values))
        histogram.stairs(counts, edges, color=color, linewidth=1.5, label=label)
        ways.plot(THIN * torch.arange(1, values.shape[1] + 1), values.mean(0), color=color, label=name)
    histogram.axvline(thermal, color="0.6", linestyle=":", label=f"{thermal:.3f} eV, were it harmonic")
    histogram.set(xlabel="potential energy above the crystal at rest / eV", ylabel="density / eV$^{-1}$", title="all states")
    ways.axhline(thermal, color="0.6", linestyle=":")
    ways.set(xlabel="step", ylabel="mean over the crystals / eV", title="on the way")
    for panel in (histogram, ways):
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, draw in both ways, compare, and draw the picture."""
    args = arguments()
    DistributedManager.initialize()
    manager = DistributedManager()
    model, heat = trained(args, manager), args.temperature * KELVIN
    generator = torch.Generator(manager.device).manual_seed(1 + manager.rank)
    chains = max(2, args.crystals // manager.world_size)
    start = Batch.from_data_list([AtomicData.from_atoms(CRYSTAL)] * chains).to(manager.device)

    mala = MetropolisAdjustedLangevin(model, step_size=0.01, temperature=heat)
    dynamics = UnderdampedLangevin(model, 5 * FEMTOSECOND, 0.02 / FEMTOSECOND, heat, mass="atomic")
    found = {}
    begun = mala.warm_up(x=start, n_steps=args.steps // 2, generator=generator)
    found["MALA"] = torch.cat(gather(energies(mala, begun, args.steps, generator), manager))
    begun = dynamics.sample(x=start, n_steps=args.steps // 2, generator=generator)
    found["molecular dynamics"] = torch.cat(gather(energies(dynamics, begun, args.steps, generator), manager))

    if manager.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(found, 0.5 * 3 * 7 * heat, args.out / "equilibrium_by_mala.png")
        (a, error), (b, other) = map(mean, found.values())
        apart = abs(a - b) / math.hypot(error, other)
        print(
            f"{manager.world_size} process(es): mean potential energy at {args.temperature:g} K, step {mala.step_size:.4f} of MALA"
        )
        print(f"  MALA {a:.4f} ± {error:.4f} eV, molecular dynamics {b:.4f} ± {other:.4f} eV: {apart:.1f} standard errors apart")
        if not apart <= 3:
            raise SystemExit("the two ways do not agree")
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()

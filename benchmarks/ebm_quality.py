"""How good samples are after a fixed number of training steps, for every loss, beside TorchEBM's in the same run.

    python benchmarks/ebm_quality.py [--only persistent denoising] [--data moons] [--steps 500] [--seeds 3]

Needs TorchEBM (``uv sync --group benchmarks``, or ``pip install torchebm``); with ``--alone`` it does without. Both train the same network from the same weights on the same
batches with the same Adam, and draw by their own samplers with the same settings from the same noise: what differs is the losses and the
samplers. Prints one JSON line for each loss and set of points:

- ``distance``: sliced Wasserstein distance from 2000 samples to as many points never seen, the mean over the seeds, with its standard error;
  ``data`` is that of other points, which is the least possible.
- ``coverage``: of the eight parts of a set (a Gaussian, a quarter of a moon, a field), the share that got at least half of the samples due to it.
- ``stray``: share of the samples that are far from every part.
- ``as_good``: whether the mean of the seeds' differences in distance is within Student's 95 % interval around zero, or better, or above it by no
  more than a hundredth of the distance, to which rounding alone leads.
- ``ms``: milliseconds of a training step, of the processor.

Equal random numbers mean different things in two libraries, so single seeds differ in either direction.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from nvalchemi.ebm import fields, losses, samplers
from nvalchemi.ebm.datasets import checkerboard, eight_gaussians, two_moons
from nvalchemi.models import MLPEnergy

BATCH, SAMPLES, HIDDEN = 128, 2000, 128


# -- points and their parts ----------------------------------------------------------------------------------------------


def on_circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], 1)


def gaussian_parts(x: Tensor) -> Tensor:
    """The Gaussian within four standard deviations, -1 where there is none."""
    distance, which = torch.cdist(x, 2 * on_circle(torch.arange(8) * math.pi / 4)).min(1)
    return torch.where(distance < 0.4, which, -1)


def moon_parts(x: Tensor) -> Tensor:
    """A quarter of one of the moons, within four standard deviations."""
    angle = (torch.arange(400) + 0.5) * math.pi / 400
    upper = on_circle(angle)
    distance, which = torch.cdist(x, torch.cat([upper, torch.tensor([1.0, 0.5]) - upper])).min(1)
    return torch.where(distance < 0.4, which // 100, -1)


def field_parts(x: Tensor) -> Tensor:
    """One of the eight fields of side 1, with a margin of 0.05 around it."""
    corners = torch.tensor([[i, j] for i in range(-2, 2) for j in range(-2, 2) if (i + j) % 2]).float()
    beyond = ((x[:, None] - corners - 0.5).abs() - 0.5).amax(2)
    distance, which = beyond.min(1)
    return torch.where(distance < 0.05, which, -1)


@dataclass(frozen=True)
class Points:
    """A set of points, and the eighth of it to which each point belongs."""

    draw: Callable[[int, torch.Generator], Tensor]
    parts: Callable[[Tensor], Tensor]


POINTS = {
    "gaussians": Points(lambda n, g: eight_gaussians(n, g, noise=0.1), gaussian_parts),
    "moons": Points(lambda n, g: two_moons(n, g, noise=0.1), moon_parts),
    "checkerboard": Points(lambda n, g: checkerboard(n, g, range_limit=2), field_parts),
}


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 100) -> float:
    """Root mean square over directions of the distance that mass travels between projections of two sets of as many points."""
    along = on_circle((torch.arange(directions) + 0.5) * math.pi / directions).T
    return float(((a @ along).sort(0)[0] - (b @ along).sort(0)[0]).square().mean().sqrt())


# -- the two libraries ---------------------------------------------------------------------------------------------------


class Field(nn.Module):
    """A vector field as wide as the energies."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Linear(3, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 2)]
        self.net = nn.Sequential(*blocks)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, t[:, None]], 1))


def ours() -> SimpleNamespace:
    return SimpleNamespace(
        energy=lambda: MLPEnergy(2, HIDDEN),
        cd=losses.ContrastiveDivergence,
        exact=losses.ScoreMatching,
        hutchinson=lambda model: losses.ScoreMatching(model, "hutchinson"),
        sliced=losses.SlicedScoreMatching,
        denoising=lambda model, scale: losses.DenoisingScoreMatching(model, scale),
        equilibrium=losses.EquilibriumMatching,
        flow=losses.FlowMatching,
        matching=losses.EnergyMatching,
        noise_contrastive=lambda model, x: losses.NoiseContrastiveEstimation(model, losses.GaussianNoise.fit(x)),
        discrepancy=losses.EnergyDiscrepancy,
        langevin=samplers.LangevinDynamics,
        descent=samplers.GradientDescentSampler,
        of_field=lambda field, kind: fields.EqMEnergy(field, kind),
        follow=lambda field, x: samplers.FlowSampler(field, integrator="heun").sample(x=x, n_steps=50),
    )


def theirs(torchebm: ModuleType) -> SimpleNamespace:
    from torchebm import core, models
    from torchebm import losses as their_losses
    from torchebm import samplers as their_samplers

    class Energy(core.BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLPEnergy(2, HIDDEN).net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).squeeze(-1)

    return SimpleNamespace(
        energy=Energy,
        cd=their_losses.ContrastiveDivergence,
        exact=their_losses.ScoreMatching,
        hutchinson=lambda model: their_losses.ScoreMatching(model, "approx"),
        sliced=their_losses.SlicedScoreMatching,
        denoising=lambda model, scale: their_losses.DenoisingScoreMatching(model, noise_scale=scale),
        equilibrium=their_losses.EquilibriumMatchingLoss,
        flow=their_losses.FlowMatchingLoss,
        matching=their_losses.EnergyMatchingLoss,
        langevin=their_samplers.LangevinDynamics,
        descent=their_samplers.GradientDescentSampler,
        of_field=lambda field, kind: models.EqMEnergy(field, "implicit" if kind == "none" else kind),
        follow=lambda field, x: their_samplers.FlowSampler(field, integrator="heun").sample(x=x, n_steps=50),
    )


@dataclass(frozen=True)
class Trial:
    """A loss of a library, on a model, and how samples are drawn afterwards."""

    loss: Callable[[SimpleNamespace, Any, Tensor], Any]
    model: Callable[[SimpleNamespace], nn.Module] = field(default=lambda library: library.energy())
    draw: Callable[[SimpleNamespace, Any, Tensor], Tensor] = field(
        default=lambda library, model, x: library.langevin(model, step_size=0.01, clamp=(-4.0, 4.0)).sample(x=x, n_steps=300)
    )
    lr: float = 3e-3
    alone: bool = False  # whether TorchEBM has nothing of the kind


def a_field(library: SimpleNamespace) -> nn.Module:
    return Field()


def downhill(kind: str | None) -> Callable[[SimpleNamespace, Any, Tensor], Tensor]:
    """Down the field, or the energy that is made of it, for a time of 0.35.

    A field learned exactly, of height 4 that decays from t = 0.8 on, brings a sample to 0.8 of its way by the time 0.2, and from there nearer by e in
    each 0.05. A longer descent is worse in either library: where data lie along a curve or in an area, it goes on to few of their points.
    """

    def draw(library: SimpleNamespace, model: Any, x: Tensor) -> Tensor:
        energy = model if kind is None else library.of_field(model, kind)
        return library.descent(energy, step_size=0.01).sample(x=x, n_steps=35)

    return draw


def cold(library: SimpleNamespace, model: Any, x: Tensor) -> Tensor:
    """The density of energy matching has the temperature 0.15, and its flow brings noise to the data in the time 1; longer is worse in either library."""
    return library.langevin(model, step_size=0.01, noise_scale=math.sqrt(0.15)).sample(x=x, n_steps=100)


def chains(persistent: bool) -> Callable[[SimpleNamespace, Any, Tensor], Any]:
    def loss(library: SimpleNamespace, model: Any, x: Tensor) -> Any:
        return library.cd(model, library.langevin(model, step_size=0.01), k_steps=10, persistent=persistent, buffer_size=2048)

    return loss


TRIALS = {
    "score_matching": Trial(lambda library, model, x: library.exact(model)),
    "hutchinson": Trial(lambda library, model, x: library.hutchinson(model)),
    "sliced": Trial(lambda library, model, x: library.sliced(model)),
    "denoising": Trial(lambda library, model, x: library.denoising(model, 0.1)),
    "contrastive": Trial(chains(False), lr=1e-3),
    "persistent": Trial(chains(True), lr=1e-3),
    "noise_contrastive": Trial(lambda library, model, x: library.noise_contrastive(model, x), alone=True),
    "discrepancy": Trial(lambda library, model, x: library.discrepancy(model), alone=True),
    "flow": Trial(lambda library, model, x: library.flow(model), a_field, lambda library, model, x: library.follow(model, x)),
    "equilibrium": Trial(lambda library, model, x: library.equilibrium(model), a_field, downhill("none")),
    "equilibrium_dot": Trial(lambda library, model, x: library.equilibrium(model, energy_type="dot"), a_field, downhill("dot")),
    "equilibrium_energy": Trial(lambda library, model, x: library.equilibrium(model), draw=downhill(None), alone=True),
    "energy_matching": Trial(lambda library, model, x: library.matching(model, n_langevin_steps=20), draw=cold, lr=1e-3),
}


# -- one run -------------------------------------------------------------------------------------------------------------


def trained(trial: Trial, library: SimpleNamespace, points: Points, steps: int, seed: int) -> tuple[Tensor, float]:
    """Samples after ``steps`` steps, and seconds a step."""
    torch.manual_seed(seed)
    model = trial.model(library)
    data = torch.Generator().manual_seed(1000 + seed)
    batches = [points.draw(BATCH, data) for _ in range(min(steps, 200))]
    loss_fn = trial.loss(library, model, torch.cat(batches))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    warm_up = steps // 2 if trial is TRIALS["energy_matching"] else 0
    start = time.process_time()
    for step in range(steps):
        if warm_up:
            loss_fn.lambda_cd = 0.0 if step < warm_up else 2.0
        found = loss_fn(batches[step % len(batches)])
        optimizer.zero_grad()
        (found[0] if isinstance(found, tuple) else found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    seconds = (time.process_time() - start) / steps
    torch.manual_seed(2000 + seed)
    return trial.draw(library, model, torch.randn(SAMPLES, 2)).detach(), seconds


def measured(points: Points, samples: Tensor, seed: int) -> dict[str, float]:
    unseen = points.draw(SAMPLES, torch.Generator().manual_seed(3000 + seed))
    parts = points.parts(samples)
    shares = torch.bincount(parts[parts >= 0], minlength=8) / len(samples)
    return {
        "distance": sliced_wasserstein(samples, unseen),
        "coverage": float((shares >= 0.5 / 8).float().mean()),
        "stray": float((parts < 0).float().mean()),
    }


def error(values: list[float]) -> float:
    """Standard error of a mean; 0 where one value tells nothing of it."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def summary(figures: list[dict[str, float]], seconds: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: round(statistics.mean(f[name] for f in figures), 4) for name in ("distance", "coverage", "stray")
    }
    return found | {
        "error": round(error([f["distance"] for f in figures]), 4),
        "ms": round(1e3 * statistics.mean(seconds), 2),
    }


def compare(name: str, kind: str, libraries: dict[str, SimpleNamespace], steps: int, seeds: int) -> dict[str, Any]:
    trial, points = TRIALS[name], POINTS[kind]
    figures: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
    seconds: dict[str, list[float]] = {library: [] for library in libraries}
    least = []
    for seed in range(seeds):
        least.append(measured(points, points.draw(SAMPLES, torch.Generator().manual_seed(4000 + seed)), seed)["distance"])
        for label, library in libraries.items():
            samples, each = trained(trial, library, points, steps, seed)
            figures[label].append(measured(points, samples, seed))
            seconds[label].append(each)
    line: dict[str, Any] = {
        "loss": name,
        "points": kind,
        "steps": steps,
        "seeds": seeds,
        "data": round(statistics.mean(least), 4),
    }
    line |= {label: summary(figures[label], seconds[label]) for label in libraries}
    if len(libraries) > 1:
        pairs = zip(figures["ours"], figures["torchebm"], strict=True)
        differences = [mine["distance"] - other["distance"] for mine, other in pairs]
        chance = float(student.ppf(0.975, seeds - 1)) * error(differences) if seeds > 1 else 0.0
        line["as_good"] = statistics.mean(differences) <= max(chance, 0.01 * line["torchebm"]["distance"])
    return line


def main() -> None:
    """Train, draw, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--data", nargs="*", choices=POINTS, default=list(POINTS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without TorchEBM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = {"ours": ours()}
    if not options.alone:
        import torchebm

        libraries["torchebm"] = theirs(torchebm)
    for kind in options.data:
        for name in options.only:
            chosen = {"ours": libraries["ours"]} if TRIALS[name].alone else libraries
            print(json.dumps(compare(name, kind, chosen, options.steps, options.seeds)), flush=True)


if __name__ == "__main__":
    main()

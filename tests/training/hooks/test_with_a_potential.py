"""The hooks around a real potential: forces by a derivative, ragged batches, a shuffled loader."""

import pytest
import torch

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.data.transforms import NeighborList
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.testing import assert_resumes
from nvalchemi.training import (
    EnergyMSELoss,
    Every,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
    evaluate,
    on,
)
from nvalchemi.training.hooks import (
    CheckpointHook,
    EMAHook,
    GradientClipHook,
    MetricsHook,
    MixedPrecisionHook,
    SpikeHook,
)

CUTOFF = 3.0


CORNERS = 1.3 * torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])


def molecules(count, seed=0):
    """Small clusters whose atoms are on springs: energies and forces that a net can learn."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(count):
        n = 3 + i % 3
        moved = 0.2 * torch.randn(n, 3, generator=generator)
        energy = 0.5 * moved.double().square().sum()
        data.append(AtomicData(CORNERS[:n] + moved, torch.tensor([1, 6, 8, 1, 6])[:n], energy=energy, forces=-moved))
    return data


def loader(count=14, batch_size=4, seed=0, shuffle=True):
    data = InMemoryDataset(molecules(count, seed), transforms=[NeighborList(CUTOFF)])
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, seed=5)


def potential():
    torch.manual_seed(0)
    return InteratomicPotential(PaiNN(n_features=8, n_interactions=2, cutoff=CUTOFF), cutoff=CUTOFF)


def loss():
    return EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss()


def strategy(model, hooks, **kwargs):
    settings = {"num_steps": 6, "optimizer_configs": OptimizerConfig(torch.optim.AdamW, {"lr": 5e-3}), **kwargs}
    return TrainingStrategy(models=model, loss_fn=loss(), hooks=hooks, **settings)


def test_b104_validation_with_forces_and_averaged_weights():
    model, ema = potential(), EMAHook(0.5)
    kept, grads = [], []

    def callback(batch, predictions, output):
        kept.extend(predictions.values())
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    data = loader(seed=1, shuffle=False)
    config = ValidationConfig(validation_data=data, every_n_steps=3, batch_callback=callback)
    ctx = strategy(model, [ema], validation_config=config).run(loader())
    assert kept and not any(value.requires_grad for value in kept)
    assert all(torch.equal(a, b) for before in grads[:4] for a, b in zip(before, grads[0], strict=True) if a is not None)

    alone = potential()
    ema.copy_to(alone)
    errors, energy_errors = [], []
    for batch in data:  # a plain forward, outside of anything
        alone.eval()
        found = alone.predict(batch, outputs=("energy", "forces"))
        errors.append((found["forces"] - batch.forces).abs().flatten())
        energy_errors.append((found["energy"] - batch.energy).abs())
    assert ctx.validation["forces_mae"] == pytest.approx(torch.cat(errors).double().mean().item(), rel=1e-6)
    assert ctx.validation["energy_mae"] == pytest.approx(torch.cat(energy_errors).mean().item(), rel=1e-12)
    assert ctx.validation == evaluate(alone, data, loss(), outputs=(), step=6)


def test_b108_how_often_is_validated_changes_no_training_loss():
    def losses(every):
        seen = []

        @on(TrainingStage.STEP_END)
        def keep(ctx):
            seen.append(ctx.loss.total.item())

        class Shaken(InteratomicPotential):
            """With a random number of torch's global stream in every forward of training, as dropout has."""

            def predict(self, batch, outputs=("energy", "forces")):
                found = super().predict(batch, outputs)
                noise = torch.nn.functional.dropout(torch.ones(()), 0.5, self.training)
                return {name: value * noise for name, value in found.items()}

        torch.manual_seed(0)
        model = Shaken(PaiNN(n_features=8, n_interactions=1, cutoff=CUTOFF), cutoff=CUTOFF)
        data = loader(seed=1)
        config = None if every is None else ValidationConfig(validation_data=data, every_n_steps=every)
        torch.manual_seed(1)
        strategy(model, [keep, EMAHook(0.9)], validation_config=config, num_steps=8).run(loader())
        return seen

    never = losses(None)
    assert losses(2) == never
    assert losses(5) == never


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_energies_in_float64(dtype):
    losses, kinds = [], set()

    @on(TrainingStage.STEP_END)
    def keep(ctx):
        losses.append(ctx.loss.total.item())

    class Watched(InteratomicPotential):
        def predict(self, batch, outputs=("energy", "forces")):
            found = super().predict(batch, outputs)
            kinds.add((found["energy"].dtype, found["forces"].dtype))
            return found

    torch.manual_seed(0)
    model = Watched(PaiNN(n_features=8, n_interactions=2, cutoff=CUTOFF), cutoff=CUTOFF)
    ctx = strategy(model, [MixedPrecisionHook(dtype, init_scale=1024.0), SpikeHook(factor=None), keep], num_steps=80).run(
        loader(8, 8)
    )
    assert kinds == {(torch.float64, torch.float32)}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert ctx.progress.skipped <= 3
    assert losses[-1] < 0.5 * losses[0]


def test_mixed_precision_is_close_to_the_full():
    model = potential()
    batch = next(iter(loader(8, 8)))
    exact = model.predict(batch, outputs=("energy", "forces"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.predict(batch, outputs=("energy", "forces"))
    scale = exact["forces"].norm()
    assert ((rough["forces"] - exact["forces"]).norm() / scale).item() < 0.05


def test_a_potential_with_every_hook_resumes():
    def factory(folder):
        hooks = [
            CheckpointHook(folder / "checkpoints", Every(steps=3)),
            EMAHook(0.9),
            GradientClipHook(1.0),
            MetricsHook(folder, Every(steps=2)),
            SpikeHook(factor=2.0, window=5),
        ]
        config = ValidationConfig(validation_data=loader(6, seed=1, shuffle=False), every_n_epochs=1)
        return strategy(potential(), hooks, validation_config=config, accumulate=2), loader()

    assert_resumes(factory, steps=9, stop_at=5)


def test_the_structures_of_a_bad_batch_are_those_with_the_bad_label():
    data = molecules(8)
    data[5] = data[5].replace(energy=torch.tensor(1e308, dtype=torch.float64))
    reasons = []

    @on(TrainingStage.OPTIMIZER_SKIPPED)
    def note(ctx):
        reasons.append(ctx.skip_reason)

    dataset = InMemoryDataset(data, transforms=[NeighborList(CUTOFF)])
    strategy(potential(), [SpikeHook(), note], num_epochs=1, num_steps=None).run(DataLoader(dataset, batch_size=2))
    assert len(reasons) == 1
    assert reasons[0].startswith("the loss is inf; structures: ") and reasons[0].endswith(": 4, 5")

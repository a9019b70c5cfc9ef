from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    ArrayZarrReader,
    ArrayZarrWriter,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchSampler,
    DataLoader,
    Dataset,
    InMemoryDataset,
    RandomSampler,
    collate,
)
from nvalchemi.data.transforms import NeighborList, Transform
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import same, same_batch, structure

LABELS = frozenset({"energy", "forces"})


@pytest.fixture(scope="module")
def data() -> list[AtomicData]:
    return [structure(seed, 1 + seed % 7, LABELS) for seed in range(40)]


@pytest.fixture(scope="module")
def store(data: list[AtomicData], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "a.zarr"
    AtomicDataZarrWriter(path).write(data)
    return path


class Noise(Transform):
    """Shakes positions with NumPy's numbers, seeded from the generator."""

    def __call__(self, data: AtomicData, generator: torch.Generator) -> AtomicData:
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        return data.replace(positions=data.positions + torch.from_numpy(random.normal(0, 0.01, data.positions.shape)))


def global_noise(data: AtomicData) -> AtomicData:
    """What a user writes who does not know of `Transform`."""
    return data.replace(positions=data.positions + torch.from_numpy(np.random.normal(0, 0.01, data.positions.shape)))  # noqa: NPY002


# -- reading ---------------------------------------------------------------------------------------------------------------------------


def test_reads_in_the_asked_for_order_and_says_where_from(data: list[AtomicData], store: Path) -> None:
    dataset = Dataset(AtomicDataZarrReader(store))
    batch = dataset.read_many([7, 0, 7, 39])
    assert all(same(a, data[i]) for a, i in zip(batch.to_data_list(), [7, 0, 7, 39], strict=True))
    assert batch.sample_index.tolist() == [7, 0, 7, 39]
    assert batch.dataset_names == (str(store),)
    assert batch.describe(3) == f"sample 39 of {store}"
    assert same(dataset[-1], data[-1])
    assert len(list(dataset)) == 40
    assert dataset.num_atoms.tolist() == [d.num_atoms for d in data]
    assert set(dataset.field_names) == {"positions", "atomic_numbers", "energy", "forces"}


def test_cast_keeps_energies(store: Path) -> None:
    batch = Dataset(AtomicDataZarrReader(store), dtype=torch.float32).read_many([1, 2])
    assert {batch.positions.dtype, batch.forces.dtype} == {torch.float32}
    assert batch.energy.dtype == torch.float64
    assert batch.sample_index.tolist() == [1, 2]


@pytest.mark.parametrize("bad", [[40], [-1], [0.5], [[1]], [True]])
def test_wrong_indices(store: Path, bad: list) -> None:
    for dataset in (Dataset(AtomicDataZarrReader(store)), InMemoryDataset(AtomicDataZarrReader(store))):
        with pytest.raises(DataError, match=r"a\.zarr"):
            dataset.read_many(bad)
    with pytest.raises(IndexError, match="40 samples"):
        dataset[40]


def test_wrong_arguments(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    with pytest.raises(ConfigError, match="reader"):
        Dataset([1, 2])
    with pytest.raises(ConfigError, match=r"transforms=\[\.\.\.\]"):
        Dataset(reader, transforms=global_noise)
    with pytest.raises(ConfigError, match="float32 or float64"):
        Dataset(reader, dtype=torch.float16)


def test_b11_wanted_and_present_fields_are_listed(store: Path) -> None:
    dataset = Dataset(AtomicDataZarrReader(store))
    dataset.require_fields("energy", "forces")
    with pytest.raises(DataError, match=r"lacks stress; found: the fields .*energy.*needed: energy, stress"):
        dataset.require_fields("energy", "stress")


def test_b13_labels_that_only_some_structures_have(tmp_path: Path) -> None:
    full = structure(1, 3, LABELS | {"stress"})
    nan_stress = structure(2, 2, LABELS).replace(stress=torch.full((3, 3), float("nan"), dtype=torch.float64))
    no_energy = structure(3, 4, frozenset({"forces", "stress"}))
    no_stress = structure(4, 1, LABELS)
    data = [full, nan_stress, no_energy, no_stress]
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(data)
    shift = lambda d: d.replace(positions=d.positions + 1.0)  # noqa: E731
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    for dataset in (
        Dataset(reader),
        InMemoryDataset(data),
        Dataset(reader, transforms=[shift]),
        InMemoryDataset(data, transforms=[shift]),
    ):
        batch = dataset.read_many([3, 2, 1, 0])
        assert batch.has("energy").tolist() == [True, False, True, True]
        assert batch.has("stress").tolist() == [False, True, True, True]
        assert batch.energy.isnan().tolist() == [False, True, False, False]
        assert torch.equal(batch.stress[3], full.stress)
        without = dataset.read_many([3])  # no structure has it, and still the field is there
        assert "stress" in without
        assert not without.has("stress").any()
        assert without.stress.shape == (1, 3, 3)


# -- transforms ------------------------------------------------------------------------------------------------------------------------


def test_draws_depend_on_seed_epoch_and_sample_alone(store: Path) -> None:
    reader = AtomicDataZarrReader(store)
    dataset = Dataset(reader, transforms=[Noise()], seed=5)
    together = dataset.read_many([3, 8, 21], epoch=2).to_data_list()
    alone = dataset.read_many([8], epoch=2)[0]
    assert same(together[1], alone)
    resident = InMemoryDataset(reader, transforms=[Noise()], seed=5)
    assert same_batch(resident.read_many([8, 3], epoch=2), dataset.read_many([8, 3], epoch=2))
    others = [
        dataset.read_many([8], epoch=3)[0],
        dataset.read_many([8], epoch=2, stream=1)[0],
        Dataset(reader, transforms=[Noise()], seed=6).read_many([8], epoch=2)[0],
    ]
    assert len({x.positions[0, 0].item() for x in [alone, *others]}) == 4


def test_two_random_transforms_draw_different_numbers(store: Path) -> None:
    class Tag(Transform):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, data: AtomicData, generator: torch.Generator) -> AtomicData:
            from nvalchemi.data import Level

            return data.replace(
                levels={self.name: Level.SYSTEM}, **{self.name: torch.randn((), generator=generator, dtype=torch.float64)}
            )

    reader = AtomicDataZarrReader(store)
    for transforms in ([Tag("a"), Tag("b")], [Tag("a"), NeighborList(3.0), Tag("b")]):
        batch = Dataset(reader, transforms=transforms).read_many([0, 1, 2])
        draws = torch.cat([batch["a"], batch["b"]]).tolist()
        assert len(set(draws)) == 6


def test_neighbour_lists_are_made_for_the_batch(store: Path, data: list[AtomicData]) -> None:
    batch = Dataset(AtomicDataZarrReader(store), transforms=[NeighborList(3.0)]).read_many([6, 13])
    assert batch.neighbor_cutoff == 3.0
    assert torch.equal(batch.edge_index, NeighborList(3.0)(Batch.from_data_list([data[6], data[13]])).edge_index)
    assert batch.sample_index.tolist() == [6, 13]


def test_errors_in_a_transform_name_it_and_the_sample(store: Path) -> None:
    def failing(data: AtomicData) -> AtomicData:
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large") as caught:
        Dataset(AtomicDataZarrReader(store), transforms=[failing]).read_many([4, 2])
    assert "failing" in caught.value.__notes__[0]
    assert "sample 4" in caught.value.__notes__[0]
    with pytest.raises(DataError, match="gave no structure"):
        Dataset(AtomicDataZarrReader(store), transforms=[lambda d: None]).read_many([4, 2])


# -- checks ----------------------------------------------------------------------------------------------------------------------------


class Damaged:
    """A reader of structures of which some have bad positions."""

    name = "old.zarr"
    field_names = ("positions", "atomic_numbers")

    def __init__(self, data: list[AtomicData], bad: dict[int, float]) -> None:
        self.batch = Batch.from_data_list(data)
        for sample, value in bad.items():
            self.batch.positions[int(self.batch.atom_offsets[sample]), 1] = value

    def __len__(self) -> int:
        return len(self.batch)

    def read_many(self, indices: np.ndarray) -> Batch:
        return self.batch.index_select(indices)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_positions_that_are_not_finite_are_named(data: list[AtomicData], value: float) -> None:
    reader = Damaged(data, {5: value})
    dataset = Dataset(reader)
    dataset.read_many([4, 6])
    with pytest.raises(DataError, match=r"positions of sample 5 of old\.zarr are not finite at atom 0"):
        dataset.read_many([6, 5, 4])
    with pytest.raises(DataError, match=r"sample 5 of old\.zarr"):
        next(iter(DataLoader(dataset, batch_size=40)))
    with pytest.raises(DataError, match=r"sample 5 of old\.zarr"):
        InMemoryDataset(reader)
    assert not Dataset(reader, check_finite=False).read_many([6, 5, 4]).positions.isfinite().all()
    InMemoryDataset(reader, check_finite=False)


def test_large_finite_positions_pass(data: list[AtomicData]) -> None:
    Dataset(Damaged([d.to(dtype=torch.float32) for d in data], {5: 3e38, 6: 3e38})).read_many(range(40))


# -- dense data ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [True, False])
def test_dense_data_from_a_store_and_from_memory(tmp_path: Path, single: bool) -> None:
    x = torch.randn(30, 2, 3, generator=torch.Generator().manual_seed(0))
    source = x if single else {"x": x, "y": torch.arange(30)}
    ArrayZarrWriter(tmp_path / "x.zarr").write(source)
    reader = ArrayZarrReader(tmp_path / "x.zarr")
    for dataset in (Dataset(reader), InMemoryDataset(reader), InMemoryDataset(source)):
        assert len(dataset) == 30
        rows = dataset.read_many([4, 4, 0])
        assert torch.equal(rows if single else rows["x"], x[[4, 4, 0]])
        assert torch.equal(dataset[3] if single else dataset[3]["x"], x[3])
        batches = list(DataLoader(dataset, batch_size=8, shuffle=True))
        assert sorted(len(b if single else b["x"]) for b in batches) == [6, 8, 8, 8]
        if not single:
            assert sorted(int(i) for b in batches for i in b["y"]) == list(range(30))
        with pytest.raises(DataError, match="no structures"):
            _ = dataset.num_atoms
        assert Dataset(reader, dtype=torch.float64).read_many([1])["x"].dtype == torch.float64 if not single else True


def test_dense_transforms_and_checks() -> None:
    class Jitter(Transform):
        def __call__(self, x, generator):
            return x + torch.randn(x.shape, generator=generator)

    x = torch.zeros(10, 3)
    dataset = InMemoryDataset(x, transforms=[Jitter()], name="zeros")
    assert torch.equal(dataset.read_many([1, 2], epoch=1)[1], dataset.read_many([2], epoch=1)[0])
    assert not torch.equal(dataset.read_many([2], epoch=1), dataset.read_many([2], epoch=2))
    x = torch.zeros(10, 3)
    x[7, 1] = float("nan")
    with pytest.raises(DataError, match="values of sample 7 of memory are not finite"):
        InMemoryDataset(x)


# -- torch's loader and its worker processes -------------------------------------------------------------------------------------------


def _torch_loader(dataset: Dataset, workers: int, **kwargs) -> TorchLoader:
    return TorchLoader(dataset, batch_size=5, num_workers=workers, collate_fn=collate, timeout=60 if workers else 0, **kwargs)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_b05_forked_workers_read_after_the_parent_has_read(data: list[AtomicData], store: Path, workers: int) -> None:
    dataset = Dataset(AtomicDataZarrReader(store))
    dataset.read_many(range(40))
    next(iter(DataLoader(dataset, batch_size=3)))  # and a thread may be at work
    batches = list(_torch_loader(dataset, workers))
    assert [i for batch in batches for i in batch.sample_index.tolist()] == list(range(40))
    assert all(same(a, data[i]) for i, a in enumerate(d for batch in batches for d in batch.to_data_list()))


def test_data_sets_can_be_pickled(store: Path) -> None:
    for dataset in (Dataset(AtomicDataZarrReader(store), transforms=[Noise()]), InMemoryDataset(AtomicDataZarrReader(store))):
        dataset.read_many([0])
        copy = pickle.loads(pickle.dumps(dataset))
        assert same_batch(copy.read_many([3, 1]), dataset.read_many([3, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_started_in_other_ways(store: Path, method: str) -> None:
    dataset = Dataset(AtomicDataZarrReader(store))
    dataset.read_many([0])
    batches = list(_torch_loader(dataset, 2, multiprocessing_context=method))
    assert [i for batch in batches for i in batch.sample_index.tolist()] == list(range(40))


def _draws(loader: TorchLoader, dataset: Dataset, epochs: int, tell: bool) -> list[list[float]]:
    """First coordinate of each sample, relative to the stored one, per epoch."""
    found = []
    for epoch in range(epochs):
        if tell:
            dataset.set_epoch(epoch)
        values = {}
        for batch in loader:
            for i, d in zip(batch.sample_index.tolist(), batch.to_data_list(), strict=True):
                values[i] = float(d.positions[0, 0])
        found.append([values[i] for i in range(40)])
    return found


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True), (4, False)])
@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_b21_random_transforms_differ_between_workers_and_epochs_and_repeat(
    store: Path, workers: int, persistent: bool, tell: bool
) -> None:  # B21
    reader = AtomicDataZarrReader(store)
    stored = np.array([float(d.positions[0, 0]) for d in Dataset(reader).read_many(range(40)).to_data_list()])

    def run() -> np.ndarray:
        torch.manual_seed(11)
        dataset = Dataset(reader, transforms=[Noise()], seed=1)
        return (
            np.array(_draws(_torch_loader(dataset, workers, shuffle=True, persistent_workers=persistent), dataset, 2, tell))
            - stored
        )

    first, again = run(), run()
    assert len(np.unique(first.round(13))) == 80
    assert np.array_equal(first, again)
    if tell:  # then the draws are those of the package's own loader, whoever makes them
        own = DataLoader(Dataset(reader, transforms=[Noise()], seed=1), batch_size=7, shuffle=True)
        own.set_epoch(1)
        values = {
            i: float(d.positions[0, 0]) for b in own for i, d in zip(b.sample_index.tolist(), b.to_data_list(), strict=True)
        }
        assert np.array_equal(np.array([values[i] for i in range(40)]) - stored, first[1])


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_numpys_global_numbers_differ_between_workers_and_epochs_and_repeat(store: Path, workers: int) -> None:  # B21
    dataset = Dataset(AtomicDataZarrReader(store), transforms=[global_noise])
    stored = np.array(
        [float(d.positions[0, 0]) for d in Dataset(AtomicDataZarrReader(store)).read_many(range(40)).to_data_list()]
    )
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(np.array(_draws(_torch_loader(dataset, workers), dataset, 2, False)) - stored)
    assert len(np.unique(runs[0].round(13))) == 80
    assert np.array_equal(*runs)


def test_torchs_loader_takes_our_samplers(store: Path) -> None:
    dataset = Dataset(AtomicDataZarrReader(store))
    sampler = BatchSampler(RandomSampler(dataset, seed=2), 6)
    loader = TorchLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    assert [batch.sample_index.tolist() for batch in loader] == list(sampler)
    subset = torch.utils.data.Subset(dataset, [5, 3, 30])
    (batch,) = TorchLoader(subset, batch_size=3, collate_fn=collate)
    assert batch.sample_index.tolist() == [5, 3, 30]


def test_collate_takes_single_samples(data: list[AtomicData]) -> None:
    assert same_batch(collate(data[:3]), Batch.from_data_list(data[:3]))
    assert collate([torch.zeros(2), torch.ones(2)]).shape == (2, 2)
    assert collate([{"x": torch.zeros(2)}, {"x": torch.ones(2)}])["x"].shape == (2, 2)
    with pytest.raises(DataError, match="str"):
        collate(["a"])

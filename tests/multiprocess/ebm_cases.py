"""What the ranks do in test_ebm_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed import exchange, members
from nvalchemi.ebm.buffer import ReplayBuffer
from nvalchemi.ebm.couplings import SinkhornCoupling


def exchanged(manager) -> Any:
    rows = torch.arange(5)[:, None] + 10 * manager.rank
    send, receive = ([2, 3], [2, 1]) if manager.rank == 0 else ([1, 4], [3, 4])
    return exchange(rows, send, receive, manager).flatten().tolist()


def within_a_group(manager) -> Any:
    group = dist.new_group([1])  # both ranks must call
    member = None if manager.rank == 0 else members(group)
    everybody = members()
    return everybody.rank, everybody.world_size, member and (member.rank, member.world_size)


def mixed(manager, size: int, seed: int) -> Any:
    buffer = ReplayBuffer(size)
    buffer.initialize(torch.arange(size)[:, None] + 1000 * manager.rank)
    buffer.mix_across_ranks(manager, torch.Generator().manual_seed(seed + manager.rank))
    slots, samples = buffer.draw(size)
    assert torch.equal(samples, buffer.samples[slots])
    return buffer.samples.flatten().tolist()


def mixed_structures(manager, size: int) -> Any:
    data = [
        AtomicData(
            torch.zeros(1 + i % 3, 3) + torch.arange(1 + i % 3)[:, None], [1] * (1 + i % 3), charge=i + 100.0 * manager.rank
        )
        for i in range(size)
    ]
    buffer = ReplayBuffer(size)
    buffer.initialize(Batch.from_data_list(data))
    buffer.mix_across_ranks(dist.group.WORLD)
    batch = buffer.samples
    assert batch.num_nodes_per_graph.tolist() == [1 + int(c) % 100 % 3 for c in batch.charge]
    return batch.charge.tolist()


def pooled(seed: int, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sources, targets and the targets' labels of every rank."""
    generator = torch.Generator().manual_seed(seed)
    parts, start = [], 0
    for n in rows:
        x0, x1 = torch.randn(n, 2, generator=generator), 3 * torch.randn(n, 2, generator=generator)
        parts.append((x0, x1, torch.arange(start, start + n)))
        start += n
    return parts


def coupled(manager, rows: list[int], reg: float, by_group: bool) -> Any:
    x0, x1, labels = pooled(11, rows)[manager.rank]
    coupling = SinkhornCoupling(reg=reg, process_group=dist.group.WORLD if by_group else manager)
    generator = torch.Generator().manual_seed(5 + manager.rank)
    pairs = coupling(x0, x1, generator=generator, conditions={"label": labels, "double": [2 * labels]})
    assert torch.equal(pairs.x0, x0)
    assert torch.equal(pairs.conditions["double"][0], 2 * pairs.conditions["label"])
    return pairs.x1.tolist(), pairs.conditions["label"].tolist()

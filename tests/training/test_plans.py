"""A plan is made once for tensors of the same names, kinds and shares."""

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.training.layout import shard_file
from nvalchemi.training.plans import Plans, same_memory

MANAGER = single_process("cpu")


def test_each_tensor_is_written_once():
    weight = torch.ones(3)
    plan = Plans().of({"a": weight, "b": weight, "c": torch.ones(2, 2), "d": weight[:2]}, MANAGER, shard_file)
    assert plan.same == {"b": "a"}
    assert plan.own == [("a", "a"), ("c", "c"), ("d", "d")]
    assert plan.blocks["c"] == [["shared-00000.safetensors", "c", [0, 0], [2, 2]]]
    assert plan.meshes == []


def test_empty_tensors_are_no_others():
    assert same_memory({"a": torch.empty(0), "b": torch.empty(0)}) == {}


def test_the_same_memory_with_another_meaning_is_another_tensor():
    square = torch.zeros(2, 2)
    assert same_memory({"a": square, "b": square.T, "c": square.view(torch.int32), "d": square.view(4)}) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"c": torch.ones(1)},
        lambda t: {"a": t["a"]},
        lambda t: t | {"b": t["b"].double()},
        lambda t: t | {"b": torch.ones(4)},
        lambda t: t | {"b": t["a"]},
    ],
    ids=["more", "fewer", "dtype", "shape", "tied"],
)
def test_it_is_made_anew_where_something_changes(change):
    plans, tensors = Plans(), {"a": torch.ones(3), "b": torch.zeros(3)}
    first = plans.of(tensors, MANAGER, shard_file)
    assert plans.of({name: tensor + 1 for name, tensor in tensors.items()}, MANAGER, shard_file) is first
    second = plans.of(change(tensors), MANAGER, shard_file)
    assert second is not first
    assert plans.of(change(tensors), MANAGER, shard_file).own == second.own

import pytest
import torch

from nvalchemi.cli.threads import cpu_threads


@pytest.mark.parametrize("count", [1, 2])
def test_threads_are_as_before_afterwards_also_after_an_error(count):
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), cpu_threads(count):
        assert torch.get_num_threads() == count
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_none_leaves_the_number_alone():
    before = torch.get_num_threads()
    with cpu_threads(None):
        assert torch.get_num_threads() == before

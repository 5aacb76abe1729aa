"""The collectives of ``bagua.torch_api`` work in place; names of Bagua 0.9 with another order are not there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.errors import InvalidReduceOpError


def among_some() -> list[list[float]]:
    """The collectives among ranks 1 and 3 of four, who are named in each way."""
    odd = bagua.new_group([1, 3])
    forms = [odd, odd.global_communicator]
    if dist.is_initialized():
        forms.append(dist.new_group([1, 3]))
    seen = []
    for form in forms:
        own = torch.tensor([bagua.get_rank() + 1.0])
        bagua.allreduce(everywhere := own.clone(), comm=form)
        bagua.reduce(at_one := own.clone(), 1, comm=form)
        bagua.broadcast(sent := own.clone(), 1, comm=form)
        seen.append([everywhere.item(), at_one.item(), sent.item()])
    return seen


def test_the_group_is_taken_in_each_form(ranks) -> None:
    first, second, third, fourth = ranks(4, among_some)
    assert len({len(seen) for seen in (first, second, third, fourth)}) == 1
    for seen in zip(first, second, third, fourth, strict=True):
        assert seen == ([1, 1, 1], [6, 2, 4], [3, 3, 3], [6, 6, 4])


def send_first() -> None:
    own = torch.ones(1)
    with pytest.raises(InvalidReduceOpError):
        bagua.allreduce(own, torch.zeros(1))
    assert own.item() == 1


def test_a_second_tensor_is_refused(thread_ranks) -> None:
    thread_ranks(2, send_first)


@pytest.mark.parametrize("name", ["allgather", "alltoall", "scatter"])
def test_a_name_with_another_order_says_where_it_is(name) -> None:
    with pytest.raises(AttributeError, match=rf"bagua\.comm\.{name} has it"):
        getattr(bagua, name)

"""Processes mix with neighbours over Gloo, where several exchanges may be under way."""

from __future__ import annotations

import torch

import bagua.comm
from bagua.primitives import neighbour_average
from bagua.topology import Round, create
from tests.primitives.test_neighbours import assert_mixed, scratch, values
from tests.topologies import STAR


def _start_all(rounds: list[Round]) -> list[torch.Tensor]:
    group = bagua.comm.get_default_group()
    tensors = [values(group.rank) for _ in rounds]
    works = [
        neighbour_average(tensor, mixing, group.global_communicator, scratch(torch.float32), async_op=True)
        for tensor, mixing in zip(tensors, rounds, strict=True)
    ]
    for work in works:
        if work is not None:
            work.wait()
    return tensors


def test_several_exchanges_are_under_way_at_the_same_time(process_ranks):
    rounds = [create("shift_one").round(3, 1), create("shift_one").round(3, 2), STAR.round(3, 1)]
    results = process_ranks(3, _start_all, rounds)
    for number, mixing in enumerate(rounds):
        assert_mixed([tensors[number] for tensors in results], [mixing])

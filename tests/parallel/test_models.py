"""Ranks whose models differ, from the start or after a change of one of them, are told what differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.errors import CollectiveMismatchError
from tests.harness import assert_same_on_all_ranks, loss_of, mlp, sgd, snapshot
from tests.parallel.test_training import frozen
from tests.parallel.wrapping import by_bagua_init

# Found out before the first exchange, and named.


def _other_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def _other_names() -> nn.Module:
    model = mlp()
    return nn.Sequential(*model[:4], nn.Sequential(model[4]))


def _other_dtype() -> nn.Module:
    model = mlp()
    model[2].to(torch.bfloat16)
    return model


def _other_buffer() -> nn.Module:
    model = mlp()
    model.register_buffer("calls", torch.zeros(3))
    return model


DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], dict[str, object], str]] = {
    "shape": (_other_shape, {}, r"^ranks have different models.*0\.weight: shape \[.*0\.weight: shape \["),
    "name": (_other_names, {}, r"4\.(0\.)?weight"),
    "dtype": (_other_dtype, {}, r"2\.weight"),
    "requires_grad": (frozen, {}, r"0\.weight"),
    "buffer": (_other_buffer, {}, "calls"),
    "bucket_bytes": (mlp, {"bucket_bytes": 77_000}, "bucket"),
    "hierarchical": (mlp, {"hierarchical_reduce": True}, "hierarchical"),
    "delay_reduce": (mlp, {"delay_reduce": True}, "delay_reduce"),
    "fusion": (mlp, {"fusion": False}, "fusion"),
    "algorithm": (mlp, {"distributed_algorithm": GradientAllReduceAlgorithm(average=False)}, "average"),
    "find_unused_parameters": (mlp, {"find_unused_parameters": True}, "find_unused_parameters"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("odd", [0, 2], ids=["rank 0 differs", "last rank differs"])
def test_models_that_differ_are_found_before_the_first_exchange(thread_ranks, difference, odd):
    make, options, pattern = DIFFERENCES[difference]

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = make() if rank == odd else mlp()
        before = snapshot(model)
        optimizer = sgd(model.parameters())
        with pytest.raises(CollectiveMismatchError, match=pattern):
            wrapped = by_bagua_init(model, optimizer, **(options if rank == odd else {}))
            loss_of(wrapped, rank, 0).backward()
        assert_same_on_all_ranks([before, snapshot(model)])

    thread_ranks(3, train, hosts=[2, 1])

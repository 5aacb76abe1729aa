"""Groups and meshes of ``torch.distributed``, where a group of bagua could be passed."""

from __future__ import annotations

import torch.distributed as dist

import bagua.comm
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)


def _train_on_torch_groups() -> dict[str, State]:
    rank = bagua.comm.get_rank()
    states = {}
    for name, options in {
        "group": {"process_group": dist.new_group([0, 1])},
        "world": {"process_group": dist.group.WORLD},
        "mesh": {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))},
    }.items():
        model = mlp(seed=rank)
        optimizer = sgd(model.parameters())
        train_steps(DistributedDataParallel(model, **options), optimizer, rank, range(3))
        states[name] = snapshot(model)
    return states


def test_groups_and_meshes_of_torch_are_taken(process_ranks):
    first, second = process_ranks(2, _train_on_torch_groups)
    expected = reference(mlp(), sgd, 2, range(3))
    for name, state in first.items():
        assert_same_on_all_ranks([state, second[name]])
        assert_close(state, expected)

"""Groups and meshes of ``torch.distributed``, where a group of bagua could be passed."""

from __future__ import annotations

import torch.distributed as dist

from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.harness import State, mlp, reference, sgd
from tests.parallel.wrapping import Loop, assert_trained, of_this_rank


def _train_on_torch_groups() -> dict[str, State]:
    return {
        name: Loop(lambda model, _, given=options: DistributedDataParallel(model, **given), of_this_rank).train(3)
        for name, options in {
            "group": {"process_group": dist.new_group([0, 1])},
            "world": {"process_group": dist.group.WORLD},
            "mesh": {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))},
        }.items()
    }


def test_groups_and_meshes_of_torch_are_taken(process_ranks):
    first, second = process_ranks(2, _train_on_torch_groups)
    expected = reference(mlp(), sgd, 2, range(3))
    for name, state in first.items():
        assert_trained([state, second[name]], expected)

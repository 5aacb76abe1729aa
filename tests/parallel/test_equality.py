"""Training on n ranks is training on the data of all of them: also on processes, where it is that of torch DDP."""

from __future__ import annotations

import pytest
import torch

from tests.harness import State, adam, assert_close, assert_same_on_all_ranks, mlp, sgd
from tests.parallel.wrapping import Loop, of_this_rank

OPTIMIZERS = {"sgd": sgd, "adam": adam}
STEPS = range(20)


def _train_both_every_way() -> dict[str, tuple[State, State]]:
    """By optimizer and options: the states that bagua and torch DDP end with."""
    results = {}
    for name, make in OPTIMIZERS.items():
        theirs = Loop(lambda model, _: torch.nn.parallel.DistributedDataParallel(model), mlp, make).train(len(STEPS))
        for options in ({}, {"delay_reduce": True}, {"fusion": False}):
            ours = Loop("bagua_init", of_this_rank, make, **options).train(len(STEPS))
            results[f"{name} {options}"] = ours, theirs
    return results


@pytest.mark.parametrize(
    "pool", [pytest.param("process_pool", marks=pytest.mark.gloo), pytest.param("shm_pool", marks=pytest.mark.shm)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_processes_agree_bitwise_and_equal_torch_ddp(request, pool, size):
    results = request.getfixturevalue(pool).run(_train_both_every_way, size=size)
    assert len(results[0]) == 6
    for way in results[0]:
        assert_same_on_all_ranks([result[way][0] for result in results])
        for result in results:
            assert_close(*result[way])


# Hierarchical exchange: inside hosts, between their leaders, inside hosts.


def _leads(intra_comm_root_rank: int) -> bool:
    loop = Loop(hierarchical_reduce=True, intra_comm_root_rank=intra_comm_root_rank)
    return bool(loop.reducer.group.inter_node_communicator)


def test_any_local_rank_that_every_host_has_can_lead(thread_ranks):
    assert thread_ranks(4, _leads, 0, hosts=[2, 2]) == [True, False, True, False]
    assert thread_ranks(4, _leads, 1, hosts=[2, 2]) == [False, True, False, True]

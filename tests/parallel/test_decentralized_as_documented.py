"""What the documentation of ``DecentralizedDataParallel`` says of hosts, of accumulation, and of its start."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bagua.comm
from bagua import env
from bagua.errors import CollectiveMismatchError
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.parallel.decentralized.rounds import nodes_for
from bagua.testing import ProcessRanks
from bagua.testing.ranks import this_rank
from tests.harness import loss_of, mlp, snapshot
from tests.parallel.decentralized_simulation import plain_sgd, wrap
from tests.parallel.wrapping import on_ranks


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ([2, 2, 2, 2], None, (0, 0, 1, 1)),
        ([2, 2, 2, 2], 1, (0, 1, 2, 3)),
        ([None] * 4, None, (0, 0, 0, 1)),
        ([3, 3, 3, 1], None, (0, 0, 0, 1)),
        ([3, 3, 3, 3], None, (0, 0, 0, 1)),
    ],
    ids=str,
)
def test_hosts_are_those_of_the_launcher(thread_ranks, monkeypatch, said, asked, expected):
    monkeypatch.setattr(env, "get_local_world_size", lambda: said[this_rank.get().rank])
    found = thread_ranks(4, lambda: nodes_for(bagua.comm.get_default_group(), asked), hosts=[3, 1])
    assert found == [expected] * 4


@pytest.mark.parametrize(("before", "between", "steps"), [(False, True, False), (True, False, True)])
@on_ranks(2)
def test_accumulation_is_asked_for_in_the_backward_pass(before, between, steps):
    """Set before a forward pass, and set otherwise before its backward pass: the latter counts."""
    model = wrap()
    loss_of(model, 0, 0).backward()
    start = snapshot(model)
    model.set_accumulate_grad(before)
    loss = loss_of(model, 0, 1)
    model.set_accumulate_grad(between)
    loss.backward()
    assert any((not torch.equal(value, start[name]) for name, value in snapshot(model).items())) == steps


def wrap_with_torch_alone(folder: str) -> bool:
    rank = this_rank.get().rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        model = DecentralizedDataParallel(mlp(), plain_sgd)
        loss_of(model, rank, 0).backward()
        return bagua.comm.is_initialized()
    finally:
        bagua.comm.destroy_process_group()
        dist.destroy_process_group()


@pytest.mark.gloo
def test_torch_alone_is_enough(tmp_path):
    assert ProcessRanks(2, backend=None).run(wrap_with_torch_alone, str(tmp_path)) == [True, True]


@on_ranks(4, hosts=[2, 2])
def test_ranks_that_ask_for_other_hosts_are_told():
    asked = None if this_rank.get().rank == 0 else 1
    with pytest.raises(CollectiveMismatchError):
        wrap(topology="alternating-exp-ring", _local_world_size=asked)

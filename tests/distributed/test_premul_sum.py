"""``ReduceOp.PREMUL_SUM``, which torch has on NCCL only: each rank multiplies its input before all are added."""

import pytest
import torch

import bagua.comm
import bagua.distributed as dist
from bagua.errors import InvalidReduceOpError


def reduce_with_factors(make_factor, dtype):
    """The exact results are 1 x 1 + 2 x 10 + 3 x 100 in each element."""
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(make_factor(10.0**rank))
    own = torch.full((size, 2), rank + 1.0, dtype=dtype)
    found = []
    dist.all_reduce(tensor := own.t().contiguous().t(), op)
    found += tensor.flatten().tolist()
    dist.all_reduce(tensor := own.clone().requires_grad_(), op, async_op=True).wait()
    found += tensor.flatten().tolist()
    dist.all_reduce_coalesced(tensors := [own[0].clone(), own[1].clone()], op)
    found += [*tensors[0].tolist(), *tensors[1].tolist()]
    dist.reduce(tensor := own.clone(), 1, op)
    assert torch.equal(tensor, own) or rank == 1
    found += tensor.flatten().tolist() if rank == 1 else []
    output = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_single(output, own, op)
    found += output.tolist()
    dist.reduce_scatter(output, list(own), op)
    assert torch.equal(own, torch.full((size, 2), rank + 1.0, dtype=dtype)), "an input was written"
    return [*found, *output.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make_factor", [float, torch.tensor], ids=["number", "tensor"])
def test_inputs_are_multiplied_before_they_are_added(thread_ranks, make_factor, dtype):
    for found in thread_ranks(3, reduce_with_factors, make_factor, dtype):
        assert set(found) == {321.0}


def refuse_and_ignore():
    tensor = torch.ones(2, dtype=torch.int64)
    for call in (
        lambda: dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.PREMUL_SUM),
        lambda: bagua.comm.allreduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)),
    ):
        with pytest.raises(InvalidReduceOpError) as caught:
            call()
        assert "multiply" in caught.value.advice.lower()
    group = dist.new_group([0])
    kept = torch.ones(2)
    dist.all_reduce(kept, dist._make_nccl_premul_sum(2.0), group)
    dist.reduce_scatter_single(torch.empty(2), kept, dist._make_nccl_premul_sum(2.0), group)
    return kept.tolist()


def test_what_has_no_factor_or_no_fraction_is_refused(thread_ranks):
    assert thread_ranks(2, refuse_and_ignore) == [[2.0, 2.0], [1.0, 1.0]]

"""Private names of torch: which one is gone, and what it was for."""

import importlib
from datetime import timedelta
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist

from bagua.comm import torch_private
from bagua.errors import TransportUnavailableError
from bagua.torch_private import ddp_seconds, profiling
from tests.versions import TORCH

#: Where each name is, and what goes wrong without it. The tests of that tell whether it still does the same.
NAMES = {
    "torch.autograd.profiler: _is_profiler_enabled": "calls are named where a profiler runs",
    "torch.distributed: _Work": "backend bagua hands its works to C++",
    "torch.distributed: _broadcast_coalesced": "bagua.watch counts the buffers of DDP",
    "torch.distributed: _make_nccl_premul_sum": "bagua.distributed has ReduceOp.PREMUL_SUM",
    "torch.nn.parallel: DistributedDataParallel._get_ddp_logging_data": "bagua.watch knows what of DDP is exposed",
    "torch.nn.parallel: DistributedDataParallel._set_ddp_runtime_logging_sample_rate": "and asks for it",
    "torch.nn.parallel: DistributedDataParallel._active_ddp_module": "with_bagua inside of it is refused",
    "torch.distributed.distributed_c10d: _get_default_store": "init_process_group meets the ranks of torch's group",
    "torch.distributed.distributed_c10d: _get_process_group_store": "from_torch_group meets the ranks of a group",
    "torch.distributed.distributed_c10d: _world.pg_map": "forked children do not destroy groups of torch",
    "torch.distributed.distributed_c10d: _DistributedBackendOptions": "registered backends are created",
    "torch.distributed: Backend._plugins": "registered backends are found",
    "torch.distributed: ProcessGroupGloo._Options._devices": "backend bagua has a Gloo group inside",
    "torch.distributed: ProcessGroupGloo._Options._timeout": "backend bagua has a Gloo group inside",
    "torch.distributed: ProcessGroupGloo._set_default_timeout": "set_timeout reaches the transports of backend bagua",
    "torch.distributed: ProcessGroupGloo._set_sequence_number_for_group": "NCCL groups of backend bagua agree on it",
    "torch.distributed: ProcessGroupGloo._start_coalescing": "messages through NCCL do not deadlock",
    "torch.distributed: ProcessGroupGloo._end_coalescing": "messages through NCCL do not deadlock",
    "torch.distributed: ProcessGroup._register_backend": "torch finds who serves a device in a group of backend bagua",
    "torch.distributed: ProcessGroup._set_default_backend": "torch finds who serves it first",
    "torch.distributed: ProcessGroup.BackendType.GLOO": "torch finds who serves the CPU",
    "torch.distributed: ProcessGroup.BackendType.NCCL": "torch finds who serves CUDA",
    "torch.distributed: TCPStore.clone": "groups talk to the store beside a thread that waits on it",
    "torch.autograd: Variable._execution_engine.queue_callback": "steps end with the backward pass",
    "torch._C: _current_graph_task_id": "DDP on backend bagua raises our errors",
    "torch._C: _will_engine_execute_node": "averaging tells steps from other passes",
    "torch._C._dynamo.eval_frame: set_code_exec_strategy": "torch.compile leaves the methods of backend bagua alone",
    **{
        f"torch: _foreach_{name}": "optimizers and buckets"
        for name in ("add", "add_", "addcdiv_", "addcmul_", "copy_", "div_", "lerp", "lerp_", "mul", "mul_", "norm")
    },
    **{f"torch: _foreach_{name}": "optimizers and buckets" for name in ("sqrt", "sqrt_", "zero_")},
}


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_does_not_promise_is_there(name: str) -> None:
    module, _, path = name.partition(": ")
    try:
        attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        pytest.fail(f"torch {torch.__version__} has no {name}. It was needed so that {NAMES[name]}.")


def test_a_creator_of_a_backend_can_see_what_is_requested() -> None:
    """Backend ``bagua`` refuses what torch would drop."""
    assert "backend_config" in dist.distributed_c10d._new_process_group_helper.__code__.co_varnames


def test_seconds_of_ddp_are_known_when_a_step_was_sampled() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert ddp_seconds(module, 1) < 0
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    assert ddp_seconds(module) >= 0


def test_a_profiler_is_seen_while_it_runs() -> None:
    assert profiling() is False
    with torch.profiler.profile():
        assert profiling() is True


def test_members_of_a_backend_agree_on_a_number() -> None:
    options = torch_private.gloo_options(timedelta(seconds=5), hosts=1, lazy=True)
    torch_private.set_sequence_number(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options))


def test_parts_of_a_module_have_their_names() -> None:
    module = torch.nn.BatchNorm1d(2)
    assert {*module._parameters} == {"weight", "bias"}
    assert "running_mean" in module._buffers
    assert module._modules == {}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_options_of_nccl_have_a_deadline() -> None:
    assert torch_private.nccl_options(timedelta(seconds=5))._timeout == timedelta(seconds=5)


def test_what_is_left_to_torch_is_there() -> None:
    """C++ looks these names up."""
    named = torch_private._LEFT_TO_TORCH | torch_private._CALLS_WITH_UNDERSCORE
    later = set() if TORCH >= (2, 13) else {"merge_remote_group", "use_pg_for_symm_mem_rendezvous"}
    assert vars(dist.ProcessGroup).keys() | later >= named


def test_a_torch_with_calls_that_the_backend_lacks_is_refused() -> None:
    class Lacking(dist.ProcessGroup):
        def allreduce(self, *_: object) -> None: ...

    with pytest.raises(TransportUnavailableError, match="allgather, allgather_coalesced") as caught:
        torch_private.require_known_calls(Lacking)
    assert "allreduce," not in str(caught.value)
    assert "_allgather_base" in str(caught.value)
    assert torch.__version__ in str(caught.value)

"""Private names of torch: which one is gone, and what it was for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua import torch_private as autograd
from bagua.comm import torch_private
from bagua.comm.store.serving import thread_store
from bagua.comm.torch_backend.creation import install_torch_backend
from bagua.comm.torch_backend.group import TorchGroup
from bagua.errors import TransportUnavailableError
from tests.versions import TORCH


def gloo() -> Any:
    options = torch_private.gloo_options(timedelta(seconds=5), hosts=1, lazy=True)
    return dist.ProcessGroupGloo(thread_store(), 0, 1, options)


def on_a_group(function: Callable[[dist.ProcessGroup], object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        function(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def coalesce() -> None:
    backend = gloo()
    assert callable(backend._start_coalescing)
    assert callable(backend._end_coalescing)


def in_a_backward_pass(function: Callable[[], object]) -> None:
    leaf, ran = torch.ones(1, requires_grad=True), []
    leaf.register_hook(lambda _: ran.append(function()))
    leaf.sum().backward()
    assert len(ran) == 1


def end_a_pass() -> None:
    ended: list[bool] = []
    in_a_backward_pass(lambda: autograd.when_backward_ends(lambda: ended.append(True)))
    assert ended == [True]


def number_a_pass() -> None:
    assert autograd.backward_pass() < 0
    numbers: list[int] = []
    for _ in range(2):
        in_a_backward_pass(lambda: numbers.append(autograd.backward_pass()))
    assert 0 <= numbers[0] != numbers[1]


def foresee_gradients() -> None:
    leaf, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen: list[bool] = []
    product = leaf * 2
    product.register_hook(lambda _: seen.append(autograd.accumulates([other, leaf])))
    product.sum().backward(retain_graph=True)
    torch.autograd.grad(product.sum(), product, retain_graph=True)
    torch.autograd.grad(product.sum(), leaf)
    assert seen == [True, False, False]


def multiply_before_adding() -> None:
    for factor in (2.0, torch.tensor(2.0)):
        assert torch_private.premul_factor(torch_private.make_premul_sum(factor)) == 2.0


def ask_for_a_backend() -> None:
    request = torch_private.backend_request()
    request.store, request.group_rank, request.group_size = dist.HashStore(), 0, 1
    request.timeout, request.group_id, request.global_ranks_in_group = timedelta(seconds=5), "test", [0]


def find_plugin() -> None:
    install_torch_backend()
    plugin = torch_private.plugins()["BAGUA"]
    assert callable(plugin.creator_fn)
    assert plugin.extended_api is True


def see_what_is_requested() -> None:
    seen: list[Any] = []

    def create(*_: object) -> Any:
        seen.append(torch_private.requested_backends())
        return gloo()

    if "private_names" not in dist.Backend.backend_list:
        dist.Backend.register_backend("private_names", create, devices=["cpu"])
    dist.init_process_group("cpu:private_names", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert seen[0].get_device_backend_map() == {"cpu": "private_names"}


def find_active_ddp() -> None:
    class Asking(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert autograd.active_ddp() is wrapped
            return super().forward(inputs)

    def ask(_: dist.ProcessGroup) -> None:
        nonlocal wrapped
        wrapped = torch.nn.parallel.DistributedDataParallel(Asking(2, 2))
        wrapped(torch.ones(1, 2))

    wrapped: Any = None
    on_a_group(ask)
    assert autograd.active_ddp() is None


def keep_from_compiling() -> None:
    class Kept:
        def method(self) -> int:
            return 1

    autograd.do_not_compile(Kept.method)
    assert Kept().method() == 1


def have_foreach_functions() -> None:
    names = ["add", "add_", "addcdiv_", "addcmul_", "copy_", "div_", "lerp", "lerp_", "mul", "mul_", "norm"]
    names += ["sqrt", "sqrt_", "zero_"]
    assert [name for name in names if not hasattr(torch, f"_foreach_{name}")] == []


def have_parts_of_modules() -> None:
    module = torch.nn.BatchNorm1d(2)
    assert {*module._parameters} == {"weight", "bias"}
    assert "running_mean" in module._buffers
    assert module._modules == {}


def see_ddp() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert autograd.ddp_seconds(module, 1) < 0
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
    assert autograd.ddp_seconds(module) >= 0


#: Name, what goes wrong without it, and a use.
def see_profiler() -> None:
    assert autograd.profiling() is False
    with torch.profiler.profile() as profile:
        assert autograd.profiling() is True
        autograd.profiler_range("named")()
    assert "named" in [event.name for event in profile.events()]


NAMES: dict[str, tuple[str, Callable[[], object]]] = {
    "torch.autograd.profiler._is_profiler_enabled": ("calls are named where a profiler runs", see_profiler),
    "torch.distributed._Work": ("backend bagua hands its works to C++", torch_private.Work),
    "torch.distributed._broadcast_coalesced": (
        "bagua.watch counts the buffers of DDP",
        lambda: on_a_group(lambda group: dist._broadcast_coalesced(group, [torch.ones(2)], 100, 0)),
    ),
    "DistributedDataParallel._get_ddp_logging_data, _set_ddp_runtime_logging_sample_rate": (
        "bagua.watch knows what part of a step of DDP is exposed",
        lambda: on_a_group(lambda _: see_ddp()),
    ),
    "torch.distributed._make_nccl_premul_sum": (
        "bagua.distributed has ReduceOp.PREMUL_SUM",
        multiply_before_adding,
    ),
    "distributed_c10d._get_default_store": (
        "init_process_group meets the ranks of torch's group",
        lambda: on_a_group(lambda _: torch_private.default_store()),
    ),
    "distributed_c10d._get_process_group_store": (
        "from_torch_group meets the ranks of a group",
        lambda: on_a_group(torch_private.store_of),
    ),
    "distributed_c10d._world.pg_map": (
        "forked children do not destroy groups of torch",
        lambda: on_a_group(lambda group: torch_private.all_groups().index(group)),
    ),
    "distributed_c10d._DistributedBackendOptions": ("registered backends are created", ask_for_a_backend),
    "Backend._plugins": ("registered backends are found", find_plugin),
    "the variable backend_config of torch": ("backend bagua refuses what torch would drop", see_what_is_requested),
    "ProcessGroupGloo._Options, _devices, _timeout": ("backend bagua has a Gloo group inside", gloo),
    "Backend._set_default_timeout": (
        "set_timeout reaches the transports of backend bagua",
        lambda: torch_private.set_default_timeout(gloo(), timedelta(seconds=1)),
    ),
    "Backend._set_sequence_number_for_group": (
        "NCCL groups of backend bagua agree on a number",
        lambda: torch_private.set_sequence_number(gloo()),
    ),
    "Backend._start_coalescing, _end_coalescing": ("messages through NCCL do not deadlock", coalesce),
    "ProcessGroup._register_backend, _set_default_backend": (
        "torch finds who serves a device in a group of backend bagua",
        lambda: (dist.ProcessGroup._register_backend, dist.ProcessGroup._set_default_backend),
    ),
    "ProcessGroup.BackendType.GLOO, NCCL": (
        "torch finds who serves a device in a group of backend bagua",
        lambda: (dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL),
    ),
    "Store.clone": ("groups talk to the store beside a thread that waits on it", lambda: dist.TCPStore.clone),
    "Variable._execution_engine.queue_callback": ("steps end with the backward pass", end_a_pass),
    "torch._C._current_graph_task_id": ("DDP on backend bagua raises our errors", number_a_pass),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": (
        "torch.compile leaves the methods of backend bagua alone",
        keep_from_compiling,
    ),
    "torch._C._will_engine_execute_node": ("averaging tells steps from other passes", foresee_gradients),
    "DistributedDataParallel._active_ddp_module": ("with_bagua inside of it is refused", find_active_ddp),
    "torch._foreach_*": ("optimizers and buckets", have_foreach_functions),
    "Module._parameters, _buffers, _modules": ("parameters are found and replaced", have_parts_of_modules),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_does_not_promise_is_there(name: str) -> None:
    purpose, use = NAMES[name]
    try:
        use()
    except Exception as error:
        pytest.fail(f"{name} is not what it was in torch {torch.__version__} ({error!r}). Needed so that {purpose}.")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_options_of_nccl_have_a_deadline() -> None:
    assert torch_private.nccl_options(timedelta(seconds=5))._timeout == timedelta(seconds=5)


# Names that C++ looks up.


def test_no_call_falls_through_to_a_method_that_would_deadlock() -> None:
    torch_private.require_known_calls(TorchGroup)


def test_what_is_left_to_torch_is_there() -> None:
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

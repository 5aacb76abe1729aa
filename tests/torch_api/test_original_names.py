"""Each name of the original Bagua exists here, or its page says what takes its place."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.errors import InvalidReduceOpError

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_bagua.md"
#: By module below ``bagua.torch_api``.
EXIST = {
    "": "init_process_group is_initialized get_rank get_world_size get_local_rank get_local_size get_node_rank "
    "new_group from_torch_group send recv broadcast broadcast_coalesced broadcast_object barrier ReduceOp "
    "allreduce allreduce_coalesced reduce",
    "communication": "init_process_group allreduce broadcast BaguaProcessGroup BaguaSingleCommunicatorPy",
    "algorithms": "gradient_allreduce bytegrad decentralized q_adam async_model_average base Algorithm",
    "algorithms.base": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "algorithms.gradient_allreduce": "GradientAllReduceAlgorithm GradientAllReduceAlgorithmImpl",
    "algorithms.bytegrad": "ByteGradAlgorithm ByteGradAlgorithmImpl",
    "algorithms.decentralized": "DecentralizedAlgorithm DecentralizedAlgorithmImpl LowPrecisionDecentralizedAlgorithm "
    "LowPrecisionDecentralizedAlgorithmImpl",
    "algorithms.q_adam": "QAdamAlgorithm QAdamAlgorithmImpl QAdamOptimizer",
    "algorithms.async_model_average": "AsyncModelAverageAlgorithm AsyncModelAverageAlgorithmImpl",
    "distributed": "BaguaModule",
    "data_parallel": "DistributedDataParallel",
    "env": "get_rank get_world_size get_local_rank get_local_size get_node_rank",
}
REPLACED = (
    "get_communicator bagua_patch _get_default_group BaguaCommBackendPy gen_nccl_unique_id "
    "data_parallel.functional.all_reduce bagua_module_name bagua_build_params bagua_train_step_counter "
    "parameters_to_ignore bagua_autotune_client bagua_ddp to_bagua_process_group BaguaTensor BaguaBucket "
    "bagua.torch_api.utils BaguaHyperparameter AutotuneService bagua.torch_api.checkpoint fuse_optimizer "
    "bagua.distributed.run get_autotune_* get_bagua_service_port find_free_network_port get_default_bucket_size "
    "get_backend allreduce_inplace allreduce_coalesced_inplace reduce_inplace allgather gather scatter reduce_scatter "
    "alltoall alltoall_v contrib.LoadBalancingDistributedSampler contrib.CacheLoader "
    "get_master_addr is_report_metrics_switch_on show_version bagua_sys_perf --bagua_service_port"
)


@pytest.mark.parametrize("module", EXIST)
def test_names_that_exist(module: str) -> None:
    found = importlib.import_module(f"bagua.torch_api{'.' * bool(module)}{module}")
    assert [name for name in EXIST[module].split() if not hasattr(found, name)] == []


def test_names_that_something_else_replaces() -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    replacements = {name: row[2].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    missing = [
        name
        for name in REPLACED.split()
        if not any(text for known, text in replacements.items() if re.search(rf"(^|\W){re.escape(name)}(\W|$)", known))
    ]
    assert missing == []


# Collectives work in place; those of Bagua 0.9 with another order are not there.


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

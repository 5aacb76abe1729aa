"""Names of the original Bagua that are not here: its page says what takes their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import InvalidReduceOpError

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
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


def test_names_that_something_else_replaces() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## The original Bagua\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    replacements = {name: row[2].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    missing = [
        name
        for name in REPLACED.split()
        if not any(text for known, text in replacements.items() if re.search(rf"(^|\W){re.escape(name)}(\W|$)", known))
    ]
    assert missing == []


# Collectives work in place; those of Bagua 0.9 with another order are not there.


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

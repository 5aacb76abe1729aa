"""The tests of collectives that ship inside torch, on the backend ``bagua`` where they ask for Gloo.

BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=/tmp/suite python -m pytest tests/clients/torch_suite.py
"""

import functools
import os
import tempfile
from typing import Any

# The suite reads these when it is imported, here and in the processes that it starts.
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="bagua-suite-"))

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

import bagua.torch_api

assert bagua.torch_api is not None, "the import makes the name known"

#: Tests that say nothing about us, and why.
SKIPPED = {"monitored_barrier": "torch allows it on Gloo only, by name", "test_get_backend": "asks for the name gloo"}


def _on_bagua(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("backend") == "gloo":
            keywords["backend"] = "bagua"
        return function(*arguments, **keywords)

    return call


if os.environ.get("BAGUA_SUITE", "bagua") == "bagua":
    dist.init_process_group = _on_bagua(dist.init_process_group)
    dist.new_group = _on_bagua(dist.new_group)


class InForks:
    """In processes of its own: forks, because importing torch takes longer than most tests."""

    def setUp(self) -> None:
        reason = next((why for name, why in SKIPPED.items() if name in self._testMethodName), None)
        if reason is not None:
            pytest.skip(reason)
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class TestCollectives(InForks, TestDistBackend, DistributedTest._DistTestBase):
    """Collectives, messages, groups, and DDP."""


class OverRpc(InForks, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
    """Ranks that call functions of each other beside their collectives."""


class TestDdpWithRpc(DdpComparisonTest, OverRpc):
    """DDP on four ranks, with gradients of torch's distributed autograd."""


class TestDdpInsideRpc(DdpUnderDistAutogradTest, OverRpc):
    """DDP on four trainers, driven by a master, beside a remote worker."""

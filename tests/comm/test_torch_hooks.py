"""Hooks of torch around calls of the backend ``bagua``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from bagua.comm import create_torch_group
from bagua.comm.torch_backend.group import TorchGroup
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError, InvalidTensorError
from tests.comm.test_torch_backend import on_threads
from tests.versions import TORCH, needs

pytestmark = [pytest.mark.shm, needs("hooks around calls", hasattr(dist.ProcessGroup, "register_pre_hook"))]


@pytest.fixture
def group() -> Iterator[TorchGroup]:
    made = create_torch_group(dist.HashStore(), 0, 1, timedelta(seconds=20))
    made._set_group_name("watched")
    yield made
    made.shutdown()


class Seen:
    """What the hooks of one group were told."""

    def __init__(self, group: Any) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.aborted = threading.Event()
        group.register_pre_hook(1, lambda told: self.before.append((told.name.name, told.op_id, told.root)))
        group.register_post_hook(2, lambda told: self.after.append((told.name.name, told.op_id)))
        group.register_abort_hook(3, self.aborted.set)


def names(seen: Seen) -> list[str]:
    assert [told[:2] for told in seen.before] == seen.after
    return [name for name, _ in seen.after]


def test_each_call_is_told_before_and_after(group: TorchGroup) -> None:
    seen, one, two = Seen(group), torch.ones(2), torch.zeros(2)
    work = group.allreduce([one], dist.AllreduceOptions())
    assert work.result()[0] is one, "it is our work, not what C++ made of it"
    group.allreduce(one, op=dist.ReduceOp.MAX).wait()
    group.broadcast(one, root=0).wait()
    group.allgather([[two]], [one]).wait()
    group.all_gather_single(two, one).wait()
    group.reduce_scatter([two], [[one]]).wait()
    group.all_to_all_single(two, one, [], []).wait()
    group.gather([[two]], [one]).wait()
    group.scatter([two], [[one]]).wait()
    group.reduce(one, 0).wait()
    group.alltoall([two], [one]).wait()
    group.allreduce_coalesced([one, two]).wait()
    group.barrier().wait()
    # Torch 2.14 tells of some forms as of others.
    told = [name.removesuffix("_BASE").removesuffix("_COALESCED") for name in names(seen)]
    assert told == [
        *("ALLREDUCE", "ALLREDUCE", "BROADCAST", "ALLGATHER", "ALLGATHER", "REDUCE_SCATTER", "ALLTOALL"),
        *("GATHER", "SCATTER", "REDUCE", "ALLTOALL", "ALLREDUCE", "BARRIER"),
    ]
    assert seen.before[2][2] == 0
    assert one.tolist() == two.tolist() == [1.0, 1.0]
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    group.allreduce(one).wait()
    assert len(seen.after) == 13
    assert not seen.aborted.is_set()


def test_calls_without_tensors_are_made_without_hooks(group: TorchGroup) -> None:
    Seen(group)
    group.all_gather_single_coalesced([], []).wait()


@pytest.mark.parametrize("register", ["register_pre_hook", "register_post_hook"])
def test_what_a_hook_raises_reaches_the_caller(group: TorchGroup, register: str) -> None:
    def refuse(_: object) -> None:
        raise ValueError("the hook says no")

    Seen(group)
    getattr(group, register)(9, refuse)
    for call in (lambda: group.allreduce(torch.ones(2)), group.barrier, lambda: group.send([torch.ones(1)], 0, 0)):
        with pytest.raises(ValueError, match="the hook says no"):
            call()


def test_errors_are_those_of_the_call(group: TorchGroup) -> None:
    seen = Seen(group)
    with pytest.raises(InvalidTensorError):
        group.gather([[], []], [torch.ones(1)])
    group.abort()
    assert seen.aborted.is_set()
    with pytest.raises(CommunicatorClosedError):
        group.allreduce(torch.ones(1))


def test_messages_and_calls_between_ranks() -> None:
    done = threading.Barrier(3, timeout=60)

    def calls(groups: list[Any], rank: int) -> list[str]:
        group = groups[0]
        seen = Seen(group)
        group.allreduce(total := torch.ones(1)).wait()
        assert total.item() == 3
        if rank == 0:
            group.send([torch.ones(1)], 1, 0).wait()
        if rank == 1:
            group.recv([torch.empty(1)], 0, 0).wait()
        group.barrier().wait()
        if rank == 2:
            with pytest.raises(CollectiveTimeoutError):
                group.allreduce([torch.ones(1)], timeout=timedelta(seconds=0.2)).wait()
            assert seen.aborted.wait(20)
        told = names(seen)
        done.wait()
        group.shutdown()
        return told

    assert on_threads(calls) == [
        ["ALLREDUCE", "SEND", "BARRIER"],
        ["ALLREDUCE", "RECV", "BARRIER"],
        ["ALLREDUCE", "BARRIER", "ALLREDUCE"],
    ]


def test_torch_asks_the_backend_what_it_can(group: TorchGroup) -> None:
    backend = group._get_backend(torch.device("cpu"))
    for name in dir(c10d.Backend):
        if "supports_" in name and isinstance(getattr(c10d.Backend, name), property):
            assert isinstance(getattr(backend, name), bool), name
    assert backend.options._timeout == timedelta(seconds=20)
    assert not group.supports_window


@needs("a recorder with the name of a backend", TORCH >= (2, 15))
def test_the_flight_recorder_of_torch_has_the_calls(group: TorchGroup) -> None:
    group._set_group_name("recorded")
    Seen(group)
    recorder = c10d.FlightRecorderHook.attach(group, [0])
    group.allreduce(torch.ones(3)).wait()
    group.barrier().wait()
    recorder.remove()
    entries = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, backend="bagua"))["entries"]
    found = [entry["profiling_name"] for entry in entries if entry["process_group"] == ["recorded", ""]]
    assert found == ["bagua:all_reduce", "bagua:barrier"]

"""What a call costs, counted in functions that run instead of in seconds."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import torch

from bagua.comm import Communicator, Membership, ReduceOp, thread_store
from bagua.comm.transports.shm import peers as shm_peers
from bagua.comm.transports.shm.attach import Attached, Peer
from bagua.comm.transports.shm.memory import create_memory
from bagua.comm.transports.shm.transport import ShmTransport, shm_refusal

pytestmark = pytest.mark.skipif(shm_refusal() is not None, reason="needs shared memory")


def attached_to_itself(membership: Membership, control_bytes: int, settings: dict[str, int]) -> Attached:
    """A rank whose peer has the same memory: it comes to each barrier at once, with the same call and data."""
    memory, descriptor = create_memory(control_bytes, in_children=False)
    os.close(descriptor)
    connection, other_end = socket.socketpair()
    other_end.close()
    peer = Peer(connection, os.pidfd_open(os.getpid()), os.eventfd(0, os.EFD_NONBLOCK), memory)
    return Attached(memory, os.eventfd(0, os.EFD_NONBLOCK), {1: peer})


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(shm_peers, "attach", attached_to_itself)
    transport = ShmTransport(Membership(thread_store(), 0, (0, 1), (0, 0), 60.0))
    yield (found := Communicator(transport, 60.0))
    found.close()


def functions_of(call: Any) -> list[str]:
    """The functions of Python that ``call`` runs, in their order."""
    seen: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def test_a_small_allreduce_takes_few_functions(communicator: Communicator) -> None:
    tensor = torch.tensor([3.0])
    for _ in range(3):  # What is the same as in the call before is kept for both slots.
        communicator.allreduce(tensor, ReduceOp.SUM)
    seen = functions_of(lambda: communicator.allreduce(tensor, ReduceOp.AVG))
    assert tensor.tolist() == [24.0]
    seen = functions_of(lambda: communicator.allreduce(tensor, ReduceOp.AVG))
    assert len(seen) <= 43, seen  # seven of them keep the record of calls

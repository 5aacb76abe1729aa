"""Which shares travel between Gloo's ranks as messages, both directions at a time; and that all of them arrive."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.comm.call import Call
from bagua.comm.transports.c10d.transport import C10dTransport
from tests.contract.exercises import CallSetting
from tests.contract.results import exercise_all

pytestmark = pytest.mark.gloo

#: Elements of float32 in a share: just below and just from where messages begin.
BELOW, FROM = 16 * 1024 - 1, 16 * 1024


def exchange() -> list[bool]:
    exercise_all(CallSetting(shape=(FROM,)))
    exercise_all(CallSetting(shape=(FROM,), dtype=torch.complex64))  # Which Gloo moves as bytes.
    transport = bagua.comm.get_default_group().global_communicator._transport
    assert isinstance(transport, C10dTransport)
    return [
        transport._default.takes_messages(Call(kind, 1, torch.float32, numel, "sum"))
        for kind in ("alltoall", "allgather", "allreduce")
        for numel in (BELOW, FROM)
    ]


def test_large_shares_are_messages(process_ranks) -> None:
    assert process_ranks(3, exchange) == [[False, True, False, True, False, False]] * 3

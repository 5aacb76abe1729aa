"""Large shares travel between Gloo's ranks as messages, both directions at a time, and arrive where they belong."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.comm.call import Call
from bagua.comm.transports.c10d.transport import C10dTransport

pytestmark = pytest.mark.gloo

#: Elements of float32 in a share: just below and just from where messages begin.
BELOW, FROM = 16 * 1024 - 1, 16 * 1024


def share(sender: int, receiver: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) % 97 + 1000 * sender + 100 * receiver).to(dtype)


def exchange_shares(numel: int, dtype: torch.dtype) -> None:
    """Two exchanges of each kind under way at a time; the second moves what the first has moved, and more."""
    comm = bagua.comm.get_default_group().global_communicator
    ranks, own = range(comm.size), comm.rank
    works, wanted = [], []
    for offset in (0, 7):
        source = torch.cat([share(own + offset, other, numel, dtype) for other in ranks])
        target = torch.zeros_like(source)
        works.append((comm.alltoall(target, source, async_op=True), target))
        wanted.append(torch.cat([share(other + offset, own, numel, dtype) for other in ranks]))
        gathered = torch.zeros(comm.size * numel, dtype=dtype)
        works.append((comm.allgather(gathered, share(own, offset, numel, dtype), async_op=True), gathered))
        wanted.append(torch.cat([share(other, offset, numel, dtype) for other in ranks]))
    for (work, seen), expected in zip(works, wanted, strict=True):
        work.wait()
        assert torch.equal(seen, expected)


def exchange_many() -> list[bool]:
    for numel in (BELOW, FROM, FROM + 1):
        exchange_shares(numel, torch.float32)
    exchange_shares(FROM, torch.complex64)  # which Gloo moves as bytes
    transport = bagua.comm.get_default_group().global_communicator._transport
    assert isinstance(transport, C10dTransport)
    return [
        transport._default.takes_messages(Call(kind, 1, torch.float32, numel, "sum"))
        for kind in ("alltoall", "allgather", "allreduce")
        for numel in (BELOW, FROM)
    ]


def test_every_share_arrives(process_ranks) -> None:
    assert process_ranks(3, exchange_many) == [[False, True, False, True, False, False]] * 3

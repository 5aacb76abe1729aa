"""A group of which one rank is there: each call returns, and what it brings has the right shape."""

from __future__ import annotations

import torch

from bagua.comm import CallRecord, Communicator, rehearsal_group


class Calls:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def call(self, record: CallRecord) -> None:
        self.kinds.append(record.call.kind)

    def span(self, *_: object) -> None:
        """Not looked at."""


def everything(comm: Communicator) -> list[torch.Tensor]:
    one, all_of_them = torch.arange(4.0), torch.arange(16.0)
    gathered, share, swapped = torch.empty(16), torch.empty(4), torch.empty(16)
    comm.allgather(gathered, one)
    comm.reduce_scatter(share, all_of_them)
    comm.alltoall(swapped, all_of_them)
    comm.allreduce(one)
    comm.broadcast(one, 1)
    comm.send(one, 1)
    comm.recv(one, 1)
    comm.barrier()
    return [gathered, share, swapped]


def test_peers_hold_what_this_rank_holds_and_the_record_says_what_was_called() -> None:
    group, calls = rehearsal_group([2, 2]), Calls()
    group.recorder.trace = calls
    gathered, share, swapped = everything(group.global_communicator)
    assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0] * 4
    assert share.tolist() == [0.0, 4.0, 8.0, 12.0]
    assert swapped.tolist() == [0.0, 1.0, 2.0, 3.0] * 4
    expected = ["allgather", "reduce_scatter", "alltoall", "allreduce", "broadcast", "send", "recv", "barrier"]
    assert calls.kinds == expected
    assert group.global_communicator.allgather_object("here") == ["here"] * 4
    group.close()


def test_groups_from_it_are_rehearsals_too() -> None:
    group = rehearsal_group([2, 2, 1])
    twin = group.duplicate().duplicate()
    assert (twin.size, twin.node_sizes, twin.backend) == (5, (2, 2, 1), "rehearsal")
    assert twin.inter_node_communicator.ranks == (0, 2, 4)
    group.close()
    assert twin.closed

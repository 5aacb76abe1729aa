"""Ranks that are threads, or of which one is there: how they meet, how they die, what they leave behind."""

import gc
import threading
import time
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from bagua.comm import Communicator, rehearsal_group
from bagua.comm.transports import threads
from bagua.errors import PeerLostError, TransportUnavailableError
from tests.comm.memory_ranks import membership, on_communicators, run, values


@pytest.mark.threads
@pytest.mark.parametrize(("rank", "world", "refusal"), [(1, "another process", ""), (0, "", "it is in process 5")])
def test_a_rank_in_another_process_is_refused_by_itself_and_by_the_others(rank: int, world: str, refusal: str) -> None:
    store, other = HashStore(), 1 - rank
    store.set(f"threads/world/{other}", f'"{world}"')
    store.set(f"threads/refusal/{other}", f'"{refusal}"')
    with pytest.raises(TransportUnavailableError, match=f"rank 1: {refusal or 'it is in process'}") as caught:
        threads.ThreadsTransport(membership(store, rank, 2))
    assert caught.value.peers == (1,)


@pytest.mark.threads
def test_a_rank_that_closed_is_lost_to_those_who_wait_for_it_only() -> None:
    def job(comm: Communicator) -> object:
        if comm.rank == 2:
            return comm.close()
        tensor = torch.full((2,), float(comm.rank))
        if comm.rank == 0:
            comm.send(tensor, 1)
        else:
            comm.recv(tensor, 0)
            assert (tensor == 0).all()
        return comm.barrier()

    outcomes = run(3, job)
    assert all(isinstance(outcome, PeerLostError) and outcome.peers == (2,) for outcome in outcomes[:2])
    assert "closed its communicator" in str(outcomes[0])


@pytest.mark.threads
def test_a_rank_lives_while_its_asynchronous_calls_run() -> None:
    """The thread of rank 1 has ended when rank 0 waits, but its call has yet to arrive."""
    rank_0_waits = threading.Event()
    works: list[Any] = []

    def hook(step: threads.Step) -> None:
        if step.name == "arrive" and step.rank == 1:
            assert rank_0_waits.wait(10)
            time.sleep(0.1)  # Rank 0 looks several times.
        elif step.name == "arrive":
            rank_0_waits.set()

    def job(comm: Communicator) -> float:
        tensor = torch.ones(1)
        if comm.rank == 1:
            works.append(comm.allreduce(tensor, async_op=True))
            return 2.0
        comm.allreduce(tensor)
        return tensor.item()

    assert values(run(2, job, fault=hook, close=False)) == [2.0, 2.0]
    assert works[0].wait()


@pytest.mark.threads
def test_a_rank_lives_while_the_thread_that_built_it_does() -> None:
    """A helper thread made the latest call of rank 1 and has ended."""
    waiting = threading.Event()

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
            waiting.set()
            comm.barrier()
            return
        helper = threading.Thread(target=comm.barrier)
        helper.start()
        helper.join()
        assert waiting.wait(60)
        time.sleep(0.1)  # Rank 0 looks several times.
        comm.barrier()

    assert values(run(2, job)) == [None, None]


@pytest.mark.threads
def test_closing_leaves_nothing_behind() -> None:
    """No thread, and neither the world nor a tensor that went through it stays alive."""
    before, others = threading.active_count(), set(threads._worlds)
    seen: list[weakref.ref[object]] = []

    def job(comm: Communicator) -> None:
        tensor = torch.ones(100_000)
        for each in (tensor, torch.ones(2)):
            comm.allreduce(each, async_op=True).wait()
        seen.extend([weakref.ref(tensor), weakref.ref(comm._transport), weakref.ref(comm._transport._peers._world)])

    values(run(3, job))
    gc.collect()
    assert len(seen) == 9
    assert [reference() for reference in seen] == [None] * 9
    assert threading.active_count() <= before  # threads of other tests may end meanwhile
    assert set(threads._worlds) <= others  # an error that some other test holds may keep its ranks' world


@pytest.mark.threads
@on_communicators(2)
def test_a_lent_tensor_is_not_kept_after_the_call(comm: Communicator) -> None:
    tensor = torch.ones(100_000)
    comm.allreduce(tensor)
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)
    reference = weakref.ref(tensor)
    del tensor
    assert reference() is None


def test_peers_hold_what_this_rank_holds_and_the_record_says_what_was_called() -> None:
    group = rehearsal_group([2, 2])
    comm, trace = group.global_communicator, Mock()
    group.recorder.trace = trace
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
    assert gathered.tolist() == swapped.tolist() == [0.0, 1.0, 2.0, 3.0] * 4
    assert share.tolist() == [0.0, 4.0, 8.0, 12.0]
    expected = ["allgather", "reduce_scatter", "alltoall", "allreduce", "broadcast", "send", "recv", "barrier"]
    assert [call.args[0].call.kind for call in trace.call.call_args_list] == expected
    assert comm.allgather_object("here") == ["here"] * 4
    group.close()


def test_groups_from_it_are_rehearsals_too() -> None:
    group = rehearsal_group([2, 2, 1])
    twin = group.duplicate().duplicate()
    assert (twin.size, twin.node_sizes, twin.backend) == (5, (2, 2, 1), "rehearsal")
    assert twin.inter_node_communicator.ranks == (0, 2, 4)
    group.close()
    assert twin.closed

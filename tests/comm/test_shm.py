"""The shared-memory transport: what the contract of all transports does not say."""

import contextlib
import gc
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.comm import Communicator, inject_fault
from bagua.comm.transports.memory.line import LineState, Step, Words
from bagua.comm.transports.shm import memory as shm_segments
from bagua.errors import BaguaError, CollectiveTimeoutError
from tests.comm.memory_ranks import LARGE, SMALL, agrees, all_kinds, ramp
from tests.contract.exercises import communicator
from tests.harness import on_ranks, until

pytestmark = pytest.mark.shm

#: More than one staging area; ``LARGE`` is more than is copied into the control memory.
PIECES = 3_000_000


def resources() -> tuple[int, int]:
    """Open descriptors of this process, and mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua")
    return len(os.listdir("/proc/self/fd")), maps


def summed(comm: Communicator, numel: int) -> torch.Tensor:
    return ramp(0, numel) * comm.size + sum(range(comm.size))


@pytest.mark.parametrize("numel", [LARGE, PIECES])
@on_ranks(3, pool="shm_pool")
def test_memory_of_the_communicator_is_reduced_where_it_lies(numel: int) -> None:
    """No ordinary memory is needed for a tensor of ``empty``, nor for a part of it."""
    comm = communicator()
    tensor = comm.empty(numel, dtype=torch.float32).copy_(ramp(comm.rank, numel))
    part = tensor[numel // 2 :]
    comm.allreduce(tensor)
    assert torch.equal(tensor, summed(comm, numel))
    comm.broadcast(part, 1)
    other = bagua.comm.get_default_group().duplicate().global_communicator
    other.allreduce(part)
    assert torch.equal(part, comm.size * summed(comm, numel)[numel // 2 :])
    assert [each._transport._shm_peers._staging for each in (comm, other)] == [None, None]


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks("size", pool="shm_pool")
def test_ranks_may_pass_different_memory(size: int) -> None:
    """Some ranks pass a tensor of ``empty``, some an ordinary one."""
    comm = communicator()
    for numel in (LARGE, PIECES + 1):
        for special in range(comm.size):
            tensor = comm.empty(numel, dtype=torch.float32) if comm.rank == special else torch.empty(numel)
            tensor.copy_(ramp(comm.rank, numel))
            comm.allreduce(tensor)
            assert torch.equal(tensor, summed(comm, numel))
            output = torch.empty(comm.size * numel)
            comm.allgather(output, tensor + 1 if comm.rank == special else tensor)
            for rank, row in enumerate(output.view(comm.size, numel)):
                assert torch.equal(row, summed(comm, numel) + (rank == special))


@pytest.mark.parametrize("seed", range(4))
@on_ranks(2, pool="shm_pool")
def test_equal_calls_from_changing_places(seed: int) -> None:
    """Calls of few kinds, one after the other, whose data lies here or there: what is known of the last one ages."""
    comm, choose = communicator(), random.Random(seed)
    other = 1 - comm.rank
    shared = comm.empty(70_000, dtype=torch.float32)  # More than two ranks copy at once.
    forms = ("send", "send", "sendrecv", "broadcast", "allgather", "allreduce")
    for number in range(120):
        form, lenders, sender = choose.choice(forms), choose.randrange(4), choose.randrange(2)
        numel, dtype = choose.choice((5, 7, 70_000)), choose.choice((torch.float32, torch.int32))
        lent = lenders >> comm.rank & 1 and dtype is torch.float32
        mine = shared[:numel] if lent else torch.empty(numel, dtype=dtype)
        mine.fill_(number + 1000 * comm.rank)
        output, expected = torch.empty(numel, dtype=dtype), number + 1000 * other
        if form == "sendrecv":
            comm.sendrecv(output, mine, other, other)
        elif form == "allgather":
            output = torch.empty(2 * numel, dtype=dtype)
            comm.allgather(output, mine)
            output = output.view(2, numel)[other]
        elif form == "allreduce":
            comm.allreduce(mine)
            output, expected = mine, 2 * number + 1000
        elif form == "broadcast":
            comm.broadcast(mine, sender)
            output, expected = mine, number + 1000 * sender
        elif comm.rank == sender:
            comm.send(mine, other)
            continue
        else:
            comm.recv(output, other)
        assert (output == expected).all(), (number, form, lenders)


def rebuild(comm: Communicator) -> None:
    tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
    comm.allreduce(tensor)
    assert (tensor == comm.size).all()
    comm.empty(LARGE, dtype=torch.float32)  # and one that nobody ever sees


def call_with_little(comm: Communicator) -> None:
    comm.allreduce(torch.zeros(1))


@pytest.mark.parametrize(("job", "times"), [(rebuild, 200), (call_with_little, 4000)], ids=["buckets", "calls"])
@on_ranks(3, pool="shm_pool")
def test_nothing_grows(job, times: int) -> None:
    for number in range(times):
        job(communicator())
        if number == 10:
            before = resources()
    after = resources()
    # A peer may have yet to notice that the last segment has gone.
    assert after[0] <= before[0] + 2, "descriptors"
    assert after[1] <= before[1] + 4, "mappings"


@on_ranks(2, pool="shm_pool")
def test_memory_that_was_read_does_not_outlive_its_owner() -> None:
    """Nothing of a peer's memory that it gave up is mapped after a message and after a collective."""
    comm = communicator()
    for exchange in (lambda tensor: (comm.recv if comm.rank else comm.send)(tensor, 1 - comm.rank), comm.allreduce):
        comm.barrier()
        _, before = resources()
        exchange(comm.empty(LARGE, dtype=torch.float32).fill_(1.0))
        comm.barrier()
        comm._transport._shm_peers._drop_gone()
        assert resources()[1] == before
        comm.barrier()


@on_ranks(2, pool="shm_pool")
def test_dev_shm_is_not_used() -> None:
    """No file there is mapped; locks of ``multiprocessing`` aside."""
    all_kinds((SMALL, LARGE))
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [one for one in maps if "/dev/shm/" in one and "/sem.mp-" not in one] == []


@on_ranks(3, pool="shm_pool")
def test_waiting_costs_little() -> None:
    comm = communicator()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(1.0)
    spent, started = time.process_time(), time.monotonic()
    comm.barrier()
    share = (time.process_time() - spent) / max(time.monotonic() - started, 1.0)  # Of one core.
    assert share <= 0.05 or comm.rank == 0


@on_ranks(2, pool="shm_pool")
def test_what_a_forked_child_writes_is_its_own() -> None:
    """What a forked child writes is its own, also if it has closed what it inherited; it closes no file of its own."""
    comm = communicator()
    tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
    descriptor = shm_segments.find(tensor).descriptor
    comm.allreduce(tensor)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
        same = bool((tensor == comm.size).all())
        tensor.zero_()
        mine = bool((tensor == 0).all())
        del tensor
        gc.collect()
        os.fstat(descriptor)  # An error, if it was closed with the tensor.
        os._exit(0 if same and mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tensor == comm.size).all()
    comm.allreduce(tensor)
    assert (tensor == comm.size**2).all()


@pytest.mark.parametrize(
    ("kind", "numel", "barrier"),
    [
        *((kind, LARGE, 1) for kind in ("allreduce", "broadcast", "alltoall")),
        ("allreduce", PIECES, -(-PIECES // (1 << 17))),  # pieces of 512 KiB
    ],
)
@on_ranks(2, pool="shm_pool")
def test_who_leaves_after_its_last_call_takes_nothing_from_the_others(kind: str, numel: int, barrier: int) -> None:
    """A call of rank 1 after which rank 0 leaves at once."""
    matters = False

    def straggle(step: Step) -> None:
        """Come to the call's data only when rank 0 has left, and look for memory that is gone meanwhile."""
        nonlocal barrier
        if not matters or step.name != "pass":
            return
        barrier -= 1
        if barrier == 0:
            peers = comm._transport._shm_peers
            until(lambda: peers.lines[0].words[Words.STATE] != LineState.OPEN)
            peers._drop_gone()  # as a thread that waits for a message does at any time

    with inject_fault(straggle if communicator().rank == 1 else None):
        group = bagua.comm.get_default_group().duplicate()
    comm = group.global_communicator
    agrees(comm, kind, numel)  # Now all memory is mapped.
    comm.barrier()
    matters = True
    agrees(comm, kind, numel)
    if comm.rank == 0:
        group.close()
    else:
        assert barrier == 0, "the other rank left before that barrier, or never"


@pytest.mark.parametrize("at", range(1, 7))
@on_ranks(2, pool="shm_pool")
def test_a_stopped_rank_does_no_harm_when_it_wakes(at: int) -> None:
    """Rank 1 is stopped at a step of a call, and woken when rank 0 has given up and used its tensor."""
    world, group = communicator(), bagua.comm.get_default_group()
    pids = world.allgather_object(os.getpid())
    steps: Iterator[int] = itertools.repeat(0)

    def stop(_: Step) -> None:
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGSTOP)

    with inject_fault(stop if world.rank == 1 else None):
        comm = group.duplicate().global_communicator
    tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
    comm.allreduce(tensor)
    world.barrier()
    steps = itertools.count(1)  # Of the call that matters.
    stopped = comm.rank == 1
    with contextlib.suppress(BaguaError) if stopped else pytest.raises(CollectiveTimeoutError):
        comm.allreduce(tensor, timeout=1.0)
    tensor.fill_(-1.0)
    if stopped:
        group.store.set("woken", "yes")
    else:
        os.kill(pids[1], signal.SIGCONT)
        group.store.wait(["woken"])
        assert (tensor == -1.0).all()

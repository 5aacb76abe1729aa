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
from bagua.comm import Communicator
from bagua.comm.transports.memory.line import LineState, Step, Words
from bagua.comm.transports.shm import memory as shm_segments
from bagua.comm.transports.threads import inject_fault
from bagua.errors import BaguaError
from tests.comm.memory_ranks import LARGE, SMALL, agrees, all_kinds, ramp
from tests.contract.exercises import communicator
from tests.harness import until

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


def reduce_in_place(numel: int) -> bool:
    """Whether ordinary memory was needed for a tensor of ``empty``; and for a part of it."""
    comm = communicator()
    tensor = comm.empty(numel, dtype=torch.float32).copy_(ramp(comm.rank, numel))
    part = tensor[numel // 2 :]
    comm.allreduce(tensor)
    assert torch.equal(tensor, summed(comm, numel))
    comm.broadcast(part, 1)
    other = bagua.comm.get_default_group().duplicate().global_communicator
    other.allreduce(part)
    assert torch.equal(part, comm.size * summed(comm, numel)[numel // 2 :])
    return any(each._transport._shm_peers._staging is not None for each in (comm, other))


@pytest.mark.parametrize("numel", [LARGE, PIECES])
def test_memory_of_the_communicator_is_reduced_where_it_lies(shm_pool, numel: int) -> None:
    assert shm_pool.run(reduce_in_place, numel, size=3) == [False] * 3


def mix_memory() -> None:
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_may_pass_different_memory(shm_pool, size: int) -> None:
    shm_pool.run(mix_memory, size=size)


def exchange_alike_from_changing_places(seed: int) -> None:
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


@pytest.mark.parametrize("seed", range(4))
def test_equal_calls_from_changing_places(shm_pool, seed: int) -> None:
    shm_pool.run(exchange_alike_from_changing_places, seed, size=2)


def rebuild(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Resources before and after, with one tensor more or less in flight."""
    comm = communicator()
    for number in range(times):
        tensor = comm.empty(LARGE, dtype=torch.float32).fill_(1.0)
        comm.allreduce(tensor)
        assert (tensor == comm.size).all()
        comm.empty(LARGE, dtype=torch.float32)  # and one that nobody ever sees
        del tensor
        if number == 10:
            before = resources()
    return before, resources()


def many_small_calls(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    comm, tensor = communicator(), torch.zeros(1)
    comm.allreduce(tensor)
    before = resources()
    for _ in range(times):
        comm.allreduce(tensor)
    return before, resources()


@pytest.mark.parametrize(("job", "times"), [(rebuild, 200), (many_small_calls, 4000)], ids=["buckets", "calls"])
def test_nothing_grows(shm_pool, job, times: int) -> None:
    for before, after in shm_pool.run(job, times, size=3):
        # A peer may have yet to notice that the last segment has gone.
        assert after[0] <= before[0] + 2, "descriptors"
        assert after[1] <= before[1] + 4, "mappings"


def forget_what_was_read() -> list[int]:
    """Mappings of a peer's memory that it gave up after a message and after a collective."""
    comm, counts = communicator(), []
    for exchange in (lambda tensor: (comm.recv if comm.rank else comm.send)(tensor, 1 - comm.rank), comm.allreduce):
        comm.barrier()
        _, before = resources()
        exchange(comm.empty(LARGE, dtype=torch.float32).fill_(1.0))
        comm.barrier()
        comm._transport._shm_peers._drop_gone()
        counts.append(resources()[1] - before)
        comm.barrier()
    return counts


def test_memory_that_was_read_does_not_outlive_its_owner(shm_pool) -> None:
    assert shm_pool.run(forget_what_was_read, size=2) == [[0, 0], [0, 0]]


def files_after_all_kinds() -> list[str]:
    """Files in ``/dev/shm`` that this process has mapped; locks of ``multiprocessing`` aside."""
    all_kinds((SMALL, LARGE))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [one for one in maps if "/dev/shm/" in one and "/sem.mp-" not in one]


def test_dev_shm_is_not_used(shm_pool) -> None:
    assert shm_pool.run(files_after_all_kinds, size=2) == [[], []]


def wait_for_a_late_rank(late_s: float) -> float:
    """Share of one core that the waiting took."""
    comm = communicator()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(late_s)
    spent, started = time.process_time(), time.monotonic()
    comm.barrier()
    return (time.process_time() - spent) / max(time.monotonic() - started, late_s)


def test_waiting_costs_little(shm_pool) -> None:
    assert max(shm_pool.run(wait_for_a_late_rank, 1.0, size=3)[1:]) <= 0.05


def write_in_a_child() -> tuple[bool, bool]:
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
    well = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    untouched = bool((tensor == comm.size).all())
    comm.allreduce(tensor)
    return well, untouched and bool((tensor == comm.size**2).all())


def test_what_a_forked_child_writes_is_its_own(shm_pool) -> None:
    assert shm_pool.run(write_in_a_child, size=2) == [(True, True)] * 2


def read_what_has_left(kind: str, numel: int, barrier: int) -> None:
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


@pytest.mark.parametrize(
    ("kind", "numel", "barrier"),
    [
        *((kind, LARGE, 1) for kind in ("allreduce", "broadcast", "alltoall")),
        ("allreduce", PIECES, -(-PIECES // (1 << 17))),  # pieces of 512 KiB
    ],
)
def test_who_leaves_after_its_last_call_takes_nothing_from_the_others(shm_pool, kind, numel, barrier) -> None:
    shm_pool.run(read_what_has_left, kind, numel, barrier, size=2)


def stop_and_wake(numel: int, at: int) -> tuple[str, bool]:
    """Rank 1 is stopped inside a call, and woken when rank 0 has given up and used its tensor."""
    world, group = communicator(), bagua.comm.get_default_group()
    pids = world.allgather_object(os.getpid())
    steps: Iterator[int] = itertools.repeat(0)

    def stop(_: Step) -> None:
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGSTOP)

    with inject_fault(stop if world.rank == 1 else None):
        comm = group.duplicate().global_communicator
    tensor = comm.empty(numel, dtype=torch.float32).fill_(1.0)
    comm.allreduce(tensor)
    world.barrier()
    steps = itertools.count(1)  # Of the call that matters.
    problem = ""
    try:
        comm.allreduce(tensor, timeout=1.0)
    except BaguaError as error:
        problem = type(error).__name__
    tensor.fill_(-1.0)
    if comm.rank == 1:
        group.store.set("woken", "yes")
    else:
        os.kill(pids[1], signal.SIGCONT)
        group.store.wait(["woken"])
    return problem, bool((tensor == -1.0).all())


@pytest.mark.parametrize("at", range(1, 7))
def test_a_stopped_rank_does_no_harm_when_it_wakes(shm_pool, at: int) -> None:
    """Stopped at each step of a call on shared memory; the survivor goes on with its tensor."""
    assert shm_pool.run(stop_and_wake, LARGE, at, size=2)[0] == ("CollectiveTimeoutError", True)

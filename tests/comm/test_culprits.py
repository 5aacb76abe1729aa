"""Whoever dies is named by all survivors, and nobody else is: on every transport, and at moments of all kinds.

The contract of transports lets a rank die in each kind of call. Here each rank dies once, on several hosts, too.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

import bagua.comm
from bagua.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from bagua.errors import PeerLostError
from bagua.parallel.data_parallel import DistributedDataParallel
from bagua.testing import ProcessRanks, RankPool, ThreadRanks, die, this_rank
from tests.comm.memory_ranks import KINDS, LARGE, agrees
from tests.contract.exercises import communicator
from tests.contract.failures import die_last, say, wait_until_said
from tests.contract.transports import check_the_dead
from tests.harness import on_ranks
from tests.launching import free_port

SIZE = 4
#: Backend, and how many ranks believe to be on each host.
PLACES = [
    ("threads", [4]), ("threads", [2, 2]), ("shm", [4]),
    ("gloo", [4]), ("gloo", [2, 2]), ("hybrid", [2, 2]), ("hybrid", [1, 3]),
]  # fmt: skip
ALGORITHMS = {
    "allreduce": GradientAllReduceAlgorithm(),
    "hierarchical allreduce": GradientAllReduceAlgorithm(hierarchical=True),
    "hierarchical bytegrad": ByteGradAlgorithm(hierarchical=True),
}


def pool(backend: str) -> RankPool:
    return ThreadRanks(SIZE) if backend == "threads" else ProcessRanks(SIZE, backend=backend)


def calls_until_one_is_lost(comm: bagua.comm.Communicator, numel: int = 3) -> PeerLostError:
    """The survivors' error: of the first call without the victim, or of the next one."""
    with pytest.raises(PeerLostError) as caught:
        for _ in range(2):
            comm.allreduce(torch.ones(numel), bagua.comm.ReduceOp.AVG)
    return caught.value


def in_a_call(victim: int, numel: int) -> PeerLostError:
    comm = communicator()
    comm.allreduce(torch.ones(numel))
    die_last(comm.rank == victim, SIZE - 1)
    return calls_until_one_is_lost(comm, numel)


def before_the_first_call(victim: int, call: str) -> PeerLostError:
    """Gloo may connect two ranks at their first call, and knows no deadline there (gloo#520)."""
    comm = communicator()
    die_last(comm.rank == victim, SIZE - 1)
    if call == "allreduce":
        return calls_until_one_is_lost(comm)
    with pytest.raises(PeerLostError) as caught:
        comm.send(torch.ones(2), victim)
        comm.recv(torch.ones(2), victim)
    return caught.value


def at_any_time(victim: int) -> PeerLostError:
    """It is killed while numbers of all sizes are on the way; what is complete before that is right."""
    comm = communicator()
    comm.barrier()
    if comm.rank == victim:
        threading.Timer(0.03 * victim, os.kill, [os.getpid(), signal.SIGKILL]).start()
    with pytest.raises(PeerLostError) as caught:
        while True:
            for kind in KINDS:
                for numel in (7, LARGE, 20 * LARGE):
                    agrees(comm, kind, numel)
    return caught.value


def in_a_step(victim: int, algorithm: str) -> PeerLostError:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), algorithm=ALGORITHMS[algorithm])
    for step in range(6):
        if step == 3 and bagua.comm.get_rank() == victim:
            die()
        try:
            model(torch.ones(1, 8)).sum().backward()
        except PeerLostError as error:
            assert step in (2, 3, 4), "the step before may hear of the death, or the one after"
            return error
    raise AssertionError("nobody was lost")


def in_a_group(victim: int) -> PeerLostError | None:
    """Ranks of the group count from 0; its errors name global ranks."""
    group = bagua.comm.new_group([1, 2, 3])
    if not group:
        return None
    group.global_communicator.barrier()
    die_last(bagua.comm.get_rank() == victim, 2)
    error = calls_until_one_is_lost(group.global_communicator)
    assert f"of communicator {group.label}" in str(error)
    return error


def while_one_is_busy(victim: int) -> PeerLostError:
    """Rank 1 comes when rank 0 has got its error already."""
    comm = communicator()
    comm.barrier()
    die_last(comm.rank == victim, SIZE - 1)
    if comm.rank == 1:
        wait_until_said("told", 1)
    error = calls_until_one_is_lost(comm)
    say("told")
    return error


def inside_a_host(victim: int) -> PeerLostError | None:
    """All others but rank 2 notice, and leave; it waits for one of them inside its host."""
    group = bagua.comm.get_default_group().duplicate()
    group.global_communicator.barrier()
    die_last(group.rank == victim, SIZE - 1)
    if group.rank == 2:
        return calls_until_one_is_lost(group.intra_node_communicator)
    with pytest.raises(PeerLostError):
        group.global_communicator.barrier()
    group.close()
    return None


class Moment(NamedTuple):
    """When ranks die. ``function(victim, *arguments)`` gives the error of a survivor, or None."""

    function: Callable[..., PeerLostError | None]
    arguments: tuple[object, ...] = ()
    victims: Sequence[int] = range(SIZE)  # One of them dies at a time.
    hosts: Sequence[list[int]] = ([4], [2, 2], [1, 3])  # Only on these.
    processes: bool = False  # Whether ranks must be processes.
    told: Sequence[int] = range(SIZE)  # Ranks whose error is looked at, if they survive.


MOMENTS = {
    "a small call": Moment(in_a_call, (3,)),
    "a large call": Moment(in_a_call, (300_000,)),
    "any time": Moment(at_any_time, processes=True),
    **{f"a first {call}": Moment(before_the_first_call, (call,), [3], [[4]]) for call in ("allreduce", "send")},
    "a group": Moment(in_a_group, victims=[3], hosts=[[4]], told=[1, 2]),
    "while one is busy": Moment(while_one_is_busy, victims=[2], hosts=[[4]]),
    "inside a host": Moment(inside_a_host, victims=[0], hosts=[[2, 2]], told=[2]),
    **{f"a step with {name}": Moment(in_a_step, (name,), hosts=[[4], [2, 2]]) for name in ALGORITHMS},
}


def case(backend: str, *more: object) -> object:
    return pytest.param(backend, *more, marks=getattr(pytest.mark, backend), id=" ".join(map(str, [backend, *more])))


CASES = [
    case(backend, hosts, name)
    for backend, hosts in PLACES
    for name, moment in MOMENTS.items()
    if hosts in moment.hosts and not (moment.processes and backend == "threads")
]


@pytest.mark.parametrize(("backend", "hosts", "moment"), CASES)
def test_all_survivors_name_the_rank_that_died(backend: str, hosts: list[int], moment: str) -> None:
    when = MOMENTS[moment]
    for victim in when.victims:
        outcomes = pool(backend).outcomes(when.function, victim, *when.arguments, size=SIZE, hosts=hosts)
        for rank in {*when.told} - {victim}:
            assert outcomes[rank].error is None, outcomes[rank].trace
            check_the_dead(outcomes[rank].value, victim, rank)


def while_it_is_sent_to(kind: str) -> PeerLostError:
    """Rank 0 is stopped when it has asked for its part, and killed when rank 1 is sending that."""
    comm, half = communicator(), 4_000_000
    (other, *_), data = comm.allgather_object(os.getpid()), torch.ones(2 * half)
    if comm.rank == 1:
        time.sleep(0.2)
        os.kill(other, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, [other, signal.SIGKILL]).start()
    elif comm.rank == 2:
        wait_until_said("over", 1)  # It has connections, and says nothing.
    with pytest.raises(PeerLostError) as caught:
        if kind == "broadcast":
            comm.broadcast(data, 1, timeout=600.0)
        elif kind == "sendrecv":
            comm.sendrecv(torch.zeros(2 * half), data, 1 - comm.rank, 1 - comm.rank, timeout=600.0)
        else:
            comm.alltoall_v(torch.zeros(2 * half), data, [half, half], [half, half], timeout=600.0)
    say("over")
    bagua.comm.destroy_process_group()
    return caught.value


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "size"), [("broadcast", 2), ("broadcast", 3), ("sendrecv", 2), ("alltoall_v", 2)])
def test_a_rank_that_dies_while_it_is_sent_to_is_noticed_long_before_the_deadline(kind: str, size: int) -> None:
    outcomes = ProcessRanks(size, backend="gloo").outcomes(while_it_is_sent_to, kind, size=size)
    assert outcomes[1].error is None, outcomes[1].trace
    check_the_dead(outcomes[1].value, 0, 1)


@pytest.mark.parametrize("took_part", [True, False])
@on_ranks(3, pool="process_pool")
def test_who_closed_without_its_part_is_missed_long_before_the_deadline(took_part: bool) -> None:
    """Rank 0 names it while it sends; rank 2 closes when it has its part, or rank 0 sends; rank 1 is late."""
    group, data = bagua.comm.get_default_group().duplicate(), torch.ones(4_000_000)
    comm, is_missed = group.global_communicator, pytest.raises(PeerLostError, check=lambda error: error.peers == (2,))
    comm.barrier()
    if comm.rank == 0:
        work = comm.broadcast(data, 0, async_op=True, timeout=600.0)
        say("sent")
        with contextlib.nullcontext() if took_part else is_missed:
            work.wait()
        say("over")
    elif comm.rank == 2:
        wait_until_said("sent", 1)
        if took_part:
            comm.broadcast(data, 0)
        group.close()
        say("left")
    else:
        wait_until_said("left", 1)
        time.sleep(2.5)  # So long no rank waits for what may yet come of a connection that has closed.
        with contextlib.nullcontext() if took_part else contextlib.suppress(PeerLostError):
            comm.broadcast(data, 0)
        wait_until_said("over", 1)


def in_a_forked_child(port: int) -> int | None:
    """Exit status of a process that multiprocessing forks: it ends without a word, and never comes to ``atexit``."""
    rank = this_rank.get().rank

    def broadcast_last() -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        bagua.comm.init_process_group(backend="gloo", timeout=60.0)
        communicator().barrier()
        if rank == 1:
            time.sleep(2.5)
        communicator().broadcast(torch.ones(4_000_000), 0)

    multiprocessing.current_process()._config["daemon"] = False  # Such a process may have no children.
    child = multiprocessing.get_context("fork").Process(target=broadcast_last)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.mark.gloo
def test_a_forked_child_that_ends_with_its_part_is_not_missed() -> None:
    assert ProcessRanks(3, backend=None).run(in_a_forked_child, free_port()) == [0, 0, 0]


def after_the_host_of_the_store(port: int, backend: str) -> PeerLostError:
    rank = this_rank.get().rank
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    bagua.comm.init_process_group(backend=backend, timeout=20.0)
    communicator().barrier()
    die_last(rank == 0, 2)
    return calls_until_one_is_lost(communicator())


@pytest.mark.parametrize("backend", [case("shm"), case("gloo")])
def test_survivors_name_the_rank_that_hosted_their_store(backend: str) -> None:
    outcomes = ProcessRanks(3, backend=None).outcomes(after_the_host_of_the_store, free_port(), backend, size=3)
    for rank in (1, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        check_the_dead(outcomes[rank].value, 0, rank)


def abort_for_another_rank() -> str | None:
    group = bagua.comm.get_default_group()
    if group.rank == 0:
        group.abort("it is on fire", culprit=3)
        return None
    with pytest.raises(PeerLostError) as caught:
        group.global_communicator.barrier()
    return caught.value.problem


@pytest.mark.parametrize(("backend", "hosts"), [case(*place) for place in PLACES])
def test_who_aborts_can_blame_another_rank(backend: str, hosts: list[int]) -> None:
    _, *told, blamed = pool(backend).run(abort_for_another_rank, size=SIZE, hosts=hosts)
    assert told == ["lost rank 3: it is on fire"] * 2
    # The one that is blamed learns who gave it up.
    assert blamed == "lost rank 0: it gave up rank 3: it is on fire"

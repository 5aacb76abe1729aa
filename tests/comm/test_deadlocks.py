"""Ranks that ask for different calls, or wait for each other in them, say so long before the deadline."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.comm
from bagua.comm import Communicator, Membership, Recorder, Transport, Work, long_wait
from bagua.comm.records.deadlock import Activity, AwaitedCall, Deadlocks, Standstill, stuck
from bagua.comm.store.keys import behind_token, bottom_of
from bagua.comm.transports import registry as checked_module
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.errors import BaguaError, CollectiveMismatchError, CollectiveTimeoutError
from bagua.parallel.module import with_bagua
from tests.comm.memory_ranks import on_communicators, run_on_gloo, values
from tests.comm.test_memory_failures import LEGAL
from tests.harness import mlp, on_ranks, sgd, train_steps

#: Taken once: ranks that are threads are impatient at the same time.
PATIENT = long_wait.FIRST_WARNING_S, long_wait.LOOK_S


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """The first warning comes soon, and looks follow one another quickly."""
    long_wait.FIRST_WARNING_S, long_wait.LOOK_S = 0.2, 0.1
    try:
        yield
    finally:
        long_wait.FIRST_WARNING_S, long_wait.LOOK_S = PATIENT


def error_of(program: Callable[[], object]) -> BaguaError:
    with impatient(), pytest.raises(BaguaError) as caught:
        program()
    return caught.value


def crossed() -> BaguaError:
    """Ranks 0 and 1 call on different groups; rank 2 waits for both."""
    group = bagua.comm.get_default_group()
    pair = bagua.comm.new_group([0, 1])
    comm = pair.global_communicator if group.rank == 1 else group.global_communicator
    return error_of(lambda: comm.allreduce(torch.ones(2)))


def test_calls_on_two_communicators_that_wait_for_each_other_end_alike_on_all_ranks(ranks):
    errors = ranks(3, crossed)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    assert {error.peers for error in errors[:2]} <= {(0, 1), (0, 1, 2)}
    assert len({error.peers for error in errors[:2]}) == 1
    assert errors[0].expected == "#1 allreduce(2 x float32, sum), on world on rank 0"
    assert "#1 allreduce(2 x float32, sum), on world/group1 on rank 1" in errors[0].seen
    assert "more batches" in errors[0].advice


@on_ranks(2, pool="rank_pool")
def test_a_message_and_a_collective_that_wait_for_each_other_end_alike() -> None:
    """Rank 0 waits for a message, rank 1 for rank 0 in a collective of another group."""
    group = bagua.comm.get_default_group()
    other = group.duplicate()
    calls = group.global_communicator.recv, other.global_communicator.allreduce
    error = error_of(lambda: calls[group.rank](torch.ones(2), *([] if group.rank else [1])))
    assert (type(error), error.peers) == (CollectiveMismatchError, (0, 1))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (2, 1)], ids=str)
@on_ranks(2, pool="rank_pool")
def test_ranks_in_calls_of_the_same_number_that_differ_are_told_of_both(sizes):
    comm = bagua.comm.get_default_group().global_communicator
    comm.barrier()
    error = error_of(lambda: comm.allreduce(torch.ones(sizes[comm.rank])))
    assert type(error) is CollectiveMismatchError
    assert all(f"#2 allreduce({size} x float32, sum)" in f"{error.expected}; {error.seen}" for size in sizes)


def uneven(algorithm: str) -> BaguaError:
    """Rank 1 has a batch more than rank 0, and then both count what was right."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = sgd(model.parameters())
    wrapped = with_bagua(model, optimizer, algorithm)

    def epoch() -> None:
        train_steps(wrapped, optimizer, rank, range(2 + rank))
        bagua.comm.get_default_group().global_communicator.allreduce(torch.ones(2))

    return error_of(epoch)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_uneven_batches_and_a_count_at_the_end_are_found_on_both_ranks(ranks, algorithm):
    errors = ranks(2, uneven, algorithm)
    assert [(type(error), error.peers) for error in errors] == [(CollectiveMismatchError, (0, 1))] * 2
    assert "on world" in errors[0].expected
    assert "in step 2, bucket 0" in errors[0].seen
    assert errors[0].seen == errors[1].expected


@on_ranks(2, pool="rank_pool")
def test_a_rank_whose_other_thread_goes_on_is_waited_for() -> None:
    """Rank 0 waits; a thread of rank 1 waits for rank 0 on another group, while rank 1 computes, and comes late."""
    group = bagua.comm.get_default_group()
    comm, other = group.global_communicator, group.duplicate().global_communicator
    tensor = torch.ones(1)
    with impatient():
        if group.rank:
            thread = threading.Thread(target=other.allreduce, args=(torch.ones(1),))
            thread.start()
            thread.join(1.5)  # Many looks.
            comm.allreduce(tensor)
            thread.join()
        else:
            comm.allreduce(tensor)
            other.allreduce(torch.ones(1))
    assert float(tensor) == 2.0


@on_ranks(2, pool="rank_pool")
def test_what_a_rank_said_in_an_earlier_wait_does_not_count() -> None:
    """Rank 0 waits; rank 1 computes, and what it said in an earlier wait lies in the store."""
    group = bagua.comm.get_default_group()
    other = group.duplicate().label
    said = Standstill(0, (AwaitedCall(f"{other} [0, 1]", 1, (0, 1), "barrier"),), {"world [0, 1]": 0})
    tensor = torch.ones(1)
    if group.rank:
        store = torch.distributed.PrefixStore(f"bagua/waits/{group.recorder.job}", behind_token(bottom_of(group.store)))
        store.set("1", json.dumps([said, 1]))
        time.sleep(1.5)  # Many looks.
    with impatient():
        group.global_communicator.allreduce(tensor)
    assert float(tensor) == 2.0


class SlowReaders(torch.distributed.HashStore):
    """A store whose other readers come one by one, each time that somebody asks how many came."""

    asked = 0

    def add(self, key: str, amount: int) -> int:
        self.asked += amount == 0
        return super().add(key, amount or 1)


def test_who_was_not_known_yet_lets_the_named_ones_read_before_it_leaves():
    call = AwaitedCall("world [0, 1, 2]", 1, (0, 1, 2), "allreduce")
    found = {rank: Standstill(1, (call,), {}) for rank in range(3)}
    store = SlowReaders()
    store.set("verdict", json.dumps([[0, 1, "allreduce"], [1, 1, "barrier"]]))
    looking = Deadlocks(Recorder(), store, Activity(), "world")
    assert looking._agreed(store, 2, found[2], found) == dict.fromkeys(range(3), "allreduce")
    assert store.asked == 2
    # An earlier verdict of the job has no readers any more.
    later = {rank: report._replace(number=2) for rank, report in found.items()}
    assert looking._agreed(store, 2, later[2], later) == dict.fromkeys(range(3), "allreduce")
    assert store.asked == 2


# What is stuck, judged from reports, against ranks that are played to their end.


class Play(NamedTuple):
    """Calls of each rank, in order: the communicator of each, and what its ranks must agree on."""

    members: list[list[int]]
    programs: list[list[tuple[int, int]]]


@st.composite
def plays(draw: st.DrawFn) -> Play:
    size = draw(st.integers(2, 4))
    sets = st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True)
    members = draw(st.lists(sets, min_size=1, max_size=3))
    mine = [[number for number, one in enumerate(members) if rank in one] for rank in range(size)]
    kinds = st.sampled_from([0, 0, 0, 1])
    programs = [draw(st.lists(st.tuples(st.sampled_from(one), kinds), max_size=5)) if one else [] for one in mine]
    return Play(members, programs)


def ended(play: Play) -> list[int]:
    """How many calls of each rank end, if none is ever given up."""
    begun = [[] for _ in play.programs]  # The calls that each rank has begun.
    over = [0] * len(play.programs)
    for _ in range(2 * sum(map(len, play.programs))):  # In each pass a call begins or ends, if one can.
        for rank, program in enumerate(play.programs):
            if over[rank] == len(begun[rank]) < len(program):
                begun[rank].append(program[over[rank]])
            elif over[rank] < len(begun[rank]):
                one = begun[rank][-1][0]
                number = len(kinds_on(one, begun[rank]))
                there = [kinds_on(one, begun[other])[number - 1 : number] for other in play.members[one]]
                over[rank] += all(kinds == [begun[rank][-1][1]] for kinds in there)
    return over


def kinds_on(communicator: int, calls: list[tuple[int, int]]) -> list[int]:
    return [kind for one, kind in calls if one == communicator]


def reports(play: Play, over: list[int]) -> dict[int, Standstill]:
    """Of the ranks that wait, when ``over`` calls of each have ended and the next one has begun, if there is one."""
    found = {}
    for rank, program in enumerate(play.programs):
        begun = program[: over[rank] + 1]
        if over[rank] < len(program):
            one, kind = program[over[rank]]
            mine = [number for number, members in enumerate(play.members) if rank in members]
            counts = {str(number): len(kinds_on(number, begun)) for number in mine}
            waits = (AwaitedCall(str(one), counts[str(one)], tuple(play.members[one]), "a call", (kind,)),)
            found[rank] = Standstill(len(begun), waits, counts)
    return found


@given(plays(), st.data())
def test_who_is_called_stuck_never_goes_on_and_who_waits_for_the_stuck_is_called_so(play, data):
    last = ended(play)
    # Any moment on the way: the calls that can end have ended up to there.
    moment = [data.draw(st.integers(0, most)) for most in last]
    early = {rank: report for rank, report in reports(play, moment).items() if moment[rank] == last[rank]}
    assert all(moment[rank] == last[rank] < len(play.programs[rank]) for rank in stuck(early))
    # At the end: all that wait for a rank that waits are stuck; the rest wait for one that has no call left.
    found = reports(play, last)
    called = stuck(found)
    for rank, report in found.items():
        wait = report.waits[0]
        there = {one: found[one] for one in wait.peers if one in found}
        missing = [one for one, other in there.items() if other.begun[wait.where] < wait.sequence]
        missing += [
            one for one, other in there.items() if other.waits[0][:2] == wait[:2] and other.waits[0][4] != wait[4]
        ]
        assert (rank in called) == any(one in called for one in missing)


def test_both_ends_of_a_message_that_takes_its_time_are_not_stuck():
    def report(peer: int) -> Standstill:
        return Standstill(1, (AwaitedCall("world", 0, (peer,), "a message"),), {"world": 0})

    assert stuck({0: report(1), 1: report(0)}) == []
    assert stuck({0: report(1), 1: report(2), 2: report(0)}) == [0, 1, 2]


def test_what_waits_for_nobody_in_particular_is_not_stuck():
    anyone = Standstill(1, (AwaitedCall("world", 0, (), "recv from any"),), {"world": 0, "pair": 0})
    other = Standstill(1, (AwaitedCall("pair", 1, (0, 1), "allreduce"),), {"world": 0, "pair": 1})
    assert stuck({0: anyone, 1: other}) == []


def test_a_rank_with_another_call_that_will_end_is_not_stuck():
    """Its background thread is in a call in which all have come: it may begin what the others wait for."""
    calls = (
        AwaitedCall(where, number, (0, 1), "allreduce", (number, ord(where))) for where in "ab" for number in (1, 2)
    )
    both = tuple(calls)
    first = Standstill(4, both, {"a": 2, "b": 2, "c": 0})
    second = Standstill(2, (AwaitedCall("c", 1, (0, 1), "barrier"),), {"a": 0, "b": 2, "c": 1})
    assert stuck({0: first, 1: second}) == stuck({0: first, 1: first}) == []
    assert stuck({0: first._replace(waits=both[:1]), 1: second}) == [0, 1]


def checked(member: Membership) -> Transport:
    return checked_module.CheckedTransport(C10dTransport("gloo", member), C10dTransport("gloo", member.part("check")))


# Programs that are right without checks are right with them.


@pytest.mark.gloo
@pytest.mark.parametrize(
    "ways",
    [
        ("isend recv wait", "isend recv wait"), ("irecv send wait", "irecv send wait"),
        ("sendrecv", "irecv isend wait"), ("sendrecv", "recv send"), ("recv_any send", "irecv send wait"),
        ("recv send", "irecv isend wait_backwards"),  # What rank 1 tells first is not what rank 0 waits for first.
    ],
    ids=" and ".join,
)  # fmt: skip
@on_communicators(2, run_on_gloo, transport=checked)
def test_ranks_may_exchange_in_ways_of_their_own(comm: Communicator, ways: tuple[str, str]) -> None:
    tensor, mine, other = torch.empty(2), torch.full((2,), float(comm.rank)), 1 - comm.rank
    works: list[Work | None] = []
    steps: dict[str, Callable[[], object]] = {
        "sendrecv": lambda: comm.sendrecv(tensor, mine, other, other),
        "recv_any": lambda: comm.recv_any(tensor),
        "recv": lambda: comm.recv(tensor, other),
        "send": lambda: comm.send(mine, other),
        "irecv": lambda: works.append(comm.recv(tensor, other, async_op=True)),
        "isend": lambda: works.append(comm.send(mine, other, async_op=True)),
        "wait": lambda: [work.wait() for work in works],
        "wait_backwards": lambda: [work.wait() for work in reversed(works)],
    }
    for step in ways[comm.rank].split():
        steps[step]()
    assert tensor.tolist() == [other, other]


def a_collective_is_started_before_a_message_is_awaited(comm: Communicator) -> None:
    tensor, message = torch.ones(2), torch.ones(1)
    if comm.rank == 0:
        work = comm.allreduce(tensor, async_op=True)
        comm.send(message, 1)
        work.wait()
    else:
        comm.recv(message, 0)
        comm.allreduce(tensor)
    assert tensor.equal(torch.full((2,), 2.0))


CORRECT = {**LEGAL, "a collective is started before a message": a_collective_is_started_before_a_message_is_awaited}


@pytest.mark.gloo
@pytest.mark.parametrize("program", CORRECT)
def test_a_correct_program_stays_correct(program: str) -> None:
    values(run_on_gloo(2, CORRECT[program], transport=checked))


@pytest.mark.gloo
def test_a_late_rank_is_named_however_late_the_comparison_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded machine the fingerprints' deadline ends long after that of the call."""
    make = checked_module.fingerprint_of

    def slowly(*arguments: Any) -> torch.Tensor:
        time.sleep(0.15)
        return make(*arguments)

    monkeypatch.setattr(checked_module, "fingerprint_of", slowly)
    others = threading.Barrier(2)

    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.8)
        else:
            others.wait()
        with pytest.raises(CollectiveTimeoutError, check=lambda error: error.peers == (1,)):
            comm.allreduce(torch.ones(3), timeout=0.4)

    values(run_on_gloo(3, job, transport=checked))

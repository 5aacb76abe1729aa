"""The collectives of shared memory: pieces, order, disagreement, and ranks that fail at any step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from bagua.comm import memory, memory_exchange, memory_peers
from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.memory_line import Deadline, Notice, State, Step, rows
from bagua.comm.threads import RankKilled
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
)
from tests.comm.memory_ranks import KINDS, LARGE, SMALL, Exercise, StagedTransport, run, values

pytestmark = pytest.mark.threads

EXERCISES = [Exercise(kind, numel) for kind in KINDS for numel in (SMALL, LARGE) if (kind, numel) != ("barrier", LARGE)]


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_limit(limit: int) -> None:
        monkeypatch.setattr(memory, "SMALL_BYTES", limit)
        monkeypatch.setattr(memory_exchange, "SMALL_BYTES", limit)

    return set_limit


def agrees(exercise: Exercise, comm: Communicator, times: int = 1, **options: object) -> bool:
    for _ in range(times):
        seen, wanted = exercise.call(comm, **options)
        assert torch.equal(seen, wanted), (exercise, comm.rank)
    return True


@pytest.mark.parametrize("exercise", EXERCISES, ids=repr)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("async_op", [False, True])
def test_right_results(exercise: Exercise, size: int, async_op: bool) -> None:
    assert values(run(size, lambda comm: agrees(exercise, comm, async_op=async_op))) == [True] * size


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["sliced", "redundant"])
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_data_that_is_shown_in_pieces(numel: int, size: int, limit: int, small_limit: Callable[[int], None]) -> None:
    """Every kind, several times in a row, through areas of a few elements that are overwritten."""
    small_limit(limit)

    def job(comm: Communicator) -> bool:
        return all(agrees(Exercise(kind, numel), comm, times=3) for kind in KINDS)

    assert all(values(run(size, job, transport=StagedTransport)))


@pytest.mark.parametrize("seed", range(4))
def test_results_do_not_depend_on_who_is_late(seed: int) -> None:
    dice = random.Random(seed)

    def delay(step: Step) -> None:
        time.sleep(dice.choice((0, 0, 0.0005, 0.002)))

    def job(comm: Communicator) -> bool:
        return all(agrees(exercise, comm) for exercise in EXERCISES)

    assert all(values(run(3, job, fault=delay)))


def test_rows_of_each_kind() -> None:
    uneven = Call("alltoall_v", 1, torch.uint8, 0, send_counts=(3, 0, 2), recv_counts=(1, 1, 1))
    assert rows(uneven, 3) == [(0, 3), (3, 0), (3, 2)]
    assert rows(Call("scatter", 1, torch.uint8, 4), 2) == [(0, 4), (4, 4)]
    assert rows(Call("broadcast", 1, torch.uint8, 4), 2) == [(0, 4)]


# Disagreement.

CALLS: dict[str, Callable[[Communicator], object]] = {
    "allreduce": lambda comm: comm.allreduce(torch.full((8,), float(comm.rank))),
    "other kind": lambda comm: comm.broadcast(torch.full((8,), float(comm.rank)), 0),
    "other size": lambda comm: comm.allreduce(torch.full((9,), float(comm.rank))),
    "other dtype": lambda comm: comm.allreduce(torch.full((8,), float(comm.rank), dtype=torch.float64)),
    "other reduction": lambda comm: comm.allreduce(torch.zeros(8), torch.distributed.ReduceOp.MAX),
    "other root": lambda comm: comm.broadcast(torch.zeros(8), 1),
    "barrier": lambda comm: comm.barrier(),
    "large": lambda comm: comm.allreduce(torch.zeros(LARGE)),
}


@pytest.mark.parametrize("odd", ["other kind", "other size", "other dtype", "other reduction", "barrier", "large"])
@pytest.mark.parametrize("where", [0, 2])
def test_all_ranks_see_a_disagreement(odd: str, where: int) -> None:
    outcomes = run(3, lambda comm: CALLS[odd if comm.rank == where else "allreduce"](comm))
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 3
    usual, unusual = (str(Call("allreduce", 1, torch.float32, 8, "sum")), f"on rank {where}")
    for rank, error in enumerate(outcomes):
        own, other = error.expected, error.seen
        assert unusual in (own if rank == where else other)
        assert usual in (other if rank == where else own)
        assert error.peers == ((where,) if rank != where else tuple({0, 1, 2} - {where}))


def test_a_disagreement_writes_nothing() -> None:
    tensors = [torch.full((LARGE + rank,), float(rank)) for rank in range(2)]
    outcomes = run(2, lambda comm: comm.allreduce(tensors[comm.rank]))
    assert all(isinstance(outcome, CollectiveMismatchError) for outcome in outcomes)
    assert all((tensor == rank).all() for rank, tensor in enumerate(tensors))


def test_counts_that_do_not_fit() -> None:
    def job(comm: Communicator) -> None:
        sent = [1, 2, 3] if comm.rank == 0 else [1, 1, 1]
        comm.alltoall_v(torch.zeros(3), torch.zeros(sum(sent)), [1, 1, 1], sent)

    outcomes = run(3, job)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 3
    assert all(error.peers == (0, 1) and "sends 2 elements to rank 1" in str(error) for error in outcomes)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("received", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)], ids=["size", "dtype"])
def test_sender_and_receiver_disagree(received: torch.Tensor, late: int) -> None:
    before = received.clone()

    def job(comm: Communicator) -> None:
        if comm.rank == late:
            time.sleep(0.05)
        if comm.rank == 0:
            comm.send(torch.ones(3), 1)
        else:
            comm.recv(received, 0)

    outcomes = run(2, job)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 2
    assert "send(3 x float32" in outcomes[0].expected
    assert "send(3 x float32" in outcomes[1].seen
    assert "recv(" in outcomes[0].seen
    assert "recv(" in outcomes[1].expected
    assert torch.equal(received, before)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_collective_meets_a_message(kind: str) -> None:
    """All ranks hear of it long before the deadline, also the third, which did nothing wrong."""

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            getattr(comm, kind)(torch.zeros(2), 1)
        else:
            comm.allreduce(torch.zeros(2))

    started = time.monotonic()
    outcomes = run(3, job, timeout_s=20.0)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 3
    assert f"#1 {kind}" in str(outcomes[1])
    assert "#1 allreduce" in str(outcomes[0])
    assert "on rank 0" in outcomes[2].seen
    assert "on rank 1" in outcomes[2].seen
    assert time.monotonic() - started < 10


# Order.


def test_messages_started_together_in_the_same_order_do_not_wait_for_each_other() -> None:
    def job(comm: Communicator) -> bool:
        other = 1 - comm.rank
        output = torch.zeros(LARGE)
        receive = comm.recv(output, other, async_op=True)
        send = comm.send(torch.full((LARGE,), float(comm.rank)), other, async_op=True)
        comm.barrier()
        assert receive is not None
        assert send is not None
        return receive.wait() and send.wait() and bool((output == other).all())

    assert values(run(2, job)) == [True, True]


def test_a_synchronous_call_comes_after_the_asynchronous_ones() -> None:
    def job(comm: Communicator) -> list[float]:
        tensor = torch.ones(LARGE)
        works = [comm.allreduce(tensor, async_op=True) for _ in range(5)]
        comm.allreduce(tensor)
        done = all(work.is_completed() for work in works if work is not None)
        messages = [torch.zeros(1) for _ in range(4)]
        if comm.rank == 0:
            pending = [comm.send(torch.full((1,), float(i)), 1, async_op=True) for i in range(3)]
            comm.send(torch.full((1,), 3.0), 1)
            assert all(work.is_completed() for work in pending if work is not None)
        else:
            for message in messages:
                comm.recv(message, 0)
        return [tensor[0].item(), done, *(message.item() for message in messages)]

    assert values(run(2, job)) == [[64.0, True, 0, 0, 0, 0], [64.0, True, 0, 1, 2, 3]]


# Deadlines, aborts, deaths.


def test_a_late_rank_is_named() -> None:
    release = threading.Event()

    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait(10)
        else:
            try:
                comm.allreduce(torch.zeros(1), timeout=0.2)
            finally:
                if comm.rank == 0:
                    time.sleep(0.1)
                    release.set()

    outcomes = run(3, job)
    kinds = {type(outcomes[0]), type(outcomes[2])}
    assert CollectiveTimeoutError in kinds <= {CollectiveTimeoutError, PeerLostError}
    errors = [outcome for outcome in outcomes if isinstance(outcome, CollectiveTimeoutError)]
    assert all(error.peers == (1,) and error.timeout_s == 0.2 for error in errors)


def test_a_rank_that_comes_after_the_deadline_of_others_learns_of_it() -> None:
    over = threading.Event()

    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            assert over.wait(10)
            comm.allreduce(torch.zeros(1))
        try:
            comm.allreduce(torch.zeros(1), timeout=0.1)
        finally:
            over.set()

    outcomes = run(2, job)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[1], PeerLostError)
    assert "CollectiveTimeoutError" in str(outcomes[1])


def test_a_wait_that_is_given_up_breaks_the_communicator() -> None:
    over = threading.Event()

    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            assert over.wait(10)
            comm.barrier()
        work = comm.barrier(async_op=True)
        assert work is not None
        try:
            work.wait(0.1)
        finally:
            over.set()

    outcomes = run(2, job)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[1], PeerLostError)


@pytest.mark.parametrize("call", ["allreduce", "recv", "send"])
def test_abort_wakes_everyone_with_the_reason(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 to 3 wait, in a collective or for each other; rank 0 aborts from another thread."""
    monkeypatch.setattr(memory_peers, "SLICE_S", 30.0)  # Nobody looks up without being woken.
    waiting = threading.Barrier(4)

    def job(comm: Communicator) -> None:
        waiting.wait(10)
        if comm.rank == 0:
            thread = threading.Thread(target=comm.abort, args=("enough of this",))
            thread.start()
            thread.join()
            comm.barrier()
        if call == "allreduce":
            comm.allreduce(torch.zeros(4), timeout=20)
        else:
            getattr(comm, call)(torch.zeros(4), comm.rank % 3 + 1, timeout=20)

    started = time.monotonic()
    outcomes = run(4, job)
    assert time.monotonic() - started < 5
    assert isinstance(outcomes[0], CommunicatorClosedError)
    for error in outcomes[1:]:
        assert isinstance(error, PeerLostError)
        assert error.peers == (0,)
        assert "enough of this" in str(error)


def test_abort_ends_the_own_calls() -> None:
    def job(comm: Communicator) -> object:
        if comm.rank == 1:
            time.sleep(0.3)
            return None
        work = comm.allreduce(torch.zeros(1), async_op=True)
        assert work is not None
        comm.abort("changed my mind")
        return work.exception() or work.wait()

    outcomes = run(2, job)
    assert isinstance(outcomes[0], CommunicatorClosedError)
    assert "changed my mind" in str(outcomes[0])


def test_who_arrived_before_dying_has_arrived() -> None:
    """Rank 1 arrives and leaves between two looks at its line."""
    over = threading.Event()

    def job(comm: Communicator) -> object:
        if comm.rank == 1:
            comm._transport._peers.leave(State.LEFT, 1, "for the test")
            return over.wait(10)
        peers, looks = comm._transport._peers, iter([(1,), ()])
        soon = Deadline(time.perf_counter() + 5, 5)
        with pytest.raises(PeerLostError):
            peers.wait(lambda: (1,), soon)
        peers.wait(lambda: next(looks), soon)
        over.set()
        return next(looks, "both looks were needed")

    assert values(run(2, job)) == ["both looks were needed", True]


def test_nothing_is_received_on_a_broken_communicator() -> None:
    """A message that lies ready is not taken after an abort."""
    target, offered = torch.zeros(3), threading.Event()

    def job(comm: Communicator) -> object:
        if comm.rank == 0:
            work = comm.send(torch.ones(3), 1, async_op=True)
            assert work is not None
            time.sleep(0.05)
            comm.abort("no more")
            offered.set()
            return None
        assert offered.wait(10)
        return comm.recv(target, 0)

    assert isinstance(run(2, job)[1], PeerLostError)
    assert (target == 0).all()


def steps_of(exercise: Exercise, size: int) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    values(run(size, lambda comm: agrees(exercise, comm), fault=lambda step: seen.append((step.rank, step.number))))
    return sorted(seen)


@pytest.mark.parametrize("exercise", EXERCISES, ids=repr)
def test_a_rank_killed_at_any_step(exercise: Exercise) -> None:
    """Survivors get a typed error at once, or the complete right result; and then no more calls."""
    places = steps_of(exercise, 3)
    assert {rank for rank, _ in places} == {0, 1, 2}
    for victim, number in places:

        def kill(step: Step, victim: int = victim, number: int = number) -> None:
            if step.rank == victim and step.number == number:
                raise RankKilled

        def job(comm: Communicator) -> tuple[object, object]:
            first = attempt(lambda: agrees(exercise, comm))
            return first, attempt(comm.barrier)

        outcomes = run(3, job, fault=kill)
        assert isinstance(outcomes[victim], RankKilled)
        for survivor in {0, 1, 2} - {victim}:
            first, second = outcomes[survivor]
            assert first is True or isinstance(first, PeerLostError), (victim, number, first)
            wanted = PeerLostError if first is True else CommunicatorClosedError
            assert isinstance(second, wanted), (victim, number, second)


def attempt(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:
        return error


@pytest.mark.parametrize("exercise", [Exercise("allreduce", LARGE), Exercise("sendrecv", SMALL)], ids=repr)
def test_a_rank_silent_at_any_step(exercise: Exercise) -> None:
    """Nobody waits past the deadline for a rank that stopped, and who finishes is right."""
    for victim, number in [place for place in steps_of(exercise, 2) if place[0] == 1]:
        release = threading.Event()

        def stop(step: Step, victim: int = victim, number: int = number, release: threading.Event = release) -> None:
            if step.rank == victim and step.number == number:
                release.wait(10)

        def job(comm: Communicator, release: threading.Event = release) -> bool:
            try:
                return agrees(exercise, comm, timeout=0.15)
            finally:
                if comm.rank == 0:
                    release.set()

        outcomes = run(2, job, fault=stop)
        for outcome in outcomes:
            errors = (CollectiveTimeoutError, PeerLostError)
            assert outcome is True or isinstance(outcome, errors), (number, outcome)


def test_a_result_read_from_a_tensor_taken_back_is_not_returned() -> None:
    """Rank 0 gives up in the last barrier and reuses its tensor, while rank 1 still reads it."""
    given_up = threading.Event()

    def delay(step: Step) -> None:
        if step.rank == 1 and step.name == "pass" and step.call.kind == "broadcast":
            assert given_up.wait(10)

    tensors = [torch.ones(LARGE), torch.zeros(LARGE)]

    def job(comm: Communicator) -> None:
        try:
            comm.broadcast(tensors[comm.rank], 0, timeout=0.1 if comm.rank == 0 else 10)
        finally:
            if comm.rank == 0:
                tensors[0].fill_(666.0)
                given_up.set()

    outcomes = run(2, job, fault=delay)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[1], PeerLostError)


def test_a_message_read_from_a_tensor_taken_back_is_not_returned() -> None:
    given_up = threading.Event()

    def delay(step: Step) -> None:
        if step.name == "take":
            assert given_up.wait(10)

    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.recv(torch.zeros(3), 0)
        try:
            comm.send(torch.zeros(3), 1, timeout=0.1)
        finally:
            given_up.set()

    outcomes = run(2, job, fault=delay)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[1], PeerLostError)


def test_the_notice_names_both_sides_of_uneven_counts() -> None:
    calls = [
        Call("alltoall_v", 1, torch.uint8, 0, send_counts=(0, 2), recv_counts=(0, 1)),
        Call("alltoall_v", 1, torch.uint8, 0, send_counts=(1, 0), recv_counts=(2, 0)),
    ]
    notices = [Notice(call, call.agreement(), False, 8) for call in calls]
    memory_exchange.compare(0, notices)
    notices[0] = notices[0]._replace(call=calls[0]._replace(send_counts=(0, 3)))
    with pytest.raises(CollectiveMismatchError, match="rank 0 sends 3 elements to rank 1, which expects 2"):
        memory_exchange.compare(1, notices)

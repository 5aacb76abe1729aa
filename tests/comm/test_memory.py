"""The collectives of shared memory: results, pieces, order, disagreement."""

import random
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from bagua import env, errors
from bagua.comm import Call, Communicator, copy_flat
from bagua.comm.transports.memory import exchange as memory_exchange
from bagua.comm.transports.memory.lanes import Lane, LaneHandle, Lanes, LaneTask
from bagua.comm.transports.memory.line import Deadline, Notice, Step
from bagua.comm.transports.memory.transport import MemoryTransport
from bagua.comm.transports.shm.transport import ShmTransport
from bagua.comm.transports.threads import RankKilled, ThreadsTransport
from tests.comm.memory_ranks import CALLS, KINDS, LARGE, agrees, on_communicators, run, values
from tests.harness import in_threads

pytestmark = pytest.mark.threads


@pytest.fixture
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory shows what ranks do not lend in pieces of a few elements, which are overwritten."""
    monkeypatch.setattr(env, "shm_staging_bytes", lambda: 64)
    monkeypatch.setattr("bagua.comm.transports.shm.transport._OUTBOX_BYTES", (64, 64))


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["sliced", "redundant"])
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_data_that_is_shown_in_pieces(numel: int, size: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind, several times in a row."""
    monkeypatch.setattr(memory_exchange, "SMALL_BYTES", limit)

    def job(comm: Communicator) -> bool:
        return all(agrees(comm, kind, numel, times=3) for kind in KINDS)

    assert all(values(run(size, job, transport=ShmTransport)))


#: In several pieces through small areas.
PIECES = [(kind, numel) for kind in KINDS for numel in (12, 50, 100)]


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("size", "transport", "calls"), [(3, ThreadsTransport, CALLS), (2, ShmTransport, PIECES), (3, ShmTransport, PIECES)]
)
def test_results_do_not_depend_on_who_is_late(size: int, transport, calls, seed: int, monkeypatch) -> None:
    if transport is ShmTransport:
        monkeypatch.setattr(memory_exchange, "SMALL_BYTES", 0)
    dice = random.Random(seed)

    def delay(step: Step) -> None:
        time.sleep(dice.choice((0, 0, 0.0005)))

    def job(comm: Communicator) -> bool:
        return all(agrees(comm, *call) for call in calls)

    assert all(values(run(size, job, fault=delay, transport=transport)))


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_collective_meets_a_message(kind: str) -> None:
    """All ranks hear of it long before the deadline, also the third, which did nothing wrong."""

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            getattr(comm, kind)(torch.zeros(2), 1)
        else:
            comm.allreduce(torch.zeros(2))

    outcomes = run(3, job, timeout_s=90.0)
    assert [type(outcome) for outcome in outcomes] == [errors.CollectiveMismatchError] * 3
    assert f"#1 {kind}" in str(outcomes[1])
    assert "#1 allreduce" in str(outcomes[0])
    assert "on rank 0" in outcomes[2].seen
    assert "on rank 1" in outcomes[2].seen


def test_the_notice_names_both_sides_of_uneven_counts() -> None:
    calls = [
        Call("alltoall_v", torch.uint8, 0, send_counts=(0, 2), recv_counts=(0, 1)),
        Call("alltoall_v", torch.uint8, 0, send_counts=(1, 0), recv_counts=(2, 0)),
    ]
    notices = [Notice(call, call.agreement(), False, 8) for call in calls]
    memory_exchange.compare((0, 1), 0, notices)
    notices[0] = notices[0]._replace(call=calls[0]._replace(send_counts=(0, 3)))
    with pytest.raises(errors.CollectiveMismatchError, match="rank 4 sends 3 elements to rank 6, which expects 2"):
        memory_exchange.compare((4, 6), 1, notices)


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize(
    ("transport", "numel"), [(ThreadsTransport, 100), (ThreadsTransport, LARGE), (ShmTransport, 100)]
)
def test_autograd_notices_what_is_written(transport: type[MemoryTransport], numel: int) -> None:
    """Also by a copy that torch does not see."""

    def change(comm: Communicator) -> list[bool]:
        tensor, output = torch.zeros(numel), torch.zeros(comm.size * numel)

        def noticed(call: Callable[..., object], *arguments: object) -> bool:
            before = tensor._version, output._version
            call(*arguments)
            return (tensor._version, output._version) != before

        exchanged = [noticed(comm.allreduce, tensor), noticed(comm.allgather, output, tensor)]
        return [*exchanged, noticed(comm.broadcast, tensor, 0), noticed(comm.reduce, tensor, 0)]

    # Who only gives, to a broadcast or to a reduction, has nothing to notice.
    assert values(run(2, change, transport=transport)) == [[True, True, False, True], [True, True, True, False]]


@on_communicators(3, close=False)
def test_a_receive_from_any_rank_ends_when_all_others_have_closed(comm: Communicator) -> None:
    if comm.rank:
        comm.close()
        return
    with pytest.raises(errors.PeerLostError, match="it closed its communicator"):
        comm.recv_any(torch.zeros(1))


@pytest.mark.parametrize("step", ["offer", "settle"])
def test_a_sender_that_dies_is_an_error_of_the_receiver(step: str) -> None:
    def fault(at: Step) -> None:
        if at.rank == 1 and at.name == step:
            raise RankKilled

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            comm.send(torch.ones(1), 0)
        return comm.recv_any(torch.zeros(1), timeout=5.0)

    received, _ = run(2, part, fault=fault)
    assert isinstance(received, errors.PeerLostError) or (step == "settle" and received == 1), f"{received!r}"


def test_receives_by_name_that_come_later_wait_for_the_message_that_is_not_theirs() -> None:
    """The lane of the named receive is quicker here: it begins before the wildcard is looked at."""
    slow, named = threading.Event(), threading.Event()

    def fault(at: Step) -> None:
        if at.rank == 0 and at.name == "want" and not slow.is_set():
            slow.set()
            named.wait(0.2)  # The wildcard is about to take its message, and stops here.

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            for number in (1.0, 2.0):
                comm.send(torch.tensor([number]), 0)
            return None
        tensor = torch.zeros(2)
        for work in (comm.recv_any(tensor[:1], async_op=True), comm.recv(tensor[1:], 1, async_op=True)):
            work.wait()
        return tensor.tolist()

    assert values(run(2, part, fault=fault))[0] == [1.0, 2.0]


@on_communicators(2)
def test_messages_are_exchanged_while_one_from_any_rank_is_awaited(comm: Communicator) -> None:
    other, tensor = 1 - comm.rank, torch.zeros(2)
    work = comm.recv_any(tensor[:1], async_op=True)
    both = comm.sendrecv(tensor[1:], torch.tensor([5.0]), other, other, async_op=True)
    comm.send(torch.tensor([7.0]), other)
    both.wait()
    assert work.result() == other
    assert tensor.tolist() == [5.0, 7.0]


def test_a_receive_that_was_not_started_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            comm.send(torch.ones(1), 0)
            return None
        lanes = comm._transport._lanes
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "submit", Mock(side_effect=errors.ConcurrentUseError("in the middle of another call")))
            with pytest.raises(errors.ConcurrentUseError):
                comm.recv_any(torch.zeros(1))
        message = torch.zeros(1)
        comm.recv(message, 1, timeout=5.0)
        return message.item()

    assert values(run(2, part))[0] == 1.0


LANE: Lane = ("collective", -1)


def deadline() -> Deadline:
    return Deadline(time.perf_counter() + 5.0, 5.0)


def test_who_waits_wakes_before_callbacks_run() -> None:
    """A future's callback waits for the lock that the waiting thread holds."""
    lanes, begin, woken = Lanes("test"), threading.Event(), threading.Event()
    pending = LaneHandle([lanes.submit(LANE, begin.wait)], deadline(), lambda _: None)
    told: list[bool] = []
    pending.notify(lambda: told.append(woken.wait(5)))
    threading.Timer(0.05, begin.set).start()
    pending.wait()
    woken.set()
    assert lanes.stop(5)
    assert told == [True]


def test_a_callback_that_comes_late_runs_at_once() -> None:
    part, told = LaneTask(lambda: None), []
    part.when_done(lambda _: told.append("early"))
    part.run()
    part.when_done(lambda _: told.append("late"))
    assert told == ["early", "late"]


def test_a_wait_ends_when_one_of_two_parts_fails_or_says_that_it_is_given_up() -> None:
    lanes, never, reasons = Lanes("test"), threading.Event(), []
    parts = [lanes.submit(("send", 1), never.wait), lanes.submit(("recv", 1), Mock(side_effect=ZeroDivisionError))]
    with pytest.raises(ZeroDivisionError):
        LaneHandle(parts, deadline(), reasons.append).wait()
    with pytest.raises(errors.CollectiveTimeoutError):
        LaneHandle([lanes.submit(LANE, never.wait)], deadline(), reasons.append).wait(0.01)
    assert reasons == ["it gave up after a wait of 0.01 s"]
    never.set()
    assert lanes.stop(5)
    with pytest.raises(errors.CommunicatorClosedError):
        lanes.submit(LANE, never.wait)


class FailingPart(LaneTask):
    """Fails right after its error was looked at for the ``looks``-th time."""

    __slots__ = ("looks", "what")

    def __init__(self, looks: int) -> None:
        self.looks, self.what = looks, None
        super().__init__(lambda: None)

    @property
    def error(self) -> BaseException | None:
        found, self.looks = self.what, self.looks - 1
        if self.looks == 0:
            self.what = ZeroDivisionError()
            self.end()
        return found

    @error.setter
    def error(self, what: BaseException | None) -> None:
        assert what is None


@pytest.mark.parametrize("looks", range(1, 5))
def test_a_part_that_fails_between_two_looks_is_not_taken_for_complete(looks: int) -> None:
    pending = LaneHandle([FailingPart(looks)], deadline(), lambda _: None)
    with pytest.raises((ZeroDivisionError, errors.CollectiveTimeoutError)):
        pending.wait(0.0)


def test_a_call_that_its_thread_never_makes_holds_nobody_up_for_ever() -> None:
    lanes, begun = Lanes("test"), threading.Event()
    inline = lanes.inline([LANE], lambda: None, deadline(), lambda _: None)
    (part,) = in_threads(1, lambda _: lanes.submit(LANE, begun.set))
    assert not lanes.idle(LANE)
    assert not inline.is_completed()
    lanes.abandon()
    assert begun.wait(60)
    assert lanes.stop(5)
    assert part.done


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("nbytes", [0, 1 << 10, (1 << 18) + 48], ids=str)
def test_every_byte_arrives_and_no_other_changes(nbytes, dtype):
    """Below and above the size from which the C library copies."""
    numel = nbytes // dtype.itemsize
    source = torch.randint(0, 2, (numel + 2,)).to(dtype)
    target = torch.ones(numel + 2, dtype=dtype)
    copy_flat(target[1:-1], source[1:-1])
    assert torch.equal(target[1:-1], source[1:-1])
    assert target[0] == target[-1] == 1


def test_what_does_not_fit_is_never_copied():
    target = torch.zeros(1 << 17)
    for source in (torch.ones(1 << 16), torch.ones(1 << 17, dtype=torch.float64), torch.ones(1 << 18)[::2]):
        with pytest.raises(AssertionError):
            copy_flat(target, source)
    assert not target.any()

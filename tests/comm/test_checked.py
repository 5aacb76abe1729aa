"""Calls are compared before they start: who disagrees learns it, who agrees is never held up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from bagua.comm.call import KIND_NUMBERS, Call
from bagua.comm.communicator import Communicator
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.checked import CheckedTransport, fingerprint_of
from bagua.comm.transports.contract import DONE, Handle, Membership, Transport
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import run_on_gloo, values

pytestmark = pytest.mark.gloo


class SpyTransport(C10dTransport):
    """Notes which calls were started."""

    def __init__(self, backend: str, member: Membership) -> None:
        super().__init__(backend, member)
        self.started: list[str] = []

    def start(self, call: Any, *arguments: Any) -> Any:
        self.started.append(call.kind)
        return super().start(call, *arguments)


def checked(member: Membership) -> Transport:
    return CheckedTransport(SpyTransport("gloo", member), C10dTransport("gloo", member.part("check")))


def started(comm: Communicator) -> list[str]:
    """The data calls that this rank has started."""
    transport = comm._transport
    assert isinstance(transport, CheckedTransport)
    assert isinstance(transport.data, SpyTransport)
    return transport.data.started


def disagreement(*calls: Callable[[Communicator], Any], starts: bool = False) -> list[CollectiveMismatchError]:
    """The errors of ranks that call different things. No data call may start, unless a part of it fits."""

    def job(comm: Communicator) -> BaseException:
        with pytest.raises(CollectiveMismatchError) as caught:
            calls[comm.rank](comm)
        assert starts or started(comm) == []
        with pytest.raises(CommunicatorClosedError):
            comm.barrier()
        return caught.value

    return values_of_errors(run_on_gloo(len(calls), job, transport=checked))


def values_of_errors(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatchError), repr(outcome)
    return outcomes


def test_sender_and_receiver_are_compared() -> None:
    errors = disagreement(
        lambda comm: comm.send(torch.ones(4), 1, async_op=True).wait(),
        lambda comm: comm.recv(torch.ones(3, dtype=torch.int64), 0, async_op=True).wait(),
    )
    assert "send(4 x float32" in str(errors[0].expected)
    assert "recv(3 x int64" in str(errors[0].seen)
    assert "recv(3 x int64" in str(errors[1].expected)


def test_both_halves_of_an_exchange_are_compared() -> None:
    errors = disagreement(
        lambda comm: comm.sendrecv(torch.ones(2), torch.ones(2), 1, 1),
        lambda comm: comm.sendrecv(torch.ones(2), torch.ones(3), 0, 0),
        starts=True,
    )
    assert {error.peers for error in errors} == {(0,), (1,)}


# Programs that are right without checks are right with them.


def at_once(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    comm.sendrecv(tensor, mine, other, other)


def one_at_a_time(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    comm.recv(tensor, other)
    comm.send(mine, other)


def from_anybody(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    assert comm.recv_any(tensor) == other
    comm.send(mine, other)


def send_first(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    sending = comm.send(mine, other, async_op=True)
    comm.recv(tensor, other)
    sending.wait()


def receive_first(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    receiving = comm.recv(tensor, other, async_op=True)
    comm.send(mine, other)
    receiving.wait()


def in_two(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int, order: int = 1) -> None:
    works = [comm.recv(tensor, other, async_op=True), comm.send(mine, other, async_op=True)]
    for work in works[::order]:
        work.wait()


def in_two_backwards(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    in_two(comm, tensor, mine, other, -1)


@pytest.mark.parametrize(
    "ways",
    [
        (send_first, send_first),
        (receive_first, receive_first),
        (at_once, in_two),
        (at_once, one_at_a_time),
        # What rank 1 tells first is not what rank 0 waits for first.
        (one_at_a_time, in_two_backwards),
        (from_anybody, receive_first),
    ],
    ids=lambda ways: " and ".join(way.__name__ for way in ways),
)
def test_ranks_may_exchange_in_ways_of_their_own(ways: tuple[Callable[..., None], Callable[..., None]]) -> None:
    def program(comm: Communicator) -> list[float]:
        tensor, other = torch.empty(2), 1 - comm.rank
        ways[comm.rank](comm, tensor, torch.full((2,), float(comm.rank)), other)
        return tensor.tolist()

    assert values(run_on_gloo(2, program, transport=checked)) == [[1.0, 1.0], [0.0, 0.0]]


def any_source_before_a_rank_that_is_named(comm: Communicator) -> None:
    """The first message is for the receive that was started first, though the second is told of at once."""
    if comm.rank == 0:
        first, second = torch.empty(2), torch.empty(3)
        works = comm.recv_any(first, async_op=True), comm.recv(second, 1, async_op=True)
        for work in reversed(works):
            work.wait()
        assert first.equal(torch.ones(2))
        assert second.equal(torch.ones(3))
    else:
        comm.send(torch.ones(2), 0)
        comm.send(torch.ones(3), 0)


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


def messages_in_a_row_keep_their_order(comm: Communicator) -> None:
    if comm.rank == 0:
        works = [comm.send(torch.full((size,), float(size)), 1, async_op=True) for size in (1, 2, 3)]
    else:
        tensors = [torch.empty(size) for size in (1, 2, 3)]
        works = [comm.recv(tensor, 0, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    if comm.rank == 1:
        assert [tensor[0].item() for tensor in tensors] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "program",
    [
        any_source_before_a_rank_that_is_named,
        a_collective_is_started_before_a_message_is_awaited,
        messages_in_a_row_keep_their_order,
    ],
)
def test_a_correct_program_stays_correct(program: Callable[[Communicator], None]) -> None:
    values(run_on_gloo(2, program, transport=checked))


def test_any_source_passes_over_the_rank_that_an_earlier_receive_waits_for() -> None:
    def job(comm: Communicator) -> None:
        message = torch.empty(1)
        if comm.rank == 0:
            earlier = comm.recv(torch.empty(1), 1, async_op=True)
            assert comm.recv_any(message) == 2
            comm.send(message, 1)
            earlier.wait()
        else:
            if comm.rank == 1:
                comm.recv(message, 0)
            comm.send(torch.ones(1), 0)

    values(run_on_gloo(3, job, transport=checked))


def test_any_source_does_not_miss_a_rank_that_has_left() -> None:
    left = threading.Event()

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            assert comm.recv_any(torch.empty(1)) == 2
        elif comm.rank == 1:
            comm.close()
            left.set()
        else:
            assert left.wait(60)
            comm.send(torch.ones(1), 0)

    values(run_on_gloo(3, job, transport=checked))


def test_any_source_ends_when_a_rank_breaks_the_communicator() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank:
            comm.abort("it had enough")
            return
        with pytest.raises(PeerLostError, match="it had enough") as caught:
            comm.recv_any(torch.empty(1))
        assert caught.value.peers == (1,)

    values(run_on_gloo(2, job, transport=checked))


@pytest.mark.parametrize("kind", ["send", "recv", "recv_any"])
def test_a_message_that_nobody_matches_ends_at_its_deadline(kind: str) -> None:
    def job(comm: Communicator) -> type[BaseException]:
        peer = () if kind == "recv_any" else (1 - comm.rank,)
        with pytest.raises((CollectiveTimeoutError, CommunicatorClosedError, PeerLostError)) as caught:
            getattr(comm, kind)(torch.ones(1), *peer, timeout=0.3)
        assert not comm.usable
        return caught.type

    assert CollectiveTimeoutError in values(run_on_gloo(2, job, transport=checked))


class LateTransport(Transport):
    """Receives what a peer wrote, but only tells so from the third look on."""

    def __init__(self, rows: list[torch.Tensor], member: Membership) -> None:
        super().__init__(member)
        self.rows = rows

    def start(self, call: Any, source: Any, target: Any, *_: Any) -> Handle:
        if call.kind == "recv":
            target.copy_(self.rows.pop(0))
            return LateHandle()
        return DONE

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class LateHandle(Handle):
    looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.looks > 2


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_message_never_starts_before_an_earlier_one(kind: str) -> None:
    """The fingerprint of the first arrives after the look for the first, and before the look for the second."""
    member = Membership(HashStore(), 0, (0, 1), ("a", "a"), 5.0, "pair")
    opposite = "recv" if kind == "send" else "send"
    rows = [
        fingerprint_of(Call(opposite, number, torch.float32, 1, "", 0), 2, KIND_NUMBERS[opposite]) for number in (1, 2)
    ]
    order: list[int] = []

    class Data(LateTransport):
        device_types = frozenset({"cpu"})

        def start(self, call: Any, *_: Any) -> Handle:
            order.append(call.sequence)
            return DONE

    transport = CheckedTransport(Data([], member), LateTransport(rows, member))
    for sequence in (1, 2):
        transport.start(Call(kind, sequence, torch.float32, 1, "", 1), torch.ones(1), torch.ones(1), 5.0, True)
    for _ in range(10):
        transport.advance()
    assert order == [1, 2]


def test_closing_ends_calls_that_have_not_started() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            works = [comm.allreduce(torch.ones(2), async_op=True), comm.recv(torch.ones(2), 1, async_op=True)]
            comm.close()
            for work in works:
                with pytest.raises(CommunicatorClosedError):
                    work.wait(5)

    values(run_on_gloo(2, job, transport=checked))

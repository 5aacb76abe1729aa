"""Messages of bytes over a transport that sends and receives; see ``lowering.py``."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from bagua.comm.call import DTYPE_NUMBERS, DTYPES, Call
from bagua.comm.transports.base import Transport
from bagua.comm.transports.failure.finder import FailureFinder
from bagua.comm.transports.memory.lanes import Lanes, LaneTask
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.memory.wildcards import Wildcard
from bagua.comm.transports.views import as_bytes
from bagua.errors import CollectiveMismatchError, CommunicationError

#: What announces a message: number of elements, and number of the dtype.
_HEADER = struct.Struct("2q")
#: A header that is expected before anybody sends has no deadline.
_LONGEST_S = 365 * 24 * 3600.0
_SLICE_S = 0.02
_EARLY_S = 0.05


class MessageLink:
    """One transport that sends and receives, with errors that name who is lost.

    Args:
        transport: moves the bytes.
        failures: knowledge of the failures of the communicator.
    """

    def __init__(self, transport: Transport, failures: FailureFinder) -> None:
        self._transport = transport
        self.failures = failures
        self.ranks = transport.membership.ranks
        self.rank = transport.rank
        self._numbers = itertools.count(1)

    def send(self, peer: int, data: torch.Tensor, deadline: Deadline) -> None:
        """Send ``data``, flat uint8, to rank ``peer``."""
        self._move("send", peer, data, deadline)

    def receive(self, peer: int, data: torch.Tensor, deadline: Deadline) -> None:
        """Fill ``data``, flat uint8, with what rank ``peer`` sends."""
        self._move("recv", peer, data, deadline)

    def _move(self, kind: Literal["send", "recv"], peer: int, data: torch.Tensor, deadline: Deadline) -> None:
        left_s = deadline.left_s
        try:
            if left_s <= 0:
                raise TimeoutError("the deadline passed before")
            self.move(kind, peer, data, left_s)
        except CommunicationError:
            raise
        except (OSError, RuntimeError) as error:
            raise self.translated(error, deadline) from error

    def move(self, kind: Literal["send", "recv"], peer: int, data: torch.Tensor, timeout_s: float) -> None:
        """Send or receive, and raise what the transport raises."""
        call = Call(kind, next(self._numbers), torch.uint8, data.numel(), "", peer)
        source, target = (data, None) if kind == "send" else (None, data)
        self._transport.start(call, source, target, timeout_s, False).wait()

    def require_all(self, deadline: Deadline) -> None:
        """Raise if a peer gave up meanwhile: what it had sent before may have come all the same."""
        if self.failures.peers_left():
            raise self.translated(ConnectionError("a peer left"), deadline)

    def translated(self, error: BaseException, deadline: Deadline) -> CommunicationError:
        """End the communicator because of ``error``; the error to raise."""
        elapsed_s = deadline.timeout_s - deadline.left_s
        # The clock of the transport may be a little ahead; a TimeoutError long before means a connection, not the call.
        if isinstance(error, TimeoutError) and elapsed_s >= deadline.timeout_s - _EARLY_S:
            return self.failures.timed_out(elapsed_s, deadline.timeout_s)
        return self.failures.failed(error, elapsed_s, deadline.timeout_s)


class LinkMessages:
    """Messages of users. Each is announced, so the receiver knows what comes, and from whom it comes first.

    Args:
        link: carries nothing else.
        name: name of the threads that expect announcements, for debuggers.
    """

    def __init__(self, link: MessageLink, name: str) -> None:
        self._link = link
        self._lanes = Lanes(f"{name}-any")
        #: By peer the announcement that a receive from any rank expects.
        self._expected: dict[int, tuple[LaneTask, torch.Tensor]] = {}

    def send(self, call: Call, source: torch.Tensor, deadline: Deadline) -> None:
        """Announce ``source``, and send it to rank ``call.root``."""
        header = bytearray(_HEADER.pack(call.numel, DTYPE_NUMBERS[call.dtype]))
        self._link.send(call.root, torch.frombuffer(header, dtype=torch.uint8), deadline)
        if source.numel():
            self._link.send(call.root, as_bytes(source), deadline)
        self._link.require_all(deadline)

    def receive(
        self, call: Call, peer: int, target: torch.Tensor, deadline: Deadline, earlier: Sequence[Wildcard] = ()
    ) -> None:
        """Receive the next message of rank ``peer`` that is for none of ``earlier``."""
        while any(wildcard.holds(peer) for wildcard in earlier):
            self._pause(threading.Event(), deadline)
        part, header = self._expected.pop(peer, (None, _empty_header()))
        if part is None:
            self._link.receive(peer, header, deadline)
        else:
            self._await(part, deadline)
        self._compare(call, peer, target, header)
        if target.numel():
            self._link.receive(peer, as_bytes(target), deadline)
        self._link.require_all(deadline)

    def receive_any(
        self,
        call: Call,
        wildcard: Wildcard,
        peers: Sequence[int],
        sender: torch.Tensor,
        target: torch.Tensor,
        deadline: Deadline,
    ) -> None:
        """Receive the next message that ``wildcard`` may take; ``sender`` takes the rank that sent it."""
        bell = threading.Event()
        try:
            while (peer := self._announced(wildcard, peers, bell, deadline)) is None:
                self._pause(bell, deadline)
            wildcard.source = peer
            self.receive(call, peer, target, deadline)
            sender.fill_(peer)
        finally:
            wildcard.close()

    def _announced(
        self, wildcard: Wildcard, peers: Sequence[int], bell: threading.Event, deadline: Deadline
    ) -> int | None:
        """A rank whose message has been announced. Ranks that have left are not missed as long as one is there."""
        left: list[BaseException] = []
        for peer in peers:
            if not wildcard.may_take(peer):
                continue
            part, _ = self._expected.get(peer) or self._expect(peer, bell)
            if part.done() and part.error is None:
                return peer
            if part.error is not None:
                left.append(part.error)
        if left and (len(left) == len(peers) or self._link.failures.peers_left()):
            raise self._link.translated(left[0], deadline) from left[0]
        return None

    def _expect(self, peer: int, bell: threading.Event) -> tuple[LaneTask, torch.Tensor]:
        header = _empty_header()
        part = self._lanes.submit(("recv", peer), partial(self._link.move, "recv", peer, header, _LONGEST_S))
        self._expected[peer] = part, header
        part.when_done(lambda _: bell.set())
        return part, header

    def _await(self, part: LaneTask, deadline: Deadline) -> None:
        bell = threading.Event()
        part.when_done(lambda _: bell.set())
        while not part.done():
            self._pause(bell, deadline)
        if part.error is not None:
            raise self._link.translated(part.error, deadline) from part.error

    def _pause(self, bell: threading.Event, deadline: Deadline) -> None:
        """Wait for ``bell``, or a moment; raise if the deadline has passed, or the communicator has ended."""
        failures, left_s = self._link.failures, deadline.left_s
        failures.check_usable()
        if left_s <= 0:
            raise failures.timed_out(deadline.timeout_s, deadline.timeout_s)
        bell.wait(min(_SLICE_S, left_s))
        bell.clear()

    def _compare(self, call: Call, peer: int, target: torch.Tensor, header: torch.Tensor) -> None:
        numel, dtype = _HEADER.unpack(bytes(header.tolist()))
        if numel == target.numel() and DTYPES[dtype] is call.dtype:
            return
        ranks = self._link.ranks
        raise CollectiveMismatchError(
            "sender and receiver disagree",
            peers=(ranks[peer],),
            expected=f"{call} on rank {ranks[self._link.rank]}",
            seen=f"{numel} x {str(DTYPES[dtype]).removeprefix('torch.')} from rank {ranks[peer]}",
            advice="What is sent and what is received must have the same dtype and number of elements.",
        )

    def close(self) -> None:
        """End the threads; the connections are closed."""
        self._lanes.stop(1.0)


def _empty_header() -> torch.Tensor:
    return torch.zeros(_HEADER.size, dtype=torch.uint8)

"""All collectives, dtypes and reductions for a transport that can only send and receive.

Each collective is one or two swaps, in which a rank sends to some ranks and receives from some. Data travels as
bytes, so every dtype does. Reductions gather the operands and fold them in rank order, so all ranks get the same
bits. Collectives and messages have connections of their own: a message that waits for its receiver never holds up
a collective.

What the transport raises is translated here: a rank that died, left or gave up is named on all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.autograd.graph import increment_version
from torch.distributed import PrefixStore

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.closing import run_all
from bagua.comm.lifetime.forks import family
from bagua.comm.reduction import fold
from bagua.comm.transports.base import DONE, Handle, Membership, Transport
from bagua.comm.transports.failure.finder import FailureFinder
from bagua.comm.transports.links import LinkMessages, MessageLink
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lane, LaneHandle, Lanes
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.memory.wildcards import Wildcards
from bagua.comm.transports.views import as_bytes, flattened, where_allowed
from bagua.errors import CommunicationError, CommunicatorClosedError, ConcurrentUseError, blame

#: Up to here an allreduce is one swap, in which each rank sends all it has to all others.
_SMALL_BYTES = 16 * 1024
#: A lane may take this much longer than the deadline of its call to find out which ranks did not come.
_GRACE_S = 2.0
_FAREWELL_S = 1.0
_SENDER: Lane = ("sender", -1)
#: Tensors by peer.
_Parts = Mapping[int, torch.Tensor]


class LoweredTransport(Transport):
    """Collectives, dtypes and reductions on top of a transport that sends and receives.

    Args:
        connect: makes that transport; collective, called twice on each rank. Its ``start`` gets calls of the kinds
            ``send`` and ``recv`` with flat tensors of uint8, one at a time for each peer and direction, from
            several threads; it may block until the message is on its way, or there. ``abort`` and ``close`` end
            all connections, so that calls under way raise, here and on the peers. It raises ``OSError``
            (``TimeoutError`` for a deadline) or an error of ``bagua.errors``.
        membership: the ranks served.

    Raises:
        TransportUnavailableError: the system gives no socket.
        CollectiveTimeoutError: some ranks did not come.

    Example:
        >>> from functools import partial
        >>> import bagua.comm
        >>> def connect(membership):
        ...     raise NotImplementedError("here a class of yours opens its connections")
        >>> bagua.comm.register_transport("mine", partial(bagua.comm.LoweredTransport, connect))
    """

    executor = "thread"

    def __init__(self, connect: Callable[[Membership], Transport], membership: Membership) -> None:
        super().__init__(membership)
        self._lanes = Lanes(f"bagua-{membership.label}-{self.rank}")
        #: Of collectives that send and receive at a time; they end after those, which need it.
        self._senders = Lanes(f"bagua-{membership.label}-{self.rank}")
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._wildcards = Wildcards(self._lanes, self._peers)
        self._below: list[Transport] = []
        self._failures = FailureFinder(membership, partial(_disconnect, self._below))
        try:
            for name in ("collectives", "messages"):
                self._below.append(connect(replace(membership, store=PrefixStore(name, membership.store))))
        except BaseException:
            self._disband()
            raise
        collectives, messages = self._below
        self.name = collectives.name
        self.device_types = collectives.device_types
        self._link = MessageLink(collectives, self._failures)
        self._messages = LinkMessages(MessageLink(messages, self._failures), f"bagua-{membership.label}-{self.rank}")
        family.add(self)

    # Calls.

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        """Run ``call`` here, or behind the calls of its lane that are under way."""
        self._failures.check_usable()
        deadline = Deadline.after(timeout_s)
        if call.kind in POINT_TO_POINT:
            return self._start_messages(call, source, target, deadline, asynchronous)
        if call.numel == 0 and call.kind not in ("barrier", "alltoall_v"):
            return DONE
        task = partial(self._collective, call, source, target, deadline)
        return self._start_in(COLLECTIVE, task, deadline, asynchronous)

    def _start_in(self, lane: Lane, task: Callable[[], None], deadline: Deadline, asynchronous: bool) -> Handle:
        return self._lanes.start(lane, task, deadline, self.abort, asynchronous=asynchronous, grace_s=_GRACE_S)

    def share(self) -> None:
        """Run synchronous calls in the thread that waits for them, or in their lane."""
        self._lanes.shared = True

    def _start_messages(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        deadline: Deadline,
        asynchronous: bool,
    ) -> Handle:
        if call.kind == "sendrecv" and call.root == self.rank:
            assert source is not None
            assert target is not None
            flattened(target).copy_(flattened(source))
            return DONE
        if call.kind == "recv" and call.root < 0:
            return self._start_wildcard(call, source, target, deadline, asynchronous)
        tasks: dict[Lane, Callable[[], None]] = {}
        if call.kind != "recv":
            assert source is not None
            tasks["send", call.root] = partial(self._messages.send, call, source, deadline)
        if call.kind != "send":
            assert target is not None
            peer = call.source if call.kind == "sendrecv" else call.root
            receive = partial(self._messages.receive, call, peer, target, deadline, self._wildcards.earlier())
            tasks["recv", peer] = where_allowed(receive, target)
        if len(tasks) == 1:
            ((lane, task),) = tasks.items()
            return self._start_in(lane, task, deadline, asynchronous)
        return LaneHandle([self._lanes.submit(*item) for item in tasks.items()], deadline, self.abort, _GRACE_S)

    def _start_wildcard(
        self,
        call: Call,
        sender: torch.Tensor | None,
        target: torch.Tensor | None,
        deadline: Deadline,
        asynchronous: bool,
    ) -> Handle:
        assert sender is not None
        assert target is not None
        wildcard = self._wildcards.start()
        receive = partial(self._messages.receive_any, call, wildcard, self._peers, sender, target, deadline)
        try:
            return self._start_in(("recv", call.root), where_allowed(receive, target), deadline, asynchronous)
        except ConcurrentUseError:
            wildcard.close()
            raise

    # Collectives, in the calling thread or in the lane.

    def _collective(
        self, call: Call, source: torch.Tensor | None, target: torch.Tensor | None, deadline: Deadline
    ) -> None:
        run: Callable[..., None] = getattr(self, f"_{call.kind.removesuffix('_v')}")
        where_allowed(partial(run, call, source, target, deadline), target)()
        self._link.require_all(deadline)
        if target is not None and not target.is_inference():
            increment_version(target)  # so that autograd notices, as after ``copy_``

    def _swap(self, call: Call, outgoing: _Parts, incoming: _Parts, deadline: Deadline) -> None:
        """Send to each peer what is for it, and receive from each what comes from there, in rounds.

        In round k everyone sends to the k-th rank behind it and receives from the k-th before it.
        """
        sending = partial(self._send_all, outgoing, deadline)
        if not (outgoing and incoming):
            sending()
            self._receive_all(incoming, deadline)
            return
        part = self._senders.submit(_SENDER, sending)
        try:
            self._receive_all(incoming, deadline)
        except BaseException as error:
            culprit, reason = blame(error, self.membership.ranks[self.rank], str(call))
            self.abort(reason, culprit)
            with contextlib.suppress(CommunicationError):  # The tensors are not read any more.
                LaneHandle([part], Deadline.after(0.0), self.abort, _FAREWELL_S).wait()
            if isinstance(error, CommunicatorClosedError) and part.error is not None:
                raise part.error from error  # It was met first, and says more.
            raise
        LaneHandle([part], deadline, self.abort, _GRACE_S).wait()

    def _receive_all(self, incoming: _Parts, deadline: Deadline) -> None:
        for peer in reversed(self._peers):
            if peer in incoming:
                self._link.receive(peer, as_bytes(incoming[peer]), deadline)

    def _send_all(self, outgoing: _Parts, deadline: Deadline) -> None:
        for peer in self._peers:
            if peer in outgoing:
                self._link.send(peer, as_bytes(outgoing[peer]), deadline)

    def _to_all(self, tensor: torch.Tensor) -> _Parts:
        return dict.fromkeys(self._peers, tensor)

    def _rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(flattened(tensor).view(self.size, -1).unbind())

    def _of_peers(self, parts: list[torch.Tensor]) -> _Parts:
        return {peer: parts[peer] for peer in self._peers if parts[peer].numel()}

    def _barrier(self, call: Call, __: None, ___: None, deadline: Deadline) -> None:
        token = torch.zeros(self.size, dtype=torch.uint8)
        self._swap(call, self._to_all(token[:1]), self._of_peers(self._rows(token.clone())), deadline)

    def _broadcast(self, call: Call, _: object, target: torch.Tensor, deadline: Deadline) -> None:
        if call.root == self.rank:
            self._swap(call, self._to_all(target), {}, deadline)
        else:
            self._swap(call, {}, {call.root: target}, deadline)

    def _allgather(self, call: Call, source: torch.Tensor, target: torch.Tensor, deadline: Deadline) -> None:
        rows = self._rows(target)
        rows[self.rank].copy_(flattened(source))
        self._swap(call, self._to_all(source), self._of_peers(rows), deadline)

    def _gather(self, call: Call, source: torch.Tensor, target: torch.Tensor | None, deadline: Deadline) -> None:
        if target is None:
            self._swap(call, {call.root: source}, {}, deadline)
            return
        rows = self._rows(target)
        rows[self.rank].copy_(flattened(source))
        self._swap(call, {}, self._of_peers(rows), deadline)

    def _scatter(self, call: Call, source: torch.Tensor | None, target: torch.Tensor, deadline: Deadline) -> None:
        if source is None:
            self._swap(call, {}, {call.root: target}, deadline)
            return
        rows = self._rows(source)
        flattened(target).copy_(rows[self.rank])
        self._swap(call, self._of_peers(rows), {}, deadline)

    def _alltoall(self, call: Call, source: torch.Tensor, target: torch.Tensor, deadline: Deadline) -> None:
        if call.kind == "alltoall_v":
            outgoing = list(torch.split(flattened(source), list(call.send_counts)))
            incoming = list(torch.split(flattened(target), list(call.recv_counts)))
        else:
            outgoing, incoming = self._rows(source), self._rows(target)
        incoming[self.rank].copy_(outgoing[self.rank])
        self._swap(call, self._of_peers(outgoing), self._of_peers(incoming), deadline)

    # Reductions.

    def _allreduce(self, call: Call, _: object, target: torch.Tensor, deadline: Deadline) -> None:
        flat = flattened(target)
        if self.size == 2 or call.nbytes <= _SMALL_BYTES:
            parts = flat.new_empty((self.size, flat.numel()))
            self._allgather(call, flat, parts, deadline)
            fold(list(parts.unbind()), call.reduction, flat)
            return
        # Each rank reduces a slice and sends the result to all others.
        slices = list(flat.tensor_split(self.size))
        own = slices[self.rank]
        self._fold(call, slices, own, deadline)
        self._swap(call, self._to_all(own), self._of_peers(slices), deadline)

    def _reduce_scatter(self, call: Call, source: torch.Tensor, target: torch.Tensor, deadline: Deadline) -> None:
        self._fold(call, self._rows(source), flattened(target), deadline)

    def _fold(self, call: Call, outgoing: list[torch.Tensor], result: torch.Tensor, deadline: Deadline) -> None:
        """Reduce what all ranks have for this one into ``result``."""
        parts = result.new_empty((self.size, result.numel()))
        parts[self.rank].copy_(outgoing[self.rank])
        self._swap(call, self._of_peers(outgoing), self._of_peers(list(parts.unbind())), deadline)
        fold(list(parts.unbind()), call.reduction, result)

    def _reduce(self, call: Call, _: object, target: torch.Tensor, deadline: Deadline) -> None:
        flat = flattened(target)
        parts = flat.new_empty((self.size, flat.numel())) if call.root == self.rank else None
        self._gather(call, flat, parts, deadline)
        if parts is not None:
            fold(list(parts.unbind()), call.reduction, flat)

    # The end.

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Tell the others why, and close all connections."""
        self._failures.abort(reason, culprit)
        self._lanes.abandon()

    def idle(self) -> bool:
        """Whether all asynchronous calls are complete."""
        return not self._lanes.busy()

    def close(self) -> None:
        """Let started calls finish for a second, then close all connections."""
        if not self._lanes.stop(_FAREWELL_S):
            self.abort("it closed its communicator with calls under way")
            self._lanes.stop(_FAREWELL_S)
        self._senders.stop(_FAREWELL_S)
        self._disband()
        self._messages.close()

    def _disband(self) -> None:
        self._failures.end(under_way=False)
        run_all([*(transport.close for transport in self._below), self._failures.close])

    def disown(self) -> None:
        """In a forked child: say nothing to anybody."""
        self._failures.disown()


def _disconnect(below: list[Transport]) -> None:
    for transport in below:
        transport.abort("its communicator broke")

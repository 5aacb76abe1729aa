"""The transport of ranks that can see each other's memory, written once.

Threads, and processes that map each other's segments, each supply a ``Peers`` and a
``Line``. What all of it rests on:

* **A rank writes its own memory only**: its line (words, notices) and its own tensors.
  It pulls what it needs from peers. So a late or dying peer never changes a survivor's tensor.
* Words only grow, and each has one writer. A barrier is "raise mine, wait for theirs".
  Data and notice are written before the word that announces them.
* A collective starts with publish and barrier. Then every rank reads the same notices, so
  all see a disagreement, or none, before any tensor is written; and all take the same path.
* No rank is more than one collective ahead: to pass the first barrier of call k+1, all
  must have finished call k. Notices and private data therefore alternate between two
  slots, and what was published for call k is safe until its owner publishes call k+2.
* Data that is *lent* (the caller's own tensor) may change when the call returns; if any rank
  lent, a last barrier ends the call. Small data is copied when published: no last barrier.
* A rank that fails says so in its line before its caller hears of it. Ranks look at all
  lines before they arrive at a barrier, hence a result read from a tensor that its owner
  took back half-way is never returned as good. Who arrived before dying has arrived.
* A message is offered (``sent``), asked for (``wanted``), pulled, and acknowledged
  (``taken``); one is under way per pair and direction, and lent until it is acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from traceback import walk_stack

import torch

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.background import handlers_may_call
from bagua.comm.reduction import copy_flat, fold
from bagua.comm.transports.contract import ARRIVALS_LENGTH, DONE, Arrivals, Data, Handle, Membership
from bagua.comm.transports.memory.exchange import MemoryExchange, compare, small_bytes
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lane, LaneHandle, Lanes, LanesTransport
from bagua.comm.transports.memory.line import Deadline, LineState, Words
from bagua.comm.transports.memory.peers import Missing, Peers
from bagua.errors import CollectiveMismatchError, CommunicatorClosedError, ConcurrentUseError


class Wildcard:
    """A receive from any rank.

    Args:
        lanes: lanes of receives from one rank.
        open_ones: those of the communicator that are not over, this one among them from now on.
    """

    def __init__(self, lanes: Lanes, open_ones: list[Wildcard]) -> None:
        #: For each peer the latest receive from it that was started before.
        self._earlier = {peer: task for (direction, peer), task in [*lanes.latest.items()] if direction == "recv"}
        #: The peer whose message it takes; None as long as that is open.
        self.source: int | None = None
        self._open_ones = open_ones
        open_ones.append(self)

    def may_take(self, peer: int) -> bool:
        """Whether the next message of ``peer`` is for no receive that was started before."""
        part = self._earlier.get(peer)
        return part is None or part.done

    def holds(self, peer: int) -> bool:
        """Whether a receive from ``peer`` that was started later has to wait."""
        return self in self._open_ones and (self.source is None or self.source == peer)

    def close(self) -> None:
        """It is over: what was started later may go on. Idempotent."""
        if self in self._open_ones:
            self._open_ones.remove(self)


class Messages:
    """Sends and receives for one rank.

    The sender offers a piece by raising its ``sent`` word for the receiver, which
    says what it wants by raising ``wanted``, pulls, and raises ``taken``. Both compare
    the two notices before anything is pulled, so both find a difference. Of receives from any rank,
    each message goes to the one that was started first, of those that can take it.

    Args:
        peers: the ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self, call: Call, source: torch.Tensor, deadline: Deadline, inline: bool) -> None:
        """Return when rank ``call.root`` has pulled ``source``."""
        piece = self._offer(call, source)
        if piece < call.numel:
            for _ in self._offer_rest(call, piece, deadline, inline):
                pass
        self._settle(call, deadline, inline)

    def receive(self, call: Call, rank: int, target: torch.Tensor, deadline: Deadline, inline: bool) -> None:
        """Pull the next message of ``rank`` into ``target``."""
        flat = self._want(call, rank, target)
        numel = len(flat)
        start = self._take(call, rank, flat, 0, deadline, inline)
        while start < numel:
            start = self._take(call, rank, flat, start, deadline, inline)

    def receive_any(
        self, call: Call, wildcard: Wildcard, sender: torch.Tensor, target: torch.Tensor, deadline: Deadline
    ) -> None:
        """Pull the next message that ``wildcard`` may take into ``target``; ``sender`` takes the rank."""
        self._peers.wait(lambda: self._without_offer(wildcard), deadline, self._peers.spin_s)
        rank = next(self._offering(wildcard))
        wildcard.source = rank
        self.receive(call, rank, target, deadline, False)
        sender.fill_(rank)

    def _offering(self, wildcard: Wildcard) -> Iterator[int]:
        """The ranks that offer a message for ``wildcard``, beginning behind this one."""
        peers, places = self._peers, self._peers.places
        own = peers.own.words
        for step in range(1, peers.size):
            rank = (peers.rank + step) % peers.size
            offered = peers.lines[rank].words[places.sent + peers.rank] > own[places.taken + rank]
            if offered and wildcard.may_take(rank):
                yield rank

    def _without_offer(self, wildcard: Wildcard) -> tuple[int, ...]:
        """The ranks that may yet offer a message; none if there is one. A rank that closed in peace is not missed."""
        peers = self._peers
        if next(self._offering(wildcard), None) is not None:
            return ()
        others = [rank for rank in range(peers.size) if rank != peers.rank]
        there = tuple(rank for rank in others if peers.lines[rank].words[Words.STATE] != LineState.LEFT)
        return there or tuple(others)

    def let_go(self, earlier: Sequence[Wildcard], rank: int, deadline: Deadline) -> None:
        """Wait until none of ``earlier`` may take the next message of ``rank``."""

        def missing() -> tuple[int, ...]:
            return (rank,) if any(wildcard.holds(rank) for wildcard in earlier) else ()

        self._peers.wait(missing, deadline, self._peers.spin_s)

    def exchange(self, call: Call, source: torch.Tensor, target: torch.Tensor, deadline: Deadline) -> None:
        """Send to ``call.root`` while receiving from ``call.source``."""
        sender, start, numel = call.source, 0, target.numel()
        piece = self._offer(call, source)
        flat = self._want(call, sender, target)
        # An offer never waits for the piece that it makes visible, only for the one before:
        # with offer and take in turns a ring of ranks always moves.
        offers = self._offer_rest(call, piece, deadline, True)
        offering = taking = True
        while offering or taking:
            if taking:
                start = self._take(call, sender, flat, start, deadline, True)
                taking = start < numel
            offering = offering and next(offers, None) is not None
        self._settle(call, deadline, True)

    def _offer(self, call: Call, source: torch.Tensor) -> int:
        """Offer the first piece of ``source``; the number of elements of one."""
        peers, receiver = self._peers, call.root
        slot = peers.slots.outgoing(receiver)
        if peers.fault is not None:
            peers.step(call, "offer")
        peers.publish(slot, call, source, False)
        piece = max(peers.own.notice(slot).piece, 1)
        peers.own.words[peers.places.sent + receiver] += 1
        peers.wake(receiver)
        return piece

    def _offer_rest(self, call: Call, piece: int, deadline: Deadline, inline: bool) -> Iterator[int]:
        """Offer the other pieces one by one, each when the one before was pulled."""
        peers, receiver = self._peers, call.root
        slot, place = peers.slots.outgoing(receiver), peers.places.sent + receiver
        for start in range(piece, call.numel, piece):
            self._await_taken(call, deadline, inline)
            peers.stage(slot, start, min(start + piece, call.numel))
            peers.own.words[place] += 1
            peers.wake(receiver)
            yield start

    def _settle(self, call: Call, deadline: Deadline, inline: bool) -> None:
        """Wait until the last piece was pulled."""
        peers = self._peers
        if peers.fault is not None:
            peers.step(call, "settle")
        self._await_taken(call, deadline, inline)
        peers.withdraw(peers.slots.outgoing(call.root))

    def _await_taken(self, call: Call, deadline: Deadline, inline: bool) -> None:
        peers, receiver = self._peers, call.root
        theirs, mine = peers.lines[receiver], peers.own.words[peers.places.sent + receiver]
        words, rank = theirs.words, peers.rank
        taken, wanted = peers.places.taken + rank, peers.places.wanted + rank
        if words[taken] >= mine:
            return
        waited, compared = (receiver,), False

        def missing() -> tuple[int, ...]:
            nonlocal compared
            if words[taken] >= mine:
                return ()
            if not compared and words[wanted] >= mine:
                wish = theirs.notice(peers.slots.incoming(rank)).call
                if words[taken] >= mine:
                    return ()  # By now it may have been the wish for the next message.
                self._compare(call, wish, receiver, call)
                compared = True
            return waited

        self._wait(missing, 1 + peers.size + receiver, deadline, inline)

    def _want(self, call: Call, sender: int, target: torch.Tensor) -> torch.Tensor:
        """Say what the next message of ``sender`` must be; where it goes to."""
        peers = self._peers
        if peers.fault is not None:
            peers.step(call, "want")
        peers.publish(peers.slots.incoming(sender), call, None, False)
        return target if target.dim() == 1 else target.view(-1)

    def _take(self, call: Call, sender: int, flat: torch.Tensor, start: int, deadline: Deadline, inline: bool) -> int:
        """Pull the piece that begins with element ``start``; where the next one begins."""
        peers, numel = self._peers, len(flat)
        theirs, own = peers.lines[sender], peers.own.words
        sent, taken = peers.places.sent + peers.rank, peers.places.taken + sender
        slot = peers.slots.outgoing(peers.rank)
        own[peers.places.wanted + sender] = expected = own[taken] + 1
        words = theirs.words
        if words[sent] < expected:
            waited = (sender,)
            self._wait(lambda: () if words[sent] >= expected else waited, 1 + sender, deadline, inline)
        notice = theirs.notice(slot)
        self._compare(notice.call, call, sender, call)
        stop = min(start + max(notice.piece, 1), numel)
        copy_flat(flat if stop - start == numel else flat[start:stop], theirs.view(slot, start, stop))
        if peers.fault is not None:
            peers.step(call, "take")
        # A sender that has given up may have changed its tensor while it was read.
        peers.require_open((sender,))
        if stop >= numel:
            theirs.conclude(slot)
        own[taken] = expected
        peers.wake(sender)
        return stop

    def _wait(self, missing: Missing, awaited: int, deadline: Deadline, inline: bool) -> None:
        """Wait until ``missing`` names no rank; announce what this rank waits for, if ``inline``."""
        if not missing():
            return
        peers = self._peers
        if not inline:
            peers.wait(missing, deadline, peers.spin_s)
            return
        words = peers.own.words
        try:
            if peers.lanes.idle(COLLECTIVE):
                words[Words.AWAITED] = awaited
            else:
                missing = self._announcing(missing, awaited)
            peers.wait(missing, deadline, peers.spin_inline_s)
        finally:
            words[Words.AWAITED] = 0

    def _announcing(self, missing: Missing, awaited: int) -> Missing:
        """``missing``, which announces what is awaited as soon as all collectives of this rank are complete.

        Until then this rank comes to the barriers of others, whatever its calling thread waits for.
        """

        def look() -> tuple[int, ...]:
            if self._peers.lanes.idle(COLLECTIVE):
                self._peers.own.words[Words.AWAITED] = awaited
            return missing()

        return look

    def _compare(self, offer: Call, wish: Call, other: int, own: Call) -> None:
        wanted = wish.recv_counts[0] if wish.kind == "sendrecv" else wish.numel
        if offer.dtype is wish.dtype and offer.numel == wanted:
            return
        raise CollectiveMismatchError(
            "sender and receiver disagree",
            peers=(self._peers.ranks[other],),
            expected=f"{own} on rank {self._peers.global_rank}",
            seen=f"{wish if own is offer else offer} on rank {self._peers.ranks[other]}",
            advice="What is sent and what is received must have the same dtype and number of elements.",
        )


#: ``Deadline`` of all its fields in their order, in a third of the time.
_new_deadline = partial(tuple.__new__, Deadline)
#: How long ``close`` waits for calls of other threads that are about to end.
_FAREWELL_S = 1.0


class MemoryTransport(LanesTransport):
    """All kinds of calls over ``Peers``.

    Collectives complete in the order in which they were started; so do the messages
    of one pair and direction. Synchronous calls run in the calling thread,
    asynchronous ones in a background thread per lane.

    Args:
        membership: the ranks.
        peers: their lines, and how to wait for them.
    """

    name = "memory"
    compares_calls = True

    def __init__(self, membership: Membership, peers: Peers) -> None:
        super().__init__(membership)
        self._peers = peers
        self._lanes = peers.lanes
        self._messages = Messages(peers)
        #: Receives from any rank that are not over, in the order in which they were started.
        self._wildcards: list[Wildcard] = []
        self._turn = 0
        self._small_bytes = small_bytes(membership.size)
        self.arrivals: Arrivals = [(0, 0.0, ())] * ARRIVALS_LENGTH
        #: Who uses what ``close`` gives back: the thread that makes a synchronous call, one at a time, and others by
        #: number. The last one to go gives it back if they kept ``close`` from doing so.
        self._calling = False
        self._inside: set[int] = set()
        self._ended = False

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """Run ``call`` here, or behind the calls of its lane that are under way."""
        deadline = _new_deadline((time.perf_counter() + timeout_s, timeout_s))
        lanes: tuple[Lane, ...] = _COLLECTIVES
        order: Sequence[Wildcard] = ()
        if call.kind in POINT_TO_POINT:
            lanes = _lanes(call, self.rank)
            if self._wildcards or call.root < 0:
                order = self._order(call)
        if not (asynchronous or order) and (not self._lanes.latest or self._lanes.idle(*lanes)):
            if not self._lanes.shared:
                self._run(call, source, target, deadline, lanes)
                return DONE
            if not handlers_may_call():
                task = partial(self._run, call, source, target, deadline, lanes)
                return self._lanes.inline(lanes, task, deadline, self.abort)
        try:
            run = partial(self._run, call, source, target, deadline, inline=False, order=order)
            parts = [self._lanes.submit(lane, partial(run, (lane,))) for lane in lanes]
        except ConcurrentUseError:
            if call.kind == "recv" and call.root < 0:
                order[-1].close()
            raise
        return LaneHandle(parts, deadline, self.abort)

    def _order(self, call: Call) -> Sequence[Wildcard]:
        """The receives from any rank that ``call`` comes after; of such a receive itself the last one is its own."""
        if call.kind not in ("recv", "sendrecv"):
            return ()
        earlier = tuple(self._wildcards)
        return (*earlier, Wildcard(self._lanes, self._wildcards)) if call.kind == "recv" and call.root < 0 else earlier

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Mark the own line broken, and wake everyone."""
        with self._used():
            self._peers.leave(LineState.BROKEN, self._peers.global_rank if culprit is None else culprit, reason)
            self._lanes.abandon()

    def awaited_by(self) -> tuple[int, ...]:
        """Members that have come to a barrier of a later call than this rank's last one."""
        if self._ended or self._lanes.busy():
            return ()
        lines = self._peers.lines
        arrived = lines[self.rank].words[Words.ARRIVED]
        return tuple(other for other, line in enumerate(lines) if line.words[Words.ARRIVED] > arrived)

    def close(self) -> None:
        """Let asynchronous calls finish for a second, then leave.

        A signal handler, or a finalizer, may come here out of a call of this communicator. That call cannot go on
        before this returns, so it ends with an error afterwards, and gives back what it uses.
        """
        interrupted = self._is_interrupted()
        if not self._lanes.stop(timeout_s=0.0 if interrupted else 1.0) and not interrupted:
            self.abort("it closed its communicator with calls under way")
            self._lanes.stop(timeout_s=1.0)
        with self._used():
            self._peers.leave(LineState.LEFT, self._peers.global_rank, "it closed its communicator")
            self._ended = True
        until = time.monotonic() + _FAREWELL_S
        while (self._calling or self._inside) and not interrupted and time.monotonic() < until:
            time.sleep(0.001)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Keep what ``close`` gives back, for the calling thread."""
        me = get_ident()
        known, interrupted = me in self._inside, self._is_interrupted()
        try:
            self._inside.add(me)
            yield
        finally:
            if not known:
                self._inside.discard(me)
            if not interrupted:
                self._give_back()

    def _is_interrupted(self) -> bool:
        """Whether the calling thread is inside a call of this communicator, which waits for this one to return."""
        if get_ident() in self._inside:
            return True
        calls = (frame for frame, _ in walk_stack(None) if frame.f_code is MemoryTransport._run.__code__)
        return self._calling and any(frame.f_locals.get("self") is self for frame in calls)

    def _give_back(self) -> None:
        """Let go of what the kernel holds, if this communicator has ended and no thread uses it any more."""
        if self._ended and not self._inside and not self._calling:
            self._peers.release()

    # Running one call, in the calling thread or in a lane.

    def _run(
        self,
        call: Call,
        source: Data,
        target: Data,
        deadline: Deadline,
        lanes: tuple[Lane, ...],
        inline: bool = True,
        order: Sequence[Wildcard] = (),
    ) -> None:
        if target is not None and target.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # torch guards tensors that were made in it
                self._run(call, source, target, deadline, lanes, inline, order)
            return
        alone = inline and not self._lanes.shared
        try:
            if alone:
                self._calling = True
            else:
                self._inside.add(get_ident())
            if self._ended:
                raise CommunicatorClosedError("the communicator was closed")  # noqa: TRY301
            if lanes[0] is COLLECTIVE:
                self._collective(call, source, target, deadline, inline)
            else:
                self._message(call, source, target, deadline, lanes, inline, order)
        except BaseException as error:
            # Before the caller can touch its tensors, peers must know not to trust them.
            self._peers.leave_with(error, call)
            raise
        finally:
            if alone:
                self._calling = False
            else:
                self._inside.discard(get_ident())
            if self._ended:
                self._give_back()

    def _collective(self, call: Call, source: Data, target: Data, deadline: Deadline, inline: bool) -> None:
        peers = self._peers
        slot = self._turn & 1
        self._turn += 1
        if peers.fault is not None:
            peers.step(call, "publish")
        small = source is not None and source.nbytes <= self._small_bytes
        peers.publish(slot, call, source, small)
        if inline:
            # Where several threads call, another one of them may yet serve a message that is waited for.
            spin_s, suspect = peers.spin_inline_s, None if self._lanes.shared else self._suspect
        else:
            spin_s, suspect = peers.spin_s, None
        come = time.perf_counter()
        last = peers.pass_barrier(call, peers.arrive(call), deadline, spin_s, suspect)
        if last:
            noted = (call.sequence, time.perf_counter() - come, last)
            self.arrivals[call.sequence % ARRIVALS_LENGTH] = noted
        if small and call.kind == "allreduce" and call.numel:
            assert target is not None
            flat = target if target.dim() == 1 else target.view(-1)
            copies = peers.copies(slot, flat)
            if copies is not None:  # Each rank reduces all. No peer reads the caller's tensor, so no last barrier.
                fold(copies, call.reduction, flat)
                return
        notices = peers.notices(slot)
        compare(peers.ranks, self.rank, notices)
        if call.kind != "barrier":
            MemoryExchange(peers, slot, call, target, notices, deadline, spin_s).run()

    def _message(
        self,
        call: Call,
        source: Data,
        target: Data,
        deadline: Deadline,
        lanes: tuple[Lane, ...],
        inline: bool,
        order: Sequence[Wildcard],
    ) -> None:
        self._peers.require_open(())
        direction, other = lanes[0]
        if direction == "recv" and other < 0:
            assert source is not None
            assert target is not None
            wildcard = order[-1]  # Those before it run in the same lane, and are over.
            try:
                self._messages.receive_any(call, wildcard, source, target, deadline)
            finally:
                wildcard.close()
            return
        if direction == "recv":
            assert target is not None
            if order:
                self._messages.let_go(order, other, deadline)
            self._messages.receive(call, other, target, deadline, inline)
            return
        assert source is not None
        if target is None or (len(lanes) == 1 and other != self.rank):
            self._messages.send(call, source, deadline, inline)
        elif other == self.rank:
            target.view(-1).copy_(source.view(-1))
        else:
            self._messages.exchange(call, source, target, deadline)

    def _suspect(self, call: Call) -> CollectiveMismatchError | None:
        """The error if a rank waits in a message for this one, which waits for it in ``call``.

        Both calling threads are blocked, no collective of the other rank is on its way, and no lane of this rank
        will serve the message: that never ends.
        """
        peers = self._peers
        for other, line in enumerate(peers.lines):
            if other == self.rank or not line.words[Words.AWAITED]:
                continue
            slot = self._awaited_slot(other)
            if slot is not None:
                return CollectiveMismatchError(
                    "two ranks wait for each other in different calls",
                    peers=(peers.ranks[other],),
                    expected=f"{call} on rank {peers.global_rank}",
                    seen=f"{line.notice(slot).call} on rank {peers.ranks[other]}",
                    advice="All ranks must make the same collective calls in the same order.",
                )
        return None

    def _awaited_slot(self, other: int) -> int | None:
        """Where ``other`` tells of the message in which it waits for this rank in vain; None if it does not.

        The order matters. This rank's lanes stay idle while its calling thread is here, so its own words stay as they
        are; a message of ``other`` that lacks one of them is never complete. What ``other`` awaits is read after that,
        and whether it has come here last: it arrives before it announces what it awaits.
        """
        peers, size = self._peers, self.size
        words, own = peers.lines[other].words, peers.own.words
        awaited = words[Words.AWAITED]
        if awaited == 1 + self.rank:
            lane, slot = ("send", other), peers.slots.incoming(self.rank)
            asked, served = peers.places.wanted + self.rank, peers.places.sent + other
        elif awaited == 1 + size + self.rank:
            lane, slot = ("recv", other), peers.slots.outgoing(self.rank)
            asked, served = peers.places.sent + self.rank, peers.places.taken + other
        else:
            return None
        stuck = self._lanes.idle(lane) and words[asked] > own[served] and words[Words.AWAITED] == awaited
        return slot if stuck and words[Words.ARRIVED] < own[Words.ARRIVED] else None


_COLLECTIVES: tuple[Lane, ...] = (COLLECTIVE,)


def _lanes(call: Call, rank: int) -> tuple[Lane, ...]:
    """Those that a call between two ranks runs in."""
    if call.kind != "sendrecv":
        return ((call.kind, call.root),)
    if call.root == rank:
        return (("send", rank),)  # to itself: one copy
    return (("send", call.root), ("recv", call.source))

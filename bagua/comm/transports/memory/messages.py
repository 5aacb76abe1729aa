"""Messages between two ranks that see each other's memory: the receiver pulls, the sender waits for that.

Of receives from any rank, each message goes to the one that was started first, of those that can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from bagua.comm.call import Call
from bagua.comm.transports.memory.copying import copy_flat
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lanes
from bagua.comm.transports.memory.line import Deadline, LineState, Words
from bagua.comm.transports.memory.peers import Peers
from bagua.errors import CollectiveMismatchError


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
    the two notices before anything is pulled, so both find a difference.

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

    def _wait(self, missing: Callable[[], tuple[int, ...]], awaited: int, deadline: Deadline, inline: bool) -> None:
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

    def _announcing(self, missing: Callable[[], tuple[int, ...]], awaited: int) -> Callable[[], tuple[int, ...]]:
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

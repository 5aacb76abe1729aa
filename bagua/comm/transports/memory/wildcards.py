"""Receives from any rank: each message goes to the receive that was started first, of those that can take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua.comm.transports.memory.lanes import Lanes, LaneTask


class Wildcard:
    """A receive from any rank.

    Args:
        earlier: for each peer the receives from it that were started before, if they are not complete.
        owner: forgets this one when it is over.
    """

    def __init__(self, earlier: dict[int, LaneTask], owner: list[Wildcard]) -> None:
        self._earlier = earlier
        self._owner = owner
        #: The peer whose message it takes; None as long as that is open.
        self.source: int | None = None

    def may_take(self, peer: int) -> bool:
        """Whether the next message of ``peer`` is for no receive that was started before."""
        part = self._earlier.get(peer)
        return part is None or part.done

    def holds(self, peer: int) -> bool:
        """Whether a receive from ``peer`` that was started later has to wait."""
        return self in self._owner and (self.source is None or self.source == peer)

    def close(self) -> None:
        """It is over: what was started later may go on. Idempotent."""
        if self in self._owner:
            self._owner.remove(self)


class Wildcards:
    """The receives from any rank of one communicator that are not over.

    Args:
        lanes: lanes of receives from one rank.
        peers: the other ranks.

    Attributes:
        open: receives that are not over, in the order in which they were started.
    """

    def __init__(self, lanes: Lanes, peers: Iterable[int]) -> None:
        self._lanes = lanes
        self._peers = tuple(peers)
        self.open: list[Wildcard] = []

    def start(self) -> Wildcard:
        """A receive from any rank begins."""
        latest = {peer: self._lanes.latest.get(("recv", peer)) for peer in self._peers}
        wildcard = Wildcard({peer: part for peer, part in latest.items() if part is not None}, self.open)
        self.open.append(wildcard)
        return wildcard

    def earlier(self) -> Sequence[Wildcard]:
        """Those that a receive from one rank that begins now has to let go first."""
        return tuple(self.open)

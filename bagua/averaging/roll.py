"""Who will not come to any further session."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.averaging.records import MemberState, Record
from bagua.comm import Board

__all__ = ["Roll"]


class Roll:
    """The members that are gone for good: they died, or their processes ended. It outlives the sessions.

    Args:
        board: for all sessions of a model.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> store = thread_store()
        >>> Roll(Board(store, 0, (0, 1, 2))).strike({2: "its process ends"})
        >>> Roll(Board(store, 1, (0, 1, 2))).answer_for(2).reason
        'its process ends'
        >>> Roll(Board(store, 1, (0, 1, 2))).answer_for(0)
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._struck: set[int] = set()

    def strike(self, gone: Mapping[int, str], session: str = "") -> None:
        """Say that ranks are gone.

        Args:
            gone: why, for each of the ranks.
            session: in which they were lost, and whose members hear of it otherwise.

        Raises:
            PeerLostError: the store is gone.
        """
        for rank in gone.keys() - self._struck:
            self._struck.add(rank)
            self._board.decide(f"gone/{rank}", [gone[rank], session])

    def answer_for(self, rank: int, session: str = "now") -> Record | None:
        """What ``rank`` would say in a session to which it will not come; None if it still may come.

        Args:
            rank: has not come yet.
            session: to which; a rank that is lost in this very session has not left it.

        Raises:
            PeerLostError: the store is gone.
        """
        reason, lost_in = self._board.decided(f"gone/{rank}") or ["", session]
        return None if lost_in == session else Record(MemberState.LEFT, reason=reason)

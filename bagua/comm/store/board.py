"""A notice board in the store: what each member says of itself, and decisions on which all members agree.

Nothing here waits for another member. Each member writes its own record and reads those of
the others whenever it likes. A decision is a cell that is written once: the member that comes first
decides, everybody else gets to know what was decided. So members that act only on decisions
act alike, in whatever order they come to look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from bagua.comm.store.cells import Cells
from bagua.comm.store.keys import read_present
from bagua.errors import PeerLostError

T = TypeVar("T")


class Board:
    """Records of the members of a group, and their decisions.

    Args:
        store: written to by these members only, and through this object only.
        rank: this member.
        ranks: global rank of each member, for messages.
        name: tells the boards of a group apart; the same on all members.

    Example:
        >>> store = dist.HashStore()
        >>> first, second = Board(store, 0, (0, 1)), Board(store, 1, (0, 1))
        >>> first.post({"ready": True})
        >>> second.read()
        [{'ready': True}, None]
        >>> first.decide("where", "here"), second.decide("where", "there"), second.decided("where")
        ('here', 'here', 'here')
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], name: str = "board") -> None:
        self._store = store
        self._cells = Cells(store)
        self.name = name
        self.rank = rank
        self.ranks = tuple(ranks)
        self._keys = [f"record/{member}" for member in range(len(self.ranks))]

    def post(self, record: dict[str, Any]) -> None:
        """Replace this member's record.

        Args:
            record: anything JSON can hold.

        Raises:
            PeerLostError: the store is gone. It may be noticed only when something is read.
        """
        self._talk(lambda: self._cells.post(self._keys[self.rank], record))

    def read(self) -> list[dict[str, Any] | None]:
        """The latest record of each member; None for one that has not posted yet.

        Raises:
            PeerLostError: the store is gone.
        """
        return self._talk(lambda: self._cells.read(self._keys))

    def decide(self, topic: str, proposal: Any) -> Any:
        """What is decided about ``topic``: ``proposal``, unless another member was first.

        Args:
            topic: name of the cell.
            proposal: anything JSON can hold.

        Raises:
            PeerLostError: the store is gone.
        """
        return self._talk(lambda: self._cells.claim(f"decision/{topic}", proposal))

    def decided(self, topic: str) -> Any:
        """What was decided about ``topic``, or None.

        Raises:
            PeerLostError: the store is gone.
        """
        (text,) = self._talk(lambda: read_present(self._store, [f"decision/{topic}"]))  # It may be forgotten.
        return None if text is None else json.loads(text)

    def forget(self, topic: str) -> None:
        """Delete a decision that no rank needs any more.

        Raises:
            PeerLostError: the store is gone.
        """
        self._talk(lambda: self._store.delete_key(f"decision/{topic}"))

    def _talk(self, conversation: Callable[[], T]) -> T:
        try:
            return conversation()
        except (RuntimeError, OSError) as error:
            raise PeerLostError(
                f"rank {self.ranks[self.rank]} lost the store through which the ranks meet",
                rank=self.ranks[self.rank],
                advice="Its host (rank 0, or the launcher) has ended: look at its output first.",
            ) from error

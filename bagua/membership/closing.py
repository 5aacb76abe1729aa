"""The cells that close exchanges through a bucket. Each lists whose contributions count; who comes first decides.

What is in a bucket stays, so a member that has read all contributions may have them count without a barrier, also that
of a member that has died since. A member that stops has to ask first whether the exchange counts.
"""

from __future__ import annotations

import contextlib
from collections import deque

from bagua.comm import Cells
from bagua.errors import StoreLostError
from bagua.membership.epochs import Epoch


class Closing:
    """Closes exchanges, for one rank of an island.

    Args:
        cells: cells of the store.
        seat: seat of the island.
    """

    def __init__(self, cells: Cells, seat: int) -> None:
        self._cells, self._seat = cells, seat
        self._last = (0, 0)
        self._over: deque[str] = deque()

    def close(self, epoch: Epoch, exchange: int, *, counts: bool) -> bool:
        """Whether the exchange counts, for all members of ``epoch`` or for nobody: ``counts``, if no other came first.

        Raises:
            StoreLostError: the store does not answer. It may be decided all the same.
        """
        wanted = epoch.members if counts else ()
        found = bool(self._cells.claim(_name(epoch.number, exchange), list(wanted)))
        if found and counts and self._seat == epoch.members[0]:
            if self._last == (epoch.number, exchange - 1):  # All who contribute now have read the one before.
                self._over.append(_name(*self._last))
            self._last = epoch.number, exchange
        return found

    def tidy(self) -> None:
        """Delete cells that nobody reads any more, if the store answers."""
        while self._over:
            with contextlib.suppress(StoreLostError):
                self._cells.drop(self._over[0])
            self._over.popleft()


def _name(epoch: int, exchange: int) -> str:
    return f"closed/{epoch}/{exchange}"

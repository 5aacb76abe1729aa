"""A rank that is not the first of its island: in each call it does what that one says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.comm import Cells
from bagua.membership.counterparts import LOSSES, Attempt, Counterparts, epoch_name
from bagua.membership.island import Island


class Follower:
    """What a ``Participant`` is on the first rank, on the others.

    Args:
        island: ranks of the island.
        counterparts: connections of this rank.
        cells: cells of the store.

    Attributes:
        contributed: seats whose contributions are part of the last result.
        waiting_for: empty: the first rank knows.
    """

    waiting_for = ""

    def __init__(self, island: Island, counterparts: Counterparts, cells: Cells) -> None:
        self._island = island
        self._cells = cells
        self._counterparts = counterparts
        self._called = False
        self.contributed: tuple[int, ...] = ()

    def join(self, *, early: bool) -> None:  # noqa: ARG002 - as a Participant is asked
        """Come in with the island; ``early`` is for islands of one rank."""
        self._follow()

    def exchange(self, attempt: Attempt, alike: Sequence[torch.Tensor] = ()) -> None:  # noqa: ARG002 - as above
        """Take part in an exchange of the island, of which the first rank compares ``alike``."""
        self._counterparts.attempt = attempt
        self.contributed, self._called = self._follow()
        self._counterparts.withdraw()

    def rest(self) -> None:
        """Let newcomers in, if there are any."""
        if self._called:
            self.contributed, self._called = self._follow()

    def _follow(self) -> Any:
        """Do what the first rank says in this call. It may be gone, and have said nothing, because the store is.

        Raises:
            StoreLostError: the first rank is lost, and so is the store.
            CommunicationError: the call ended on the first rank with it, or that one is lost.
        """
        try:
            return self._island.follow()
        except LOSSES:
            self._cells.read([epoch_name(1)])
            raise

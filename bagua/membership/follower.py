"""A rank that is not the first of its island: in each call it does what that one says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.membership.counterparts import Attempt, Counterparts
from bagua.membership.island import Island


class Follower:
    """What a ``Participant`` is on the first rank, on the others.

    Args:
        island: ranks of the island.
        counterparts: connections of this rank.

    Attributes:
        contributed: seats whose contributions are part of the last result.
        waiting_for: empty: the first rank knows.
    """

    waiting_for = ""

    def __init__(self, island: Island, counterparts: Counterparts) -> None:
        self._island = island
        self._counterparts = counterparts
        self._called = False
        self.contributed: tuple[int, ...] = ()

    def join(self, *, early: bool) -> None:  # noqa: ARG002 - as a Participant is asked
        """Come in with the island; ``early`` is for islands of one rank."""
        self._island.follow()

    def exchange(self, attempt: Attempt, alike: Sequence[torch.Tensor] = ()) -> None:  # noqa: ARG002 - as above
        """Take part in an exchange of the island, of which the first rank compares ``alike``."""
        self._counterparts.attempt = attempt
        self._end_with(self._island.follow())
        self._counterparts.withdraw()

    def rest(self) -> None:
        """Let newcomers in, if there are any."""
        if self._called:
            self._end_with(self._island.follow())

    def _end_with(self, outcome: tuple[tuple[int, ...], bool]) -> None:
        self.contributed, self._called = outcome

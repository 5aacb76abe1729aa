"""How members find out together what is merged next."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.comm import Communicator
from bagua.membership.merging.quorum import Choice, QuorumRule, Said, choose

#: Members look around so many times while the training of the fastest goes on beside a merge.
_LOOKS = 16
#: Longest pause between two looks, in seconds.
_PAUSE_S = 0.25


class Chooser:
    """Has members look around until something is merged: each tells all how far it is.

    Args:
        say: returns what this member says of itself.
        check: raises if this process leaves.
        pause: waits for so many seconds, or until this process leaves.
        clock: seconds.
        poll_s: shortest pause between two looks, in seconds.

    Attributes:
        look_s: seconds between the last two looks.
    """

    def __init__(
        self,
        say: Callable[[], Said],
        check: Callable[[], None],
        pause: Callable[[float], object],
        clock: Callable[[], float],
        poll_s: float,
    ) -> None:
        self._say = say
        self._check = check
        self._pause = pause
        self._clock = clock
        self._poll_s = poll_s
        self.look_s = 0.0

    def choose(self, communicator: Communicator, rule: QuorumRule) -> Choice:
        """What is merged, when something is: the same on all members.

        Args:
            communicator: members.
            rule: when a fragment is merged.
        """
        looked_at = self._clock()
        while True:
            self._check()
            said = self._look_around(communicator)
            choice = choose(said, rule)
            if choice is not None:
                return choice
            fastest_s = min(one.step_s for one in said.values())
            self._pause(min(_PAUSE_S, max(self._poll_s, max(rule.overlap, 1) * fastest_s / _LOOKS)))
            looked_at, before = self._clock(), looked_at
            self.look_s = looked_at - before

    def _look_around(self, communicator: Communicator) -> dict[int, Said]:
        own = torch.tensor(self._say().numbers(), dtype=torch.float64)
        told = torch.empty(communicator.size * own.numel(), dtype=own.dtype)
        communicator.allgather(told, own)
        rows = told.view(communicator.size, -1).tolist()
        return {seat: Said.of(row) for seat, row in zip(communicator.ranks, rows, strict=True)}

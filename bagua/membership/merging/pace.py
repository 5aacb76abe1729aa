"""How fast a member trains, and how much its differences count by that."""

from __future__ import annotations

#: Part of the measured time of a step that each step replaces.
_FRESH = 0.25


class Pace:
    """Steps and tokens of this member, and how long its steps and its merges take.

    Attributes:
        step_s: seconds of a step, without what it waits for others.
        merge_s: seconds that the last merge has taken until it counted.
    """

    def __init__(self) -> None:
        self.step_s = self.merge_s = 0.0
        self._steps, self._tokens = 0, 0.0
        self._stepped_at: float | None = None
        self._idle_s = 0.0
        #: Steps and tokens when a fragment was contributed last.
        self._counted: dict[int, tuple[int, float]] = {}

    def count(self, tokens: float) -> None:
        """This member has trained on so many tokens more."""
        self._tokens += tokens

    def step(self, now: float) -> None:
        """A step begins now, in seconds of any clock."""
        if self._stepped_at is not None:
            step_s = max(0.0, now - self._stepped_at - self._idle_s)
            self.step_s += (_FRESH if self.step_s else 1.0) * (step_s - self.step_s)
        self._stepped_at, self._idle_s = now, 0.0
        self._steps += 1

    def idle(self, seconds: float) -> None:
        """The training has waited so long for others."""
        self._idle_s += seconds

    def weight(self, fragment: int, *, equal: bool, void: bool) -> float:
        """How much what was learned of a fragment since its last weight counts; see ``Merges.contribute``."""
        steps, tokens = self._steps, self._tokens
        steps_before, tokens_before = self._counted.get(fragment, (0, 0.0))
        self._counted[fragment] = steps, tokens
        made = steps - steps_before
        if void or not made:
            return 0.0
        learned_from = tokens - tokens_before if tokens else float(made)
        return 1.0 if equal else learned_from**2 / made

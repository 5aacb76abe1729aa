"""When differences are merged, and whose: a rule that each member works out by itself, from what all have said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Part of the time that is hidden anyway which is waited for others; the rest is for what was not foreseen.
_GRACE = 0.9


class Said(NamedTuple):
    """What a member says of itself when all look around.

    Attributes:
        ages_s: for each fragment, for how many seconds its difference has been ready; below 0 if there is none.
        weights: for each fragment the weight of that difference.
        step_s: seconds that a step of its training takes.
        merge_s: seconds that the last merge has taken until it counted, and those between two looks.
        held_up: its training waits for a merge.
        ended: its training has ended, and it has nothing more to contribute.
    """

    ages_s: tuple[float, ...]
    weights: tuple[float, ...]
    step_s: float = 0.0
    merge_s: float = 0.0
    held_up: bool = False
    ended: bool = False

    def numbers(self) -> list[float]:
        """As numbers, for those who know how many fragments there are."""
        return [self.step_s, self.merge_s, float(self.held_up), float(self.ended), *self.ages_s, *self.weights]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Said:
        """From what ``numbers`` returned."""
        count = (len(numbers) - 4) // 2
        step_s, merge_s, held_up, ended = numbers[:4]
        return cls(
            tuple(numbers[4 : 4 + count]), tuple(numbers[4 + count :]), step_s, merge_s, bool(held_up), bool(ended)
        )


class Choice(NamedTuple):
    """What all members do next.

    Attributes:
        fragment: number of the fragment that is merged; -1 if all have ended.
        seats: seats of those whose differences are merged.
        weights: weights of these.
    """

    fragment: int
    seats: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def ends(self) -> bool:
        """Whether all have come to the end."""
        return self.fragment < 0


class QuorumRule(NamedTuple):
    """When a fragment is merged.

    Attributes:
        quorum: differences that must be there. Members that cannot come before others give way are not waited for:
            those whose training has ended, and those whose training waits for the merge of another fragment.
        grace_s: seconds to wait for more after that; None for the time that is hidden anyway.
        overlap: steps that a member makes before it waits for the merge of its difference.
    """

    quorum: int
    grace_s: float | None = None
    overlap: int = 0


def choose(said: dict[int, Said], rule: QuorumRule) -> Choice | None:
    """What is merged now; None if nothing is yet. The same on all members, because all have heard the same.

    Among several fragments the one comes first whose quorum has been there for longest.

    Args:
        said: words of each member, by seat.
        rule: the same on all.

    Example:
        >>> fast, slow = Said((0.3,), (8.0,)), Said((-1.0,), (0.0,))
        >>> choose({0: fast, 4: slow}, QuorumRule(1, grace_s=0.2))
        Choice(fragment=0, seats=(0,), weights=(8.0,))
        >>> choose({0: fast, 4: slow}, QuorumRule(2, grace_s=0.2)) is None
        True

    Paper: "Decoupled DiLoCo", 2026, arXiv 2604.21428.
    """
    members = list(said.values())
    count = len(members[0].ages_s)
    ripe = [(since, -fragment) for fragment in range(count) if (since := _ripe_s(members, fragment, rule)) is not None]
    if ripe:
        fragment = -max(ripe)[1]
        seats = tuple(seat for seat, one in sorted(said.items()) if one.ages_s[fragment] >= 0)
        return Choice(fragment, seats, tuple(said[seat].weights[fragment] for seat in seats))
    ended = all(one.ended for one in members) and all(age < 0 for one in members for age in one.ages_s)
    return Choice(-1) if ended else None


def _ripe_s(members: Sequence[Said], fragment: int, rule: QuorumRule) -> float | None:
    """For how many seconds the quorum of a fragment has been there; None if it cannot be merged yet."""
    ready = sorted((one for one in members if one.ages_s[fragment] >= 0), key=lambda one: -one.ages_s[fragment])
    coming = sum(not (one.ages_s[fragment] >= 0 or one.held_up or one.ended) for one in members)
    needed = min(rule.quorum, len(ready) + coming)
    if not ready or len(ready) < needed:
        return None
    since_s = ready[needed - 1].ages_s[fragment]
    if coming and since_s < _grace_s(members, ready, fragment, since_s, rule):
        return None
    return since_s


def _grace_s(members: Sequence[Said], ready: Sequence[Said], fragment: int, since_s: float, rule: QuorumRule) -> float:
    """How long to wait for more once the quorum is there: so long that no member that is there waits for it."""
    if rule.grace_s is not None:
        return rule.grace_s
    quorum_s = ready[0].ages_s[fragment] - since_s
    hidden_s = rule.overlap * min((one.step_s for one in ready), default=math.inf)
    return max(0.0, _GRACE * (hidden_s - quorum_s - max(one.merge_s for one in members)))

"""How many steps each member makes from one outer step to the next, so that all come to it together."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

#: Steps whose times are remembered at most.
_REMEMBERED = 4096


class Announced(NamedTuple):
    """What a member says of itself in an exchange.

    Attributes:
        step_s: median time of its steps in the last period, in seconds; 0.0 if it has measured none.
        steps: how many it has made since the last exchange of the same part.
        tokens: how many it has trained on since then; 0.0 if it counts none.
    """

    step_s: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0


def numbers_of(told: Mapping[int, Announced], period: int) -> dict[int, int]:
    """The steps that each member makes in the next period: ``max(1, round(period * fastest / own))``.

    Args:
        told: words of each member, by seat. Who has measured nothing yet counts as the fastest.
        period: steps of the fastest member, ``sync_every``.

    Example:
        >>> numbers_of({0: Announced(0.1), 1: Announced(0.3), 4: Announced()}, 30)
        {0: 30, 1: 10, 4: 30}
    """
    fastest = min((one.step_s for one in told.values() if one.step_s), default=0.0)
    return {seat: max(1, round(period * fastest / one.step_s)) if one.step_s else period for seat, one in told.items()}


def contributions(told: Mapping[int, Announced], seat: int) -> float:
    """How many contributions like that of ``seat`` make one mean: it counts by its tokens, or by its steps.

    Tokens count if all that have made a step count them. ``inf`` if only others have learned something.

    Example:
        >>> told = {0: Announced(steps=30.0), 1: Announced(steps=10.0)}
        >>> contributions(told, 0), contributions(told, 1)
        (1.3333333333333333, 4.0)
    """
    by_tokens = all(one.tokens or not one.steps for one in told.values())
    weights = {other: one.tokens if by_tokens else one.steps for other, one in told.items()}
    total = sum(weights.values())
    if not total:
        return len(weights)
    return total / weights[seat] if weights[seat] else float("inf")


class Pace:
    """The pace of this member, and the numbers that all have agreed on.

    Args:
        seat: seat of its island.
        clock: seconds.

    Attributes:
        numbers: steps of each member in a period, by seat. Who is not in it makes those of the fastest one.
    """

    def __init__(self, seat: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seat, self._clock = seat, clock
        self.numbers: dict[int, int] = {}
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._waited_s = 0.0
        self._stepped_s: float | None = None
        self._steps, self._tokens = 0, 0.0
        #: Steps and tokens at the last exchange of each part, and of any.
        self._counted: dict[Hashable, tuple[int, float]] = {}
        self._since = (0, 0.0)

    def stride(self, steps: int, period: int) -> int:
        """For how many steps of the fastest member the next one of this member stands.

        The ``u``-th of ``h`` steps in a period of ``H`` ends at ``u * H // h``.

        Args:
            steps: steps that the fastest member has made when it begins.
            period: its steps in a period, ``H``.
        """
        done, own = steps % period, self._number(period)
        return -(-own * (done + 1) // period) * period // own - done

    def _number(self, period: int) -> int:
        return min(self.numbers.get(self._seat, period), period)

    def count(self, tokens: float) -> None:
        """This member has trained on so many tokens more."""
        self._tokens += tokens

    def step(self) -> None:
        """One step of this member is made, but for its update."""
        active_s = self._clock() - self._waited_s
        if self._stepped_s is not None:
            self._took.append(active_s - self._stepped_s)
        self._stepped_s = active_s
        self._steps += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens here is no part of a step."""
        begun = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - begun

    def announce(self, part: Hashable, period: int) -> Announced:
        """What this member says in an exchange.

        Args:
            part: key of what is exchanged; None for all of the model, between two outer steps.
            period: steps of the fastest member in a period.
        """
        steps, tokens = self._since if part is None else self._counted.get(part, (0, 0.0))
        took = list(self._took)[-self._number(period) :]
        return Announced(statistics.median(took) if took else 0.0, self._steps - steps, self._tokens - tokens)

    def agree(self, told: Mapping[int, Announced], part: Hashable, period: int) -> None:
        """An exchange in which members have said this counts; see ``announce``."""
        self.numbers = numbers_of(told, period)
        self._counted[part] = self._since = self._steps, self._tokens

"""What a transport declares about itself to the contract suite, and the ranks it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from bagua.testing.ranks import Outcome, RankPool

#: What is true of a transport without a capability.
_WITHOUT = {
    "compares_calls": "calls are not compared",
    "can_lose_ranks": "there is no other rank",
    "adds_in_float32": "a foreign library adds",
    "keeps_apart": "communicators are used in one order, and share their fate",
    "receives_from_any": "ranks to receive from are named",
    "matches_in_order": "a foreign library matches receives",
    "blocks_host": "waiting does not block",
}


ContractTest = Callable[["ContractBase", RankPool], None]


class ContractBase:
    """Declarations of a transport under test. The suite asks these, never its name.

    Attributes:
        sizes: numbers of ranks with which every promise is checked.
        compares_calls: ranks that disagree get ``CollectiveMismatchError``.
        can_lose_ranks: ranks can die, be late, or call something else; not where there is only one.
        adds_in_float32: sums of 16-bit floats are accumulated in float32 by this project.
        keeps_apart: calls on two communicators may be issued in different orders on
            different ranks.
        receives_from_any: ``recv_any`` works.
        matches_in_order: a message goes to the receive that was started first, also where one takes any sender.
        blocks_host: ``wait`` returns when the result is there, not when a stream will see it.
        deadline_s: timeout that the tests of late and silent ranks use, in seconds.
    """

    sizes: ClassVar[tuple[int, ...]] = (2, 3)
    compares_calls: ClassVar[bool] = True
    can_lose_ranks: ClassVar[bool] = True
    adds_in_float32: ClassVar[bool] = True
    keeps_apart: ClassVar[bool] = True
    receives_from_any: ClassVar[bool] = True
    matches_in_order: ClassVar[bool] = True
    blocks_host: ClassVar[bool] = True
    deadline_s: ClassVar[float] = 0.6

    @pytest.fixture
    def pool(self) -> RankPool:
        """The ranks, on the transport under test. Every transport supplies its own."""
        raise NotImplementedError("give the class a fixture `pool` that returns a RankPool")

    @property
    def size(self) -> int:
        """The largest number of ranks."""
        return max(self.sizes)

    def need(self, *capabilities: str) -> None:
        """Skip, visibly, a test that this transport declares not to be for it."""
        for name in capabilities:
            if not getattr(self, name):
                pytest.skip(f"{type(self).__name__} declares: {_WITHOUT[name]}")

    def survivors(self, outcomes: list[Outcome], lost: int) -> list[Outcome]:
        """The outcomes of all ranks but ``lost``, after a check that only that one was lost."""
        assert outcomes[lost].error is not None, f"rank {lost} should have been lost"
        rest = [outcome for outcome in outcomes if outcome.rank != lost]
        for outcome in rest:
            if outcome.error is not None:
                raise outcome.error
        return rest


def on_every_size(function: Callable[..., Any], *arguments: Any) -> ContractTest:
    """A test that runs ``function`` with each of the numbers of ranks."""

    def test(self: ContractBase, pool: RankPool) -> None:
        __tracebackhide__ = True
        for size in self.sizes:
            pool.run(function, *arguments, size=size)

    return test


def on_most_ranks(function: Callable[..., Any], *needs: str) -> ContractTest:
    """A test that runs ``function`` with the largest number of ranks, on transports with the capabilities ``needs``."""

    def test(self: ContractBase, pool: RankPool) -> None:
        __tracebackhide__ = True
        self.need(*needs)
        pool.run(function, size=self.size)

    return test

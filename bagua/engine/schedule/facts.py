"""What follows from the exchanges of a phase: when they are made, and which memory they need."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from bagua.algorithms import OF_BUCKETS, Exchange


def sends_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether anything is made of gradients."""
    return any("gradients" in one.needs for one in exchanges)


def gathers(exchanges: Iterable[Exchange]) -> bool:
    """Whether gradients are gathered in flat memory as they arrive."""
    return sends_gradients(one for one in exchanges if one.parts.by == "arrival")


def is_chunked(exchanges: Iterable[Exchange]) -> bool:
    """Whether buckets have to split evenly over the ranks."""
    return any(one.how is not None and one.how.chunked for one in exchanges)


def is_between_steps(exchanges: Iterable[Exchange]) -> bool:
    """Whether ranks exchange between steps, each at its own pace, and not in them."""
    return any(one.how is not None and not one.how.lockstep for one in exchanges)


def follows_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether something happens as gradients arrive; otherwise a backward pass only counts as a step."""
    return any(
        "gradients" in one.needs | one.writes or not {one.at, one.until}.isdisjoint(OF_BUCKETS) for one in exchanges
    )


def layout_of(exchanges: Sequence[Exchange]) -> Hashable:
    """What changes when buckets must be formed anew."""
    return is_chunked(exchanges), is_between_steps(exchanges), gathers(exchanges)

"""Pools of ranks and contract suites, shipped so that other people's transports and algorithms can use them.

``ThreadRanks`` and ``ProcessRanks`` run one function on n ranks and hand back what each
rank returned. ``bagua.testing.transport_contract`` (which needs pytest) holds every
promise that a transport makes.
"""

from bagua.testing.process_ranks import ProcessRanks
from bagua.testing.ranks import (
    Outcome,
    RankDiedError,
    RankHangsError,
    RankPool,
    die,
    fall_silent,
)
from bagua.testing.thread_ranks import ThreadRanks

__all__ = [
    "Outcome",
    "ProcessRanks",
    "RankDiedError",
    "RankHangsError",
    "RankPool",
    "ThreadRanks",
    "die",
    "fall_silent",
]

"""Pools of ranks, for tests: ``ThreadRanks`` and ``ProcessRanks`` run one function on n ranks.

They hand back what each rank returned.
"""

from bagua.testing import ranks
from bagua.testing.process_ranks import PRELOADED as PRELOADED
from bagua.testing.process_ranks import ProcessRanks
from bagua.testing.ranks import *
from bagua.testing.ranks import this_rank as this_rank

__all__ = ["ProcessRanks"]
__all__ += ranks.__all__

"""Who takes part, by epochs, while members come and go."""

from bagua.membership.islands import Islands, Members, join_islands
from bagua.membership.pace import Announced as Announced
from bagua.membership.pace import Pace as Pace
from bagua.membership.pace import contributions as contributions
from bagua.membership.sampler import ElasticSampler

__all__ = ["ElasticSampler", "Islands", "Members", "join_islands"]

"""Who takes part, by epochs, while members come and go."""

from bagua.membership.islands import Islands, Members
from bagua.membership.joining import join_islands
from bagua.membership.sampler import ElasticSampler

__all__ = ["ElasticSampler", "Islands", "Members", "join_islands"]

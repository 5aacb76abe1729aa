"""Who takes part, by epochs, while members come and go."""

from bagua.membership.islands import Islands, Members
from bagua.membership.joining import join_islands
from bagua.membership.merging.fragments import Fragment as Fragment
from bagua.membership.merging.fragments import Merge
from bagua.membership.merging.quorum import QuorumRule as QuorumRule
from bagua.membership.sampler import ElasticSampler

__all__ = ["ElasticSampler", "Islands", "Members", "Merge", "join_islands"]

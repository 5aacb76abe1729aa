"""Operations that algorithms are made of: communicators composed with host layouts, codecs and topologies."""

from bagua.primitives.centralized import allreduce_sum
from bagua.primitives.hierarchical import hierarchical_sum, on_leaders

__all__ = ["allreduce_sum", "hierarchical_sum", "on_leaders"]

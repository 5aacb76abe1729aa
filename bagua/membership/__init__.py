"""Who takes part, by epochs, while members come and go."""

from bagua.membership.islands import Islands, Members
from bagua.membership.joining import join_islands

__all__ = ["Islands", "Members", "join_islands"]

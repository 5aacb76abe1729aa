"""A reducer of few elements that goes over to ranges of positions where there are many ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua.checks import check_flags, check_whole
from bagua.comm import Communicator
from bagua.compression import Codec, check_codec
from bagua.primitives.codec_reducers import (
    AllGatherReducer,
    ContributorsByRange,
    ContributorsReducer,
    ScatterGatherReducer,
)
from bagua.primitives.memory import ReducerMemory
from bagua.primitives.reducers import SumReducer


@dataclass(frozen=True)
class SparseReducer(SumReducer):
    """Few elements of everyone: sent to everyone between few ranks, and by ranges of positions between many.

    Between up to ``gather_ranks`` ranks this is ``AllGatherReducer``, or ``ContributorsReducer``, and each rank
    receives what all others send. Between more it is ``ScatterGatherReducer``: each rank chooses elements in each of
    ``n`` ranges, one rank adds up for each range, and sends as many of the sums as a rank chose there. That takes two
    messages of the compressed size, whatever the number of ranks, and loses more: use it with error feedback.

    Args:
        codec: codec that keeps few elements, as ``TopK(0.01)``.
        contributors: True gives the mean of each element over those ranks that sent it, times the number of ranks.
        gather_ranks: at least 1.

    Raises:
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> from bagua.compression import TopK
        >>> SparseReducer(TopK(0.01)).chosen(8), SparseReducer(TopK(0.01)).chosen(9)
        (AllGatherReducer(codec=TopK(ratio=0.01)), ScatterGatherReducer(codec=TopK(ratio=0.01)))
    """

    codec: Codec
    contributors: bool = False
    gather_ranks: int = 8

    def __post_init__(self) -> None:
        check_codec(self.codec)
        check_flags(contributors=self.contributors)
        check_whole(1, gather_ranks=self.gather_ranks)

    def chosen(self, size: int) -> SumReducer:
        """The reducer between ``size`` ranks."""
        if size <= self.gather_ranks:
            return ContributorsReducer(self.codec) if self.contributors else AllGatherReducer(self.codec)
        return ContributorsByRange(self.codec) if self.contributors else ScatterGatherReducer(self.codec)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        for size in (self.gather_ranks, self.gather_ranks + 1):
            self.chosen(size).check_dtype(dtype)

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``."""
        self.chosen(communicator.size).reduce(flat, communicator, memory, remainder)

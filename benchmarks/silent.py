"""An algorithm that does all that gradient allreduce does, except to communicate: the engine's own cost."""

from dataclasses import dataclass

from bagua.algorithms import Algorithm, AlgorithmImpl, Traits
from bagua.buckets import Bucket
from bagua.comm import ProcessGroup

__all__ = ["SilentAlgorithm", "SilentAlgorithmImpl"]


@dataclass(frozen=True)
class SilentAlgorithm(Algorithm):
    """Gradients are gathered in buckets, and stay what they are."""


class SilentAlgorithmImpl(AlgorithmImpl, declaration=SilentAlgorithm):
    """``SilentAlgorithm`` on a group."""

    traits = Traits(result="consensus")

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:  # noqa: ARG002  # the contract's names
        """Use the bucket's memory as gradient allreduce does, and send nothing."""
        bucket.allocate_gradients()

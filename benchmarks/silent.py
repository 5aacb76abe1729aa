"""An algorithm that does all that gradient allreduce does, except to communicate: the engine's own cost."""

from collections.abc import Hashable
from dataclasses import dataclass

from bagua.algorithms import Algorithm, Every, Exchange, Flight, Gradients, How, Replace, bound_form
from bagua.comm import ProcessGroup

__all__ = ["SilentAlgorithm", "SilentAlgorithmImpl"]


@dataclass(frozen=True)
class Nothing(How):
    """Sends nothing."""

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Leave the flight as it is."""


@dataclass(frozen=True)
class SilentAlgorithm(Algorithm):
    """Gradients are gathered in buckets, and stay what they are."""

    ranks_differ = True  # Otherwise the engine finds out, and says so.

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:  # noqa: ARG002 - there is one phase
        """Use the bucket's memory as gradient allreduce does, and send nothing."""
        return (Exchange(Gradients(), Every(), Nothing(), Replace()),)


SilentAlgorithmImpl = bound_form(SilentAlgorithm)

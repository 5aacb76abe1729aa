"""Training by gossip that sends a few bits for each weight, or few weights, and follows neighbours from afar."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every
from bagua.algorithms.exchanges.gossip import DifferenceMix
from bagua.algorithms.exchanges.values import Replace, Weights
from bagua.checks import check_flags, check_whole
from bagua.compression import Codec, Int4, as_codec, check_codec
from bagua.topology import Topology

_FOUR_BITS = Int4()


@dataclass(frozen=True)
class ChocoAlgorithm(ByHost):
    """After each update, move towards what is known of neighbours: ``x_i <- x_i + gamma sum_j W_ij (w_j - w_i)``.

    ``w_i`` is what rank ``i`` and its neighbours know of it: ``w_i <- w_i + Q(x_i - w_i)`` before each step. What ``Q``
    loses is in the next difference, so ``Q`` may lose most of it, if ``gamma`` is small enough. A rank remembers its
    own ``w_i`` and the weighted sum of its neighbours': twice the memory of the weights, however many there are.

    In ``LowPrecisionDecentralizedAlgorithm`` weights become what was sent instead. What that class says about skipped
    updates holds here, too.

    Args:
        hierarchical: ranks of one host take their mean, and hosts mix with hosts, weighted by their sizes.
        communication_interval: number of updates from one exchange to the next; the first update has one.
        topology: a name, or a ``bagua.topology.Topology``: the same in every round, and symmetric.
        codec: ``Q``, or its name.
        consensus_step: ``gamma``, above 0 and at most 1. Less for codecs that lose more.

    Raises:
        ConfigurationError: an option that cannot be used.

    Example:
        >>> ChocoAlgorithm(codec="int2", consensus_step=0.3).codec
        Int2(block_numel=4096, seed=None)

    Paper: Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019.
    """

    hierarchical: bool = True
    communication_interval: int = 1
    _: KW_ONLY
    topology: str | Topology = "ring"
    codec: Codec | str = _FOUR_BITS
    consensus_step: float = 0.8

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        check_whole(1, communication_interval=self.communication_interval)
        object.__setattr__(self, "codec", as_codec(self.codec))
        check_codec(self.codec)
        self.exchanges()

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Send what the update has changed; the weights move towards what is known of neighbours."""
        when = Every(self.communication_interval, offset=1)
        assert isinstance(self.codec, Codec)
        how = DifferenceMix(self.topology, self.codec, self.hierarchical, self.consensus_step)
        return (Exchange(Weights(), when, how, Replace()),)


ChocoAlgorithmImpl = bound_form(ChocoAlgorithm)

"""Training by gossip: each rank mixes its weights with those of a few others, in full or in low precision."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Model
from bagua.algorithms.exchanges.gossip import DifferenceMix, Mix
from bagua.algorithms.exchanges.values import Replace, Weights
from bagua.checks import check_flags, check_whole
from bagua.compression import Codec, MinMaxUInt8
from bagua.errors import ConfigurationError
from bagua.topology import Topology, create

_ONE_BYTE = MinMaxUInt8()


@dataclass(frozen=True)
class DecentralizedAlgorithm(ByHost):
    """Mix weights with neighbours while gradients are computed: ``x_i <- sum_j W_ij x_j - u_i(x_i)``.

    ``u_i`` is what the optimizer makes of this rank's own gradient. The weights before the
    step are exchanged during the backward pass, so the exchange costs time only where it
    takes longer than that.

    Args:
        hierarchical: ranks of one host take their mean, and hosts mix with hosts, weighted by
            their sizes. With a single host, or a single rank on each, ranks mix with ranks.
        peer_selection_mode: ``all``: everyone takes the mean of everyone. ``shift_one``: pairs,
            others in each exchange. Or another name of a topology, or a
            ``bagua.topology.Topology``.
        communication_interval: number of steps from one exchange to the next; the first step has one.

    Raises:
        ConfigurationError: there is no such topology, or the interval is no integer >= 1.

    Example:
        >>> DecentralizedAlgorithm(peer_selection_mode="shift_one")
        DecentralizedAlgorithm(hierarchical=True, peer_selection_mode='shift_one', communication_interval=1)

    Paper: Lian et al., Can decentralized algorithms outperform centralized algorithms?, 2017.
    """

    hierarchical: bool = True
    peer_selection_mode: str | Topology = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        check_whole(1, communication_interval=self.communication_interval)
        create(self.peer_selection_mode, "peer_selection_mode")

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Send the weights as they are before this step; the optimizer will step from the mean."""
        return (
            Exchange(
                Weights(),
                Every(self.communication_interval, offset=1),
                Mix(self.peer_selection_mode, self.hierarchical),
                Replace(),
                at="backward begins",
            ),
        )


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(ByHost):
    """After each update, mix weights with neighbours by sending compressed differences: ``x_i <- w_i + Q(z_i)``.

    ``z_i = y_i - w_i + sum_j W_ij w_j - w_i``, with ``y_i`` the weights after the update and
    ``w_j`` what rank ``j`` and its neighbours know of it. A rank remembers its own ``w_i`` and the
    weighted sum of its neighbours': twice the memory of the weights, however many there are.

    A rank that gets gradients which are not finite exchanges before its update, which a
    ``GradScaler`` skips. One that skips an update for another reason exchanges in its next
    forward pass; if there is none, let it call ``state_dict()`` before it does anything else
    together with the others, who wait for it. For the same reason a script that trains several
    models with a ``GradScaler`` has to step the optimizers of this one before another model's
    backward pass: otherwise an overflow on one rank ends in a ``CollectiveTimeoutError``.

    Args:
        hierarchical: ranks of one host take their mean, and hosts mix with hosts, weighted by
            their sizes. With a single host, or a single rank on each, ranks mix with ranks.
        communication_interval: number of updates from one exchange to the next; the first update has one.
        topology: a name, or a ``bagua.topology.Topology``: the same in every round, and
            symmetric. On ``ring`` each neighbour weighs a third, of two ranks one half.
        codec: ``Q``.

    Raises:
        ConfigurationError: a topology that is not static, or there is none of that name, or the
            interval is no integer >= 1.

    Example:
        >>> LowPrecisionDecentralizedAlgorithm(topology="torus").topology
        'torus'

    Paper: Tang et al., Communication compression for decentralized training, 2018.
    """

    hierarchical: bool = True
    communication_interval: int = 1
    _: KW_ONLY
    topology: str | Topology = "ring"
    codec: Codec = _ONE_BYTE

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        check_whole(1, communication_interval=self.communication_interval)
        self.exchanges()

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Send what the update has changed; the weights become what the neighbours know."""
        when = Every(self.communication_interval, offset=1)
        return (Exchange(Weights(), when, DifferenceMix(self.topology, self.codec, self.hierarchical), Replace()),)

    def check(self, model: Model) -> None:
        """Refuse parameters that no optimizer steps."""
        for name, parameter in model.parameters.items():
            if model.owner_of(parameter) is None:
                raise ConfigurationError(
                    f"no optimizer steps {name}, whose update would be sent",
                    argument="optimizers",
                    expected="optimizers of all trainable parameters",
                    seen=f"{len(model.optimizers)} without it",
                    advice="Pass the optimizer that has it, or set its requires_grad to False.",
                )


DecentralizedAlgorithmImpl = bound_form(DecentralizedAlgorithm)
LowPrecisionDecentralizedAlgorithmImpl = bound_form(LowPrecisionDecentralizedAlgorithm)

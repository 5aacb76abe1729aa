"""Training by gossip that sends a byte for each weight: the difference to what neighbours know already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.algorithms.gossip import Mixing, write_if_finite
from bagua.buckets import Bucket
from bagua.checks import check_flags, check_whole
from bagua.comm import Communicator, Group, ProcessGroup
from bagua.compression import Codec, Metadata, MinMaxUInt8
from bagua.compression.base import check_codec
from bagua.errors import ConfigurationError
from bagua.primitives import DifferenceExchange, on_leaders
from bagua.topology import Topology, create

__all__ = ["LowPrecisionDecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithmImpl"]

_ONE_BYTE = MinMaxUInt8()


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
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
        communication_interval: exchange after every so-manieth update, beginning with the first.
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
        check_codec(self.codec)
        if not create(self.topology).static:
            raise ConfigurationError(
                "neighbours follow each other's changes, so they must stay the same",
                argument="topology",
                expected="a static one, as ring, torus, hypercube, star or complete",
                seen=repr(self.topology),
                advice="Use DecentralizedAlgorithm for neighbours that change.",
            )


class LowPrecisionDecentralizedAlgorithmImpl(AlgorithmImpl, declaration=LowPrecisionDecentralizedAlgorithm):
    """``LowPrecisionDecentralizedAlgorithm`` on a group."""

    traits = Traits(result="consensus", gathers_gradients=False, after_optimizer=True)
    options: LowPrecisionDecentralizedAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._mixing = Mixing(create(self.options.topology), self.process_group, hierarchical=self.options.hierarchical)
        over_ranks = self._mixing.over_ranks.round(self.process_group.size, 1, self.process_group.nodes)
        if not over_ranks.symmetric:
            raise ConfigurationError(
                "neighbours must give each other the same weight",
                argument="topology",
                expected="a symmetric one, as ring, torus, hypercube, star or complete",
                seen=repr(self.options.topology),
            )
        self._exchange = DifferenceExchange(self._mixing.round(1), self.options.codec)

    def check_model(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Refuse parameters that the codec cannot compress, or that no optimizer steps."""
        owned = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        for name, parameter in parameters.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self.options.codec.compressed_bytes(Metadata(parameter.numel(), dtype))
            if id(parameter) not in owned:
                raise ConfigurationError(
                    f"no optimizer steps {name}, whose update would be sent",
                    argument="optimizers",
                    expected="optimizers of all trainable parameters",
                    seen=f"{len(optimizers)} without it",
                    advice="Pass the optimizer that has it, or set its requires_grad to False.",
                )

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        """After every ``communication_interval``-th update, from the first one on."""
        return step % self.options.communication_interval == 0

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Two estimates that the first exchange will start."""
        return self._exchange.init_state(bucket.numel, bucket.dtype, bucket.device)

    def fill(self, bucket: Bucket, step: int) -> None:
        """The weights after the update."""
        bucket.read_weights(bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        """Send the compressed difference, and follow the neighbours'."""
        if not self._mixing.by_host:
            self._exchange.run(bucket.buffer(), group.global_communicator, bucket.state)
            return

        def between_hosts(total: torch.Tensor, leaders: Communicator) -> None:
            total.div_(group.local_size)
            self._exchange.run(total, leaders, bucket.state)

        on_leaders(bucket.buffer(), group, between_hosts)
        if not group.inter_node_communicator:  # What this rank knew of others before is out of date.
            bucket.state["started"].zero_()

    def apply(self, bucket: Bucket, step: int) -> None:
        """The weights are what the neighbours know."""
        write_if_finite(bucket, bucket.buffer())

"""The algorithm behind ``DecentralizedDataParallel``: mix what was sent a step ago, step, send."""

from __future__ import annotations

import dataclasses

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl, Traits
from bagua.buckets import Bucket
from bagua.comm import Communicator, ProcessGroup, Work
from bagua.parallel.decentralized.plan import Plan
from bagua.parallel.decentralized.stepping import Stepping
from bagua.topology import Neighbours

__all__ = ["DelayedMixing", "DelayedMixingImpl"]


@dataclasses.dataclass(frozen=True)
class DelayedMixing(Algorithm):
    """Each bucket mixes its weights with what others sent a step ago, steps, and sends its weights.

    Not registered under a name: it makes the optimizers itself, so only a wrapper that is
    given functions for that can use it.

    Args:
        plan: who mixes with whom.
        stepping: the optimizers.
    """

    plan: Plan
    stepping: Stepping


class DelayedMixingImpl(AlgorithmImpl, declaration=DelayedMixing):
    """``DelayedMixing`` bound to a group.

    After the exchange of a round, ``bucket.buffer()`` holds the weights of the peer if two ranks
    meet; the weighted sum over all ranks of an edge, this one included, if it has a
    communicator of its own; the weighted sum over all neighbours without this rank otherwise.

    Weights that lie in flat memory are sent from there: nobody changes them before this
    bucket waits for the end of the exchange.
    """

    traits = Traits(
        result="consensus", gathers_gradients=False, owns_optimizers=True, active_alone=True, same_order=True
    )
    lag = 1

    @property
    def _plan(self) -> Plan:
        plan: Plan = self.options.plan
        return plan

    @property
    def _stepping(self) -> Stepping:
        stepping: Stepping = self.options.stepping
        return stepping

    @property
    def blocking(self) -> bool:
        """Only where a rank exchanges with several others, one after the other."""
        return self._plan.by_neighbours

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        """In every step, if there is anyone."""
        return self.process_group.size > 1

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Make the optimizer of the bucket, which keeps its state itself."""
        self._stepping.prepare(bucket)
        return {}

    def local_step(self, bucket: Bucket, step: int) -> None:
        """Clip, update, and forget the gradients."""
        self._stepping.step(bucket)

    @torch.no_grad()
    def fill(self, bucket: Bucket, step: int) -> None:
        """What an allreduce changes in place, and weights that are not flat, are copied."""
        neighbours = self._plan.at(step + 1)
        if self._plan.communicator(neighbours) is None:
            if bucket.weights is None:
                bucket.read_weights(bucket.buffer("flat"))
            return
        assert neighbours.edge is not None
        share = neighbours.edge.other_weight
        if bucket.weights is None:
            bucket.read_weights(bucket.buffer()).mul_(share)
        else:
            torch.mul(bucket.weights, share, out=bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Start round ``step + 1``."""
        neighbours = self._plan.at(step + 1)
        if not neighbours.sources and not neighbours.destinations:
            return None
        communicator = self._plan.communicator(neighbours)
        if communicator is not None:
            return communicator.allreduce(bucket.buffer(), async_op=True)
        weights = bucket.buffer("flat") if bucket.weights is None else bucket.weights
        if _is_pair(neighbours):
            peer = neighbours.destinations[0]
            return group.global_communicator.sendrecv(bucket.buffer(), weights, peer, peer, async_op=True)
        _sum_of_neighbours(bucket.buffer(), weights, neighbours, bucket.buffer("arriving"), group.global_communicator)
        return None

    @torch.no_grad()
    def apply(self, bucket: Bucket, step: int) -> None:
        """Mix with what was received in the round that was started in ``step``."""
        neighbours = self._plan.at(step + 1)
        hook = self._stepping.pre_average_hook(bucket)
        if hook is None and not neighbours.sources:
            return
        received = bucket.buffer()
        weights = bucket.read_weights(bucket.buffer("flat")) if bucket.weights is None else bucket.weights
        if hook is None and _is_pair(neighbours):
            weights.lerp_(received, 1.0 - neighbours.own_weight)
        else:
            kept = neighbours.own_weight
            if self._plan.communicator(neighbours) is not None and neighbours.edge is not None:
                kept -= neighbours.edge.other_weight
            if hook is not None and neighbours.edge is not None:
                self._complete_sum(received, weights, neighbours)
                hook(neighbours.edge, neighbours.edge.weight)
                kept = neighbours.edge.weight - neighbours.edge.other_weight
            if abs(kept) < 1e-12:  # the mean: what comes from this rank is in the sum already
                weights.copy_(received)
            else:
                torch.add(received, weights, alpha=kept, out=weights)
        if bucket.weights is None:
            bucket.write_weights(weights)

    def _complete_sum(self, received: torch.Tensor, weights: torch.Tensor, neighbours: Neighbours) -> None:
        """Make of ``received`` the weighted sum over the whole edge: what optimizers expect to look at."""
        assert neighbours.edge is not None
        if len(neighbours.edge.ranks) == 1:
            received.zero_()
        elif _is_pair(neighbours):
            received.add_(weights).mul_(neighbours.edge.other_weight)
        elif self._plan.communicator(neighbours) is None:
            received.add_(weights, alpha=neighbours.edge.other_weight)


def _is_pair(neighbours: Neighbours) -> bool:
    return neighbours.edge is not None and len(neighbours.edge.ranks) == 2


def _sum_of_neighbours(
    total: torch.Tensor,
    weights: torch.Tensor,
    neighbours: Neighbours,
    arriving: torch.Tensor,
    communicator: Communicator,
) -> None:
    """Send ``weights`` to all who take them, and sum up in ``total`` what comes from others."""
    # No send waits for a receive, so no order of ranks can lock them.
    sending = [communicator.send(weights, rank, async_op=True) for rank in neighbours.destinations]
    total.zero_()
    for rank, share in neighbours.sources:
        communicator.recv(arriving, rank)
        total.add_(arriving, alpha=share)
    for work in sending:
        assert work is not None
        work.wait()

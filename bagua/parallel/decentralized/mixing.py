"""The algorithm behind ``DecentralizedDataParallel``: mix what was sent a step ago, step, send."""

from __future__ import annotations

import dataclasses

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl, Traits
from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, Work
from bagua.parallel.decentralized.plan import Plan
from bagua.parallel.decentralized.stepping import Stepping
from bagua.primitives import neighbour_average
from bagua.topology import Edge, Neighbours

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
    meet; the weighted sum over all ranks of an edge, this one included, if the edge has a
    communicator of its own; what the weights shall become in all other rounds.

    Weights that lie in flat memory are sent from there: nobody changes them before this
    bucket waits for the end of the exchange.
    """

    traits = Traits(
        result="consensus",
        gathers_gradients=False,
        owns_optimizers=True,
        active_alone=True,
        same_order=True,
        sends_weights=True,
    )
    lag = 1

    #: Which part of the way to the mixed weights a rank goes; see ``set_adaptive_factor``.
    factor = 1.0

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
        """Copy the weights where the exchange changes what it sends, or where they are not flat."""
        neighbours = self._plan.at(step + 1)
        if self._plan.communicator(neighbours) is not None:
            assert neighbours.edge is not None
            if bucket.weights is not None:
                torch.mul(bucket.weights, neighbours.edge.other_weight, out=bucket.buffer())
            else:
                bucket.read_weights(bucket.buffer()).mul_(neighbours.edge.other_weight)
        elif not _is_pair(neighbours):
            bucket.read_weights(bucket.buffer())
        elif bucket.weights is None:
            bucket.read_weights(bucket.buffer("flat"))

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Start round ``step + 1``."""
        neighbours = self._plan.at(step + 1)
        if not neighbours.sources and not neighbours.destinations:
            return None
        communicator = self._plan.communicator(neighbours)
        if communicator is not None:
            return communicator.allreduce(bucket.buffer(), async_op=True)
        if _is_pair(neighbours):
            weights = bucket.buffer("flat") if bucket.weights is None else bucket.weights
            peer = neighbours.destinations[0]
            return group.global_communicator.sendrecv(bucket.buffer(), weights, peer, peer, async_op=True)
        mixing = self._plan.round(step + 1)
        return neighbour_average(bucket.buffer(), mixing, group.global_communicator, bucket.buffer, async_op=True)

    @torch.no_grad()
    def apply(self, bucket: Bucket, step: int) -> None:
        """Mix with what was received in the round that was started in ``step``."""
        neighbours = self._plan.at(step + 1)
        hook = self._stepping.pre_average_hook(bucket)
        if hook is None and not neighbours.sources:
            return
        received = bucket.buffer()
        weights = bucket.read_weights(bucket.buffer("flat")) if bucket.weights is None else bucket.weights
        if hook is not None and neighbours.edge is not None:
            self._make_sum(received, weights, neighbours)
            hook(neighbours.edge, neighbours.edge.weight)
            _add_kept(received, weights, neighbours.edge, self.factor)
        elif _is_pair(neighbours):
            weights.lerp_(received, self.factor * (1.0 - neighbours.own_weight))
        elif neighbours.edge is not None and self._plan.communicator(neighbours) is not None:
            _add_kept(received, weights, neighbours.edge, self.factor)
        elif self.factor == 1.0:
            weights.copy_(received)
        else:
            weights.lerp_(received, self.factor)
        if bucket.weights is None:
            bucket.write_weights(weights)

    def _make_sum(self, received: torch.Tensor, weights: torch.Tensor, neighbours: Neighbours) -> None:
        """Make of ``received`` the weighted sum over the whole edge: what optimizers expect to look at."""
        assert neighbours.edge is not None
        if self._plan.communicator(neighbours) is not None:
            return
        share = neighbours.edge.other_weight
        if not neighbours.sources:
            received.zero_()
        elif _is_pair(neighbours):
            received.add_(weights).mul_(share)
        else:
            received.add_(weights, alpha=share - neighbours.edge.weight)


def _is_pair(neighbours: Neighbours) -> bool:
    return neighbours.edge is not None and len(neighbours.edge.ranks) == 2


def _add_kept(total: torch.Tensor, weights: torch.Tensor, edge: Edge, factor: float) -> None:
    """Go from ``weights`` by ``factor`` to their mix with ``total``, the weighted sum over all ranks of ``edge``."""
    kept = 1.0 - factor + factor * (edge.weight - edge.other_weight)
    if abs(kept) < 1e-12:  # the mean: what comes from this rank is in the sum already
        weights.copy_(total)
    else:
        torch.add(total if factor == 1.0 else total * factor, weights, alpha=kept, out=weights)

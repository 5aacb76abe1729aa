"""The exchanges of ``DecentralizedDataParallel``: mix what was sent a step ago, step, send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.algorithms import Algorithm, Every, Exchange, Flight, How, Model, Parts, Then, What
from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, Work
from bagua.engine import compare
from bagua.parallel.decentralized.rounds import RankRounds
from bagua.parallel.decentralized.stepping import Stepping
from bagua.primitives import neighbour_average
from bagua.topology import Edge, Neighbours, Topology


def mixing_a_step_late(mix: RoundMix, stepping: Stepping) -> Algorithm:
    """Each bucket mixes its weights with what others sent a step ago, steps, and sends its weights.

    Args:
        mix: who mixes with whom.
        stepping: the optimizers.
    """
    parts = Parts(same_order=True)
    step = Exchange(None, Every(), None, StepBucket(stepping), at="bucket ready", parts=parts, label="step")
    then = MixIn(stepping)
    return Algorithm.of(step, Exchange(WeightsInPlace(), Every(), mix, then, at="bucket stepped", lag=1, parts=parts))


@dataclass(frozen=True)
class StepBucket(Then):
    """A local action: clip, update, and forget the gradients."""

    stepping: Stepping

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """Make the optimizers of the buckets, which keep their state themselves."""
        for bucket in buckets:
            self.stepping.prepare(bucket)

    def fold(self, flight: Flight) -> None:
        """Step."""
        self.stepping.step(flight.bucket)


@dataclass(frozen=True)
class WeightsInPlace(What):
    """The weights; where they are flat they are sent from there: they do not change before they are folded."""

    reads: ClassVar[frozenset[str]] = frozenset({"weights"})
    in_place: ClassVar[bool] = True

    @torch.no_grad()
    def fill(self, flight: Flight) -> None:
        """Copy the weights where the exchange changes what it sends, or where they are not flat."""
        rounds: RankRounds = flight.prepared
        bucket, neighbours = flight.bucket, rounds.at(flight.round)
        if rounds.communicator(neighbours) is not None:
            assert neighbours.edge is not None
            if bucket.weights is not None:
                torch.mul(bucket.weights, neighbours.edge.other_weight, out=flight.flat)
            else:
                bucket.read_weights(flight.flat).mul_(neighbours.edge.other_weight)
        elif not _is_pair(neighbours):
            bucket.read_weights(flight.flat)
        elif bucket.weights is None:
            bucket.read_weights(flight.scratch("flat"))


@dataclass(frozen=True, repr=False)
class RoundMix(How):
    """One round of a topology.

    The result is the weights of the peer if two ranks meet; the weighted sum over all ranks of an edge, this one
    included, if the edge has a communicator of its own; what the weights are to become in all other rounds.

    Args:
        topology: who mixes with whom.
        nodes: index of the host of each rank.
    """

    topology: Topology
    nodes: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        """Ranks mix their own weights in."""
        return False

    def check(self, group: ProcessGroup) -> None:
        """Refuse a topology that does not exist for these ranks, or does not keep their mean."""
        self.rounds(group)

    def rounds(self, group: ProcessGroup) -> RankRounds:
        """The rounds as this rank sees them, without connections."""
        return RankRounds(self.topology, group.size, group.rank, self.nodes)

    def prepare(self, group: ProcessGroup) -> RankRounds:
        """The rounds, compared between ranks, and the connections of large edges. Collective."""
        rounds = self.rounds(group)
        compare(rounds.facts, group.global_communicator, "topologies")
        rounds.connect(group)
        return rounds

    def blocking(self, group: ProcessGroup, prepared: RankRounds) -> bool:
        """Only where a rank exchanges with several others, one after the other."""
        return prepared.by_neighbours

    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        """Exchange in this round."""
        rounds: RankRounds = flight.prepared
        neighbours = rounds.at(flight.round)
        if not neighbours.sources and not neighbours.destinations:
            return None
        communicator = rounds.communicator(neighbours)
        if communicator is not None:
            return communicator.allreduce(flight.flat, async_op=True)
        if _is_pair(neighbours):
            weights = flight.scratch("flat") if flight.bucket.weights is None else flight.bucket.weights
            peer = neighbours.destinations[0]
            return group.global_communicator.sendrecv(flight.flat, weights, peer, peer, async_op=True)
        mixing = rounds.round(flight.round)
        return neighbour_average(flight.flat, mixing, group.global_communicator, flight.scratch, async_op=True)

    def __repr__(self) -> str:
        return f"RoundMix({self.topology!r}, {self.nodes})"


@dataclass(frozen=True)
class MixIn(Then):
    """Mix the weights of now with what was received.

    Args:
        stepping: the optimizers, which may want to be called before.
    """

    stepping: Stepping

    @torch.no_grad()
    def fold(self, flight: Flight) -> None:
        """Mix."""
        rounds: RankRounds = flight.prepared
        bucket, neighbours = flight.bucket, rounds.at(flight.round)
        hook = self.stepping.pre_average_hook(bucket)
        if hook is None and not neighbours.sources:
            return
        received, edge = flight.flat, neighbours.edge
        weights = bucket.read_weights(flight.scratch("flat")) if bucket.weights is None else bucket.weights
        if hook is not None and edge is not None:
            _make_sum(rounds, received, weights, neighbours)
            for parameter, view in zip(bucket.parameters, flight.views(received), strict=True):
                parameter.comm_buffer = view  # type: ignore[attr-defined]
            hook(edge, edge.weight)
            _add_kept(received, weights, edge)
        elif _is_pair(neighbours):
            weights.lerp_(received, 1.0 - neighbours.own_weight)
        elif edge is not None and rounds.communicator(neighbours) is not None:
            _add_kept(received, weights, edge)
        else:
            weights.copy_(received)
        if bucket.weights is None:
            bucket.write_weights(weights)


def _make_sum(rounds: RankRounds, received: torch.Tensor, weights: torch.Tensor, neighbours: Neighbours) -> None:
    """Make of ``received`` the weighted sum over the whole edge: what optimizers expect to look at."""
    assert neighbours.edge is not None
    if rounds.communicator(neighbours) is not None:
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


def _add_kept(total: torch.Tensor, weights: torch.Tensor, edge: Edge) -> None:
    """Mix ``weights`` with ``total``, the weighted sum over all ranks of ``edge``."""
    kept = edge.weight - edge.other_weight
    if abs(kept) < 1e-12:  # the mean: what comes from this rank is in the sum already
        weights.copy_(total)
    else:
        torch.add(total, weights, alpha=kept, out=weights)

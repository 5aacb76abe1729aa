"""``DecentralizedDataParallel``, with the constructor and the methods that are documented for it, and its exchanges.

These mix what was sent a step ago, step, and send. First what one rank does in each round of a topology, and the
communicators of edges that need one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from bagua import env
from bagua.algorithms import Algorithm, Every, Exchange, Flight, How, Model, Parts, Then, What
from bagua.buckets import Bucket
from bagua.checks import check_flags
from bagua.comm import Communicator, Group, ProcessGroup, Work, get_world_size
from bagua.engine import GlobalAverage, begin_training, check_module, compare
from bagua.errors import ConfigurationError
from bagua.parallel.data_parallel import bytes_from_megabytes, resolve_group
from bagua.parallel.decentralized.stepping import LRSchedulerFunction, OptimizerFunction, Stepping
from bagua.parallel.wrappers import OverlappingWrapper
from bagua.primitives import neighbour_average
from bagua.topology import AlternatingRing, Edge, Neighbours, Round, Topology, check_round, create, ranks_by_node

#: So many rounds are compared between ranks, and looked at to see what kind they are.
_FIRST_ROUNDS = 16


def resolve_topology(topology: str | Topology) -> Topology:
    """The topology that the documented argument means: its ``ring`` is the one whose ranks meet in pairs.

    Raises:
        ConfigurationError: there is none of that name.

    Example:
        >>> resolve_topology("ring"), resolve_topology("one-peer-exp")
        (AlternatingRing(), OnePeerExponential())
    """
    means_pairs = isinstance(topology, str) and topology.strip().lower() == "ring"
    return AlternatingRing() if means_pairs else create(topology)


def nodes_for(group: ProcessGroup, local_world_size: object) -> tuple[int, ...]:
    """Index of the host of each rank: as found, or hosts of ``local_world_size`` ranks each. Collective.

    Args:
        group: the ranks.
        local_world_size: a number; None for that of the launcher, if all ranks of the world have the same, and
            otherwise for what was found.

    Raises:
        ConfigurationError: the ranks cannot be dealt out to such hosts.
    """
    launchers = _launchers(group)  # On all ranks, also on those that were given another argument than others.
    if local_world_size is None:
        local_world_size = launchers
    if local_world_size is None:
        return tuple(group.nodes)
    if type(local_world_size) is not int or local_world_size < 1 or group.size % local_world_size:
        raise ConfigurationError(
            "ranks cannot be dealt out to hosts like this",
            argument="_local_world_size",
            expected=f"a divisor of {group.size}, or None",
            seen=repr(local_world_size),
        )
    return tuple(rank // local_world_size for rank in range(group.size))


def _launchers(group: ProcessGroup) -> int | None:
    """Ranks on each host as the launcher says, if it says so on all ranks of the world alike."""
    if group.size == 1:
        return None
    said = set(group.global_communicator.allgather_object(env.get_local_world_size()))
    count = said.pop()
    if said or not count or group.size % count or group.size != get_world_size():
        return None
    whole: int = count
    return whole


class RankRounds:
    """The rounds of a topology, as one rank sees them.

    Args:
        topology: who mixes with whom.
        size: number of ranks.
        rank: this one.
        nodes: index of the host of each rank.

    Attributes:
        topology: as given.
        by_neighbours: True if some round sends to each neighbour apart, instead of to one peer or in one allreduce.

    Raises:
        ConfigurationError: the topology does not exist for these ranks, or does not keep
            their mean.
    """

    def __init__(self, topology: Topology, size: int, rank: int, nodes: Sequence[int]) -> None:
        topology.check(size, nodes, rounds=_FIRST_ROUNDS)
        self.topology = topology
        self._size = size
        self._rank = rank
        self._nodes = tuple(nodes)
        self._period = topology.period(size, nodes)
        self._known: dict[int, tuple[Round, Neighbours]] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        rounds = [self._round(number) for number in self._first_rounds()]
        self.by_neighbours = any(
            one.edges is None or (self._period is None and any(len(edge.ranks) > 2 for edge in one.edges))
            for one in rounds
        )

    def _first_rounds(self) -> range:
        return range(1, 1 + min(self._period or _FIRST_ROUNDS, _FIRST_ROUNDS))

    def _round(self, number: int) -> Round:
        return self.topology.round(self._size, number, self._nodes)

    def at(self, number: int) -> Neighbours:
        """What this rank does in the mix ``number``, counted from 1."""
        return self._look_up(number)[1]

    def round(self, number: int) -> Round:
        """What all ranks do in the mix ``number``, counted from 1."""
        return self._look_up(number)[0]

    def _look_up(self, number: int) -> tuple[Round, Neighbours]:
        key = number if self._period is None else (number - 1) % self._period + 1
        if key not in self._known:
            found = self._round(key)
            if self._period is None:  # It may be a function of the user's: only the first rounds have been looked at.
                check_round(found, size=self._size, symmetric=self.topology.symmetric, name=repr(self.topology))
                self._known.clear()
            self._known[key] = found, found[self._rank]
        return self._known[key]

    @property
    def facts(self) -> list[str]:
        """The first rounds, in words that are equal on ranks with equal rounds."""
        rounds = [(number, self._round(number)) for number in self._first_rounds()]
        return [f"round {number}: {one.rows if one.edges is None else one.edges}" for number, one in rounds]

    def connect(self, group: ProcessGroup) -> None:
        """Make the communicators of edges of three and more ranks, once for each set of ranks. Collective.

        A topology that never repeats could have any number of such edges, so it gets none: its
        larger edges exchange with each neighbour apart.

        Args:
            group: private to the model.
        """
        local = {tuple(members) for members in ranks_by_node(group.nodes)}
        everyone = tuple(range(group.size))
        for ranks in self._large_edges():
            if ranks == everyone:
                self._communicators[ranks] = group.global_communicator
            elif ranks in local:
                if group.rank in ranks:
                    self._communicators[ranks] = group.intra_node_communicator
            else:
                edge = group.subgroup(ranks, label="edge")
                if edge:
                    self._communicators[ranks] = edge.global_communicator

    def _large_edges(self) -> list[tuple[int, ...]]:
        """In the order in which rounds need them, which is the same on all ranks."""
        found: dict[tuple[int, ...], None] = {}
        for number in range(1, 1 + (self._period or 0)):
            for edge in self._round(number).edges or ():
                if len(edge.ranks) > 2:
                    found[edge.ranks] = None
        return list(found)

    def communicator(self, neighbours: Neighbours) -> Communicator | None:
        """The communicator of all ranks of this rank's edge, if it has one of its own."""
        return None if neighbours.edge is None else self._communicators.get(neighbours.edge.ranks)

    def __repr__(self) -> str:
        return f"{self.topology!r} on {self._size} ranks"


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
    uniform = False  # Ranks mix their own weights in.

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


class DecentralizedDataParallel(OverlappingWrapper):
    r"""Trains a module on many ranks that mix their weights with a few others, one step behind.

    Building one is collective. Parameters are dealt into buckets in the first backward
    pass; each bucket has an optimizer of its own and steps by itself as soon as its
    gradients are there. The training loop is forward and backward, nothing else. In step
    :math:`k`, with the local gradients :math:`g_i`, rank :math:`i` computes for each bucket

    .. math::

        x_i \leftarrow \operatorname{step}\Bigl(w_{ii} x_i + \sum_{j \ne i} w_{ij} x_j, \; g_i\Bigr)

    where the weights :math:`x_j` are those that the others had after step :math:`k - 1`, and
    :math:`w` belongs to round :math:`k - 1` of the topology. So communication has a whole
    forward and backward pass of time. Rounds are counted from 1; nothing is mixed in the
    first step, in which all start from rank 0's parameters and buffers. On one rank this is plain
    training.

    Weights must not be changed between steps by anything but ``load_state_dict`` and
    ``global_avg``: they may be on their way to another rank.

    Args:
        model: the module to train.
        optim_fn: makes the optimizer of a bucket from a list of (name, parameter); called
            once for each bucket. If the optimizer has ``pre_average_hook(edge, weight)``,
            it is called before each mixing over an edge: ``edge.ranks`` mix, this rank keeps
            ``weight`` of itself, and each ``parameter.comm_buffer`` holds the sum of
            ``(1 - weight) / (len(edge.ranks) - 1)`` times the parameter over the edge.
        lr_scheduler_fn: makes the schedule of a bucket from its optimizer; stepped after
            each step of the optimizer.
        topology: ``complete``, ``ring``, ``one-peer-exp``, ``alternating-exp-ring``, another
            registered name (``ring`` is ``alternating_ring`` there), or a
            ``bagua.topology.Topology``.
        scaler: the ``GradScaler`` that scales the losses of this rank. It is stepped and
            updated here; a bucket with an Inf skips its update, but is mixed as always.
        grad_clip_norm: the largest norm of the gradients of a bucket; 0 does not clip.
        param_as_bucket_view: weights of a bucket live in one flat block, which saves copies
            and half of the memory for communication.
        sync_buffer_in_global_avg: ``global_avg`` averages float16, float32 and float64
            buffers, too.
        bucket_size_in_mb: a bucket is closed when it holds so many MiB.
        _local_world_size: ranks on each host, for topologies that look at hosts; None for
            ``LOCAL_WORLD_SIZE``, and without it, or where it differs between ranks, for what was
            found out.
        process_group: the ranks; None means all.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it
            is an error.

    Raises:
        CollectiveMismatchError: the models, options or topologies of the ranks differ.
        ConfigurationError: an argument that cannot be used, or a topology that does not
            exist for these ranks.

    Example:
        >>> import bagua.comm
        >>> model = DecentralizedDataParallel(
        ...     torch.nn.Linear(2, 1),
        ...     optim_fn=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        ...     process_group=bagua.comm.solo_group(),
        ... )
        >>> for _ in range(3):
        ...     model(torch.ones(4, 2)).square().mean().backward()
        >>> with model.global_avg() as average:
        ...     loss = model(torch.ones(4, 2)).square().mean()
        >>> average.distance
        0.0

    Wang et al., "From Promise to Practice: Realizing High-performance Decentralized
    Training", ICLR 2025.
    """

    #: The dtypes of buffers that ``global_avg`` averages.
    FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def __init__(
        self,
        model: torch.nn.Module,
        optim_fn: OptimizerFunction,
        lr_scheduler_fn: LRSchedulerFunction | None = None,
        topology: str | Topology = "complete",
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
        *,
        process_group: Group | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        check_module(model, "model")
        check_flags(
            param_as_bucket_view=param_as_bucket_view,
            sync_buffer_in_global_avg=sync_buffer_in_global_avg,
            find_unused_parameters=find_unused_parameters,
        )
        bucket_bytes = bytes_from_megabytes(bucket_size_in_mb=bucket_size_in_mb)
        group = resolve_group(process_group, None)
        nodes = nodes_for(group, _local_world_size)
        mix = RoundMix(resolve_topology(topology), nodes)
        stepping = Stepping(optim_fn, lr_scheduler_fn, scaler, grad_clip_norm)
        super().__init__(
            model,
            [],
            fusion=param_as_bucket_view,
            process_group=group,
            algorithm=mixing_a_step_late(mix, stepping),
            bucket_bytes=bucket_bytes,
            find_unused_parameters=find_unused_parameters,
        )
        self._rounds = repr(mix.rounds(group))
        self._stepping = stepping
        self._sync_buffers = sync_buffer_in_global_avg
        formation = self.reducer.formation
        try:  # What exchanges make now, they do not make in the first backward pass.
            formation.scheduler.prepare(formation.phases.coming)
            begin_training(self.reducer, average=False, broadcast_buffers=True)
        except BaseException:
            self._engine.remove_hooks()
            formation.close()
            raise

    # The module's own.

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The parameters of the module."""
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of the module, under the names that they have there."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    # Training.

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of each bucket; none before the first backward pass."""
        return self._stepping.optimizers

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """The schedule of each bucket; none before the first backward pass."""
        return self._stepping.schedules

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Whether backward passes from now on only accumulate gradients.

        It is looked at when a backward pass begins; ``no_sync()`` is, as torch's, when the forward pass ends.
        """
        check_flags(enable=enable)
        self._engine.accumulates = enable

    def global_avg(self) -> GlobalAverage:
        """Replace the parameters by their mean over all ranks. Collective.

        As a call, the mean stays. In a ``with`` statement, which all ranks must leave before they go on training, the
        weights of each rank come back::

            with model.global_avg() as average:
                evaluate(model)
            log(average.distance)

        Returns:
            An object that knows how far this rank was from the mean.
        """
        closing = self.reducer.phases.made(self.reducer.formation.declaration.closing())
        unwanted = frozenset() if self._sync_buffers else {"buffers"}
        return GlobalAverage(self.reducer, [one for one in closing if one.needs.isdisjoint(unwanted)])

    # Checkpoints.

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the weights of this rank.

        What other ranks had sent before belongs to other weights, and is dropped, unless
        ``bagua_load_state_dict`` was called since the last step.
        """
        return super().load_state_dict(*args, **kwargs)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """State of all optimizers and schedules of this rank, by names of parameters. Every rank saves its own."""
        return self._stepping.state_dict()

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``optimizer_state_dict`` returned, whatever the buckets are now.

        Raises:
            ConfigurationError: it has state of other parameters.
        """
        self._stepping.load_state_dict(state_dict, self.reducer.formation.registration.names)

    def bagua_state_dict(self) -> dict[str, Any]:
        """The step, the buckets, and what was received and is not mixed yet. Every rank saves its own.

        Together with the ``state_dict()``, the ``optimizer_state_dict()`` and the scaler's state
        of the same moment, training goes on exactly as if it had not stopped.
        """
        return {**self.reducer.state_dict(), "plan": self._rounds}

    def bagua_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``bagua_state_dict`` returned on this rank. Collective.

        Raises:
            ConfigurationError: it was saved by another rank, or with another topology or number of ranks.
            CollectiveMismatchError: ranks load different checkpoints.
        """
        seen = state_dict.get("plan", "no communication state")
        if seen != self._rounds:
            raise ConfigurationError(
                "the state of another topology cannot be continued",
                argument="state_dict",
                expected=self._rounds,
                seen=seen,
                advice="Load the weights and the optimizers only, after averaging or from one rank.",
            )
        self.reducer.load_state_dict(state_dict)

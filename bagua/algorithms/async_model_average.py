"""Asynchronous model averaging: every rank trains at its own pace; weights are averaged in the background."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Plane
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, How
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.values import Add, Gradients, Mean, Replace, Weights
from bagua.averaging import Averager, AveragingStatus, Buffers, Part, Schedule, parts_of_buffers, topology_of
from bagua.buckets import Bucket
from bagua.checks import check_choice, check_flags, check_numbers, check_whole
from bagua.comm import Group, ProcessGroup
from bagua.errors import ConfigurationError


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Let every rank train at its own pace, and average the weights in the background.

    From time to time each rank ``i`` puts down a copy ``s_i`` of its weights and trains on. When all who
    meet in a round have done so, their mean is formed in the background, and at its next step
    each takes it in: ``x_i <- x_i + (mean_j s_j - s_i)``. What it has learned meanwhile is kept.

    ``model.bagua_algorithm.abort(model)`` ends averaging, with the same weights on all ranks.

    Args:
        peer_selection_mode: who meets in a round: ``all``; ``shift_one`` or ``random_pair``, so
            that a round waits for one other rank only; or the name of a topology, in which
            neighbours meet.
        sync_interval_ms: time between two copies of a rank.
        warmup_steps: steps of gradient allreduce before that.
        average_buffers: average floating-point buffers, too, such as running means.
        on_peer_loss: reaction to the death of a rank: ``raise`` a ``PeerLostError`` on the others, or ``continue`` with
            those that are left.
        peer_timeout_s: a rank without a sign of life for so long is taken for dead. Longer than any single call that
            holds the interpreter's lock, such as unpickling a large file: it gives no sign meanwhile.

    Raises:
        ConfigurationError: a value that makes no sense.

    Example:
        >>> AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=10).peer_selection_mode
        'all'

    Paper: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018;
    Stich, Local SGD converges fast and communicates little, 2019.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: float = 500
    warmup_steps: int = 0
    average_buffers: bool = field(default=False, kw_only=True)
    on_peer_loss: Literal["raise", "continue"] = field(default="raise", kw_only=True)
    peer_timeout_s: float = field(default=15.0, kw_only=True)

    def __post_init__(self) -> None:
        topology_of(self.peer_selection_mode)
        check_numbers(lambda time: time >= 0, "milliseconds >= 0", sync_interval_ms=self.sync_interval_ms)
        check_whole(0, warmup_steps=self.warmup_steps)
        check_flags(average_buffers=self.average_buffers)
        check_choice(("raise", "continue"), on_peer_loss=self.on_peer_loss)
        check_numbers(lambda time: time > 0, "seconds > 0", peer_timeout_s=self.peer_timeout_s)

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, if there is one, and averaging."""
        return ("warm-up", "averaging") if self.warmup_steps else ("averaging",)

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        return "warm-up" if step < self.warmup_steps else "averaging"

    def exchanges(self, phase: Hashable = "averaging") -> tuple[Exchange, ...]:
        """Gradients in the warm-up, weights between steps after it."""
        if phase == "warm-up":
            return (Exchange(Gradients(), Every(), Mean(), Replace()),)
        how = MeanOfMembers(self.peer_selection_mode)
        return (Exchange(Weights(), Every(), how, Add(), at="safe"),)


@dataclass(frozen=True)
class MeanOfMembers(How):
    """A mean that is formed in the background, of those who have put down a copy; ``bagua.averaging`` says how.

    Args:
        peer_selection_mode: as for ``AsyncModelAverageAlgorithm``.
    """

    peer_selection_mode: str

    lockstep: ClassVar[bool] = False

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Never called: the plane of the bound form does it."""
        raise AssertionError("exchanges in the background have no flights")


class AveragingPlane(Plane):
    """What goes on between steps: an ``Averager``, while there is one.

    Args:
        options: options that say what to average, and how often.
        group: the user's.

    Attributes:
        averager: None before the first ``attach``, and after ``close``.
    """

    def __init__(self, options: AsyncModelAverageAlgorithm, group: ProcessGroup) -> None:
        self._options = options
        self._schedule = Schedule(topology_of(options.peer_selection_mode), group.rank, group.nodes)
        self.averager: Averager | None = None

    def attach(self, buckets: Sequence[Bucket], buffers: Buffers, group: ProcessGroup, step: int) -> None:
        """Buckets were formed; average what is in them from now on."""
        if group.size == 1:
            return

        def make_parts() -> list[Part]:
            communicator = group.global_communicator
            extra = parts_of_buffers(buffers, communicator) if self._options.average_buffers else []
            return [Part(bucket) for bucket in buckets] + extra

        if self.averager is None:
            self.averager = Averager(
                group,
                self._schedule,
                interval_s=self._options.sync_interval_ms / 1e3,
                warmup_steps=self._options.warmup_steps,
                peer_timeout_s=self._options.peer_timeout_s,
                continue_alone=self._options.on_peer_loss == "continue",
            )
        self.averager.attach(make_parts, step)

    def safe_point(self, step: int) -> None:
        """The first training forward of a step begins: take in an average, put down a copy."""
        if self.averager is not None:
            self.averager.step(step)

    def settle(self) -> None:
        """Stop together, so that buckets can be taken apart; go on with the next step after that. Collective.

        Raises:
            CollectiveTimeoutError: not all ranks came.
        """
        if self.averager is not None:
            self.averager.settle()

    def close(self) -> None:
        """Leave, without waiting for anybody."""
        averager, self.averager = self.averager, None
        if averager is not None:
            averager.leave("its model was given another algorithm, or was closed", for_good=True)

    def begin_step(self, step: int) -> None:
        """This rank counts on all others in a step of warm-up."""
        if self.averager is not None:
            self.averager.begin_warm_up_step(step)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl, declaration=AsyncModelAverageAlgorithm):
    """``AsyncModelAverageAlgorithm`` on a group."""

    options: AsyncModelAverageAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._plane = self.plane = AveragingPlane(self.options, self.process_group)

    @property
    def _averager(self) -> Averager | None:
        return self._plane.averager

    def abort(self, bagua_module: torch.nn.Module, *, timeout: float | timedelta | None = None) -> bool:
        """Stop averaging. To be called after training; every rank does so when it has come to its end.

        A rank that waits here goes on taking part in averages, so that it stops no rank that still
        trains. When all have come, they form a last average of all, with which each of
        them ends. Calling it again does nothing.

        Args:
            bagua_module: the model that this algorithm trains.
            timeout: how long to wait for the others, in seconds; then this rank leaves, and
                they go on without it. None means until all have come, left or died.

        Returns:
            Whether all ranks that are alive have stopped together.

        Raises:
            PeerLostError: a rank died, unless ``on_peer_loss`` is ``continue``, and this was not raised before.
            NonFiniteError: the same for weights that are not finite.
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        if self._averager is None:
            return True
        together = self._averager.stop(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        self._averager.raise_news()
        return together

    def resume(self, bagua_module: torch.nn.Module) -> None:
        """Average again, after ``abort``. Every rank has to call it, but none waits for the others here.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        if self._averager is not None:
            self._averager.resume()

    @contextmanager
    def running(self, bagua_module: torch.nn.Module) -> Iterator[None]:
        """Average in this block: ``resume`` at its beginning, ``abort`` at its end.

        When an exception ends the block, this rank leaves without waiting for the others.

        Args:
            bagua_module: the model that this algorithm trains.
        """
        self.resume(bagua_module)
        try:
            yield
        except BaseException as error:
            if self._averager is not None:
                self._averager.leave(f"an exception ended training: {error!r}")
            raise
        self.abort(bagua_module)

    def status(self) -> AveragingStatus:
        """How averaging goes, as seen from this rank."""
        return AveragingStatus() if self._averager is None else self._averager.status()

    def _check(self, bagua_module: torch.nn.Module) -> None:
        if getattr(bagua_module, "bagua_algorithm", None) is not self:
            raise ConfigurationError(
                "this is not the model that is trained here",
                argument="bagua_module",
                expected="the model that was wrapped: model.bagua_algorithm.abort(model)",
                seen=type(bagua_module).__name__,
            )

"""Asynchronous model averaging: every rank trains at its own pace; weights are averaged in the background."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.buckets import Bucket, form_buckets
from bagua.comm import ProcessGroup, Work
from bagua.errors import CollectiveTimeoutError, ConfigurationError
from bagua.primitives import allreduce_sum
from bagua.primitives.averaging import (
    Desk,
    GroupCourier,
    Member,
    Patience,
    Schedule,
    Session,
    Stage,
    topology_of,
)
from bagua.primitives.averaging.parts import Part

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl", "AveragingStatus"]

#: How long those who agreed on a round may take to connect, the first time that they meet.
CONNECT_TIMEOUT_S = 8.0
#: A transfer has this, and a second for each megabyte; whatever is slower is taken for broken.
TRANSFER_GRACE_S, SLOWEST_BYTES_PER_S = 30.0, 1e6
#: How often a rank that waits in ``abort`` lets Ctrl-C through.
_SLICE_S = 0.25

#: Returns the buffers of a module as they are now, by name.
Buffers = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class AveragingStatus:
    """What a user watches to know that averaging works.

    Attributes:
        state: ``idle`` (before the first step, or on one rank), ``warming up``, ``averaging``,
            ``paused`` (after ``abort``), or ``alone`` (nobody is left to average with).
        rounds: averages that this rank has received since averaging began or was resumed.
        age_steps: steps since this rank last took in an average; None if it never did.
        age_ms: the same in milliseconds.
        sent_bytes: of weights that went into exchanges.
        round_ms: from the agreement to the average, in the last round.
        distance: Euclidean norm of the difference between the average and this rank's weights,
            in the last round.
        members: ranks that took part in the last round.
        failed: exchanges that broke off, and were left out.
        overflowed: averages that were dropped because they were not finite.
    """

    state: Literal["idle", "warming up", "averaging", "paused", "alone"] = "idle"
    rounds: int = 0
    age_steps: int | None = None
    age_ms: float | None = None
    sent_bytes: int = 0
    round_ms: float = 0.0
    distance: float = 0.0
    members: tuple[int, ...] = ()
    failed: int = 0
    overflowed: int = 0


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
        on_peer_loss: what happens when a rank dies: ``raise`` a ``PeerLostError`` on the others,
            or ``continue`` with those that are left.
        peer_timeout_s: a rank without a sign of life for so long is taken for dead.

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
        checks = (
            ("sync_interval_ms", _is_number(self.sync_interval_ms) and self.sync_interval_ms >= 0, "milliseconds >= 0"),
            ("warmup_steps", type(self.warmup_steps) is int and self.warmup_steps >= 0, "a whole number >= 0"),
            ("on_peer_loss", self.on_peer_loss in ("raise", "continue"), "'raise' or 'continue'"),
            ("peer_timeout_s", _is_number(self.peer_timeout_s) and self.peer_timeout_s > 0, "seconds > 0"),
        )
        for argument, sensible, expected in checks:
            if not sensible:
                raise ConfigurationError(
                    "this cannot be", argument=argument, expected=expected, seen=repr(getattr(self, argument))
                )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124 - nan


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl, declaration=AsyncModelAverageAlgorithm):
    """``AsyncModelAverageAlgorithm`` on a group. ``bagua.primitives.averaging`` says how ranks agree."""

    traits = Traits(result="consensus", rank_local=True, background=True)
    options: AsyncModelAverageAlgorithm

    def __init__(self, process_group: ProcessGroup, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._schedule = Schedule(
            topology_of(self.options.peer_selection_mode), process_group.rank, process_group.nodes
        )
        self._group: ProcessGroup | None = None
        self._buckets: Sequence[Bucket] = ()
        self._buffers: Buffers = dict
        self._parts: list[Part] = []
        self._session: Session | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._paused = False
        self._reported: BaseException | None = None
        self._begun = 0
        self._step = -1
        self._due = 0.0
        self._averaged: tuple[int, float] | None = None

    # What the engine asks.

    def phase(self, step: int) -> Hashable:
        """Warm-up, then averaging."""
        return step < self.options.warmup_steps

    def between_steps(self, step: int) -> bool:
        """After warm-up."""
        return step >= self.options.warmup_steps

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        """Gradients are exchanged in each step of warm-up."""
        return not self.between_steps(step)

    @property
    def gradient_scale(self) -> float:
        """Dividing before the sum keeps 16-bit gradients in range."""
        return 1.0 / self.process_group.size

    @property
    def blocking(self) -> bool:
        """One call for each bucket."""
        return False

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Sum gradients, in warm-up. Says first that this rank counts on all others in this step."""
        if bucket.index == 0:
            self._begun = step + 1
            if self._session is not None:
                self._session.member.begun = self._begun
        return allreduce_sum(bucket.allocate_gradients(), group, async_op=True)

    def attach(self, buckets: Sequence[Bucket], buffers: Buffers, group: ProcessGroup, step: int) -> None:
        """Buckets were formed; average what is in them from now on."""
        self._group, self._buckets, self._buffers = group, buckets, buffers
        self._begun = step
        self._parts = []

    def safe_point(self, step: int) -> None:
        """The first training forward of a step begins: take in an average, put down a copy."""
        if self._paused or self._group is None or self._group.size == 1:
            return
        session = self._session or self._begin()
        if session.error is not None:
            self._reported = session.error
            raise session.error
        if step == self._step or session.over:
            return
        self._step = step
        session.member.fresh = False
        if not self.between_steps(step):
            return
        desk = session.desk
        if session.member.warming:
            self._prepare(session)
        if desk.stage is Stage.AVERAGE:
            self._take_average(desk)
        if desk.stage is Stage.EMPTY and time.monotonic() >= self._due:
            self._put_snapshot(desk, at_rest=False)

    def settle(self) -> None:
        """Stop together, so that buckets can be taken apart; go on with the next step after that. Collective.

        Raises:
            CollectiveTimeoutError: not all ranks came.
        """
        if self._group is None or self._paused or self._group.size == 1:
            return
        waited_s = self._group.timeout_s
        together = self._stop(waited_s)
        remaining = [] if self._session is None else self._session.member.remaining
        self._session, self._paused = None, False
        if not together and remaining:
            raise CollectiveTimeoutError(
                "not all ranks stopped averaging, which must be done together to change a model or its algorithm",
                rank=self._group.rank,
                peers=remaining,
                timeout_s=waited_s,
            )

    def close(self) -> None:
        """Leave, without waiting for anybody."""
        session, self._session, self._group = self._session, None, None
        if session is not None:
            session.leave("its model was given another algorithm, or was closed")

    # What users call.

    def abort(self, bagua_module: torch.nn.Module, timeout: float | timedelta | None = None) -> bool:
        """Stop averaging. To be called after training; every rank does so when it has come to its end.

        A rank that waits here goes on taking part in averages, so that it stops nobody who still
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
        self._check_model(bagua_module)
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        together = self._stop(limit_s)
        error = None if self._session is None else self._session.error
        if error is not None and error is not self._reported:
            self._reported = error
            raise error
        return together

    def resume(self, bagua_module: torch.nn.Module) -> None:
        """Average again, after ``abort``. Every rank has to call it, but none waits for the others here.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            ConfigurationError: another algorithm trains this model.
        """
        self._check_model(bagua_module)
        running = self._session is not None and not self._session.over
        if running and not self._paused:
            return
        self._paused = False
        if self._group is not None and self._group.size > 1:
            self._begin()

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
            self._paused = True
            if self._session is not None:
                self._session.leave(f"an exception ended training: {error!r}")
                self._reported = self._session.error
            raise
        self.abort(bagua_module)

    def status(self) -> AveragingStatus:
        """How averaging goes, as seen from this rank."""
        session = self._session
        if session is None:
            return AveragingStatus()
        progress = session.member.progress
        age_steps = age_ms = None
        if self._averaged is not None:
            age_steps = self._step - self._averaged[0]
            age_ms = 1e3 * (time.monotonic() - self._averaged[1])
        return AveragingStatus(
            state=self._state(session),
            rounds=progress.rounds,
            age_steps=age_steps,
            age_ms=age_ms,
            sent_bytes=progress.nbytes,
            round_ms=1e3 * progress.round_s,
            distance=progress.distance,
            members=progress.members,
            failed=progress.failed,
            overflowed=progress.overflowed,
        )

    def _state(self, session: Session) -> Literal["warming up", "averaging", "paused", "alone"]:
        if self._paused:
            return "paused"
        if session.over:
            return "alone"
        return "warming up" if session.member.warming else "averaging"

    def _check_model(self, bagua_module: torch.nn.Module) -> None:
        if getattr(bagua_module, "bagua_algorithm", None) is not self:
            raise ConfigurationError(
                "this is not the model that is trained here",
                argument="bagua_module",
                expected="the model that was wrapped: model.bagua_algorithm.abort(model)",
                seen=type(bagua_module).__name__,
            )

    # The life of a session, on the training thread.

    def _begin(self) -> Session:
        group, before = self._group, self._session
        assert group is not None
        if before is not None and not before.join(1.0):
            self._parts = []  # A thread that hangs may still write what is on its desk.
        board = group.board("averaging")
        desk = Desk()
        courier = GroupCourier(
            group,
            board.name,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            transfer_timeout_s=lambda nbytes: min(group.timeout_s, TRANSFER_GRACE_S + nbytes / SLOWEST_BYTES_PER_S),
        )
        member = Member(
            board, self._schedule, desk, courier, self._patience(group), time.monotonic,
            continue_alone=self.options.on_peer_loss == "continue",
            hosts_store=group.hosts_store,
            strand=group.abort,
        )  # fmt: skip
        session = Session(member, desk, courier, f"bagua-{group.label}-averaging", hosts_store=group.hosts_store)
        member.begun, member.warming = self._begun, True
        if self.between_steps(self._begun):
            self._prepare(session)
        self._session = session
        self._step, self._averaged = -1, None
        self._due = time.monotonic() + self.options.sync_interval_ms / 1e3
        self._end_with_its_owners(session, group)
        session.start()
        return session

    def _end_with_its_owners(self, session: Session, group: ProcessGroup) -> None:
        """Whoever drops the model, or closes the group, ends the session."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, session.forget)
        self._finalizer.atexit = False
        watched = weakref.ref(session)

        def leave() -> None:
            found = watched()
            if found is not None:
                found.leave("its process group was closed")

        group.when_closing(leave)

    def _prepare(self, session: Session) -> None:
        """Warm-up is over: from now on snapshots are put on the desk."""
        group = self._group
        assert group is not None
        if not self._parts:
            self._parts = [Part(bucket) for bucket in self._buckets]
            if self.options.average_buffers:
                self._parts += _parts_of_buffers(self._buffers, len(self._buckets), group)
        session.desk.parcels = [part.parcel for part in self._parts]
        session.member.warming = False

    def _patience(self, group: ProcessGroup) -> Patience:
        silence_s = self.options.peer_timeout_s
        return Patience(
            beat_s=min(1.0, silence_s / 8), silence_s=silence_s, suspect_s=silence_s / 5, join_s=group.timeout_s
        )

    def _stop(self, limit_s: float | None) -> bool:
        """Take part in rounds until all have agreed to stop, or leave when the time is up."""
        if self._paused or self._group is None or self._group.size == 1:
            return True
        session = self._session or self._begin()
        if session.member.warming and self.between_steps(self._begun):
            self._prepare(session)
        until = None if limit_s is None else time.monotonic() + limit_s
        session.member.pausing = True
        session.desk.wake.set()
        while not self._serve(session):
            left_s = _SLICE_S if until is None else until - time.monotonic()
            if left_s > 0:
                session.wait_for_change(min(left_s, _SLICE_S))
            elif session.leave("abort() had waited long enough"):
                until = None
            else:
                break
        self._paused = True
        session.join(1.0)
        return session.ended_together

    def _serve(self, session: Session) -> bool:
        """Be at the desk while training rests; whether the session is over, and everything taken from the desk."""
        over, desk = session.over, session.desk  # In this order: the last average comes before the end.
        if desk.stage is Stage.AVERAGE:
            self._take_average(desk)
        if desk.stage is Stage.EMPTY and not over and not session.member.warming:
            self._put_snapshot(desk, at_rest=True)
        return over

    def _take_average(self, desk: Desk) -> None:
        for part in self._parts:
            part.take_average(replace=desk.replace)
        desk.clear()
        self._averaged = (self._step, time.monotonic())

    def _put_snapshot(self, desk: Desk, *, at_rest: bool) -> None:
        for part in self._parts:
            part.take_snapshot()
        self._due = time.monotonic() + self.options.sync_interval_ms / 1e3
        desk.hand_in(at_rest=at_rest)


def _parts_of_buffers(buffers: Buffers, first_index: int, group: ProcessGroup) -> list[Part]:
    """Floating-point buffers, one part for each dtype and device. Modules may replace them, so their names are kept."""
    found = [(name, buffer) for name, buffer in buffers().items() if buffer.is_floating_point()]
    parts: list[Part] = []
    for members in form_buckets(
        found, key=lambda item: (item[1].dtype, item[1].device), nbytes=lambda item: item[1].nbytes, bucket_bytes=2**63
    ):
        names = [name for name, _ in members]
        like = cast("list[torch.nn.Parameter]", [buffer for _, buffer in members])
        bucket = Bucket(first_index + len(parts), names, like, group.global_communicator, fusion=False)
        parts.append(Part(bucket, functools.partial(_named, buffers, names)))
    return parts


def _named(buffers: Buffers, names: Sequence[str]) -> list[torch.Tensor]:
    found = buffers()
    return [found[name] for name in names]

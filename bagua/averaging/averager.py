"""The training thread's side of averaging: one session after the other, and the only place where weights change."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from bagua.averaging.handoff import HandoffBuffer, Part, Stage
from bagua.averaging.link import DataLink
from bagua.averaging.membership import Departures, Patience
from bagua.averaging.round_protocol import Member
from bagua.averaging.rounds import AveragingStatus, Schedule
from bagua.averaging.session import EXIT_S, Session, sign_off_at_exit
from bagua.comm import ProcessGroup, bounded
from bagua.errors import CollectiveTimeoutError, CommunicationError

#: How long those who agreed on a round may take to connect, the first time that they meet: at most, and as a part of
#: the time after which others take them for dead.
CONNECT_TIMEOUT_S, CONNECT_PART = 8.0, 0.5
#: A transfer has this, and a second for each megabyte; whatever is slower is taken for broken.
TRANSFER_GRACE_S, SLOWEST_BYTES_PER_S = 30.0, 1e6
#: How often a rank that waits lets Ctrl-C through.
_SLICE_S = 0.25


class Averager:
    """Averages a model in the background. All methods belong to the thread that trains.

    Args:
        group: the ranks; their background threads connect by themselves.
        schedule: who meets in which round.
        interval_s: between two snapshots.
        warmup_steps: steps in which ranks exchange gradients instead.
        peer_timeout_s: who gives no sign of life for so long is lost.
        continue_alone: go on without lost ranks, instead of raising.
    """

    def __init__(
        self,
        group: ProcessGroup,
        schedule: Schedule,
        *,
        interval_s: float,
        warmup_steps: int,
        peer_timeout_s: float,
        continue_alone: bool,
    ) -> None:
        self._group = group
        self._schedule = schedule
        self._interval_s = interval_s
        self._warmup_steps = warmup_steps
        self._continue_alone = continue_alone
        self._connect_timeout_s = min(CONNECT_TIMEOUT_S, CONNECT_PART * peer_timeout_s)
        self._patience = Patience(
            beat_s=min(1.0, peer_timeout_s / 8),
            silence_s=peer_timeout_s,
            suspect_s=peer_timeout_s / 5,
            join_s=group.timeout_s,
        )
        self._make_parts: Callable[[], list[Part]] = list
        self._parts: list[Part] = []
        self._session: Session | None = None
        self._departures = Departures(group.board("averaging-departures"))
        self._process = os.getpid()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._paused = False
        self._fresh = True
        self._raised: BaseException | None = None
        self._begun = 0
        self._step = -1
        self._due = 0.0
        self._averaged: tuple[int, float] | None = None
        sign_off_at_exit(self)
        watched = weakref.ref(self)

        def sign_off() -> None:
            found = watched()
            if found is not None:
                found.sign_off("its process group was closed")

        group.when_closing(sign_off)

    def attach(self, make_parts: Callable[[], list[Part]], step: int) -> None:
        """The model lies elsewhere from now on. No session is under way, or it has not seen a step after warm-up.

        Args:
            make_parts: makes what is averaged, equal in sizes on all ranks; called when it is needed.
            step: number of the next step.
        """
        self._make_parts = make_parts
        self._parts = []
        self._begun = step
        self._fresh = True
        session = self._session
        if session is not None and not self._paused and not session.member.warming:
            # Resumed after the last step of warm-up, whose buckets it began with. It has handed in nothing yet.
            self._end_warm_up(session)

    def begin_warm_up_step(self, step: int) -> None:
        """This rank is about to wait for all others in ``step``."""
        self._begun = step + 1
        if self._session is not None:
            self._session.member.begun = self._begun

    def step(self, step: int) -> None:
        """The safe point before the first forward pass of ``step``, and of no effect before further ones.

        Raises:
            PeerLostError: a rank died.
            NonFiniteError: the weights of a rank are not finite.
        """
        self._fresh = False
        if self._paused:
            return
        session = self._session or self._begin()
        member, handoff = session.member, session.handoff
        if member.error is not None:
            self._raised = member.error
            raise member.error
        if step == self._step or session.over:
            return
        self._step = step
        member.fresh = False
        if step < self._warmup_steps:
            return
        if member.warming:
            self._end_warm_up(session)
        if handoff.stage is Stage.AVERAGE:
            self._take_average(session)
        if handoff.stage is Stage.EMPTY and time.monotonic() >= self._due:
            self._put_snapshot(handoff, at_rest=False)

    def stop(self, limit_s: float | None) -> bool:
        """Take part in rounds until all have agreed to stop, or leave when the time is up.

        Returns:
            Whether all who are alive stopped together.
        """
        if self._paused:
            return self._session is None or self._session.ended_together
        session = self._session or self._begin()
        if session.member.warming and self._begun >= self._warmup_steps:
            self._end_warm_up(session)
        until = None if limit_s is None else time.monotonic() + limit_s
        session.member.pausing = True
        session.handoff.wake.set()
        try:
            self._wait_for_the_end(session, until)
        except BaseException as error:  # Ctrl-C, for example: a rank that trains on must not be taken to be at rest.
            self.leave(f"abort() was interrupted: {error!r}")
            raise
        self._paused = True
        session.join(1.0)
        self._fresh = session.ended_together and not session.member.warming
        return session.ended_together

    def _wait_for_the_end(self, session: Session, until: float | None) -> None:
        while not self._serve(session):
            left_s = _SLICE_S if until is None else until - time.monotonic()
            if left_s > 0:
                session.wait_for_change(min(left_s, _SLICE_S))
            elif session.leave("abort() had waited long enough"):
                until = None
            else:
                break

    def settle(self) -> None:
        """Stop, so that the model can be taken apart; the next step begins anew. Collective.

        Raises:
            CollectiveTimeoutError: not all ranks came.
            PeerLostError: the last average broke off, so models may differ.
        """
        if self._paused:
            return
        limit_s = self._group.timeout_s
        together = self.stop(limit_s)
        member = None if self._session is None else self._session.member
        remaining = [] if member is None else member.remaining
        self._session, self._paused = None, False
        if member is not None and member.apart is not None:
            raise member.apart
        if not together and remaining:
            raise CollectiveTimeoutError(
                "not all ranks stopped averaging, which must be done together to change a model or its algorithm",
                rank=self._group.ranks[self._group.rank],
                peers=[self._group.ranks[rank] for rank in remaining],
                timeout_s=limit_s,
            )

    def resume(self) -> None:
        """Begin a session, unless one is under way."""
        running = self._session is not None and not self._session.over
        if self._paused or not running:
            self._paused = False
            self._begin()

    def leave(self, reason: str, *, for_good: bool = False) -> None:
        """End without waiting for anybody; what went wrong in the session is not raised any more.

        Args:
            reason: cause that the others are told.
            for_good: this rank will not resume.
        """
        self._paused = True
        if self._session is not None:
            self._session.leave(reason, for_good=for_good)
            self._raised = self._session.error
        elif for_good:
            self.sign_off(reason)

    def sign_off(self, reason: str) -> None:
        """If no session is under way here, others need not wait for this rank in the next one, to which it never comes.

        Args:
            reason: cause that the others are told.
        """

        def note() -> None:
            with contextlib.suppress(CommunicationError):
                self._departures.note({self._group.rank: reason})

        if self._session is None and os.getpid() == self._process:
            bounded(note, EXIT_S / 2)

    def raise_news(self) -> None:
        """Raise what went wrong in the session, unless that was done before."""
        error = None if self._session is None else self._session.error
        if error is not None and error is not self._raised:
            self._raised = error
            raise error

    def status(self) -> AveragingStatus:
        """What this rank knows."""
        session = self._session
        if session is None:
            return AveragingStatus()
        averaged = self._averaged
        if self._paused:
            state = "paused"
        elif session.over or not session.member.remaining:
            state = "alone"
        else:
            state = "warming up" if session.member.warming else "averaging"
        return dataclasses.replace(
            session.member.progress,
            state=state,  # type: ignore[arg-type]  # one of the four
            age_steps=None if averaged is None else self._step - averaged[0],
            age_ms=None if averaged is None else 1e3 * (time.monotonic() - averaged[1]),
        )

    # The beginning of a session.

    def _begin(self) -> Session:
        group, before = self._group, self._session
        if before is not None and not before.join(1.0):
            self._parts = []  # A thread that hangs may still write into its buffers.
        board = group.board("averaging")
        handoff = HandoffBuffer()
        link = DataLink(
            group,
            board.name,
            connect_timeout_s=self._connect_timeout_s,
            transfer_timeout_s=lambda nbytes: min(group.timeout_s, TRANSFER_GRACE_S + nbytes / SLOWEST_BYTES_PER_S),
        )
        member = Member(
            board, self._departures, self._schedule, handoff, link, self._patience, time.monotonic,
            continue_alone=self._continue_alone, hosts_store=group.hosts_store, strand=group.abort,
        )  # fmt: skip
        session = Session(member, handoff, link, f"bagua-{group.label}-averaging", hosts_store=group.hosts_store)
        member.begun, member.fresh, member.warming = self._begun, self._fresh, True
        if self._begun >= self._warmup_steps:
            self._end_warm_up(session)
        self._session = session
        self._step, self._averaged = -1, None
        self._due = time.monotonic() + self._interval_s
        self._end_with_its_owners(session)
        session.start()
        return session

    def _end_warm_up(self, session: Session) -> None:
        """From now on snapshots are handed in."""
        if not self._parts:
            self._parts = self._make_parts()
        session.handoff.contributions = [part.contribution for part in self._parts]
        session.member.warming = False

    def _end_with_its_owners(self, session: Session) -> None:
        """Dropping the model, or closing the group, ends the session."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, session.forget)
        self._finalizer.atexit = False
        watched = weakref.ref(session)

        def leave() -> None:
            found = watched()
            if found is not None:
                found.leave("its process group was closed", for_good=True)

        self._group.when_closing(leave)

    # Snapshots and averages.

    def _serve(self, session: Session) -> bool:
        """Hand in and take while training rests; whether the session is over, and all was taken."""
        over, handoff = session.over, session.handoff  # In this order: the last average comes before the end.
        if handoff.stage is Stage.AVERAGE:
            self._take_average(session)
        if handoff.stage is Stage.EMPTY and not over and not session.member.warming:
            self._put_snapshot(handoff, at_rest=True)
        return over

    def _take_average(self, session: Session) -> None:
        handoff, member = session.handoff, session.member
        handoff.clear()  # First: after an error half-way, the same average must not be taken in twice.
        for part in self._parts:
            part.take_average(replace=handoff.replace)
        self._averaged = (self._step, time.monotonic())
        met = float(len(member.progress.members))
        # Others may have ended since they met.
        here = max(1.0 + len(member.remaining), met)
        self._group.gauges.update({"comm/epoch_members": here, "comm/contributed": met})

    def _put_snapshot(self, handoff: HandoffBuffer, *, at_rest: bool) -> None:
        for part in self._parts:
            part.take_snapshot()
        self._due = time.monotonic() + self._interval_s
        handoff.hand_in(at_rest=at_rest)

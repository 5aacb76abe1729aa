"""One rank's part in a session of averaging: what it looks at, what it decides, when it exchanges.

Nothing in here blocks, except opening a connection, which has a deadline of its own: ``poll`` looks at
the board, does what can be done, and says when to look again. So a test can run the members
of a session in any order, with any clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

from bagua.averaging.handoff import HandoffBuffer, Stage
from bagua.averaging.link import Connection, Connections, DataLink, IsComplete
from bagua.averaging.membership import Departures, MembershipView, MemberState, Patience, Record
from bagua.averaging.rounds import AveragingStatus, Decisions, Schedule
from bagua.comm import Board
from bagua.errors import CommunicationError, PeerLostError

_log = logging.getLogger("bagua")

#: The last exchange, of all members, is a round after all others.
FINAL = 1 << 40
_FINAL_ATTEMPTS = 2
_FAILURES_IN_A_ROW = 3
#: Pauses between looks at the board. Each look interrupts the training thread, and a transfer may last for seconds.
_SHORTEST_S, _LONGEST_S = 0.001, 0.05
#: Rounds without anybody to meet that are passed at a time.
_MOST_RESTS = 64


class Member:
    """One rank in a session.

    Args:
        board: records and decisions of this session.
        departures: members that come to no further session.
        schedule: who meets in which round.
        handoff: buffer from which snapshots come and to which averages go.
        link: moves contributions.
        patience: how long to wait for what.
        clock: seconds.
        continue_alone: go on without members that are lost or diverged, instead of failing.
        hosts_store: the board ends with this process, so it stays until all others have gone.
        strand: breaks what other ranks would wait on for this one, in warm-up.

    Attributes:
        pausing: set by the training thread: it has stopped training.
        leaving: set by anyone: why to go without waiting for anybody.
        for_good: set before ``leaving``: it will not come to a later session either.
        warming: set by the training thread: it still trains synchronously.
        begun: set by the training thread: synchronous steps that it has begun.
        fresh: set by the training thread: it has not trained since weights were made equal, or loaded.
        state: activity of this member.
        over: True when there is nothing left to do.
        apart: why it missed the last average, with which others may have ended; None if it did not.
        error: error that the training thread must raise.
        progress: counts so far; the training thread adds the rest of the status.
    """

    def __init__(
        self,
        board: Board,
        departures: Departures,
        schedule: Schedule,
        handoff: HandoffBuffer,
        link: DataLink,
        patience: Patience,
        clock: Callable[[], float],
        *,
        continue_alone: bool = False,
        hosts_store: bool = False,
        strand: Callable[[str], None] = lambda reason: None,  # noqa: ARG005
    ) -> None:
        self.rank = board.rank
        self.pausing = False
        self.leaving = ""
        self.for_good = False
        self.warming = False
        self.begun = 0
        self.fresh = True
        self.state = MemberState.TRAINING
        self.over = False
        self.apart: PeerLostError | None = None
        self.error: BaseException | None = None
        self.progress = AveragingStatus()
        self._view = MembershipView(board, departures, patience)
        self._decisions = Decisions(board, self._view)
        self._schedule = schedule
        self._handoff = handoff
        self._link = link
        self._connections = Connections(link)
        self._patience = patience
        self._clock = clock
        self._continue_alone = continue_alone
        self._hosts_store = hosts_store
        self._strand: Callable[[str], None] | None = strand
        self._round = 0
        self._meeting = schedule.members(0)
        self._ready = False
        self._transfer: tuple[IsComplete, Connection, float] | None = None
        self._failures = 0
        self._abandoned = False
        self._broke = -1
        self._pause_s = _SHORTEST_S
        self._name = self._view.names[self.rank]

    # One look.

    def poll(self) -> float:
        """Do what can be done now, and say in how many seconds to come again at the latest.

        Raises:
            PeerLostError: the store is gone.
        """
        now = self._clock()
        before = (self._ready, self._transfer is None, self.state)
        if self._transfer is None or now - self._view.looked >= self._patience.beat_s:
            self._look(now)
        if self.state.gone:
            self._linger()
        elif self._transfer is not None:
            self._attend()
        elif self.leaving:
            self._leave()
        elif self._is_sound():
            self._advance()
        self._publish(now)
        return self._pause(moved=before != (self._ready, self._transfer is None, self.state))

    def _pause(self, *, moved: bool) -> float:
        """Seconds until the next look: few after something has happened, then ever more.

        While something is waited for, it is about a third of the time that was waited already.
        """
        rests = len(self._meeting) == 1 and not self.pausing
        meets = (self._ready and not rests) or self._transfer is not None
        waiting = meets or self.pausing or self.state.gone or bool(self.leaving)
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_S) if waiting and not moved else _SHORTEST_S
        return min(self._pause_s, self._patience.beat_s) if waiting else self._patience.beat_s

    def _look(self, now: float) -> None:
        self._view.look(now)
        self._decisions.forget()

    def _publish(self, now: float, *, at_once: bool = False, connecting: bool = False) -> None:
        pausing = self.state is MemberState.TRAINING and self.pausing
        record = Record(
            MemberState.PAUSING if pausing else self.state,
            warming=self.warming,
            begun=self.begun,
            fresh=self.fresh,
            round=self._round,
            ready=self._ready,
            connection=self._connections.name(self._meeting),
            connecting=connecting,
            broke=self._broke,
            reason=self.leaving,
        )
        self._view.tell(record, now, at_once=at_once)

    # Is everybody well?

    def _is_sound(self) -> bool:
        """Whether this member can go on; otherwise ``error`` or ``leaving`` says why not."""
        excluded, loss = self._view.exclusion(), self._view.loss()
        if excluded is not None:
            self._be_excluded(excluded)
        elif loss is not None and self._continue_alone:
            _log.warning("rank %d goes on: %s", self._name, loss)
        elif loss is not None:
            self._fail(loss)
        if self.warming and not self.leaving:
            self._watch_warm_up()
        if self.leaving:
            self._leave()
        return not self.leaving

    def _be_excluded(self, error: BaseException | None) -> None:
        assert error is not None
        if self._continue_alone:
            _log.warning("rank %d goes on alone: %s", self._name, error)
            self.leaving = "it was taken for dead"
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.leaving = str(getattr(error, "problem", error)) or type(error).__name__

    def _watch_warm_up(self) -> None:
        """Synchronous training needs everyone in every step."""
        if self.pausing:
            if self._view.begun_beyond(self.begun):
                self._release(f"called abort() after {self.begun} steps, in warm-up")
            return
        early = self._view.early_departure()
        if early is not None:
            self._fail(early)

    def _release(self, reason: str) -> None:
        """Break, once, what others wait on for this member."""
        if self._strand is not None:
            strand, self._strand = self._strand, None
            strand(f"rank {self._name} {reason}")

    # From decision to decision.

    def _advance(self) -> None:
        for _ in range(_MOST_RESTS):
            if len(self._meeting) > 1 or self._round >= FINAL or self.pausing:
                break
            self._next_round()  # This member meets no other one in it.
        self._take_snapshot()
        if self.leaving or not (self._ready or self.pausing):
            return
        decision = self._decisions.made(self._round, self._meeting)
        if decision is None:
            proposal = self._proposal()
            if proposal is None:
                return
            decision = self._decisions.make(self._round, self._meeting, proposal)
        self._follow(decision)

    def _take_snapshot(self) -> None:
        """Contribute the snapshot that was handed in, if it is fit for that."""
        handoff = self._handoff
        if self._ready or self.warming or handoff.stage is not Stage.SNAPSHOT:
            return
        if self._round >= FINAL and not handoff.at_rest:
            handoff.discard()
            return
        for contribution in handoff.contributions:
            contribution.arrived()
        if all(contribution.fill() for contribution in handoff.contributions):
            self._ready = True
            return
        handoff.discard()
        self._fail(self._view.divergence(self.rank))
        self._end(MemberState.DIVERGED)

    def _proposal(self) -> dict[str, Any] | None:
        """What could be decided about this round, as far as this member can see."""
        view = self._view
        if self._round < FINAL and self.pausing and view.all_others_rest():
            trained = not (self.fresh or self.warming) or view.have_trained()
            return {"kind": "stop", "average": trained}
        alive = tuple(rank for rank in self._meeting if rank == self.rank or not view.gone(rank))
        if not self._ready or not all(rank == self.rank or view.is_ready(rank, self._round) for rank in alive):
            return None
        if alive == (self.rank,) and self._round < FINAL and not view.present():
            return None  # No member is left: there will be no more rounds.
        own = self._connections.name(self._meeting)
        names = [own if rank == self.rank else view.record(rank).connection for rank in alive]
        fresh = self._decisions.topic(self._round, self._meeting)
        return {
            "kind": "go",
            "members": list(alive),
            "connection": self._connections.common(self._meeting, alive, names, fresh),
        }

    def _follow(self, decision: dict[str, Any]) -> None:
        """Do what was decided about the round that this member is in."""
        if decision["kind"] == "stop":
            self._stop(average=decision["average"])
            return
        members = tuple(decision.get("members", ()))
        if decision["kind"] == "void" or members == (self.rank,):
            self._next_round()
            if members and self._round > FINAL:  # No member is left to make weights equal with.
                self._finish()
        elif self.rank not in members:
            self._be_excluded(self._view.exclusion(certain=True))
            self._leave()
        else:
            self._start(members, decision["connection"])

    def _next_round(self) -> None:
        """Go on with the round after this one; a snapshot that was not used is kept for it."""
        self._decisions.done_with(self._round, self._meeting)
        self._round += 1
        if self._round < FINAL:
            self._meeting = self._schedule.members(self._round)

    def _stop(self, *, average: bool) -> None:
        """All have agreed to end: a last exchange of all, then nothing more."""
        if not self.pausing:
            self._be_excluded(self._view.exclusion(certain=True))
            self._leave()
            return
        if self.warming or not average or not self._view.present():
            self._end(MemberState.STOPPED)
            return
        self._ready = False
        self._failures = 0
        self._round = FINAL
        self._meeting = self._schedule.everyone

    # One exchange.

    def _start(self, members: tuple[int, ...], name: str) -> None:
        connection = Connection(name, members)
        if name != self._connections.name(self._meeting):
            self._publish(self._clock(), at_once=True, connecting=True)
        try:
            connection = self._connections.require(self._meeting, members, name)
            is_complete = self._link.start(connection, self._handoff.contributions)
        except CommunicationError as error:
            self._broke_off(error, connection)
            return
        self._transfer = (is_complete, connection, self._clock())

    def _attend(self) -> None:
        assert self._transfer is not None
        is_complete, connection, started = self._transfer
        gone = [rank for rank in connection.members if rank != self.rank and self._view.gave_up(rank, self._round)]
        try:
            complete = is_complete()
            if not complete and gone:
                raise PeerLostError(
                    f"rank {self._view.names[gone[0]]} left in the middle of an exchange",
                    rank=self._view.names[self.rank],
                    peers=[self._view.names[rank] for rank in gone],
                )
        except CommunicationError as error:
            self._transfer = None
            self._broke_off(error, connection)
            return
        if complete:
            self._transfer = None
            self._deliver(connection, self._clock() - started)

    def _deliver(self, connection: Connection, seconds: float) -> None:
        handoff, before, final = self._handoff, self.progress, self._round >= FINAL
        distance = math.hypot(
            *(contribution.make_difference(keep_mean=final) for contribution in handoff.contributions)
        )
        finite = math.isfinite(distance)
        self.progress = dataclasses.replace(
            before,
            rounds=before.rounds + finite,
            overflowed=before.overflowed + (not finite),
            sent_bytes=before.sent_bytes + sum(contribution.nbytes for contribution in handoff.contributions),
            round_ms=1e3 * seconds,
            distance=distance if finite else before.distance,
            members=connection.members,
        )
        self._failures = 0
        self._ready = False
        if finite:
            handoff.deliver(replace=final)
        else:
            _log.warning("rank %d: an average of finite weights is not finite; it was dropped", self._name)
            handoff.discard()
        if final:
            self._end(MemberState.STOPPED)
        else:
            self._next_round()

    def _broke_off(self, error: CommunicationError, connection: Connection) -> None:
        """An exchange failed: this member's weights are as they were; try again with who is left, in the next round."""
        self._connections.drop(self._meeting)
        self._view.suspect(error.peers)
        self.progress = dataclasses.replace(self.progress, failed=self.progress.failed + 1)
        self._failures += 1
        self._broke = self._round
        _log.info("rank %d: averaging with ranks %s broke off: %s", self._name, connection.members, error)
        self._next_round()
        if self._round > FINAL and self._failures >= _FINAL_ATTEMPTS:
            self._finish()
        elif self._failures >= _FAILURES_IN_A_ROW and not self._continue_alone:
            self._fail(error)

    # The end.

    def _finish(self) -> None:
        """End with the others, but without a last average."""
        if self._failures and (self._view.present() or self._view.some_have_stopped()):
            self.apart = self._view.broken_end()
            if self._continue_alone:
                _log.warning("rank %d: %s", self._name, self.apart)
            else:
                self.error = self.error or self.apart
        self._end(MemberState.STOPPED)

    def _leave(self) -> None:
        """Go, after making sure that no member begins an exchange with this member."""
        if self._ready and not self.state.gone:
            decision = self._decisions.make(self._round, self._meeting, {"kind": "void"})
            if decision["kind"] == "go" and self.rank in decision["members"] and len(decision["members"]) > 1:
                self._follow(decision)  # It was decided before; they count on this member.
                if self._transfer is not None:
                    return
        self._end(MemberState.LEFT)

    def _end(self, state: MemberState) -> None:
        if not self.state.gone:
            self.state = state
        self._ready = False
        self._publish(self._clock(), at_once=True)
        self._connections.close()
        if self.for_good:
            self._view.leave_for_good(self.leaving)
        if state is MemberState.LEFT and self.warming:
            self._release(f"left in warm-up: {self.leaving}")
        self.over = not self._hosts_store or state is not MemberState.STOPPED
        self._handoff.tell()

    def _linger(self) -> None:
        """The store is here: stay until the others have ended, too."""
        self.over = self.over or bool(self.leaving) or not self._view.present()
        if self.over:
            self._handoff.tell()

    @property
    def others_remain(self) -> bool:
        """Whether some other member has not ended, as far as this one knows. Looks at the board once more."""
        self._look(self._clock())
        return bool(self._view.present())

    @property
    def remaining(self) -> list[int]:
        """Global ranks of the others that had not ended when this one last looked."""
        return [self._view.names[rank] for rank in self._view.present()]

    def sign_off(self) -> None:
        """Say that no later session need wait for this member, unless that was said."""
        with contextlib.suppress(CommunicationError):
            if not self._abandoned:
                self._view.leave_for_good(self.leaving)

    def abandon(self, error: CommunicationError) -> None:
        """The board is gone: end here, with ``error`` unless this member may go on alone."""
        if not self.state.gone:  # Otherwise all that mattered was done.
            self.state = MemberState.LEFT
            if self._continue_alone:
                _log.warning("rank %d goes on alone: %s", self._name, error)
            else:
                self.error = self.error or error
        self._transfer = None
        self._abandoned = True
        self._connections.close()
        self.over = True
        self._handoff.tell()

"""One process through its epochs: how it comes in, exchanges, and goes on when others are gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from bagua.comm import Cells, ProcessGroup, ReduceOp
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    LeftOutError,
    PeerLostError,
    StoreLostError,
    TooFewMembersError,
    TransportUnavailableError,
)
from bagua.membership.epochs import Epoch, Standing, StopReport, first_epoch, next_epoch
from bagua.membership.presence import Presence
from bagua.membership.roster import Deadlines
from bagua.membership.transfer import receive_state, send_state

__all__ = ["Attempt", "Participant"]

_log = logging.getLogger("bagua")
#: Runs an exchange on the group of the epoch, from the same contribution each time.
Attempt = Callable[[ProcessGroup], None]
#: What ends an exchange that can be repeated without those who are lost.
_LOSSES = (PeerLostError, CollectiveTimeoutError, CommunicatorClosedError)


class Participant:
    """One process in the epochs of its islands.

    Args:
        presence: its seat.
        cells: cells of the store.
        connect: makes the group of an epoch; collective among its members.
        minimum: members that may go on; None for more than half of the last epoch.
        timeout_s: how long to wait for others before giving up, in seconds.
        deadlines: how often to look.
        tell: called after each change, with the epoch.

    Attributes:
        standing: how far it has come; None before it has the state.
        contributed: seats whose contributions are part of the last result.
        waiting_for: why nothing goes on; empty if something does.
    """

    def __init__(
        self,
        presence: Presence,
        cells: Cells,
        connect: Callable[[Epoch], ProcessGroup],
        *,
        minimum: int | None,
        timeout_s: float,
        deadlines: Deadlines,
        tell: Callable[[Epoch], None],
    ) -> None:
        self._presence = presence
        self._cells = cells
        self._connect = connect
        self._minimum = minimum
        self._timeout_s = timeout_s
        self._deadlines = deadlines
        self._tell = tell
        #: One value, because the thread that gives signs of life reads both.
        self._link: tuple[Epoch, ProcessGroup] | None = None
        self._called = False
        self._busy = False
        self.standing: Standing | None = None
        self.contributed: tuple[int, ...] = ()
        self.waiting_for = ""

    @property
    def epoch(self) -> Epoch | None:
        """That it takes part in; None before the first."""
        return None if self._link is None else self._link[0]

    @property
    def _group(self) -> ProcessGroup:
        assert self._link is not None
        return self._link[1]

    # Coming in.

    def join(self, size: int, give: Callable[[], object], take: Callable[[object], None]) -> None:
        """Come in: with the others at the beginning, or as a newcomer. Waits until this process has the state.

        Args:
            size: processes that begin together, if none has begun yet.
            give: returns the state.
            take: replaces the state of this process.

        Raises:
            TooFewMembersError: too few others came.
            StoreLostError: the store does not answer.
        """
        started = time.monotonic()
        self._presence.tell(waiting=True)
        epoch: Epoch | None = None
        while self.standing is None:
            later = self._cell(1 if epoch is None else epoch.number + 1, partial(self._not_yet, epoch, size))
            if later is None:
                self._wait(started)
                continue
            epoch = later
            if self._presence.seat in epoch.members and self._cell(epoch.number + 1) is None:
                self._come_in(epoch, give, take)

    def _not_yet(self, epoch: Epoch | None, size: int) -> Epoch | str:
        """The first epoch, if it is time, or why a newcomer is not in yet: later epochs are not for it to propose.

        Raises:
            TooFewMembersError: no member will let it in.
        """
        if epoch is None:
            waiting = self._presence.roster.waiting()
            return first_epoch(waiting) if len(waiting) >= size else f"{len(waiting)} of {size} that begin are here"
        if set(epoch.members) - {self._presence.seat} <= self._presence.roster.left():
            raise TooFewMembersError(
                f"the run is over: all members of epoch {epoch.number} have left",
                rank=self._presence.seat,
                peers=epoch.members,
                advice="Choose another name= for another run.",
            )
        return f"waiting to be let in by seats {list(epoch.members)}, after their next exchange"

    def _come_in(self, epoch: Epoch, give: Callable[[], object], take: Callable[[object], None]) -> None:
        seat = self._presence.seat
        if seat in epoch.donors:  # Only in the first epoch.
            self._presence.tell(waiting=False, epoch=epoch.number)
            self.standing = Standing(seat, epoch)
            if not self._meet(epoch, resting=True):
                self._change()
            self._serve(give)
            return
        try:
            self._enter(epoch)
            donor = epoch.members.index(epoch.donor_of(seat))
            self._busy = True
            take(receive_state(self._group.global_communicator, donor))
        except CommunicationError as error:
            _log.info("islands: no state for seat %d in epoch %d: %s", seat, epoch.number, error)
            self._presence.tell(epoch=epoch.number, report=StopReport(epoch.number, complete=False))
            return
        finally:
            self._busy = False
        self.standing = Standing.of_newcomer(seat, epoch)
        self._presence.tell(waiting=False, epoch=epoch.number, report=None)

    # Exchanges.

    def exchange(self, attempt: Attempt) -> None:
        """Have one exchange happen, for all members or for none.

        Args:
            attempt: run once, and again in each epoch in which the exchange is repeated.

        Raises:
            TooFewMembersError: too few are left.
            LeftOutError: the others went on without this process.
            StoreLostError: members are lost, and so is the store.
        """
        assert self.standing is not None
        self.standing = self.standing.enter()
        number = self.standing.entered
        members = self.standing.epoch.members
        while not self._attempt(attempt):
            self._change()
            if self.standing.applied >= number:  # All who stay hold the result, which those before have made.
                break
            members = self.standing.epoch.members
            self.standing = self.standing.enter()
        self.contributed = members

    def _attempt(self, attempt: Attempt) -> bool:
        """Whether the exchange has happened, for all members."""
        assert self.standing is not None
        group = self._group
        self._busy = True
        try:
            attempt(group)
            self.standing = self.standing.hold()
            self._called = self._pass_barrier(group)
        except _LOSSES as error:
            self._stop(error)
            return False
        finally:
            self._busy = False
        self.standing = self.standing.apply()
        return True

    def _pass_barrier(self, group: ProcessGroup) -> bool:
        """Wait until all members hold the result; whether one of them sees a newcomer."""
        assert self.standing is not None
        waiting = set(self._presence.roster.waiting()) - set(self.standing.epoch.members)
        called = torch.tensor([len(waiting)])
        group.global_communicator.allreduce(called, ReduceOp.MAX)
        return bool(called)

    def rest(self, give: Callable[[], object]) -> None:
        """Between two steps: let newcomers in, if the last exchange said that there are any.

        Args:
            give: returns the state.
        """
        if not self._called:
            return
        assert self.standing is not None
        self.standing = self.standing.stop(resting=True)
        self._presence.tell(report=self.standing.report)
        self._change()
        self._serve(give)

    def _serve(self, give: Callable[[], object]) -> None:
        """Give newcomers the state, where it is this process's turn."""
        assert self._link is not None
        epoch, group = self._link
        mine = [seat for seat in epoch.newcomers if epoch.donor_of(seat) == self._presence.seat]
        if not mine:
            return
        state = give()
        self._busy = True
        try:
            for seat in mine:
                send_state(state, group.global_communicator, epoch.members.index(seat))
        except CommunicationError as error:  # The next exchange fails, and goes on without that one.
            _log.info("islands: a newcomer did not get the state: %s", error)
            group.abort(f"it could not give a newcomer the state: {error}")
        finally:
            self._busy = False

    # From one epoch to the next.

    def _stop(self, error: CommunicationError, *, resting: bool = False) -> None:
        """Say that this process takes part in this epoch no more."""
        assert self.standing is not None
        lost = set(error.peers) - {self._presence.seat} if isinstance(error, PeerLostError) else ()
        self.standing = self.standing.stop(resting=resting, lost=lost)
        self._presence.tell(report=self.standing.report)

    def _change(self) -> None:
        """Go on to the next epoch, as it is written, or propose one."""
        started = time.monotonic()
        self._called = False
        while True:
            standing = self.standing
            assert standing is not None
            assert standing.report is not None
            late = time.monotonic() - started > self._timeout_s
            epoch = self._cell(standing.epoch.number + 1, partial(self._successor, standing, late=late))
            if epoch is None:
                self._wait(started, give_up=late)
                continue
            if self._presence.seat not in epoch.members:
                raise self._left_out(epoch)
            self.standing = standing.follow(epoch)
            if self._meet(epoch, resting=standing.report.resting):
                return

    def _successor(self, standing: Standing, *, late: bool) -> Epoch | str:
        """What follows the epoch of ``standing``, as far as this process can tell."""
        epoch, roster = standing.epoch, self._presence.roster
        reports, gone = roster.reports(epoch.number), roster.gone(epoch.number)
        if standing.report is not None:  # The store may not have taken it.
            reports[standing.seat] = standing.report
        if late:
            stuck = set(epoch.members) - reports.keys() - gone.keys()
            gone |= dict.fromkeys(stuck, f"it did not come to its next exchange within {self._timeout_s:g} s")
        return next_epoch(epoch, reports, gone, roster.waiting(), self._minimum, roster.left())

    def _cell(self, number: int, propose: Callable[[], Epoch | str] | None = None) -> Epoch | None:
        """Epoch ``number``, if it is written; else what ``propose`` returns, if no other process comes first."""
        name = f"epoch/{number}"
        try:
            written = self._cells.read([name])[0]
            if written is None and propose is not None:
                self._presence.look()
                proposal = propose()
                if isinstance(proposal, str):
                    self._note(proposal)
                else:
                    written = self._cells.claim(name, proposal.to_json())
        except StoreLostError as error:
            self._presence.trouble = error.problem
            return None
        return None if written is None else Epoch.from_json(written)

    def _note(self, why: str) -> None:
        if why != self.waiting_for:
            _log.info("islands: seat %d: %s", self._presence.seat, why)
        self.waiting_for = why

    def _wait(self, started: float, *, give_up: bool = True) -> None:
        """Wait for a moment, or give up after ``timeout_s``.

        Args:
            started: when this process began to wait.
            give_up: False if there is something left to try.

        Raises:
            TooFewMembersError: too few are there, for too long.
            StoreLostError: the store has not answered.
        """
        if self._presence.has_left:
            raise CommunicatorClosedError("this process has left its islands", rank=self._presence.seat)
        elapsed_s = time.monotonic() - started
        if elapsed_s <= self._timeout_s or not give_up:
            time.sleep(self._deadlines.poll_s)
            return
        seat, timeout_s = self._presence.seat, self._timeout_s
        if self._presence.trouble:
            raise StoreLostError(self._presence.trouble, rank=seat, elapsed_s=elapsed_s, timeout_s=timeout_s)
        away = self._presence.roster.gone(-1)
        raise TooFewMembersError(
            self.waiting_for or "the others do not come",
            rank=seat,
            peers=[member for member in (() if self.epoch is None else self.epoch.members) if member in away],
            elapsed_s=elapsed_s,
            timeout_s=timeout_s,
            advice="Start more processes, or pass minimum= to join_islands. A run that ended needs another name.",
        )

    def _meet(self, epoch: Epoch, *, resting: bool = False) -> bool:
        """Whether the members of ``epoch`` have met; if not, this process has said so."""
        try:
            self._enter(epoch)
        except (*_LOSSES, TransportUnavailableError) as error:
            self._stop(error, resting=resting)
            return False
        self._presence.tell(epoch=epoch.number, report=None)
        return True

    def _enter(self, epoch: Epoch) -> None:
        """Connect with the members of ``epoch``. The connections of the one before stay until then.

        Who closes them refuses others that still ask who is lost.
        """
        before, self._link = self._link, (epoch, self._connect(epoch))
        self.waiting_for = ""
        if before is not None:
            before[1].close()
        _log.info("islands: epoch %d of seats %s: %s", epoch.number, list(epoch.members), epoch.why)
        self._tell(epoch)

    def _left_out(self, epoch: Epoch) -> LeftOutError:
        return LeftOutError(
            f"seat {self._presence.seat} is not in epoch {epoch.number} of seats {list(epoch.members)}: {epoch.why}",
            rank=self._presence.seat,
            peers=epoch.members,
        )

    # From the thread that gives signs of life.

    def watch(self) -> None:
        """End a call that waits for somebody who is gone, or who has stopped."""
        link = self._link
        if not self._busy or link is None:
            return
        epoch, group = link
        roster = self._presence.roster
        gone = {seat: why for seat, why in roster.gone(epoch.number).items() if seat in epoch.members}
        stopped = [seat for seat, report in roster.reports(epoch.number).items() if not report.resting]
        if gone:
            seat, why = next(iter(gone.items()))
            group.abort(why, seat)
        elif stopped or self._cell(epoch.number + 1) is not None:
            group.abort("it went on to the next epoch")

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._link is not None:
            self._link[1].close()

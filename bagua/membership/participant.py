"""One island through its epochs: how it comes in, exchanges, and goes on when others are gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from bagua.comm import Cells, ReduceOp
from bagua.errors import (
    CommunicatorClosedError,
    LeftOutError,
    PeerLostError,
    StoreLostError,
    TooFewMembersError,
)
from bagua.membership.counterparts import LOSSES, Attempt, Counterparts, epoch_name
from bagua.membership.epochs import Epoch, Standing, StopReport, first_epoch, next_epoch
from bagua.membership.island import FailedAct, Island
from bagua.membership.presence import Presence
from bagua.membership.roster import Deadlines

__all__ = ["Participant"]

_log = logging.getLogger("bagua")


class Participant:
    """One island in the epochs of all, on its first rank.

    Args:
        presence: its seat.
        cells: cells of the store.
        island: its ranks.
        counterparts: connections of this rank with the first ranks of other islands.
        size: islands that begin together, if none has begun yet.
        minimum: members that may go on; None for more than half of the last epoch.
        timeout_s: how long to wait for others before giving up, in seconds.
        deadlines: how often to look.

    Attributes:
        standing: how far it has come; None before it has the state.
        contributed: seats whose contributions are part of the last result.
        waiting_for: why nothing goes on; empty if something does.
    """

    def __init__(
        self,
        presence: Presence,
        cells: Cells,
        island: Island,
        counterparts: Counterparts,
        *,
        size: int,
        minimum: int | None,
        timeout_s: float,
        deadlines: Deadlines,
    ) -> None:
        self._presence = presence
        self._cells = cells
        self._island = island
        self._counterparts = counterparts
        self._size = size
        self._minimum = minimum
        self._timeout_s = timeout_s
        self._deadlines = deadlines
        self._called = False
        self.standing: Standing | None = None
        self.contributed: tuple[int, ...] = ()
        self.waiting_for = ""

    # Coming in.

    def join(self) -> None:
        """Come in: with the others at the beginning, or as a newcomer. Waits until this island has the state.

        Raises:
            TooFewMembersError: too few others came.
            StoreLostError: the store does not answer.
        """
        self._presence.tell(waiting=True)
        with self._island.leading(self._outcome):
            self._wait_for_the_state(time.monotonic())

    def _wait_for_the_state(self, started: float) -> None:
        epoch: Epoch | None = None
        while self.standing is None:
            later = self._cell(1 if epoch is None else epoch.number + 1, partial(self._not_yet, epoch))
            if later is None:
                self._wait(started)
                continue
            epoch = later
            if self._presence.seat in epoch.members and self._cell(epoch.number + 1) is None:
                self._come_in(epoch)

    def _not_yet(self, epoch: Epoch | None) -> Epoch | str:
        """The first epoch, if it is time, or why a newcomer is not in yet: later epochs are not for it to propose.

        Raises:
            TooFewMembersError: no member will let it in.
        """
        if epoch is None:
            waiting, size = self._presence.roster.waiting(), self._size
            return first_epoch(waiting) if len(waiting) >= size else f"{len(waiting)} of {size} that begin are here"
        if set(epoch.members) - {self._presence.seat} <= self._presence.roster.left():
            raise TooFewMembersError(
                f"the run is over: all members of epoch {epoch.number} have left",
                rank=self._presence.seat,
                peers=epoch.members,
                advice="Choose another name= for another run.",
            )
        return f"waiting to be let in by seats {list(epoch.members)}, after their next exchange"

    def _come_in(self, epoch: Epoch) -> None:
        seat = self._presence.seat
        if seat in epoch.donors:  # Only in the first epoch.
            self._presence.tell(waiting=False, epoch=epoch.number)
            self.standing = Standing(seat, epoch)
            if not self._meet(epoch, resting=True):
                self._change()
            self._serve()
            return
        failure = self._enter(epoch) or self._island.do("receive") or self._island.do("take")
        if failure is not None:
            _log.info("islands: no state for seat %d in epoch %d: %s", seat, epoch.number, failure.problem)
            self._presence.tell(epoch=epoch.number, report=StopReport(epoch.number, complete=False))
            return
        self.standing = Standing.of_newcomer(seat, epoch)
        self._presence.tell(waiting=False, epoch=epoch.number, report=None)

    # Exchanges.

    def exchange(self, attempt: Attempt) -> None:
        """Have one exchange happen, for all members or for none.

        Args:
            attempt: run once, and again in each epoch in which the exchange is repeated.

        Raises:
            TooFewMembersError: too few are left.
            LeftOutError: the others went on without this island.
            StoreLostError: members are lost, and so is the store.
            PeerLostError: a rank of this island is lost.
        """
        assert self.standing is not None
        self._counterparts.attempt = attempt
        with self._island.leading(self._outcome):
            self.standing = self.standing.enter()
            number = self.standing.entered
            members = self.standing.epoch.members
            while not self._attempt():
                self._change()
                if self.standing.applied >= number:  # All who stay hold the result, which those before have made.
                    break
                members = self.standing.epoch.members
                self.standing = self.standing.enter()
            self.contributed = members

    def _outcome(self) -> tuple[tuple[int, ...], bool]:
        """Who has contributed, and whether newcomers are let in before the next step."""
        return self.contributed, self._called

    def _attempt(self) -> bool:
        """Whether the exchange has happened, for all members. The island holds what all of its ranks hold."""
        assert self.standing is not None
        failure = self._island.do("attempt", len(self._strangers()))
        if failure is not None:
            self._stop(failure)
            return False
        self.standing = self.standing.hold()
        try:
            self._called = self._pass_barrier()
        except LOSSES as error:
            self._stop(FailedAct(error.problem, error.peers if isinstance(error, PeerLostError) else ()))
            return False
        self.standing = self.standing.apply()
        return True

    def _pass_barrier(self) -> bool:
        """Wait until all members hold the result; whether one of them sees a newcomer."""
        assert self.standing is not None
        called = torch.tensor([len(self._strangers())])
        with self._counterparts.call() as group:
            group.global_communicator.allreduce(called, ReduceOp.MAX)
        return bool(called) if self._counterparts.samples is None else self._counterparts.room > 0

    def _strangers(self) -> list[int]:
        """Seats of those who wait, and are no members."""
        members = () if self.standing is None else self.standing.epoch.members
        return [seat for seat in self._presence.roster.waiting() if seat not in members]

    def rest(self) -> None:
        """Between two steps: let newcomers in, if the last exchange said that there are any."""
        if not self._called:
            return
        assert self.standing is not None
        with self._island.leading(self._outcome):
            self.standing = self.standing.stop(resting=True)
            self._presence.tell(report=self.standing.report)
            self._change()
            self._serve()

    def _serve(self) -> None:
        """Give newcomers the state, where it is this island's turn."""
        epoch = self._counterparts.epoch
        if epoch is not None and epoch.served_by(self._presence.seat):
            self._island.do("serve")

    # From one epoch to the next.

    def _stop(self, failure: FailedAct, *, resting: bool = False) -> None:
        """Say that this island takes part in this epoch no more."""
        assert self.standing is not None
        self.standing = self.standing.stop(resting=resting, lost=set(failure.lost) - {self._presence.seat})
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
        waiting, resting = roster.waiting(), standing.report is not None and standing.report.resting
        if resting and standing.applied and self._counterparts.samples is not None:
            waiting = waiting[: self._counterparts.room]  # There are samples for so many until the next exchange.
        return next_epoch(epoch, reports, gone, waiting, self._minimum, roster.left())

    def _cell(self, number: int, propose: Callable[[], Epoch | str] | None = None) -> Epoch | None:
        """Epoch ``number``, if it is written; else what ``propose`` returns, if no other process comes first."""
        name = epoch_name(number)
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
        away, epoch = self._presence.roster.gone(-1), self._counterparts.epoch
        raise TooFewMembersError(
            self.waiting_for or "the others do not come",
            rank=seat,
            peers=[member for member in (() if epoch is None else epoch.members) if member in away],
            elapsed_s=elapsed_s,
            timeout_s=timeout_s,
            advice="Start more processes, or pass minimum= to join_islands. A run that ended needs another name.",
        )

    def _meet(self, epoch: Epoch, *, resting: bool = False) -> bool:
        """Whether the members of ``epoch`` have met; if not, this island has said so."""
        failure = self._enter(epoch)
        if failure is not None:
            self._stop(failure, resting=resting)
            return False
        self._presence.tell(epoch=epoch.number, report=None)
        return True

    def _enter(self, epoch: Epoch) -> FailedAct | None:
        """Have all ranks connect with those of the other members."""
        self.waiting_for = ""
        return self._island.do("enter", epoch.to_json())

    def _left_out(self, epoch: Epoch) -> LeftOutError:
        return LeftOutError(
            f"seat {self._presence.seat} is not in epoch {epoch.number} of seats {list(epoch.members)}: {epoch.why}",
            rank=self._presence.seat,
            peers=epoch.members,
        )

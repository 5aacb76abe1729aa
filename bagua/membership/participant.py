"""One island through its epochs: how it comes in, exchanges, and goes on when others are gone."""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bagua import errors
from bagua.comm import ProcessGroup
from bagua.membership.counterparts import LOSSES, MOST_DONORS, Counterparts
from bagua.membership.epochs import Epoch, Standing, StopReport, first_epoch, next_epoch
from bagua.membership.island import FailedAct, Island
from bagua.membership.state import Attempt, MemberState, epoch_name
from bagua.primitives import differ_by_rounding, quick_digest

_log = logging.getLogger("bagua")
#: How often a newcomer receives the state while the others go on, before it asks them to wait for it.
_ROUNDS = 3
#: What an island tells that compares nothing.
_NOTHING = (0, 0)


class Participant:
    """One rank of an island in the epochs of all. The first rank decides, the others do what it says, each call long.

    Args:
        state: state of this rank.
        island: ranks of its island.
        counterparts: connections of this rank with those of other islands.
        size: islands that begin together, if none has begun yet.
        minimum: members that may go on; None for more than half of the last epoch.
    """

    def __init__(
        self, state: MemberState, island: Island, counterparts: Counterparts, *, size: int, minimum: int | None
    ) -> None:
        self._state, self._island, self._counterparts = state, island, counterparts
        self._size = size
        self._minimum = minimum
        self._timeout_s = state.deadlines.timeout_s
        #: Whether newcomers receive the state before they come in; of this one itself, as long as it may catch up.
        self._early = False
        self._rounds = 0
        self._seen: object = None
        self._alike = Alike()

    # Coming in.

    def join(self, *, early: bool) -> None:
        """Come in: with the others at the beginning, or as a newcomer. Waits until this island has the state.

        Args:
            early: newcomers receive the state before they come in, if they have one rank: several receive it together.

        Raises:
            TooFewMembersError: too few others came.
            StoreLostError: the store does not answer.
            ConfigurationError: no member can send its state.
        """
        if not self._island.leads:
            self._follow()
            return
        self._early = early and self._island.size == 1
        self._state.tell(waiting=True, admit=not self._early)
        with self._island.leading(self._outcome):
            self._wait_for_the_state(time.monotonic())

    def _wait_for_the_state(self, started: float) -> None:
        epoch: Epoch | None = None
        while self._state.standing is None:
            later = self._cell(1 if epoch is None else epoch.number + 1, partial(self._not_yet, epoch))
            if later is None:
                if epoch is not None and self._catch_up(epoch):
                    started = time.monotonic()
                else:
                    self._wait(started)
                continue
            epoch = later
            if self._state.seat in epoch.members and self._cell(epoch.number + 1) is None:
                self._come_in(epoch)

    def _not_yet(self, epoch: Epoch | None) -> Epoch | str:
        """The first epoch, if it is time, or why a newcomer is not in yet: later epochs are not for it to propose.

        Raises:
            TooFewMembersError: no member will let it in.
        """
        if epoch is None:
            waiting, size = self._state.roster.waiting(), self._size
            return first_epoch(waiting) if len(waiting) >= size else f"{len(waiting)} of {size} that begin are here"
        if set(epoch.members) - {self._state.seat} <= self._state.roster.left():
            raise errors.TooFewMembersError(
                f"the run is over: all members of epoch {epoch.number} have left",
                rank=self._state.seat,
                peers=epoch.members,
                advice="Choose another name= for another run.",
            )
        if self._counterparts.closing is not None:
            self._refuse_leftovers(epoch)
        return f"waiting to be let in by seats {list(epoch.members)}, after their next exchange"

    def _refuse_leftovers(self, epoch: Epoch) -> None:
        """A bucket keeps what a killed run leaves. An island that finds it comes alone, and is told whose it is."""
        roster = self._state.roster
        others = [seat for seat in epoch.members if seat != self._state.seat]
        if set(others) - roster.gone(-1).keys():
            return
        hosts = "; ".join(f"seat {seat} was {roster.records[seat].host}" for seat in others)
        raise errors.TooFewMembersError(
            f"another run left objects of this name, and all of its members are gone ({hosts})",
            rank=self._state.seat,
            peers=others,
            advice=f"Choose another name=, or delete what it left: bagua islands clean {self._state.cells.where}",
        )

    def _catch_up(self, epoch: Epoch) -> bool:
        """Receive the state of the last exchange before coming in, if it is not here; whether it was received."""
        state, receiver = self._state, self._counterparts.receiver
        newest = state.roster.exchange_of(epoch.members)
        if not self._early or receiver.exchange >= newest:
            return False
        if self._rounds == _ROUNDS:
            state.tell(admit=True)
        self._rounds += 1
        if self._rounds > _ROUNDS:
            return False
        first = state.seat % len(epoch.members)  # Newcomers ask different members.
        asks = (*epoch.members[first:], *epoch.members[:first])[:MOST_DONORS]
        state.tell(needs=newest, asks=asks)
        try:
            receiver.receive_early(asks, newest, partial(self._wait, time.monotonic(), pause=False))
        except (errors.PeerLostError, errors.CollectiveTimeoutError) as error:
            _log.info("islands: no state for seat %d: %s", state.seat, error.problem)
        state.tell(needs=-1, asks=(), has=receiver.exchange)
        return True

    def _come_in(self, epoch: Epoch) -> None:
        seat = self._state.seat
        if epoch.number == 1 and seat in epoch.donors:
            self._state.tell(waiting=False, epoch=epoch.number)
            self._state.standing = Standing(seat, epoch)
            if not self._meet(epoch, resting=True):
                self._change()
            self._serve()
            return
        failure = self._enter(epoch) or self._get_state(epoch)
        if failure is not None:
            _log.info("islands: no state for seat %d in epoch %d: %s", seat, epoch.number, failure.problem)
            self._state.tell(epoch=epoch.number, has=-1, report=StopReport(epoch.number, complete=False))
            return
        self._state.standing = Standing.of_newcomer(seat, epoch)
        self._state.tell(waiting=False, admit=False, epoch=epoch.number, exchange=epoch.base, report=None)

    def _get_state(self, epoch: Epoch) -> FailedAct | None:
        """Receive the state that ``epoch`` begins with, if it is not here, and go on where the others are."""
        receiver = self._counterparts.receiver
        if self._state.seat in epoch.newcomers:
            return self._island.do("receive", self._donors(epoch)) or self._island.do("take", -1)
        if receiver.exchange != epoch.base:
            return FailedAct(f"it has the state of exchange {receiver.exchange}, and {epoch.base} counts")
        return self._island.do("take", receiver.latest_step())

    # Exchanges.

    def exchange(self, attempt: Attempt, alike: Sequence[torch.Tensor] = ()) -> None:
        """Have one exchange happen, for all members or for none.

        Args:
            attempt: run once, and again in each epoch in which the exchange is repeated.
            alike: tensors that are equal on all islands before it; not changed by ``attempt``. None to compare nothing.

        Raises:
            CollectiveMismatchError: on all islands: ``alike`` differs.
            TooFewMembersError: too few are left.
            LeftOutError: the others went on without this island.
            StoreLostError: members are lost, and so is the store.
            PeerLostError: a rank of this island is lost.
        """
        self._state.attempt = attempt
        if self._island.leads:
            self._alike.begin(alike)
            with self._island.leading(self._outcome):
                self._state.standing = self._standing.enter()
                number = self._standing.entered
                members = self._standing.epoch.members
                while not self._attempt():
                    self._change()
                    if self._standing.applied >= number:  # All who stay hold the result, which those before have made.
                        break
                    members = self._standing.epoch.members
                    self._state.standing = self._standing.enter()
                self._state.contributed = members
        else:
            self._state.contributed, self._state.called = self._follow()
        if not self._early:
            self._counterparts.donor.withdraw()

    def _follow(self) -> Any:
        """Do what the first rank says in this call. It may be gone, and have said nothing, because the store is.

        Raises:
            StoreLostError: the first rank is lost, and so is the store.
            CommunicationError: the call ended on the first rank with it, or that one is lost.
        """
        try:
            return self._island.follow()
        except LOSSES:
            self._state.read_epoch(1)
            raise

    @property
    def _standing(self) -> Standing:
        assert self._state.standing is not None
        return self._state.standing

    def _outcome(self) -> tuple[tuple[int, ...], bool]:
        """Who has contributed, and whether newcomers are let in before the next step."""
        return self._state.contributed, self._state.called

    def _attempt(self) -> bool:
        """Whether the exchange has happened, for all members. The island holds what all of its ranks hold.

        Through a bucket all tell what they have to tell before it: a member whose contribution is there is not needed.
        """
        number, closes = self._standing.entered, self._counterparts.closing is not None
        self._counterparts.exchange = number
        failure = (self._hear() if closes else None) or self._island.do("attempt", number)
        if failure is None and closes and not self._close(counts=True):
            failure = FailedAct("another member stopped before it had the result")
        if failure is None:
            self._state.standing = self._standing.hold()
            failure = None if closes else self._hear()
        if failure is not None:
            self._stop(failure)
            return False
        self._state.standing = self._standing.apply()
        return True

    def _hear(self) -> FailedAct | None:
        """Pass the barrier, and keep what it told; why it was not passed, if it was not."""
        try:
            self._state.called = self._pass_barrier()
        except LOSSES as error:
            return FailedAct(error.problem, error.peers if isinstance(error, errors.PeerLostError) else ())
        return None

    def _close(self, *, counts: bool) -> bool:
        """What the cell says that closes the exchange, as soon as the store answers."""
        closing, started = self._counterparts.closing, time.monotonic()
        assert closing is not None
        while True:
            try:
                return closing.close(self._standing.epoch, self._standing.entered, counts=counts)
            except errors.StoreLostError as error:
                self._state.trouble = error.problem
            self._wait(started)

    def _pass_barrier(self) -> bool:
        """Wait for all members, and compare what they hold alike; whether one of them sees a newcomer."""
        with self._counterparts.call() as group:
            told = torch.tensor([len(self._strangers()), *self._alike.told], device="cpu")
            heard = told.new_empty(group.size * told.numel())
            group.global_communicator.allgather(heard, told)
            rows = heard.view(group.size, -1).tolist()
            self._alike.compare([(digest, kind) for _, digest, kind in rows], group)
        return any(called for called, *_ in rows)

    def _strangers(self, *, admit: bool = True) -> list[int]:
        """Seats of those who wait, and are no members: all, or those who want to be let in without the state."""
        members = () if self._state.standing is None else self._standing.epoch.members
        roster = self._state.roster
        found = [seat for seat in roster.waiting() if seat not in members]
        return [seat for seat in found if roster.records[seat].admit] if admit else found

    def rest(self) -> None:
        """Between two steps: let newcomers in, and offer the state to those who ask for it."""
        if not self._island.leads:
            if self._state.called:
                self._state.contributed, self._state.called = self._follow()
            return
        assert self._state.training is not None
        self._state.at = (self._standing.applied, self._state.training.step())
        self._state.note(exchange=self._standing.applied)
        changes, offers = self._state.called, False
        if self._early and not changes:
            changes, offers = self._look_around(self._standing)
        if not (changes or offers):
            return
        with self._island.leading(self._outcome):
            if changes:
                self._counterparts.donor.tell_step()
                self._state.standing = self._standing.stop(resting=True)
                self._state.tell(report=self._standing.report)
                self._change()
                self._serve()
            else:
                self._island.do("offer", [self._standing.applied, self._standing.epoch.number])

    def _look_around(self, standing: Standing) -> tuple[bool, bool]:
        """Whether the epoch ends, and whether somebody asks for the state; new only after a new look at the others."""
        roster, offered = self._state.roster, self._counterparts.donor.offered
        if roster.records is self._seen:
            return False, False
        self._seen = roster.records
        if roster.reports(standing.epoch.number):  # Somebody lets in a newcomer that this island has not seen.
            return True, False
        strangers = [roster.records[seat] for seat in self._strangers(admit=False)]
        if not strangers and standing.applied > offered:
            self._counterparts.donor.withdraw()
        seat, applied = self._state.seat, standing.applied
        return (
            any(one.has == applied for one in strangers),
            any(seat in one.asks and offered < one.needs <= applied for one in strangers),
        )

    def _serve(self) -> None:
        """Offer newcomers the state, if this island is one of those that do."""
        epoch = self._state.epoch
        if epoch is not None and epoch.newcomers and self._state.seat in self._donors(epoch):
            self._island.do("offer", [epoch.base, epoch.number])

    def _donors(self, epoch: Epoch) -> tuple[int, ...]:
        """Seats of those who give the state that ``epoch`` begins with: several ranks receive that of one island."""
        return epoch.donors[: MOST_DONORS if self._state.size == 1 else 1]

    # From one epoch to the next.

    def _stop(self, failure: FailedAct, *, resting: bool = False) -> None:
        """Say that this island takes part in this epoch no more.

        Through a bucket no exchange comes to count after that. One that counts, and whose result is not here, ends it.
        """
        standing, closes = self._standing, self._counterparts.closing is not None
        misses = closes and standing.entered > standing.applied and self._close(counts=False)
        lost = set(failure.lost) - {self._state.seat}
        self._state.standing = standing.stop(resting=resting, lost=lost, complete=not misses)
        self._state.tell(report=self._standing.report)

    def _change(self) -> None:
        """Go on to the next epoch, as it is written, or propose one."""
        started = time.monotonic()
        self._state.called = False
        while True:
            standing = self._standing
            assert standing.report is not None
            late = time.monotonic() - started > self._timeout_s
            epoch = self._cell(standing.epoch.number + 1, partial(self._successor, standing, late=late))
            if epoch is None:
                self._wait(started, give_up=late)
                continue
            if self._state.seat not in epoch.members:
                self._check_here()  # Others may learn of a goodbye, and go on, before this thread does.
                told = f"is not in epoch {epoch.number} of seats {list(epoch.members)}: {epoch.why}"
                seat = self._state.seat
                raise errors.LeftOutError(f"seat {seat} {told}", rank=seat, peers=epoch.members)
            self._state.standing = standing.follow(epoch)
            if self._meet(epoch, resting=standing.report.resting):
                return

    def _successor(self, standing: Standing, *, late: bool) -> Epoch | str:
        """What follows the epoch of ``standing``, as far as this process can tell."""
        epoch, roster = standing.epoch, self._state.roster
        reports, gone = roster.reports(epoch.number), roster.gone(epoch.number)
        if standing.report is not None:  # The store may not have taken it.
            reports[standing.seat] = standing.report
        if late:
            stuck = set(epoch.members) - reports.keys() - gone.keys()
            gone |= dict.fromkeys(stuck, f"it did not come to its next exchange within {self._timeout_s:g} s")
        ready = {seat: roster.records[seat].has for seat in self._strangers(admit=False)}
        return next_epoch(epoch, reports, gone, self._strangers(), self._minimum, roster.left(), ready)

    def _cell(self, number: int, propose: Callable[[], Epoch | str] | None = None) -> Epoch | None:
        """Epoch ``number``, if it is written; else what ``propose`` returns, if no other process comes first."""
        state = self._state
        try:
            written = state.read_epoch(number)
            if written is not None or propose is None:
                return written
            state.look()
            proposal = propose()
            if not isinstance(proposal, str):
                return Epoch.from_json(state.cells.claim(epoch_name(number), proposal._asdict()))
            if proposal != state.waiting_for:
                _log.info("islands: seat %d: %s", state.seat, proposal)
            state.waiting_for = proposal
        except errors.StoreLostError as error:
            state.trouble = error.problem
        return None

    def _wait(self, started: float, *, give_up: bool = True, pause: bool = True) -> None:
        """Wait for a moment, or give up after ``timeout_s``, unless there is something left to try.

        Without ``pause`` somebody else does what this process waits for: only give up when waiting is no use.
        """
        self._check_here()
        elapsed_s = time.monotonic() - started
        if elapsed_s <= self._timeout_s or not give_up:
            time.sleep(self._state.deadlines.poll_s if pause else 0.0)
            return
        seat, timeout_s = self._state.seat, self._timeout_s
        if self._state.trouble:
            raise errors.StoreLostError(self._state.trouble, rank=seat, elapsed_s=elapsed_s, timeout_s=timeout_s)
        away, epoch = self._state.roster.gone(-1), self._state.epoch
        raise errors.TooFewMembersError(
            self._state.waiting_for or "the others do not come",
            rank=seat,
            peers=[member for member in (() if epoch is None else epoch.members) if member in away],
            elapsed_s=elapsed_s,
            timeout_s=timeout_s,
            advice=f"Start more processes that reach the same {self._state.cells.where}, with the same BAGUA_TOKEN, or "
            "pass minimum= to join_islands. A run that ended needs another name.",
        )

    def _check_here(self) -> None:
        if self._state.has_left:
            raise errors.CommunicatorClosedError("this process has left its islands", rank=self._state.seat)

    def _meet(self, epoch: Epoch, *, resting: bool = False) -> bool:
        """Whether the members of ``epoch`` have met; if not, this island has said so."""
        failure = self._enter(epoch)
        if failure is not None:
            self._stop(failure, resting=resting)
            return False
        self._state.tell(epoch=epoch.number, report=None)
        return True

    def _enter(self, epoch: Epoch) -> FailedAct | None:
        """Have all ranks connect with those of the other members."""
        self._state.waiting_for = ""
        return self._island.do("enter", epoch._asdict())


class Alike:
    """Compares tensors with those of other islands. Islands that only round differently are told so once, and go on.

    Attributes:
        told: two numbers for the other islands, equal on all: a digest of the tensors, and one of their shapes.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._rounds = False
        self.told = _NOTHING

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """An exchange begins, before which all islands hold ``tensors``."""
        self._tensors, self.told = tensors, _NOTHING
        if tensors and not self._rounds:
            kinds = repr([(tuple(one.shape), one.dtype) for one in tensors])
            self.told = (int.from_bytes(quick_digest(tensors), "little", signed=True), 1 + zlib.crc32(kinds.encode()))

    def compare(self, everyone: Sequence[tuple[int, int]], group: ProcessGroup) -> None:
        """Compare what all members of ``group`` told. Collective if they told different things.

        Raises:
            CollectiveMismatchError: on all of them, if there is a difference beyond rounding.
        """
        if _NOTHING in everyone or len(set(everyone)) == 1:
            return
        same_shapes = len({kind for _, kind in everyone}) == 1
        communicator = group.global_communicator
        self._rounds = same_shapes and differ_by_rounding(self._tensors, communicator)
        communicator.barrier()  # A member that raises ends the connections: others may still be receiving.
        if not self._rounds:
            raise _different(everyone, group)
        if communicator.rank == 0:
            _log.warning("islands: what all hold alike differs by rounding. Training goes on, and compares no more")


def _different(everyone: Sequence[tuple[int, int]], group: ProcessGroup) -> errors.CollectiveMismatchError:
    """The error that names the islands that differ from most; all, if there are not more of one kind."""
    (most, count), *others = Counter(everyone).most_common()
    tied = bool(others) and others[0][1] == count
    strange = [seat for seat, one in zip(group.ranks, everyone, strict=True) if tied or one != most]
    rest = [seat for seat in group.ranks if seat not in strange]
    said = f"that of seats {strange} is not that of seats {rest}" if rest else f"seats {strange} have no majority"
    return errors.CollectiveMismatchError(
        f"islands hold different shared state or weights: {said}",
        rank=group.ranks[group.rank],
        peers=strange,
        expected="what all islands have exchanged",
        seen=f"something else on seats {strange}",
        advice="Load weights before the first exchange, on all islands alike, and change weights and shared state on "
        "none alone. join_islands(resume=...) begins another run from one state.",
    )

"""The connections of one rank with its counterparts: the ranks of the same number in the other islands of the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bagua.comm import Cells, KeyStore, PhaseDeadline, ProcessGroup, group_of_seats
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
    StoreLostError,
    TransportUnavailableError,
)
from bagua.membership.epochs import Epoch
from bagua.membership.island import Act
from bagua.membership.presence import Presence
from bagua.membership.roster import Deadlines, SeatRecord, record_name
from bagua.membership.transfer import MOST_DONORS, Donor, Offer, Receiver

_log = logging.getLogger("bagua")
#: Runs an exchange on the group of the epoch, from the same contribution each time.
Attempt = Callable[[ProcessGroup], None]
#: Parts of the state that belong to one island: what a newcomer got first will do.
_OWN_PARTS = frozenset({"optimizers"})
#: Parts that only exchanges change: they are copied for newcomers while training goes on.
_LASTING_PARTS = frozenset({"engine"})
#: What ends an exchange that can be repeated without those who are lost.
LOSSES = (PeerLostError, CollectiveTimeoutError, CommunicatorClosedError)


def epoch_name(number: int) -> str:
    """The cell that says who takes part in epoch ``number``."""
    return f"epoch/{number}"


def connect(
    store: KeyStore, presence: Presence, rank: int, backend: str, deadlines: Deadlines, connecting: PhaseDeadline,
    epoch: Epoch,
) -> ProcessGroup:  # fmt: skip
    """The counterparts of ``rank`` in ``epoch``; a function, so that nothing but its user keeps the islands alive."""
    name, seat = f"epoch{epoch.number}" + (f"/rank{rank}" if rank else ""), presence.seat

    def look() -> None:
        if presence.has_left:
            raise CommunicatorClosedError("this process has left its islands", rank=seat)
        for other, why in presence.roster.gone(epoch.number).items():
            if other in epoch.members and other != seat:
                raise PeerLostError(f"seat {other} does not come to {name}: {why}", rank=seat, peers=[other])

    return group_of_seats(
        store, epoch.members, seat, name, backend=backend, timeout_s=deadlines.timeout_s,
        meet_s=deadlines.meet_s, look=look, connecting=connecting,
    )  # fmt: skip


class Samples(Protocol):
    """What deals out samples, as ``ElasticSampler`` does."""

    @property
    def fact(self) -> str:
        """What all islands have in common."""

    def begin(self) -> None:
        """This island has come in."""

    def said(self) -> int:
        """How many samples this rank has drawn since the last exchange."""

    def hear(self, said: Mapping[int, int]) -> None:
        """What all have said, by seat, if the exchange comes to count."""

    def settle(self) -> None:
        """The exchange counts."""

    def give(self) -> dict[str, Any]:
        """What a newcomer needs."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin where the others are."""


class Counterparts:
    """What one rank does with those of the other islands, when the first rank of its own says so.

    Args:
        presence: seat of the island, and what is seen of the others.
        cells: cells of the store.
        connect: makes the group of an epoch; collective among its members.
        tell: called after each change, with the epoch.
        place: rank of this process in its island.
        ranks: ranks of each island.
        receiver: fetches the state, if this island is a newcomer.

    Attributes:
        give: returns the state of this rank, in parts by name.
        take: replaces it, and goes on after a step: its number, or -1 for the one that the state tells.
        step: returns the number of the last step.
        at: last exchange that counts and last step, when this rank was between two steps last.
        under_way: number of the exchange that is under way, on the first rank of the island.
        attempt: the exchange that is under way.
        samples: deals out samples, and agrees on them in exchanges; None if there is no sampler.
    """

    def __init__(
        self,
        presence: Presence,
        cells: Cells,
        connect: Callable[[Epoch], ProcessGroup],
        tell: Callable[[Epoch], None],
        place: int,
        ranks: int,
        receiver: Receiver,
    ) -> None:
        self._presence = presence
        self._cells = cells
        self._connect = connect
        self._tell = tell
        #: One value, because the thread that gives signs of life reads both.
        self._link: tuple[Epoch, ProcessGroup] | None = None
        self.busy = False
        self._place = place
        self._ranks = ranks
        self._receiver = receiver
        self._donor = Donor(lambda: [*self.at])
        self.give: Callable[[], Mapping[str, object]] = dict
        self.take: Callable[[Mapping[str, Any], int], None] = _ignore
        self.step: Callable[[], int] = int
        self.at = (0, 0)
        self.under_way = 0
        self.attempt: Attempt = _ignore
        self.samples: Samples | None = None
        self._sent_before = 0

    @property
    def epoch(self) -> Epoch | None:
        """That whose members it has met last; None before the first."""
        return None if self._link is None else self._link[0]

    @property
    def group(self) -> ProcessGroup:
        """The members of that epoch."""
        assert self._link is not None
        return self._link[1]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to its counterparts in exchanges, at least."""
        link = self._link
        return self._sent_before + (0 if link is None else link[1].recorder.sent_bytes())

    @property
    def acts(self) -> Mapping[str, tuple[Act, tuple[type[CommunicationError], ...]]]:
        """What the first rank of the island may order, and which errors say that it has not happened."""
        return {
            "enter": (self._enter, (*LOSSES, TransportUnavailableError)),
            "attempt": (self._attempt, LOSSES),
            "receive": (self._receive, (CommunicationError,)),
            "take": (self._take, ()),
            "offer": (self._offer, ()),
        }

    @contextmanager
    def call(self) -> Iterator[ProcessGroup]:
        """The group, for a call that is ended if a member is gone."""
        self.busy = True
        try:
            yield self.group
        finally:
            self.busy = False

    def _enter(self, told: Mapping[str, Any]) -> None:
        """Connect with the members of an epoch. The connections of the one before stay until then.

        Who closes them refuses others that still ask who is lost.
        """
        epoch = Epoch.from_json(told)
        before, self._link = self._link, (epoch, self._connect(epoch))
        if before is not None:
            self._sent_before += before[1].recorder.sent_bytes()
            before[1].close()
        _log.info("islands: epoch %d of seats %s: %s", epoch.number, list(epoch.members), epoch.why)
        self._tell(epoch)

    def _attempt(self, _: object) -> None:
        """Run the exchange, and agree on samples: a rank that has the result has heard what all have said."""
        self._donor.settle()
        with self.call() as group:
            self.attempt(group)
            if self.samples is not None:
                told = torch.empty(group.size, dtype=torch.int64)
                group.global_communicator.allgather(told, torch.tensor([self.samples.said()]))
                self.samples.hear(dict(zip(group.ranks, told.tolist(), strict=True)))

    def _receive(self, donors: Sequence[int]) -> None:
        """Fetch the state that the epoch begins with, for this rank, from its counterparts in these islands."""
        epoch = self.epoch
        assert epoch is not None

        def look() -> dict[int, Offer | None]:
            if self._is_over(epoch):
                raise CommunicatorClosedError("the others went on before it had the state", rank=self._presence.seat)
            offers = self._offers(donors)
            return {seat: offer if offer and offer.epoch == epoch.number else None for seat, offer in offers.items()}

        self._receiver.receive(look)

    def receive_early(self, seats: Sequence[int], needs: int, check: Callable[[], None]) -> None:
        """Fetch the state, or what has changed of it, before this island comes in.

        Args:
            seats: members that were asked.
            needs: number of the exchange that has to be part of it.
            check: raises if it is no use to go on.
        """

        def look() -> dict[int, Offer | None]:
            check()
            offers = self._offers(seats)
            return {seat: offer if offer and offer.exchange >= needs else None for seat, offer in offers.items()}

        self._receiver.receive(look, kept=_OWN_PARTS)

    def donors(self, epoch: Epoch) -> tuple[int, ...]:
        """Seats of those who give the state that ``epoch`` begins with: several ranks receive that of one island."""
        return epoch.donors[: MOST_DONORS if self._ranks == 1 else 1]

    @property
    def has(self) -> int:
        """Number of the exchange whose state was received; -1 if none was."""
        return self._receiver.exchange

    def _offers(self, seats: Sequence[int]) -> dict[int, Offer | None]:
        """What those of ``seats`` offer that are not gone."""
        gone = self._presence.roster.gone(-1)
        here = [seat for seat in seats if seat not in gone]
        try:
            said = self._cells.read([record_name(seat, self._place) for seat in here])
        except StoreLostError as error:
            self._presence.trouble = error.problem
            return dict.fromkeys(here)
        records = [SeatRecord() if one is None else SeatRecord.from_json(one) for one in said]
        return {seat: record.offer for seat, record in zip(here, records, strict=True)}

    def latest_step(self) -> int:
        """The last step of any member that holds what was received; -1 if no member tells."""
        return self._receiver.latest_step()

    def _take(self, step: int) -> None:
        """Replace the state of this rank. All ranks have received theirs: they compare what they load."""
        self.replace(self._receiver.take(), step)

    def replace(self, state: dict[str, Any], step: int) -> None:
        """Replace the state of this rank by what ``state`` returned on another one, and go on after ``step``."""
        samples = state.pop("samples")
        self.take(state, step)
        if self.samples is not None:
            self.samples.take(samples)

    def state(self) -> dict[str, object]:
        """The state of this rank, with its position in the data."""
        return {**self.give(), "samples": None if self.samples is None else self.samples.give()}

    def _offer(self, told: Sequence[int]) -> None:
        """Offer newcomers the state: that of the last exchange, told with the epoch."""
        exchange, epoch = told
        offer = self._donor.offer(self.state(), exchange, epoch, _LASTING_PARTS)
        if offer.problem:
            _log.warning("islands: newcomers cannot come in, because the state cannot be sent: %s", offer.problem)
        self._presence.tell(offer=offer)

    @property
    def offered(self) -> int:
        """Number of the exchange whose state this rank offers; -1 for none."""
        offer = self._donor.offered
        return -1 if offer is None else offer.exchange

    def withdraw(self) -> None:
        """Offer nothing any more."""
        if self.offered >= 0:
            self._donor.withdraw()
            self._presence.tell(offer=None)

    # From the thread that gives signs of life.

    def watch(self) -> None:
        """End a call that waits for a member that is gone, or that has stopped."""
        link = self._link
        if not self.busy or link is None:
            return
        epoch, group = link
        roster = self._presence.roster
        gone = {seat: why for seat, why in roster.gone(epoch.number).items() if seat in epoch.members}
        reports = roster.reports(epoch.number)
        # Who rests before this exchange does not come to it; who rests after it has sent its part.
        stopped = [seat for seat, one in reports.items() if not one.resting or one.held < self.under_way]
        if gone:
            seat, why = next(iter(gone.items()))
            group.abort(why, seat)
        elif stopped or self._is_over(epoch):
            group.abort("it went on to the next epoch")

    def _is_over(self, epoch: Epoch) -> bool:
        try:
            return self._cells.read([epoch_name(epoch.number + 1)])[0] is not None
        except StoreLostError as error:
            self._presence.trouble = error.problem
            return False

    def abort(self, reason: str) -> None:
        """End whatever waits for other islands, from any thread."""
        if self._link is not None:
            self._link[1].abort(reason)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._donor.close()
        if self._link is not None:
            self._link[1].close()


def _ignore(*_: object) -> None:
    """What is done before anything is known."""

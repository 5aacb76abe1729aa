"""The connections of one rank with its counterparts: the ranks of the same number in the other islands of the epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua.comm import KeyStore, PhaseDeadline, ProcessGroup, group_of_seats
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
    StoreLostError,
    TransportUnavailableError,
)
from bagua.membership.epochs import Epoch
from bagua.membership.island import Acts
from bagua.membership.state import MemberState, SeatRecord, record_name
from bagua.membership.transfer import MOST_DONORS, Donor, Offer, Receiver

_log = logging.getLogger("bagua")
#: Parts of the state that belong to one island: what a newcomer got first will do.
_OWN_PARTS = frozenset({"optimizers"})
#: Parts that only exchanges change: they are copied for newcomers while training goes on.
_LASTING_PARTS = frozenset({"engine"})
#: What ends an exchange that can be repeated without those who are lost.
LOSSES = (PeerLostError, CollectiveTimeoutError, CommunicatorClosedError)


class Counterparts:
    """What one rank does with those of the other islands, when the first rank of its own says so.

    Args:
        state: state of this rank.
        store: store through which the members of an epoch connect.
        backend: name of the backend that connects them.
        tell: function to call after each change, with the epoch.

    Attributes:
        busy: True while a call waits for other islands.
    """

    def __init__(self, state: MemberState, store: KeyStore, backend: str, tell: Callable[[Epoch], None]) -> None:
        deadlines = state.deadlines
        self._state, self._store, self._backend, self._tell = state, store, backend, tell
        self._connecting = PhaseDeadline(deadlines.meet_s, deadlines.silence_s)
        self._receiver = Receiver(state.seat, deadlines.timeout_s, deadlines.beat_s / 4)
        self._donor = Donor(lambda: [*state.at])
        self._sent_before = 0
        self.busy = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to its counterparts in exchanges, at least."""
        link = self._state.link
        return self._sent_before + (0 if link is None else link[1].recorder.sent_bytes())

    @property
    def acts(self) -> Acts:
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
        """The members of the epoch, for a call that is ended if one of them is gone."""
        assert self._state.link is not None
        self.busy = True
        try:
            yield self._state.link[1]
        finally:
            self.busy = False

    def _enter(self, told: Mapping[str, Any]) -> None:
        """Connect with the members of an epoch. The connections of the one before stay until then.

        Who closes them refuses others that still ask who is lost.
        """
        epoch = Epoch.from_json(told)
        before, self._state.link = self._state.link, (epoch, self._connect(epoch))
        if before is not None:
            self._sent_before += before[1].recorder.sent_bytes()
            before[1].close()
        _log.info("islands: epoch %d of seats %s: %s", epoch.number, list(epoch.members), epoch.why)
        self._tell(epoch)

    def _connect(self, epoch: Epoch) -> ProcessGroup:
        """The ranks of this number in the islands of ``epoch``. Collective among them."""
        state, deadlines = self._state, self._state.deadlines
        name = f"epoch{epoch.number}" + (f"/rank{state.rank}" if state.rank else "")

        def look() -> None:
            if state.has_left:
                raise CommunicatorClosedError("this process has left its islands", rank=state.seat)
            for other, why in state.roster.gone(epoch.number).items():
                if other in epoch.members and other != state.seat:
                    raise PeerLostError(f"seat {other} does not come to {name}: {why}", rank=state.seat, peers=[other])

        return group_of_seats(
            self._store, epoch.members, state.seat, name, backend=self._backend, timeout_s=deadlines.timeout_s,
            meet_s=deadlines.meet_s, look=look, connecting=self._connecting,
        )  # fmt: skip

    def _attempt(self, _: object) -> None:
        """Run the exchange, and agree on samples: a rank that has the result has heard what all have said."""
        attempt, samples = self._state.attempt, self._state.samples
        assert attempt is not None
        self._donor.settle()
        with self.call() as group:
            attempt(group)
            if samples is not None:
                told = torch.empty(group.size, dtype=torch.int64)
                group.global_communicator.allgather(told, torch.tensor([samples.said()]))
                samples.hear(dict(zip(group.ranks, told.tolist(), strict=True)))

    def _receive(self, donors: Sequence[int]) -> None:
        """Fetch the state that the epoch begins with, for this rank, from its counterparts in these islands."""
        epoch = self._state.epoch
        assert epoch is not None

        def look() -> dict[int, Offer | None]:
            if self._is_over(epoch):
                raise CommunicatorClosedError("the others went on before it had the state", rank=self._state.seat)
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
        return epoch.donors[: MOST_DONORS if self._state.size == 1 else 1]

    @property
    def has(self) -> int:
        """Number of the exchange whose state was received; -1 if none was."""
        return self._receiver.exchange

    def _offers(self, seats: Sequence[int]) -> dict[int, Offer | None]:
        """What those of ``seats`` offer that are not gone."""
        gone = self._state.roster.gone(-1)
        here = [seat for seat in seats if seat not in gone]
        try:
            said = self._state.cells.read([record_name(seat, self._state.rank) for seat in here])
        except StoreLostError as error:
            self._state.trouble = error.problem
            return dict.fromkeys(here)
        records = [SeatRecord() if one is None else SeatRecord.from_json(one) for one in said]
        return {seat: record.offer for seat, record in zip(here, records, strict=True)}

    def latest_step(self) -> int:
        """The last step of any member that holds what was received; -1 if no member tells."""
        return self._receiver.latest_step()

    def _take(self, step: int) -> None:
        """Replace the state of this rank. All ranks have received theirs: they compare what they load."""
        self._state.take(self._receiver.take(), step)

    def _offer(self, told: Sequence[int]) -> None:
        """Offer newcomers the state: that of the last exchange, told with the epoch."""
        exchange, epoch = told
        offer = self._donor.offer(self._state.give(), exchange, epoch, _LASTING_PARTS)
        if offer.problem:
            _log.warning("islands: newcomers cannot come in, because the state cannot be sent: %s", offer.problem)
        self._state.tell(offer=offer)

    @property
    def offered(self) -> int:
        """Number of the exchange whose state this rank offers; -1 for none."""
        offer = self._donor.offered
        return -1 if offer is None else offer.exchange

    def withdraw(self) -> None:
        """Offer nothing any more."""
        if self.offered >= 0:
            self._donor.withdraw()
            self._state.tell(offer=None)

    # From the thread that gives signs of life.

    def watch(self) -> None:
        """End a call that waits for a member that is gone, or that has stopped."""
        link = self._state.link
        if not self.busy or link is None:
            return
        epoch, group = link
        roster = self._state.roster
        gone = {seat: why for seat, why in roster.gone(epoch.number).items() if seat in epoch.members}
        reports = roster.reports(epoch.number)
        # Who rests before this exchange does not come to it; who rests after it has sent its part.
        entered = 0 if self._state.standing is None else self._state.standing.entered
        stopped = [seat for seat, one in reports.items() if not one.resting or one.held < entered]
        if gone:
            seat, why = next(iter(gone.items()))
            group.abort(why, seat)
        elif stopped or self._is_over(epoch):
            group.abort("it went on to the next epoch")

    def _is_over(self, epoch: Epoch) -> bool:
        try:
            return self._state.read_epoch(epoch.number + 1) is not None
        except StoreLostError as error:
            self._state.trouble = error.problem
            return False

    def abort(self, reason: str) -> None:
        """End whatever waits for other islands, from any thread."""
        if self._state.link is not None:
            self._state.link[1].abort(reason)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._donor.close()
        if self._state.link is not None:
            self._state.link[1].close()

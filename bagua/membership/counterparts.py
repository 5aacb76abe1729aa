"""The connections of one rank with its counterparts: the ranks of the same number in the other islands of the epoch."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bagua import errors
from bagua.comm import Cells, PhaseDeadline, ProcessGroup, Store, bucket_of, group_of_seats
from bagua.membership.epochs import Epoch
from bagua.membership.island import Acts
from bagua.membership.state import MemberState
from bagua.membership.transfer import Donor, Receiver

_log = logging.getLogger("bagua")
#: What ends an exchange that can be repeated without those who are lost.
LOSSES = (errors.PeerLostError, errors.CollectiveTimeoutError, errors.CommunicatorClosedError)


class Closing:
    """Closes exchanges through a bucket, for one rank of an island. A cell lists whose contributions count.

    What is in a bucket stays, so a member that has read all contributions may have them count without a barrier, also
    that of a member that has died since. A member that stops has to ask first whether the exchange counts.

    Args:
        cells: cells of the store.
        seat: seat of the island.
    """

    def __init__(self, cells: Cells, seat: int) -> None:
        self._cells, self._seat = cells, seat
        self._last = (0, 0)
        self._over: deque[str] = deque()

    def close(self, epoch: Epoch, exchange: int, *, counts: bool) -> bool:
        """Whether the exchange counts, for all members of ``epoch`` or for nobody: ``counts``, if no other came first.

        Raises:
            StoreLostError: the store does not answer. It may be decided all the same.
        """
        wanted = epoch.members if counts else ()
        found = bool(self._cells.claim(_cell_of(epoch.number, exchange), list(wanted)))
        if found and counts and self._seat == epoch.members[0]:
            if self._last == (epoch.number, exchange - 1):  # All who contribute now have read the one before.
                self._over.append(_cell_of(*self._last))
            self._last = epoch.number, exchange
        return found

    def tidy(self) -> None:
        """Delete cells that nobody reads any more, if the store answers."""
        while self._over:
            with contextlib.suppress(errors.StoreLostError):
                self._cells.drop(self._over[0])
            self._over.popleft()


def _cell_of(epoch: int, exchange: int) -> str:
    return f"closed/{epoch}/{exchange}"


class Counterparts:
    """What one rank does with those of the other islands, when the first rank of its own says so.

    Args:
        state: state of this rank.
        store: store through which the members of an epoch connect.
        backend: name of the backend that connects them.
        tell: function to call after each change, with the epoch.

    Attributes:
        donor: part that offers the state of this rank.
        receiver: part that fetches it, if this island is a newcomer.
        busy: True while a call waits for other islands.
        closing: cells that close exchanges, through a bucket; None where a barrier does.
        exchange: number of the exchange that was begun last.
    """

    def __init__(self, state: MemberState, store: Store, backend: str, tell: Callable[[Epoch], None]) -> None:
        self._state, self._store, self._backend, self._tell = state, store, backend, tell
        self._connecting = PhaseDeadline(state.deadlines.meet_s, state.deadlines.silence_s)
        bucket = bucket_of(store)
        self.donor, self.receiver = Donor(state, bucket), Receiver(state, bucket)
        self.closing = None if bucket is None else Closing(state.cells, state.seat)
        self._sent_before = 0
        self.busy = False
        self.exchange = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to its counterparts in exchanges, at least."""
        link = self._state.link
        return self._sent_before + (0 if link is None else link[1].recorder.sent_bytes())

    @property
    def acts(self) -> Acts:
        """What the first rank of the island may order, and which errors say that it has not happened."""
        return {
            "enter": (self._enter, (*LOSSES, errors.TransportUnavailableError)),
            "attempt": (self._attempt, LOSSES),
            "receive": (self.receiver.receive, (errors.CommunicationError,)),
            "take": (self.receiver.take, ()),
            "offer": (self.donor.offer, ()),
        }

    @contextlib.contextmanager
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
                raise errors.CommunicatorClosedError("this process has left its islands", rank=state.seat)
            for other, why in state.roster.gone(epoch.number).items():
                if other in epoch.members and other != state.seat:
                    raise errors.PeerLostError(
                        f"seat {other} does not come to {name}: {why}", rank=state.seat, peers=[other]
                    )

        return group_of_seats(
            self._store, epoch.members, state.seat, name, backend=self._backend, timeout_s=deadlines.timeout_s,
            meet_s=deadlines.meet_s, look=look, connecting=self._connecting,
        )  # fmt: skip

    def _attempt(self, number: int) -> None:
        """Agree on samples, and run the exchange: a rank that has the result has heard what all have said."""
        attempt, samples = self._state.attempt, self._state.samples
        assert attempt is not None
        self.exchange = number
        self.donor.settle()
        with self.call() as group:
            if samples is not None:
                told = torch.empty(group.size, dtype=torch.int64, device="cpu")
                group.global_communicator.allgather(told, torch.tensor([samples.said()], device="cpu"))
                samples.hear(dict(zip(group.ranks, told.tolist(), strict=True)))
            attempt(group)

    # From the thread that gives signs of life.

    def watch(self) -> None:
        """End a call that waits for a member that is gone, or that has stopped."""
        link = self._state.link
        if self.closing is not None:
            self.closing.tidy()
        if not self.busy or link is None:
            return
        epoch, group = link
        roster = self._state.roster
        gone = {seat: why for seat, why in roster.gone(epoch.number).items() if seat in epoch.members}
        reports = roster.reports(epoch.number)
        # Who rests before this exchange does not come to it; who rests after it has sent its part.
        number = self.exchange
        stopped = [seat for seat, one in reports.items() if not one.resting or one.held < number]
        if self._state.is_over(epoch):
            group.abort("it went on to the next epoch")
        elif (gone or stopped) and not self._counts(epoch, number):
            seat, why = next(iter(gone.items()), (None, "it went on to the next epoch"))
            group.abort(why, seat)

    def _counts(self, epoch: Epoch, number: int) -> bool:
        """Whether all that an exchange needs is in the bucket, or may be: then nobody has to come for it."""
        if self.closing is None:
            return False
        try:
            return self.closing.close(epoch, number, counts=False)
        except errors.StoreLostError as error:
            self._state.trouble = error.problem
            return True

    def abort(self, reason: str) -> None:
        """End whatever waits for other islands, from any thread."""
        if self._state.link is not None:
            self._state.link[1].abort(reason)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.donor.close()
        if self._state.link is not None:
            self._state.link[1].close()

"""The connections of one rank with its counterparts: the ranks of the same number in the other islands of the epoch."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua import comm, errors
from bagua.membership.epochs import Epoch
from bagua.membership.island import Acts
from bagua.membership.state import MemberState, Offer, SeatRecord, record_name

_log = logging.getLogger("bagua")
#: More sources than a few make no link faster, and each of them copies its state.
MOST_DONORS = 4
#: Parts of the state that belong to one island: what a newcomer got first will do.
_OWN_PARTS = frozenset({"optimizers"})
#: Parts that only exchanges change: they are copied for newcomers while training goes on.
_LASTING_PARTS = frozenset({"engine"})


class Donor:
    """Offers the state of one rank, in its record; the rank goes on when it is copied.

    Args:
        state: state of the rank.
        bucket: bucket in which newcomers find it; None if they connect with this rank.
    """

    def __init__(self, state: MemberState, bucket: comm.ObjectBucket | None = None) -> None:
        self._state = state
        self._shelf = None if bucket is None else comm.PieceShelf(bucket, lambda: [*state.at])
        self._server = self._shelf or comm.PieceServer(lambda: [*state.at])

    def offer(self, told: Sequence[int]) -> None:
        """Offer newcomers the state after the exchange that is told, in the epoch that is told with it."""
        exchange, epoch = told
        try:
            encoded = {name: comm.encoded_later(part) for name, part in self._state.give().items()}
            for name in encoded.keys() - _LASTING_PARTS:
                encoded[name][1]()
            later = [encoded[name][1] for name in encoded.keys() & _LASTING_PARTS]
            contents = {name: memory for name, (memory, _) in encoded.items()}
            offer = Offer(exchange, epoch, "", self._server.offer(contents, lambda: comm.run_all(later)))
        except (errors.BaguaError, OSError) as error:  # The newcomer has to go elsewhere; this member trains on.
            offer = Offer(exchange, epoch, error.problem if isinstance(error, errors.BaguaError) else str(error))
            _log.warning("islands: newcomers cannot come in, because the state cannot be sent: %s", offer.problem)
        self._state.tell(offer=offer)

    @property
    def offered(self) -> int:
        """Number of the exchange whose state is offered; -1 for none."""
        offer = self._state.record.offer
        return -1 if offer is None else offer.exchange

    def settle(self) -> None:
        """Wait until all of the state is copied, which is about to change."""
        self._server.wait_until_filled()

    def tell_step(self) -> None:
        """Say how far this rank is, where newcomers cannot ask it."""
        if self._shelf is not None and self.offered >= 0:
            self._shelf.tell_now()

    def withdraw(self) -> None:
        """Offer nothing any more, and give the memory back."""
        if self.offered >= 0:
            self._server.withdraw()
            self._state.tell(offer=None)

    def close(self) -> None:
        """Give the memory back, and end all threads. Idempotent."""
        self._server.withdraw()
        self._server.close()


class Receiver:
    """Fetches the state for one rank of a newcomer, and again what has changed.

    Args:
        state: state of the rank.
        bucket: bucket in which members put theirs; None if this rank connects with them.

    Attributes:
        exchange: number of the last exchange that is part of what was received; -1 before.
    """

    def __init__(self, state: MemberState, bucket: comm.ObjectBucket | None = None) -> None:
        self._state, self._bucket = state, bucket
        self._timeout_s = state.deadlines.timeout_s
        self._deadline = comm.PhaseDeadline(self._timeout_s)
        self._contents: dict[str, bytearray] = {}
        self._sources: dict[comm.Source, tuple[int, Offer]] = {}
        self.exchange = -1

    def receive(self, seats: Sequence[int]) -> None:
        """Fetch the state that the epoch begins with from these members; see ``receive_early`` for what it raises."""
        state, epoch = self._state, self._state.epoch
        assert epoch is not None

        def check() -> None:
            if state.is_over(epoch):
                raise errors.CommunicatorClosedError("the others went on before it had the state", rank=state.seat)

        self._receive(seats, lambda offer: offer.epoch == epoch.number, check)

    def receive_early(self, seats: Sequence[int], needs: int, check: Callable[[], None]) -> None:
        """Fetch the state after exchange ``needs`` or a later one, or what has changed, before this island comes in.

        Raises:
            PeerLostError: no member is left that offers it.
            CollectiveTimeoutError: no member has offered it.
            ConfigurationError: no member can send it.
        """
        self._receive(seats, lambda offer: offer.exchange >= needs, check, _OWN_PARTS & self._contents.keys())

    def _receive(
        self,
        seats: Sequence[int],
        serves: Callable[[Offer], bool],
        check: Callable[[], None],
        kept: frozenset[str] = frozenset(),
    ) -> None:
        started = time.monotonic()
        latest: dict[int, Offer] = {}

        def find() -> list[comm.Source]:
            check()
            offers = self._offers(seats)
            latest.update({seat: offer for seat, offer in offers.items() if offer is not None and serves(offer)})
            known = {seat: latest.get(seat) for seat in offers}  # The store may not answer each time.
            self._refuse_without_hope(known, time.monotonic() - started)
            found = {offer.source: (seat, offer) for seat, offer in known.items() if offer and offer.source}
            self._sources.update(found)
            return list(found)

        fetch = comm.Fetch(self._contents, kept, self._deadline, self._bucket)
        fetched = fetch.run(find, self._state.deadlines.beat_s / 4)
        if fetched is None:
            whys = [f"seat {self._sources[source][0]}: {why}" for source, why in fetch.failures.items()]
            raise errors.PeerLostError(
                f"nobody is left who gives seat {self._state.seat} the state ({'; '.join(whys)})",
                rank=self._state.seat,
                peers=sorted({self._sources[source][0] for source in fetch.failures}),
            )
        source, contents = fetched
        self._contents.update(contents)
        self.exchange = self._sources[source][1].exchange

    def _offers(self, seats: Sequence[int]) -> dict[int, Offer | None]:
        """What those of ``seats`` offer to this rank that are not gone."""
        state = self._state
        gone = state.roster.gone(-1)
        here = [seat for seat in seats if seat not in gone]
        try:
            said = state.cells.read([record_name(seat, state.rank) for seat in here])
        except errors.StoreLostError as error:
            state.trouble = error.problem
            return dict.fromkeys(here)
        return {seat: SeatRecord.from_json(one).offer for seat, one in zip(here, said, strict=True)}

    def _refuse_without_hope(self, offers: Mapping[int, Offer | None], elapsed_s: float) -> None:
        own = self._state.seat
        if not offers:
            raise errors.PeerLostError(f"all members that have the state are lost; seat {own} has none", rank=own)
        problems = {seat: offer.problem for seat, offer in offers.items() if offer is not None and offer.problem}
        if len(problems) == len(offers):
            seat, problem = next(iter(problems.items()))
            raise errors.ConfigurationError(
                f"newcomers cannot come in, because members cannot send their state; seat {seat}: {problem}",
                argument="between",
                expected="a model and optimizers whose state_dict() holds numbers, strings, tensors, and containers",
                seen=f"seats {sorted(problems)} that cannot send theirs",
            )
        if elapsed_s > self._timeout_s and not any(offers.values()):
            raise errors.CollectiveTimeoutError(
                f"no member has offered seat {own} the state", elapsed_s=elapsed_s, timeout_s=self._timeout_s
            )

    def latest_step(self) -> int:
        """The last step of any member that holds the same state, as far as they answer; -1 if none does."""
        ends = [comm.ask_now(source, min(self._timeout_s, 1.0), self._bucket) for source in self._sources]
        return max((end[1] for end in ends if end is not None and end[0] == self.exchange), default=-1)

    def take(self, step: int) -> None:
        """Replace the state of this rank by what was received, which is then forgotten here, and go on after ``step``.

        All ranks of the island have received theirs: they compare what they load.
        """
        contents, self._contents = self._contents, {}
        parts = {name: comm.decode(torch.frombuffer(content, dtype=torch.uint8)) for name, content in contents.items()}
        self._state.take(parts, step)


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

    def __init__(self, cells: comm.Cells, seat: int) -> None:
        self._cells, self._seat = cells, seat
        self._last = (0, 0)
        self._over: deque[str] = deque()

    def close(self, epoch: Epoch, exchange: int, *, counts: bool) -> bool:
        """Whether the exchange counts, for all members of ``epoch`` or for none: ``counts``, if no other came first.

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
        """Delete cells that no member reads any more, if the store answers."""
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

    def __init__(self, state: MemberState, store: comm.Store, backend: str, tell: Callable[[Epoch], None]) -> None:
        self._state, self._store, self._backend, self._tell = state, store, backend, tell
        self._connecting = comm.PhaseDeadline(state.deadlines.meet_s, state.deadlines.silence_s)
        bucket = comm.bucket_of(store)
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
    def call(self) -> Iterator[comm.ProcessGroup]:
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

    def _connect(self, epoch: Epoch) -> comm.ProcessGroup:
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

        return comm.group_of_seats(
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
        """Whether all that an exchange needs is in the bucket, or may be: then no member has to come for it."""
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

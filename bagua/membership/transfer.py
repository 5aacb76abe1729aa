"""How a newcomer gets the state: members offer it and train on, and the newcomer fetches it from several at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bagua import errors
from bagua.comm import (
    Fetch,
    ObjectBucket,
    PhaseDeadline,
    PieceServer,
    PieceShelf,
    Source,
    ask_now,
    decode,
    encoded_later,
)
from bagua.membership.state import MemberState, Offer, SeatRecord, record_name

_log = logging.getLogger("bagua")
#: More sources than a few make no link faster, and each of them copies its state.
MOST_DONORS = 4
#: Parts of the state that belong to one island: what a newcomer got first will do.
_OWN_PARTS = frozenset({"optimizers"})
#: Parts that only exchanges change: they are copied for newcomers while training goes on.
_LASTING_PARTS = frozenset({"engine"})


def _call_all(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


class Donor:
    """Offers the state of one rank, in its record; the rank goes on when it is copied.

    Args:
        state: state of the rank.
        bucket: bucket in which newcomers find it; None if they connect with this rank.
    """

    def __init__(self, state: MemberState, bucket: ObjectBucket | None = None) -> None:
        self._state = state
        self._shelf = None if bucket is None else PieceShelf(bucket, lambda: [*state.at])
        self._server = self._shelf or PieceServer(lambda: [*state.at])

    def offer(self, told: Sequence[int]) -> None:
        """Offer newcomers the state after the exchange that is told, in the epoch that is told with it."""
        exchange, epoch = told
        try:
            encoded = {name: encoded_later(part) for name, part in self._state.give().items()}
            for name in encoded.keys() - _LASTING_PARTS:
                encoded[name][1]()
            later = [encoded[name][1] for name in encoded.keys() & _LASTING_PARTS]
            contents = {name: memory for name, (memory, _) in encoded.items()}
            offer = Offer(exchange, epoch, "", self._server.offer(contents, lambda: _call_all(later)))
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

    def __init__(self, state: MemberState, bucket: ObjectBucket | None = None) -> None:
        self._state, self._bucket = state, bucket
        self._timeout_s = state.deadlines.timeout_s
        self._deadline = PhaseDeadline(self._timeout_s)
        self._contents: dict[str, bytearray] = {}
        self._sources: dict[Source, tuple[int, Offer]] = {}
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

        def find() -> list[Source]:
            check()
            offers = self._offers(seats)
            latest.update({seat: offer for seat, offer in offers.items() if offer is not None and serves(offer)})
            known = {seat: latest.get(seat) for seat in offers}  # The store may not answer each time.
            self._refuse_without_hope(known, time.monotonic() - started)
            found = {offer.source: (seat, offer) for seat, offer in known.items() if offer and offer.source}
            self._sources.update(found)
            return list(found)

        fetch = Fetch(self._contents, kept, self._deadline, self._bucket)
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
        ends = [ask_now(source, min(self._timeout_s, 1.0), self._bucket) for source in self._sources]
        return max((end[1] for end in ends if end is not None and end[0] == self.exchange), default=-1)

    def take(self, step: int) -> None:
        """Replace the state of this rank by what was received, which is then forgotten here, and go on after ``step``.

        All ranks of the island have received theirs: they compare what they load.
        """
        contents, self._contents = self._contents, {}
        parts = {name: decode(torch.frombuffer(content, dtype=torch.uint8)) for name, content in contents.items()}
        self._state.take(parts, step)

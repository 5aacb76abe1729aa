"""How a newcomer gets the state: members offer it and train on, and the newcomer fetches it from several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bagua.comm import Fetch, PhaseDeadline, PieceServer, Source, ask_now, decode, encoded_later
from bagua.errors import BaguaError, CollectiveTimeoutError, ConfigurationError, PeerLostError

#: More sources than a few make no link faster, and each of them copies its state.
MOST_DONORS = 4


class Offer(NamedTuple):
    """What a member says when it was asked for the state.

    Attributes:
        exchange: number of the last exchange that is part of the state.
        epoch: number of the epoch in which it was offered.
        problem: reason why the state cannot be sent; empty if it can.
        source: place to fetch it; None with a problem.
    """

    exchange: int
    epoch: int
    problem: str = ""
    source: Source | None = None

    @classmethod
    def from_json(cls, found: Sequence[Any] | None) -> Offer | None:
        """From what the store keeps."""
        if found is None:
            return None
        exchange, epoch, problem, source = found
        return cls(exchange, epoch, problem, None if source is None else Source(*source))


def _call_all(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


class Donor:
    """Offers the state of one rank; the rank goes on when it is copied.

    Args:
        now: returns the last exchange that counts for this rank, and the number of its last step.

    Attributes:
        offered: latest offer; None if there is none, or it was withdrawn.
    """

    def __init__(self, now: Callable[[], list[int]]) -> None:
        self._server = PieceServer(now)
        self.offered: Offer | None = None

    def offer(
        self, state: Mapping[str, object], exchange: int, epoch: int, lasting: frozenset[str] = frozenset()
    ) -> Offer:
        """Offer ``state``, in the place of what was offered before.

        Args:
            state: parts by name, made of numbers, strings, tensors, and containers of these.
            exchange: number of the last exchange that is part of it.
            epoch: number of the epoch.
            lasting: names of parts that stay as they are until ``settle``, which are copied in another thread.
        """
        try:
            encoded = {name: encoded_later(part) for name, part in state.items()}
            for name in encoded.keys() - lasting:
                encoded[name][1]()
            later = [encoded[name][1] for name in encoded.keys() & lasting]
            contents = {name: memory for name, (memory, _) in encoded.items()}
            self.offered = Offer(exchange, epoch, "", self._server.offer(contents, lambda: _call_all(later)))
        except (BaguaError, OSError) as error:  # The newcomer has to go elsewhere; this member trains on.
            self.offered = Offer(exchange, epoch, error.problem if isinstance(error, BaguaError) else str(error))
        return self.offered

    def settle(self) -> None:
        """Wait until all of the state is copied, which is about to change."""
        self._server.wait_until_filled()

    def withdraw(self) -> None:
        """Give the memory back."""
        self.offered = None
        self._server.withdraw()

    def close(self) -> None:
        """Offer nothing any more, and end all threads. Idempotent."""
        self.withdraw()
        self._server.close()


class Receiver:
    """Fetches the state for one rank of a newcomer, and again what has changed.

    Args:
        seat: seat of the newcomer.
        timeout_s: how long to wait for an offer, and the longest time that a piece may take, in seconds.
        poll_s: seconds between two looks at who offers.

    Attributes:
        exchange: number of the last exchange that is part of what was received; -1 before.
        received_bytes: bytes that came in the last fetch, by the seat of the member that gave them.
    """

    def __init__(self, seat: int, timeout_s: float, poll_s: float) -> None:
        self._seat = seat
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._deadline = PhaseDeadline(timeout_s)
        self._contents: dict[str, bytearray] = {}
        self._sources: dict[Source, tuple[int, Offer]] = {}
        self.exchange = -1
        self.received_bytes: dict[int, int] = {}

    def receive(self, look: Callable[[], Mapping[int, Offer | None]], kept: frozenset[str] = frozenset()) -> None:
        """Fetch the state from those who offer it.

        Args:
            look: returns what each member that can be asked offers, by seat. It may raise, which ends the fetch.
            kept: parts that were received before and need not be newer.

        Raises:
            PeerLostError: no member is left that offers it.
            CollectiveTimeoutError: no member has offered it.
            ConfigurationError: no member can send it.
        """
        started = time.monotonic()
        names = frozenset(kept & self._contents.keys())
        latest: dict[int, Offer] = {}

        def find() -> list[Source]:
            offers = look()
            latest.update({seat: offer for seat, offer in offers.items() if offer is not None})
            known = {seat: latest.get(seat) for seat in offers}  # The store may not answer each time.
            self._refuse_without_hope(known, time.monotonic() - started)
            found = {offer.source: (seat, offer) for seat, offer in known.items() if offer and offer.source}
            self._sources.update(found)
            return list(found)

        fetch = Fetch(self._contents, names, self._deadline)
        fetched = fetch.run(find, self._poll_s)
        self.received_bytes = {self._sources[source][0]: count for source, count in fetch.received_bytes.items()}
        if fetched is None:
            whys = [f"seat {self._sources[source][0]}: {why}" for source, why in fetch.failures.items()]
            raise PeerLostError(
                f"nobody is left who gives seat {self._seat} the state ({'; '.join(whys)})",
                rank=self._seat,
                peers=sorted({self._sources[source][0] for source in fetch.failures}),
            )
        source, contents = fetched
        self._contents.update(contents)
        self.exchange = self._sources[source][1].exchange

    def _refuse_without_hope(self, offers: Mapping[int, Offer | None], elapsed_s: float) -> None:
        if not offers:
            raise PeerLostError(
                f"all members that have the state are lost; seat {self._seat} has none", rank=self._seat
            )
        problems = {seat: offer.problem for seat, offer in offers.items() if offer is not None and offer.problem}
        if len(problems) == len(offers):
            seat, problem = next(iter(problems.items()))
            raise ConfigurationError(
                f"newcomers cannot come in, because members cannot send their state; seat {seat}: {problem}",
                argument="between",
                expected="a model and optimizers whose state_dict() holds numbers, strings, tensors, and containers",
                seen=f"seats {sorted(problems)} that cannot send theirs",
            )
        if elapsed_s > self._timeout_s and not any(offers.values()):
            raise CollectiveTimeoutError(
                f"no member has offered seat {self._seat} the state", elapsed_s=elapsed_s, timeout_s=self._timeout_s
            )

    def latest_step(self) -> int:
        """The last step of any member that holds the same state, as far as they answer; -1 if none does."""
        ends = [ask_now(source, min(self._timeout_s, 1.0)) for source in self._sources]
        return max((end[1] for end in ends if end is not None and end[0] == self.exchange), default=-1)

    def take(self) -> dict[str, Any]:
        """The parts of the state by name, which are then forgotten here."""
        contents, self._contents = self._contents, {}
        return {name: decode(torch.frombuffer(content, dtype=torch.uint8)) for name, content in contents.items()}

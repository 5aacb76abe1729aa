"""Fetches contents from several processes at once; where one is lost, the others give what is missing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError

from bagua.comm.lifetime.background import daemon
from bagua.comm.pieces.server import LENGTH, PIECE_BYTES, Source, asked_of_shelf, digest_of, is_shelf, pieces_of
from bagua.comm.store.bucket import ObjectBucket

#: A list of the digests of a state of one terabyte has a quarter of that.
_CATALOGUE_BYTES = 64 * 1024 * 1024
#: Asks a source: question, seconds until all of the answer must be here, and the longest answer in bytes.
_Ask = Callable[[list[Any], float, int], bytearray]
#: What a source says of itself.
_NEWS_BYTES = 4096


class _Place(NamedTuple):
    """Where a piece belongs."""

    name: str
    piece: int


class Fetch:
    """Brings the contents of one source together, from all sources that offer the same pieces.

    The first source that answers says what is to be fetched; if it is lost before all is there, the next one does.
    A piece counts only with the digest that was said.

    Args:
        known: contents that are there already, by name: pieces with the same digest are not fetched.
        without: names of contents that are not wanted.
        deadline: how long an answer may take; it is told how long each took.
        bucket: bucket in which sources are that cannot be connected with; None for none.

    Attributes:
        received_bytes: bytes of pieces that came, by source.
        failures: why a source was given up, by source.
    """

    def __init__(
        self,
        known: Mapping[str, bytearray],
        without: frozenset[str],
        deadline: PhaseDeadline,
        bucket: ObjectBucket | None = None,
    ) -> None:
        self._without = without
        self._deadline = deadline
        self._bucket = bucket
        self._changed = threading.Condition()
        #: Length and digests of each of the wanted contents, and where each digest belongs, as sources said.
        self._offers: dict[Source, dict[str, tuple[int, list[str]]]] = {}
        self._places: dict[Source, dict[str, _Place]] = {}
        self._pieces: dict[str, memoryview] = {}
        for content in known.values():
            self._pieces |= {digest_of(piece): piece for piece in pieces_of(memoryview(content))}
        self._under_way: dict[str, Source] = {}
        self._connections: dict[Source, socket.socket] = {}
        self._ended = False
        self.received_bytes: dict[Source, int] = {}
        self.failures: dict[Source, str] = {}

    def run(self, find: Callable[[], list[Source]], poll_s: float = 0.05) -> tuple[Source, dict[str, bytearray]] | None:
        """The contents, and the source that said what they are; None if no source is left.

        Args:
            find: returns the sources that are there now; one that is no longer named is given up. It may raise, which
                ends the fetch.
            poll_s: seconds between two calls of it.
        """
        begun: set[Source] = set()
        try:
            while True:
                named = find()
                for source in named:
                    if source not in begun:
                        begun.add(source)
                        daemon("bagua-fetch", self._draw_from, source)
                with self._changed:
                    for source in begun - set(named):
                        self._give_up(source, "it is no longer there")
                    if begun and begun <= self.failures.keys():
                        return None
                    leader = self._leader()
                    if leader is not None and self._places[leader].keys() <= self._pieces.keys():
                        return leader, self._put_together(leader)
                    self._changed.wait(poll_s)
        finally:
            with self._changed:
                self._ended = True
                for source in begun:
                    self._give_up(source, "nothing more is wanted")

    def _leader(self) -> Source | None:
        return next((source for source in self._offers if source not in self.failures), None)

    def _put_together(self, leader: Source) -> dict[str, bytearray]:
        found = {}
        for name, (length, digests) in self._offers[leader].items():
            content = found[name] = bytearray(length)
            for piece, digest in enumerate(digests):
                start = piece * PIECE_BYTES
                content[start : start + PIECE_BYTES] = self._pieces[digest]
        return found

    # In the thread of a source.

    def _draw_from(self, source: Source) -> None:
        try:
            with self._reached(source) as ask:
                # Digests are taken when they are asked for first, which takes longer than any piece.
                catalogue = ask([source.number], self._deadline.most_s, _CATALOGUE_BYTES)
                self._hear(source, _offer_of(json.loads(catalogue)))
                while (task := self._next_task(source)) is not None:
                    self._take(ask, source, *task)
        except Exception as error:  # noqa: BLE001 - whatever it answers that is not understood, others may have it
            with self._changed:
                self._give_up(source, str(error) or type(error).__name__)

    @contextmanager
    def _reached(self, source: Source) -> Iterator[_Ask]:
        if self._bucket is not None and is_shelf(source):
            yield partial(self._ask_bucket, self._bucket, source)
            return
        with socket.create_connection((source.host, source.port), self._deadline.seconds) as connection:
            with self._changed:
                self._connections[source] = connection
            yield partial(_asked, connection, source)

    def _ask_bucket(
        self, bucket: ObjectBucket, source: Source, question: list[Any], limit_s: float, limit_bytes: int
    ) -> bytearray:
        """The list of pieces is put when they are there: it is waited for, and pieces are not."""
        until = time.monotonic() + limit_s

        def goes_on() -> bool:
            wanted = not self._ended and source not in self.failures
            return len(question) == 1 and wanted and time.monotonic() < until

        return asked_of_shelf(bucket, source, question, goes_on, limit_bytes)

    def _hear(self, source: Source, offered: dict[str, tuple[int, list[str]]]) -> None:
        """Take in what it offers."""
        wanted = {name: content for name, content in offered.items() if name not in self._without}
        with self._changed:
            self._offers[source] = wanted
            self._places[source] = {
                digest: _Place(name, piece)
                for name, (_, digests) in wanted.items()
                for piece, digest in enumerate(digests)
            }
            self._changed.notify_all()

    def _next_task(self, source: Source) -> tuple[str, _Place] | None:
        """A piece that is not being fetched; waits for one as long as others might fail. None at the end."""
        with self._changed:
            while True:
                leader = self._leader()
                if self._ended or source in self.failures or leader is None:
                    return None
                own = self._places[source]
                wanted = own.keys() - self._pieces.keys() - self._under_way.keys()
                here = [digest for digest in self._places[leader] if digest in wanted]
                if here:  # The rarest first.
                    offers = [places for one, places in self._places.items() if one not in self.failures]
                    digest = min(here, key=lambda digest: sum(digest in places for places in offers))
                    self._under_way[digest] = source
                    return digest, own[digest]
                self._changed.wait()

    def _take(self, ask: _Ask, source: Source, digest: str, place: _Place) -> None:
        started = time.monotonic()
        length, _ = self._offers[source][place.name]
        piece = ask([source.number, *place], self._deadline.seconds, PIECE_BYTES)
        if digest_of(memoryview(piece)) != digest or len(piece) != min(PIECE_BYTES, length - place.piece * PIECE_BYTES):
            raise ValueError("what it sent has another digest, or another length, than it said")
        with self._changed:
            self._deadline.note(time.monotonic() - started)
            self._pieces[digest] = memoryview(piece)
            self._under_way.pop(digest, None)
            self.received_bytes[source] = self.received_bytes.get(source, 0) + len(piece)
            self._changed.notify_all()

    def _give_up(self, source: Source, why: str) -> None:
        """Others may fetch what it was about to give. The caller holds the lock."""
        self.failures.setdefault(source, why)
        self._under_way = {digest: giver for digest, giver in self._under_way.items() if giver != source}
        connection = self._connections.pop(source, None)
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                connection.close()
        self._changed.notify_all()


def ask_now(source: Source, timeout_s: float, bucket: ObjectBucket | None = None) -> list[int] | None:
    """What a source says of itself at this moment; None if it does not answer, or not with whole numbers."""
    try:
        if bucket is not None and is_shelf(source):
            text = asked_of_shelf(bucket, source, ["now"], lambda: False, _NEWS_BYTES)
        else:
            with socket.create_connection((source.host, source.port), timeout_s) as connection:
                text = _asked(connection, source, ["now"], timeout_s, _NEWS_BYTES)
        news = json.loads(text)
    except (OSError, ValueError, RecursionError, DistNetworkError):
        return None
    understood = isinstance(news, list) and all(type(number) is int for number in news)
    return news if understood else None


def _offer_of(catalogue: Any) -> dict[str, tuple[int, list[str]]]:
    """Length and digests of each content.

    Raises:
        ValueError: ``catalogue`` is none.
    """
    if not isinstance(catalogue, dict):
        raise ValueError("it does not say what it offers")  # noqa: TRY004 - what a peer sent is a value
    found = {}
    for name, content in catalogue.items():
        length, digests = content if isinstance(content, list) and len(content) == 2 else (-1, [])
        counts = type(length) is int and length >= 0 and isinstance(digests, list)
        if not counts or len(digests) != -(-length // PIECE_BYTES) or not all(isinstance(one, str) for one in digests):
            raise ValueError(f"it does not say what {name} is")
        found[name] = (length, digests)
    return found


def _asked(
    connection: socket.socket, source: Source, question: list[Any], limit_s: float, limit_bytes: int
) -> bytearray:
    """What the other end answers.

    Args:
        connection: connection to ``source``.
        source: process that is asked.
        question: request to the source.
        limit_s: seconds until all of the answer must be here.
        limit_bytes: the longest answer.

    Raises:
        OSError: it has gone, or is late.
        ValueError: it has nothing like that.
    """
    until = time.monotonic() + limit_s
    connection.settimeout(limit_s)
    connection.sendall(json.dumps([source.key, *question]).encode() + b"\n")
    (length,) = LENGTH.unpack(_received(connection, LENGTH.size, until))
    if length < 0:
        raise ValueError("it offers that no longer")
    if length > limit_bytes:
        raise ValueError(f"it answers with {length} bytes, where {limit_bytes} are too many")
    return _received(connection, length, until)


def _received(connection: socket.socket, length: int, until: float) -> bytearray:
    found = bytearray(length)
    rest = memoryview(found)
    while rest:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it answers too slowly")
        connection.settimeout(left_s)
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionResetError("it closed the connection")
        rest = rest[count:]
    return found


_KEPT, _FIRST = 64, 8
_DEVIATIONS, _TIMES_FIRST = 8.0, 3.0


class PhaseDeadline:
    """A deadline that follows what was measured: median and 8 median absolute deviations of the last 64 durations.

    It is at least 3 times the median of the first 8, which a lucky series of short ones must not undercut.

    Args:
        most_s: largest deadline, and that of the first time, in seconds: what the user allows.
        least_s: smallest deadline, in seconds.

    Attributes:
        most_s: the largest deadline, in seconds.

    Example:
        >>> deadline = PhaseDeadline(60.0)
        >>> deadline.seconds
        60.0
        >>> for duration_s in (2.0, 2.1, 1.9):
        ...     deadline.note(duration_s)
        >>> deadline.seconds
        6.0
    """

    def __init__(self, most_s: float, least_s: float = 1.0) -> None:
        self.most_s = most_s
        self._least_s = min(least_s, most_s)
        self._durations: deque[float] = deque(maxlen=_KEPT)
        self._first: list[float] = []

    def note(self, duration_s: float) -> None:
        """It has happened once more, and took so many seconds."""
        self._durations.append(duration_s)
        if len(self._first) < _FIRST:
            self._first.append(duration_s)

    def forget(self) -> None:
        """It has failed, perhaps because it was given too little time: begin again with the largest deadline."""
        self._durations.clear()
        self._first.clear()

    @property
    def seconds(self) -> float:
        """Seconds that it may take the next time."""
        if not self._durations:
            return self.most_s
        return min(max(self.usual_s, _TIMES_FIRST * median(self._first), self._least_s), self.most_s)

    @property
    def known(self) -> bool:
        """Whether it has happened often enough to tell what is usual."""
        return len(self._first) == _FIRST

    @property
    def usual_s(self) -> float:
        """Seconds that it takes at most, but for outliers: median and deviations alone; 0 before the first."""
        durations = list(self._durations)
        middle = median(durations) if durations else 0.0
        return middle + _DEVIATIONS * median([abs(duration - middle) for duration in durations] or [0.0])

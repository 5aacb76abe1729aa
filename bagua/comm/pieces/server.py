"""Offers contents to other processes, and gives them the pieces that they ask for, in threads of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import socketserver
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError

from bagua.comm.addresses import own_address
from bagua.comm.lifetime.background import daemon
from bagua.comm.lifetime.forks import family
from bagua.comm.objects import Memory
from bagua.comm.store.bucket import ObjectBucket, quoted

#: Small enough that a source that is lost costs little, large enough that asking costs nothing.
PIECE_BYTES = 4 * 1024 * 1024
#: Begins each answer.
LENGTH = struct.Struct("<q")
_NOTHING = LENGTH.pack(-1)
#: Connections at a time: more than there are members, and little for the system.
_MOST_CONNECTIONS = 256
#: Seconds until the first question must be there, and until each later one: who fetches may wait for other sources.
_FIRST_S, _LATER_S = 10.0, 3600.0
_LONGEST_QUESTION = 4096


class Source(NamedTuple):
    """Where contents are offered; as a tuple, the store can keep it.

    Attributes:
        host: address of the host.
        port: port on which pieces are given out.
        key: word that a process must know to ask.
        number: number of the offer. The next one of the same process has another.
    """

    host: str
    port: int
    key: str
    number: int


class PieceServer:
    """Gives out one offer at a time: named contents of bytes, cut in pieces with a digest each.

    Args:
        now: returns what those who fetch may ask while they do: whole numbers.

    Example:
        >>> server = PieceServer(lambda: [0])
        >>> server.offer({"text": bytearray(b"hello")}).number
        1
        >>> server.close()
    """

    def __init__(self, now: Callable[[], list[int]]) -> None:
        self._now = now
        self._key = uuid.uuid4().hex
        self._number = 0
        self._catalogue: _Later | None = None
        self._server: _Server | None = None
        self._forked = False
        family.add(self)

    def offer(self, contents: Mapping[str, Memory], fill: Callable[[], None] = lambda: None) -> Source:
        """Give out ``contents`` from now on, in the place of what was offered before. Returns at once.

        Args:
            contents: bytes by name, which stay as they are.
            fill: function that writes them, called in another thread; see ``wait_until_filled``.

        Raises:
            OSError: the system gives no socket.
        """
        if self._server is None:
            self._server = _Server((own_address(), 0), self._answer)
        self._number += 1
        self._catalogue = _Later(contents, fill)
        host, port = self._server.server_address[:2]
        return Source(str(host), int(port), self._key, self._number)

    def wait_until_filled(self) -> None:
        """Until ``fill`` of the latest offer has returned."""
        catalogue = self._catalogue
        if catalogue is not None:
            catalogue.filled.wait()

    def withdraw(self) -> None:
        """Offer nothing any more, and give the memory back."""
        self._catalogue = None

    def _answer(self, question: list[Any]) -> bytes | memoryview | None:
        """What is said to ``[key, "now"]``, ``[key, number]`` or ``[key, number, name, piece]``; None for nothing."""
        catalogue, number = self._catalogue, self._number
        key, what, *place = question
        if key != self._key:
            return None
        if what == "now":
            return json.dumps(self._now()).encode()
        if what != number or catalogue is None:
            return None
        if not place:
            return catalogue.text()
        name, piece = place
        return catalogue.contents[name][piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]

    def close(self) -> None:
        """End all threads and connections. Idempotent."""
        self.withdraw()
        server, self._server = self._server, None
        if server is not None and not self._forked:
            server.end()

    def disown(self) -> None:
        """In a forked child: the parent gives out pieces."""
        self._forked = True


class _Later:
    """What is offered, and the digests of all pieces, taken in another thread and waited for when asked for."""

    def __init__(self, contents: Mapping[str, Memory], fill: Callable[[], None]) -> None:
        self.contents = {name: memoryview(content) for name, content in contents.items()}
        self._text = b""
        self.filled = threading.Event()
        self._thread = daemon("bagua-digests", self._take, fill)

    def _take(self, fill: Callable[[], None]) -> None:
        try:
            fill()
        finally:
            self.filled.set()
        named = self.contents.items()
        found = {name: [len(content), list(map(digest_of, pieces_of(content)))] for name, content in named}
        self._text = json.dumps(found).encode()

    def text(self) -> bytes:
        """Length and digests of all contents, once they are written; empty if that failed."""
        self._thread.join()
        return self._text


def pieces_of(content: memoryview) -> list[memoryview]:
    """The content, cut."""
    return [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]


def digest_of(piece: memoryview) -> str:
    """A digest that cannot be forged."""
    return hashlib.sha256(piece).hexdigest()


class _Server(socketserver.ThreadingTCPServer):
    """One thread for each connection; all of them end with it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], answer: Callable[[list[Any]], bytes | memoryview | None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Connection)
        self.answer = answer
        self.ending = False
        self.connections: set[socket.socket] = set()
        self._thread = daemon("bagua-pieces", self.serve_forever, 0.05)

    def end(self) -> None:
        """Close everything, and wait for the thread that listens."""
        self.ending = True
        self.shutdown()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self._thread.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - as in the standard library
        """Whether there is room for one more."""
        if len(self.connections) >= _MOST_CONNECTIONS:
            return False
        self.connections.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        """It has ended, or there was no room for it."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The process that asks has gone, or asks nonsense: that ends its connection, and nothing else."""


class _Connection(socketserver.BaseRequestHandler):
    """Answers one who asks, line by line."""

    server: _Server
    request: socket.socket

    def handle(self) -> None:
        limit_s = _FIRST_S
        while not self.server.ending and (line := self._line(time.monotonic() + limit_s)):
            answer = self.server.answer(json.loads(line))
            if answer is None:
                self.request.sendall(_NOTHING)
                continue
            self.request.settimeout(_LATER_S)
            self.request.sendall(LENGTH.pack(len(answer)))
            self.request.sendall(answer)
            limit_s = _LATER_S

    def _line(self, until: float) -> bytes:
        """The next question; empty at the end."""
        line = b""
        while not line.endswith(b"\n"):
            self.request.settimeout(max(until - time.monotonic(), 0.001))
            piece = self.request.recv(_LONGEST_QUESTION)
            line += piece
            if not piece or len(line) > _LONGEST_QUESTION:
                return b""
        return line


# By way of a bucket, where those who want contents cannot connect with the process that has them.

#: The host of a source that is in a bucket.
_BUCKET = "a bucket"
#: Seconds that objects may take to be deleted at the end.
_FAREWELL_S = 5.0


class PieceShelf:
    """What a ``PieceServer`` does, with an object for each piece. Objects of an offer are deleted when it is withdrawn.

    Args:
        bucket: bucket that holds the objects.
        now: function that returns what those who fetch may ask while they do: whole numbers; see ``tell_now``.
    """

    def __init__(self, bucket: ObjectBucket, now: Callable[[], list[int]]) -> None:
        self._bucket, self._now = bucket, now
        self._key = f"objects/state-{uuid.uuid4().hex}"
        self._number = 0
        self._catalogue: _Later | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def offer(self, contents: Mapping[str, Memory], fill: Callable[[], None]) -> Source:
        """See ``PieceServer.offer``."""
        self.withdraw()
        self._number += 1
        source = Source(_BUCKET, 0, self._key, self._number)
        self._catalogue, self._over = _Later(contents, fill), threading.Event()
        self._thread = daemon("bagua-shelf", self._serve, source, self._catalogue, self._over)
        return source

    def _serve(self, source: Source, catalogue: _Later, over: threading.Event) -> None:
        """Put the pieces, then what says which there are; delete all of it when the offer is over."""
        if not (text := catalogue.text()):
            return
        objects = {
            _object(source.key, [source.number, name, piece]): part
            for name, content in catalogue.contents.items()
            for piece, part in enumerate(pieces_of(content))
        }
        objects[_object(source.key, [source.number])] = memoryview(text)
        for path, part in objects.items():
            self._put(path, part, over)
        over.wait()
        with contextlib.suppress(DistNetworkError):  # ``bagua islands clean`` deletes it.
            self._bucket.delete([*objects, _object(source.key, ["now"])])

    def _put(self, path: str, content: memoryview, over: threading.Event) -> None:
        for pause_s in self._bucket.pauses():
            if over.is_set():
                return
            with contextlib.suppress(DistNetworkError):
                self._bucket.put(path, content)
                return
            over.wait(pause_s)

    def tell_now(self) -> None:
        """Say what those who fetch may ask."""
        if not self._over.is_set() and self._thread is not None:
            content = memoryview(json.dumps(self._now()).encode())
            self._put(_object(self._key, ["now"]), content, self._over)

    def wait_until_filled(self) -> None:
        """See ``PieceServer.wait_until_filled``."""
        if self._catalogue is not None:
            self._catalogue.filled.wait()

    def withdraw(self) -> None:
        """Offer nothing any more."""
        self._over.set()

    def close(self) -> None:
        """Delete what is there. Idempotent."""
        self.withdraw()
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)


def is_shelf(source: Source) -> bool:
    """Whether pieces of ``source`` are objects of a bucket."""
    return source.host == _BUCKET


def _object(key: str, question: list[Any]) -> str:
    """The suffix keeps the list of an offer apart from the folder of its pieces."""
    return "/".join([key, *(quoted(str(one)) for one in question)]) + ".piece"


def asked_of_shelf(
    bucket: ObjectBucket, source: Source, question: list[Any], goes_on: Callable[[], bool], limit_bytes: int
) -> bytearray:
    """What the object says that answers ``question``.

    Args:
        bucket: bucket that holds the object.
        source: process that is asked.
        question: words that it is asked.
        goes_on: function that says whether to go on waiting for an object that is not there yet.
        limit_bytes: the longest answer.

    Raises:
        ValueError: there is nothing like that.
    """
    for pause_s in bucket.pauses():
        found = bucket.get(_object(source.key, question))
        if found is not None and len(found) <= limit_bytes:
            return bytearray(found)
        if found is not None or not goes_on():
            raise ValueError("it offers that no longer")
        threading.Event().wait(pause_s)
    raise AssertionError

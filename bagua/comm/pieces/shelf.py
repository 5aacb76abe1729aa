"""Offers contents by way of a bucket, where those who want them cannot connect with the process that has them."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import DistNetworkError

from bagua.comm.lifetime.background import daemon
from bagua.comm.objects import Memory
from bagua.comm.pieces.server import Source, catalogue_of, pieces_of
from bagua.comm.store.bucket import ObjectBucket, quoted

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
        self._filled, self._over = threading.Event(), threading.Event()
        self._filled.set()
        self._thread: threading.Thread | None = None

    def offer(self, contents: Mapping[str, Memory], fill: Callable[[], None]) -> Source:
        """See ``PieceServer.offer``."""
        self.withdraw()
        self._number += 1
        self._filled, self._over = threading.Event(), threading.Event()
        source = Source(_BUCKET, 0, self._key, self._number)
        views = {name: memoryview(content) for name, content in contents.items()}
        self._thread = daemon("bagua-shelf", self._serve, source, views, fill, self._filled, self._over)
        return source

    def _serve(
        self,
        source: Source,
        contents: Mapping[str, memoryview],
        fill: Callable[[], None],
        filled: threading.Event,
        over: threading.Event,
    ) -> None:
        """Put the pieces, then what says which there are; delete all of it when the offer is over."""
        catalogue = catalogue_of(contents, fill, filled)
        objects = {
            _place(source, [source.number, name, piece]): part
            for name, content in contents.items()
            for piece, part in enumerate(pieces_of(content))
        }
        objects[_place(source, [source.number])] = memoryview(catalogue)
        for path, part in objects.items():
            self._put(path, part, over)
        over.wait()
        self._delete([*objects, _place(source, ["now"])])

    def _put(self, path: str, content: memoryview, over: threading.Event) -> None:
        for pause_s in self._bucket.pauses():
            if over.is_set():
                return
            try:
                self._bucket.put(path, content)
            except DistNetworkError:
                over.wait(pause_s)
            else:
                return

    def _delete(self, paths: list[str]) -> None:
        try:
            self._bucket.delete(paths)
        except DistNetworkError:
            return  # ``bagua islands clean`` deletes it.

    def tell_now(self) -> None:
        """Say what those who fetch may ask."""
        if not self._over.is_set() and self._thread is not None:
            content = memoryview(json.dumps(self._now()).encode())
            self._put(_object(self._key, ["now"]), content, self._over)

    def wait_until_filled(self) -> None:
        """See ``PieceServer.wait_until_filled``."""
        self._filled.wait()

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


def _place(source: Source, question: list[Any]) -> str:
    return _object(source.key, question)


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
        found = bucket.get(_place(source, question))
        if found is not None and len(found) <= limit_bytes:
            return bytearray(found)
        if found is not None or not goes_on():
            raise ValueError("it offers that no longer")
        threading.Event().wait(pause_s)
    raise AssertionError

"""Stores of torch whose every question ends, also when the process that hosts them was stopped."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store, TCPStore

from bagua.comm.lifetime.background import BackgroundThread
from bagua.comm.store.keys import bottom_of, read_all, read_present
from bagua.comm.store.polled import PolledStore, as_bytes

T = TypeVar("T")

#: A host that asks a name server who has connected may take 10 s to answer.
_LEAST_S = 15.0


class NoAnswerError(DistNetworkError):
    """The store exists, and says nothing."""


class BoundedStore(PolledStore):
    """A store each of whose calls ends, also when the host of the other store was stopped.

    The clients of torch then ignore their own timeouts. They never connect again, either: a store that was lost once is
    not asked any more, because each question would only print another warning of torch.

    Args:
        store: store of torch; used by this object only.
        timeout_s: how long ``get`` and ``wait`` wait for a key, in seconds.
        limit_s: seconds that each request may take.
    """

    def __init__(self, store: Store, timeout_s: float, limit_s: float = 3.0) -> None:
        super().__init__(timeout_s)
        self._inner = store
        self._limit_s = limit_s
        self._thread = BackgroundThread("bagua-bounded-store")
        weakref.finalize(self, self._thread.stop, 0.0).atexit = False
        self._asking = threading.RLock()
        self._unanswered: futures.Future[Any] | None = None
        self._lost = ""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._bounded(lambda: read_present(self._inner, keys))

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        return self._bounded(lambda: self._inner.check(list(keys)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``, as soon as all are there."""
        if not self.check(keys):
            self.wait(keys)
        return self._bounded(lambda: read_all(self._inner, keys))

    def write(self, key: str, value: bytes) -> None:
        self._bounded(lambda: self._inner.set(key, value))  # type: ignore[arg-type]  # torch takes bytes as well

    def swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """See ``PolledStore``; that another wrote the same is not told apart."""
        found = self._bounded(lambda: self._inner.compare_set(key, expected.decode(), desired.decode()))
        return found == desired, found

    def remove(self, key: str) -> bool:
        return self._bounded(lambda: self._inner.delete_key(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; the sum."""
        return self._bounded(lambda: self._inner.add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._bounded(lambda: self._inner.append(key, as_bytes(value).decode()))  # type: ignore[attr-defined]  # it has it

    def clone(self) -> Store:
        """The other store, over a connection of its own."""
        return self._bounded(self._inner.clone)  # type: ignore[attr-defined,no-any-return]  # torch has no hint for it

    def _bounded(self, ask: Callable[[], T]) -> T:
        with self._asking:
            if self._lost:
                raise DistNetworkError(self._lost)
            late = self._unanswered
            if late is not None:  # Asking more would only make the queue longer.
                self._await(late)
                self._unanswered = None
            question = self._thread.submit(ask)
            self._await(question)
            try:
                return question.result()
            except DistNetworkError as error:
                self._lost = str(error)
                raise

    def _await(self, question: futures.Future[Any]) -> None:
        if not futures.wait([question], self._limit_s).done:
            self._unanswered = question
            raise NoAnswerError(f"the store did not answer within {self._limit_s:g} s")

    def close(self) -> None:
        """Let the thread end, if it is not stuck."""
        self._thread.stop(0.0 if self._unanswered is not None else 0.5)


@contextlib.contextmanager
def bounded(store: Store, limit_s: float) -> Iterator[Store]:
    """``store``, each of whose questions inside ends.

    Args:
        store: any; one that no other process hosts stays as it is.
        limit_s: seconds that a question may take. Each may take a few: a deadline that has almost passed does not mean
            that the host of the store is stopped.
    """
    asked = with_limit(store, limit_s)
    try:
        yield asked
    finally:
        if isinstance(asked, BoundedStore) and asked is not store:
            asked.close()


def with_limit(store: Store, limit_s: float) -> Store:
    """As ``bounded``, for as long as somebody keeps a reference to it."""
    limit_s = max(limit_s, _LEAST_S)
    is_hosted = isinstance(bottom_of(store), TCPStore)  # By a process, which may be stopped.
    return BoundedStore(store, limit_s, limit_s) if is_hosted else store


def connection_to(store: Store, limit_s: float) -> Store:
    """A connection of its own to where ``store`` is. See ``bounded``."""
    with bounded(store, limit_s) as asked:
        return asked.clone()  # type: ignore[attr-defined,no-any-return]  # torch has no hint for it

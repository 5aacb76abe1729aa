"""Keys of a store: waiting until they are there, reading several at once, values behind them that JSON can hold.

And stores in Python: ``torch.distributed.Store`` over a few requests that all return soon (``PolledStore``), one of
which is a store of torch whose every question ends, also when the process that hosts it was stopped (``BoundedStore``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from bagua import env
from bagua.comm.lifetime.background import BackgroundThread
from bagua.errors import StoreLostError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def wait_for_keys(
    store: Store, keys: Sequence[str], deadline: float, meanwhile: Callable[[], object] | None = None
) -> bool:
    """Poll until all keys are there, or the deadline has passed.

    ``Store.wait`` would hold the only connection of the store, ignore Ctrl-C, and print a warning when its time is up.

    Args:
        store: key-value store.
        keys: names of the keys.
        deadline: value of ``time.monotonic()`` at which to give up.
        meanwhile: called whenever a key is missing; the wait is over if it returns something true.

    Returns:
        Whether the wait was over in time.

    Example:
        >>> from torch.distributed import HashStore
        >>> wait_for_keys(HashStore(), ["missing"], time.monotonic() + 0.01)
        False
    """
    pause_s, longest_s = getattr(bottom_of(store), "pauses_s", (_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        if meanwhile is not None and meanwhile():
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


def missing_keys(store: Store, keys: Sequence[str]) -> list[int]:
    """The places in ``keys`` of those that are not there.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("first", "")
        >>> missing_keys(store, ["first", "second"])
        [1]
    """
    return [place for place, key in enumerate(keys) if not store.check([key])]


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of ``keys``, which are all there, in one request where the store can do that."""
    # A file, unlike a server, gives one value at a time. Torch forgot the question in its hints.
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    found: list[bytes] = store.multi_get(list(keys)) if at_once else [store.get(key) for key in keys]
    return found


def read_present(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """The values of ``keys``; None for those that are not there, for which a store would wait.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("first", "one")
        >>> read_present(store, ["first", "second"])
        [b'one', None]
    """
    present = [key for key in keys if store.check([key])]
    found = dict(zip(present, read_all(store, present) if present else [], strict=True))
    return [found.get(key) for key in keys]


def behind_token(store: Store) -> Store:
    """The keys of ``store`` that begin with ``BAGUA_TOKEN``; all of them where it is not set."""
    token = env.token()
    return PrefixStore(token, store) if token else store


def bottom_of(store: Store) -> Store:
    """The store without its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def job_board(store: Store) -> Store:
    """All of the job's keys that begin with ``BAGUA_TOKEN``, over a connection that no call of the job keeps busy.

    Args:
        store: any store of the job; its server is what counts. One that makes no other connection is used itself.
    """
    bottom = bottom_of(store)
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        bottom = bottom.clone()  # type: ignore[attr-defined]  # which torch forgot in its hints
    return behind_token(bottom)


def as_bytes(value: str | bytes) -> bytes:
    """What a store keeps of ``value``."""
    return value.encode() if isinstance(value, str) else bytes(value)


class PolledStore(Store):
    """A store whose subclasses have four requests; waiting is asking again.

    C++ holds no Python object: keep a reference as long as something uses the store.

    Args:
        timeout_s: how long ``get`` and ``wait`` wait for a key, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)

    # Requests.

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of ``keys``; None where there is none.

        Raises:
            DistNetworkError: the store does not answer.
        """

    @abstractmethod
    def write(self, key: str, value: bytes) -> None:
        """Replace the value of ``key``."""

    @abstractmethod
    def swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """Write ``desired`` if the value is ``expected``, empty for none; whether it was, and the value afterwards."""

    @abstractmethod
    def remove(self, key: str) -> bool:
        """Whether there was such a key."""

    def close(self) -> None:
        """Give back threads and connections. Idempotent."""

    # What torch calls.

    def set(self, key: str, value: str | bytes) -> None:
        """Replace the value of ``key``."""
        self.write(key, as_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of ``key``, as soon as there is one."""
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        return None not in self.read(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there."""
        limit = self._timeout if timeout is None else timeout
        if not wait_for_keys(self, keys, time.monotonic() + limit.total_seconds()):
            raise DistStoreError(f"wait timeout after {limit.total_seconds() * 1000:.0f}ms, keys: {', '.join(keys)}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``, as soon as all are there."""
        found = self.read(keys)
        if None in found:
            self.wait(keys)
            found = self.read(keys)
        return [value for value in found if value is not None]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Replace the values of ``keys``."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value is the expected one; the value afterwards."""
        return self.swap(key, as_bytes(expected_value), as_bytes(desired_value))[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; the sum."""
        return int(self._change(key, lambda before: str(int(before or 0) + amount).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._change(key, lambda before: before + as_bytes(value))

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        while True:
            before = self.read([key])[0] or b""
            after = change(before)
            if self.swap(key, before, after)[0]:
                return after

    def delete_key(self, key: str) -> bool:
        """Whether there was such a key."""
        return self.remove(key)

    deleteKey = delete_key  # noqa: N815 - the name that C++ looks for

    def set_timeout(self, timeout: timedelta) -> None:
        """How long ``get`` and ``wait`` wait from now on."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait for a key."""
        return self._timeout

    def has_extended_api(self) -> bool:
        """Whether several keys can be asked for at once."""
        return True


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


class Cells:
    """Values that JSON can hold, under names.

    Args:
        store: key-value store whose calls do not block for long.
        where: name of the store in messages.
        prefix: what the keys of the store begin with.

    Attributes:
        where: the same.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> cells = Cells(thread_store())
        >>> cells.claim("epoch/1", {"members": [0]}), cells.claim("epoch/1", {"members": [1]})
        ({'members': [0]}, {'members': [0]})
        >>> cells.post("record/0", {"beat": 1})
        >>> cells.read(["record/0", "record/1"])
        [{'beat': 1}, None]
    """

    def __init__(self, store: Store, where: str = "the store", prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self.where = where
        #: In a store of torch, what is read is never deleted: what was there once need not be looked for again.
        self._present: set[str] = set()

    def claim(self, name: str, value: Any) -> Any:
        """What is written under ``name``: ``value``, unless something was there before.

        Raises:
            StoreLostError: the store does not answer. It may be written all the same.
        """
        text = json.dumps(value)
        return json.loads(self._talk(lambda: self._store.compare_set(self._prefix + name, "", text)))

    def post(self, name: str, value: Any) -> None:
        """Replace the value of ``name``.

        Raises:
            StoreLostError: the store does not answer.
        """
        text = json.dumps(value)
        self._talk(lambda: self._store.set(self._prefix + name, text))

    def drop(self, name: str) -> None:
        """Delete a cell that no rank asks for any more.

        Raises:
            StoreLostError: the store does not answer.
        """
        self._talk(lambda: self._store.delete_key(self._prefix + name))

    def read(self, names: Sequence[str]) -> list[Any]:
        """The values of ``names``; None where there is none.

        Raises:
            StoreLostError: the store does not answer.
        """
        return self._talk(lambda: self._read(names))

    def _read(self, names: Sequence[str]) -> list[Any]:
        keys, store = [self._prefix + name for name in names], self._store
        if isinstance(store, PolledStore) and not isinstance(store, BoundedStore):
            texts = store.read(keys)  # It does not wait for a cell that is gone: somebody may have deleted the run.
        else:
            self._present |= {key for key in keys if key not in self._present and store.check([key])}
            found = [key for key in keys if key in self._present]
            values = dict(zip(found, read_all(store, found) if found else [], strict=True))
            texts = [values.get(key) for key in keys]
        return [None if text is None else json.loads(text) for text in texts]

    def _talk(self, conversation: Callable[[], T]) -> T:
        try:
            return conversation()
        except (RuntimeError, OSError) as error:
            raise StoreLostError(f"{self.where} does not answer: {str(error).partition(chr(10))[0]}") from error

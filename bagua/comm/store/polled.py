"""Stores in Python: ``torch.distributed.Store`` over a few requests that all return soon."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, Store

from bagua.comm.lifetime.background import BackgroundThread
from bagua.comm.store.keys import wait_for_keys

T = TypeVar("T")


def _bytes(value: str | bytes) -> bytes:
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

    @abstractmethod
    def close(self) -> None:
        """Give back threads and connections. Idempotent."""

    # What torch calls.

    def set(self, key: str, value: str | bytes) -> None:
        """Replace the value of ``key``."""
        self.write(key, _bytes(value))

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
        return self.swap(key, _bytes(expected_value), _bytes(desired_value))[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; the sum."""
        return int(self._change(key, lambda before: str(int(before or 0) + amount).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._change(key, lambda before: before + _bytes(value))

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
        self._thread = BackgroundThread("bagua-islands-store")
        self._asking = threading.RLock()
        self._unanswered: futures.Future[Any] | None = None
        self._lost = ""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See ``PolledStore``."""

        def ask() -> list[bytes | None]:
            present = [key for key in keys if self._inner.check([key])]
            found = dict(zip(present, self._inner.multi_get(present) if present else [], strict=True))
            return [found.get(key) for key in keys]

        return self._bounded(ask)

    def write(self, key: str, value: bytes) -> None:
        """See ``PolledStore``."""
        self._bounded(lambda: self._inner.set(key, value))  # type: ignore[arg-type]  # torch takes bytes as well

    def swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        """See ``PolledStore``; that another wrote the same is not told apart."""
        found = self._bounded(lambda: self._inner.compare_set(key, expected.decode(), desired.decode()))
        return found == desired, found

    def remove(self, key: str) -> bool:
        """See ``PolledStore``."""
        return self._bounded(lambda: self._inner.delete_key(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``; the sum."""
        return self._bounded(lambda: self._inner.add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._bounded(lambda: self._inner.append(key, _bytes(value).decode()))  # type: ignore[attr-defined]  # it has it

    def _bounded(self, ask: Callable[[], T]) -> T:
        with self._asking:
            if self._lost:
                raise DistNetworkError(self._lost)
            late = self._unanswered
            if late is not None:  # Asking more would only make the queue longer.
                if not futures.wait([late], self._limit_s).done:
                    raise self._no_answer()
                self._unanswered = None
            question = self._thread.submit(ask)
            if not futures.wait([question], self._limit_s).done:
                self._unanswered = question
                raise self._no_answer()
            try:
                return question.result()
            except DistNetworkError as error:
                self._lost = str(error)
                raise

    def _no_answer(self) -> DistNetworkError:
        return DistNetworkError(f"the store did not answer within {self._limit_s:g} s")

    def close(self) -> None:
        """Let the thread end, if it is not stuck."""
        self._thread.stop(0.5)

"""Stores in Python: ``torch.distributed.Store`` over a few requests that all return soon."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from bagua.comm.store.keys import wait_for_keys


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

    @abstractmethod
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

"""A slow link between processes of one machine: a transport that waits as long as a link of a given rate would take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from bagua.comm import Call, Handle, Membership, Transport, Work, create_transport, register_transport, sent_bytes

#: Name of the backend.
PACED = "paced"


class Link:
    """What one process sends through: one message after the other, at a fixed rate.

    Args:
        mbit_per_s: its rate.
        clock: seconds that pass.
        sleep: lets seconds pass.

    Example:
        >>> slept = []
        >>> Link(8.0, clock=lambda: 0.0, sleep=slept.append).carry(1_000_000)
        >>> slept
        [1.0]
    """

    def __init__(
        self,
        mbit_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = mbit_per_s * 1e6 / 8
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._guard = threading.Lock()

    def carry(self, nbytes: int) -> None:
        """Return when so many bytes would have passed, after those of other threads."""
        with self._guard:
            now = self._clock()
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            left_s = self._free_at - now
        if left_s > 0:
            self._sleep(left_s)


class PacedTransport(Transport):
    """Another transport, whose calls take at least as long as the link needs for what this rank must send.

    Args:
        inner: does the work.
        link: link of this process.
    """

    name = PACED
    executor: Literal["caller", "thread", "stream"] = "thread"

    def __init__(self, inner: Transport, link: Link) -> None:
        super().__init__(inner.membership)
        self._inner = inner
        self._link = link
        self.device_types = inner.device_types
        self.compares_calls = inner.compares_calls

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        """Start ``call``; who waits for it waits for the link, too."""
        handle = self._inner.start(call, source, target, timeout_s, asynchronous)
        nbytes = sent_bytes(call, self.rank, self.size)

        def complete(timeout_s: float | None) -> None:
            handle.wait(timeout_s)
            self._link.carry(nbytes)

        return Work(complete, handle.is_completed)

    def share(self) -> None:
        self._inner.share()

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self._inner.abort(reason, culprit)

    def close(self) -> None:
        self._inner.close()

    def idle(self) -> bool:
        return self._inner.idle()

    def awaited_by(self) -> tuple[int, ...]:
        return self._inner.awaited_by()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)


def register_paced(mbit_per_s: float, backend: str) -> None:
    """Make ``init_process_group(backend="paced")`` use ``backend`` behind a link of this rate, in this process."""
    link = Link(mbit_per_s)

    def paced(membership: Membership) -> Transport:
        return PacedTransport(create_transport(backend, membership), link)

    register_transport(PACED, paced)

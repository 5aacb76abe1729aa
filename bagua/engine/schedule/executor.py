"""Who runs an exchange: the thread that computes, a background thread, or a communication stream."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from bagua.comm import BackgroundThread, ProcessGroup, Recorder, Work, in_background

Exchange = Callable[[], Work | None]
Wait = Callable[[], object]


def nothing() -> None:
    """Wait for something that is over."""
    return


class Executor(ABC):
    """Runs exchanges in the order in which they are given to it."""

    @abstractmethod
    def run(self, exchange: Exchange) -> Wait:
        """Start ``exchange``; the returned function waits for its end and raises its error."""

    def idle(self) -> bool:
        """Whether no thread of this executor has anything to do."""
        return True

    def close(self) -> None:
        """Give back threads. Idempotent."""
        return


class CallerExecutor(Executor):
    """In the calling thread; what the exchange returns is waited for later."""

    def run(self, exchange: Exchange) -> Wait:
        """Run ``exchange`` here and now."""
        work = exchange()
        return nothing if work is None else work.wait


class ThreadExecutor(Executor):
    """In one background thread.

    Args:
        name: name of the thread.
        recorder: recorder of the rank: told while the thread that computes waits.
    """

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._recorder = recorder
        self._thread = BackgroundThread(name)
        self._queued = self._ended = 0

    def run(self, exchange: Exchange) -> Wait:
        """Queue ``exchange``."""

        def complete() -> None:
            try:
                with in_background(self._recorder):
                    work = exchange()
                    if work is not None:
                        work.wait()
            finally:
                self._ended += 1

        self._queued += 1
        result = self._thread.submit(complete).result
        return lambda: self._recorder.while_blocked(result)

    def idle(self) -> bool:
        """Whether all exchanges that were queued are over."""
        return self._ended >= self._queued

    def close(self) -> None:
        """Let the thread end."""
        self._thread.stop()


@functools.cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all models of the process, so that all ranks issue exchanges in one order."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StreamExecutor(Executor):
    """On a CUDA stream of its own: the host never blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _communication_stream(device)

    def run(self, exchange: Exchange) -> Wait:
        """Issue ``exchange`` behind everything that the current stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work = exchange()
            if work is not None:
                work.wait()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def create_executor(group: ProcessGroup, device: torch.device, *, blocking: bool) -> Executor:
    """The executor that the group's transport prefers for tensors on ``device``.

    Args:
        group: group whose exchanges will run.
        device: device on which the buckets lie.
        blocking: exchanges wait for calls that they start, so they cannot run where
            gradients are computed.
    """
    preferred = group.global_communicator.executor
    if device.type == "cuda" and preferred == "stream":
        return StreamExecutor(device)
    if group.size == 1 or (preferred == "caller" and not blocking):
        return CallerExecutor()
    return ThreadExecutor(f"bagua-{group.label}", group.recorder)

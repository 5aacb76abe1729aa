"""What a timeline and torch's profiler show of the engine: passes of the model, exchanges, and waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bagua.comm import ProcessGroup, Recorder, Work
from bagua.engine.schedule.executor import Exchange, Wait
from bagua.torch_private import profiler_range, profiling

T = TypeVar("T")


def is_watched(recorder: Recorder) -> bool:
    """Whether a timeline, or torch's profiler, wants to show what happens."""
    return recorder.trace is not None or profiling()


def shown(name: str, group: ProcessGroup, start: Callable[[Exchange], Wait], exchange: Exchange) -> Wait:
    """Start an exchange so that timeline and profiler show it.

    Args:
        name: name of the exchange and its bucket.
        group: group whose ranks exchange.
        start: starts it; returns what waits for its end.
        exchange: communicates, in whatever thread that happens.

    Returns:
        What waits for its end.
    """
    recorder = group.recorder

    def run() -> Work | None:
        running = recorder.clock()
        try:
            return exchange()
        finally:
            recorder.span(f"run {name}", running, track="work", group=group.label)

    begun = recorder.clock()
    inner = _in_range(name, lambda: start(run))

    def wait() -> None:
        waiting = recorder.clock()
        _in_range(f"wait for {name}", inner)
        recorder.span(f"wait for {name}", waiting, track="waits")
        recorder.span(name, begun, track="exchanges")

    return wait


def _in_range(name: str, act: Callable[[], T]) -> T:
    end_range = profiler_range(name)
    try:
        return act()
    finally:
        end_range()


class Pass:
    """One backward pass. Autograd holds the only strong reference, so it dies with the pass, also on errors."""

    __slots__ = ("__weakref__", "_complete")

    def __init__(self, complete: Callable[[Pass], None]) -> None:
        self._complete = complete

    def __call__(self) -> None:
        self._complete(self)


class Passes:
    """The passes of one model, for the timeline."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun: float | None = None
        self._name = ""

    def enter(self, name: str) -> None:
        """A part of a step begins, which ends the one before."""
        if self._recorder.trace is None:
            return
        if self._begun is not None:
            self._recorder.span(self._name, self._begun, track="model")
        self._begun, self._name = self._recorder.clock(), name

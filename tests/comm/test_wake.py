"""One thread looks; anybody wakes it, and nothing else keeps it asleep."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from bagua.comm.lifetime.closer import Wake


def ends(run: Callable[[], object]) -> bool:
    """Whether ``run`` returns, in a thread of its own."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_finalizer_may_wake_the_thread_that_it_interrupts() -> None:
    """The garbage collector may run one at any place of a wait."""
    wake, interrupted = Wake(), []

    def interrupt(*_: object) -> None:
        interrupted.append(1)
        wake.set()

    def look() -> None:
        sys.setprofile(interrupt)
        try:
            wake.wait(5.0)
        finally:
            sys.setprofile(None)

    assert ends(look)
    assert interrupted


def test_a_call_between_two_waits_ends_the_next_one_only() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    wake.wait(30.0)
    assert not ends_at_once(wake)
    wake.set()
    wake.wait()
    wake.wait(-1.0)


def ends_at_once(wake: Wake) -> bool:
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (wake.wait(60.0), ended.set()), daemon=True)
    thread.start()
    if not ended.wait(0.05):
        wake.set()
        thread.join(60)
        return False
    return True


def test_a_limit_that_passes_at_any_moment_ends_the_wait() -> None:
    """``SimpleQueue.get`` sleeps for ever if that happens between its first and its second look."""
    wake = Wake()

    def look() -> None:
        for _ in range(20_000):
            wake.set()
            wake.wait(0.0)
            wake.wait(1e-9)

    assert ends(look)

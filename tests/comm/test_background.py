"""Functions that run in background threads, also when none can be started any more."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from bagua.comm.lifetime.background import BackgroundThread, bounded
from bagua.comm.lifetime.closer import Wake
from tests.interpreters import interpreter


def test_a_talk_that_no_thread_can_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert bounded(lambda: "said", 5.0) is None


def test_a_thread_that_could_not_start_may_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = BackgroundThread("bagua-test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            one.submit(lambda: None)
    assert one.submit(lambda: "runs").result(5) == "runs"
    assert one.stop()


def test_a_call_of_torch_under_way_does_not_take_the_process_down_at_its_end() -> None:
    """A thread that wants the interpreter back while that ends is ended in the middle of C++, which aborts."""
    script = """
        import gc
        import sys
        import time
        from datetime import timedelta
        from bagua.comm.lifetime.background import beside
        from bagua.comm.store.serving import connect_store, serve_store

        server, port = serve_store()
        store = connect_store(port, 20.0)

        def talk():
            try:
                store.wait(["nobody sets it"], timedelta(seconds=0.5))
            except Exception:
                pass

        assert beside(talk)
        pauses = iter([1.0])
        gc.callbacks.append(lambda *_: sys.is_finalizing() and time.sleep(next(pauses, 0)))
        """
    command = [*interpreter(), "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# One thread looks; anybody wakes it, and nothing else keeps it asleep.


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

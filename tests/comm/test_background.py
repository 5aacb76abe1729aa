"""Functions that run in background threads, also when none can be started any more."""

from __future__ import annotations

import subprocess
import textwrap
import threading

import pytest

from bagua.comm.lifetime.background import BackgroundThread, bounded
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

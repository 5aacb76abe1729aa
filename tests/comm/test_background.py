"""Functions that run in background threads, also when none can be started any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bagua.comm.lifetime import background
from bagua.comm.lifetime.background import BackgroundThread, bounded, stand_by


@pytest.fixture
def as_python_312_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundThread]:
    """No thread of ours starts; the one that stands by is yielded, and not started yet."""

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("bagua-") and thread.name != "bagua-test":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        really_start(thread)

    really_start = threading.Thread.start
    standing_by = BackgroundThread("bagua-test")
    monkeypatch.setattr(background, "STARTS_AT_EXIT", False)
    monkeypatch.setattr(background, "_standby", standing_by)
    monkeypatch.setattr(threading.Thread, "start", start)
    yield standing_by
    standing_by.stop()


def test_a_talk_at_exit_uses_the_thread_that_stands_by(as_python_312_ends: BackgroundThread) -> None:
    stand_by()
    talked_in: list[str] = []
    assert bounded(lambda: talked_in.append(threading.current_thread().name) or 5, 5.0) == 5
    assert talked_in == ["bagua-test"]


def test_a_talk_at_exit_that_nobody_answers_ends_in_time(as_python_312_ends: BackgroundThread) -> None:
    stand_by()
    answer = threading.Event()
    assert bounded(answer.wait, 0.01) is None
    assert bounded(lambda: "not asked before the first has ended", 0.01) is None
    answer.set()


def test_a_talk_that_no_thread_can_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "_standby", BackgroundThread("bagua-test"))
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

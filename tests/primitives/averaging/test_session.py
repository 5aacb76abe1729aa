"""What ends with the interpreter."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bagua.averaging.handoff import HandoffBuffer
from bagua.averaging.session import Session
from bagua.comm.lifetime import background
from bagua.comm.lifetime.background import BackgroundThread, stand_by


def ends(run: Any) -> bool:
    """Whether ``run`` returns, in a thread of its own."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


class Silent:
    """A member whose store never answers."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def sign_off(self) -> None:
        self.answer.wait()


def test_a_farewell_that_nobody_answers_does_not_hold_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in Python 3.12, which starts no thread while it ends."""

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("bagua-"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        really_start(thread)

    really_start = threading.Thread.start
    member: Any = Silent()
    link: Any = None
    session = Session(member, HandoffBuffer(), link, "test")
    monkeypatch.setattr(background, "STARTS_AT_EXIT", False)
    monkeypatch.setattr(background, "_standby", BackgroundThread("test"))
    stand_by()
    monkeypatch.setattr(threading.Thread, "start", start)
    assert ends(lambda: session._sign_off(0.01))
    member.answer.set()

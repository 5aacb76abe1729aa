"""What ranks tell each other through the store, above all when it does not answer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from bagua.comm.background import bounded
from bagua.comm.c10d_errors import lost_error, timeout_error
from bagua.comm.c10d_reports import Attendance, Cause, Reports, meet
from bagua.errors import CollectiveTimeoutError, PeerLostError
from tests.comm.c10d_ranks import membership

CAUSE = Cause(1, "aborted", "rank 1 had enough")


def test_the_first_cause_is_kept_and_those_who_do_not_report_are_missing() -> None:
    store = HashStore()
    ranks = [Reports(store, rank, 4) for rank in range(4)]
    ranks[1].leave(CAUSE)
    ranks[2].leave(Cause(2, "aborted", "too late"))
    assert ranks[0].attend() == Attendance(True, CAUSE, (3,))


def test_attendance_ends_as_soon_as_everybody_is_there() -> None:
    store = HashStore()
    started = time.monotonic()
    rest = threading.Timer(0.1, Reports(store, 1, 2).attend)
    rest.start()
    attendance = Reports(store, 0, 2).attend()
    assert attendance == Attendance(True, None, ())
    assert time.monotonic() - started < 0.5
    rest.join()


class HangingStore:
    """The store of a host that was stopped: it answers when that is continued."""

    def __init__(self) -> None:
        self.continued = threading.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> None:
            self.asked += 1
            self.continued.wait(30)

        return ask


class DeadStore:
    """The store of a host that died."""

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> None:
            raise RuntimeError("Broken pipe")

        return ask


def test_a_store_that_hangs_holds_nobody_and_is_not_asked_twice() -> None:
    store = HangingStore()
    reports = Reports(store, 0, 2)  # type: ignore[arg-type]
    started = time.monotonic()
    reports.leave(CAUSE)
    assert reports.attend() == Attendance(answered=False)
    assert time.monotonic() - started < 1.0
    assert store.asked == 1
    store.continued.set()


def test_a_dead_store_raises_nothing() -> None:
    reports = Reports(DeadStore(), 0, 2)  # type: ignore[arg-type]
    assert reports.attend() == Attendance(answered=False)
    reports.leave(CAUSE)
    assert bounded(reports.cause, 1.0) is None


def test_meeting_names_who_is_missing() -> None:
    store = HashStore()
    late = threading.Timer(0.05, meet, [store, 1, 2, 5.0])
    late.start()
    assert meet(store, 0, 2, 5.0) == ()
    late.join()
    assert meet(store, 0, 4, 0.05) == (2, 3)


MEMBERS = membership(HashStore(), 1, 3)
BROKEN = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("attendance", "elapsed_s", "error_class", "peers", "words"),
    [
        (Attendance(True, CAUSE, (2,)), 1.0, PeerLostError, (1,), "had enough"),
        (Attendance(True, None, (2,)), 1.0, PeerLostError, (2,), "did not answer"),
        (Attendance(answered=False), 1.0, PeerLostError, (0,), "store is silent"),
        (Attendance(True), 1.0, PeerLostError, (), "Connection closed by peer"),
        (Attendance(True, Cause(0, "timed out", "gave up"), (2,)), 9.9, CollectiveTimeoutError, (2,), "rank 2"),
        (Attendance(True, Cause(0, "timed out", "gave up"), ()), 0.1, PeerLostError, (0,), "gave up"),
    ],
)
def test_what_a_lost_connection_meant(
    attendance: Attendance, elapsed_s: float, error_class: type, peers: tuple[int, ...], words: str
) -> None:
    error = lost_error(BROKEN, attendance, MEMBERS, elapsed_s, 10.0)
    assert type(error) is error_class
    assert error.peers == peers
    assert words in str(error)


def test_a_timeout_names_the_silent_ranks() -> None:
    error = timeout_error(Attendance(True, None, (0, 2)), MEMBERS, 10.0, 10.0)
    assert (error.peers, error.timeout_s) == ((0, 2), 10.0)
    assert "rank 0, 2 did not answer" in str(error)
    assert timeout_error(Attendance(answered=False), MEMBERS, 10.0, 10.0).peers == (0,)

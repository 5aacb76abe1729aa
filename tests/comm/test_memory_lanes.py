"""Calls of one lane: in order, and known to be over to those who wait before others are told."""

from __future__ import annotations

import threading
import time

import pytest

from bagua.comm.transports.memory.lanes import Lane, LaneHandle, Lanes, LaneTask
from bagua.comm.transports.memory.line import Deadline
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError

LANE: Lane = ("collective", -1)


def deadline(timeout_s: float = 5.0) -> Deadline:
    return Deadline(time.perf_counter() + timeout_s, timeout_s)


def test_who_waits_wakes_before_callbacks_run() -> None:
    """A future's callback waits for the lock that the waiting thread holds."""
    lanes, begin, woken = Lanes("test"), threading.Event(), threading.Event()
    pending = LaneHandle([lanes.submit(LANE, begin.wait)], deadline(), lambda _: None)
    told: list[bool] = []
    pending.notify(lambda: told.append(woken.wait(5)))
    threading.Timer(0.05, begin.set).start()
    pending.wait()
    woken.set()
    assert lanes.stop(5)
    assert told == [True]


def test_a_callback_that_comes_late_runs_at_once() -> None:
    part, told = LaneTask(lambda: None), []
    part.when_done(lambda _: told.append("early"))
    part.run()
    part.when_done(lambda _: told.append("late"))
    assert told == ["early", "late"]


def test_one_of_two_parts_that_fails_ends_the_wait() -> None:
    lanes, never = Lanes("test"), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    parts = [lanes.submit(("send", 1), never.wait), lanes.submit(("recv", 1), fail)]
    with pytest.raises(ZeroDivisionError):
        LaneHandle(parts, deadline(), lambda _: None).wait()
    never.set()
    assert lanes.stop(5)


def test_a_wait_that_is_given_up_says_so() -> None:
    lanes, never, reasons = Lanes("test"), threading.Event(), []
    with pytest.raises(CollectiveTimeoutError):
        LaneHandle([lanes.submit(LANE, never.wait)], deadline(), reasons.append).wait(0.01)
    assert reasons == ["it gave up after a wait of 0.01 s"]
    never.set()
    assert lanes.stop(5)
    with pytest.raises(CommunicatorClosedError):
        lanes.submit(LANE, never.wait)


class FailingPart(LaneTask):
    """Fails right after its error was looked at for the ``looks``-th time."""

    __slots__ = ("looks", "what")

    def __init__(self, looks: int) -> None:
        self.looks, self.what = looks, None
        super().__init__(lambda: None)

    @property
    def error(self) -> BaseException | None:
        found, self.looks = self.what, self.looks - 1
        if self.looks == 0:
            self.what = ZeroDivisionError()
            self.end()
        return found

    @error.setter
    def error(self, what: BaseException | None) -> None:
        assert what is None


@pytest.mark.parametrize("looks", range(1, 5))
def test_a_part_that_fails_between_two_looks_is_not_taken_for_complete(looks: int) -> None:
    pending = LaneHandle([FailingPart(looks)], deadline(), lambda _: None)
    with pytest.raises((ZeroDivisionError, CollectiveTimeoutError)):
        pending.wait(0.0)


def test_a_call_that_its_thread_never_makes_holds_nobody_up_for_ever() -> None:
    lanes, begun = Lanes("test"), threading.Event()
    inline, parts = lanes.inline([LANE], lambda: None, deadline(), lambda _: None), []
    thread = threading.Thread(target=lambda: parts.append(lanes.submit(LANE, begun.set)))
    thread.start()
    thread.join(60)
    assert not lanes.idle(LANE)
    assert not inline.is_completed()
    lanes.abandon()
    assert begun.wait(60)
    assert lanes.stop(5)
    assert parts[0].done

"""Callbacks of futures: where and in which order they run, and what becomes of them at the end. Without ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bagua.comm.torch_backend.work import CallbackThread, in_callback
from bagua.comm.work import Work, joined
from bagua.errors import CommunicatorClosedError


class Call:
    """A call that is complete when the test says so, and that tells, or makes those who want to know wait."""

    def __init__(self, tells: bool = True) -> None:
        self._over = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.work = Work(lambda _: self._over.wait(10), self._over.is_set, self._notify if tells else None)

    def _notify(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def end(self) -> None:
        self._over.set()
        for callback in self._callbacks:
            callback()


@pytest.fixture
def thread() -> Iterator[CallbackThread]:
    thread = CallbackThread("test")
    yield thread
    thread.stop()


def future_of(thread: CallbackThread, call: Call, value: Any = None) -> Any:
    def outcome() -> Any:
        call.work.wait()
        return value

    return thread.future(call.work, outcome)


@pytest.mark.parametrize("tells", [{0, 1, 2, 3, 4}, set(), {0, 3}, {1, 2}])
@pytest.mark.parametrize("completed", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_callbacks_run_in_the_order_of_the_calls(thread: CallbackThread, tells: set[int], completed: list[int]) -> None:
    calls, order = [Call(number in tells) for number in range(5)], []
    futures = [future_of(thread, call, number) for number, call in enumerate(calls)]
    last = [future.then(lambda done: order.append(done.value())) for future in futures]
    for number in completed:
        calls[number].end()
    for future in last:
        future.wait()
    assert order == list(range(5))


def test_no_callback_runs_in_the_thread_that_adds_it(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call)
    call.end()
    future.wait()
    assert not in_callback()
    assert future.then(lambda _: in_callback()).wait() is True
    assert future.then(lambda _: threading.get_ident()).then(lambda done: done.value()).wait() != threading.get_ident()


def test_what_a_callback_starts_comes_before_the_next_callback(thread: CallbackThread) -> None:
    first, second, order = Call(), Call(), []

    def start(_: Any) -> None:
        inner = Call()
        future_of(thread, inner).then(lambda _: order.append("inner"))
        second.end()
        inner.end()
        order.append("first")

    futures = [future_of(thread, first).then(start), future_of(thread, second).then(lambda _: order.append("second"))]
    first.end()
    for future in futures:
        future.wait()
    assert order == ["first", "inner", "second"]


def test_messages_do_not_wait_for_their_turn(thread: CallbackThread) -> None:
    first, second = Call(), Call()
    waiting = [thread.future(call.work, lambda: None, in_order=False) for call in (first, second)]
    second.end()
    assert waiting[1].then(lambda _: 5).wait() == 5
    assert not waiting[0].done()
    first.end()
    waiting[0].wait()


@pytest.mark.parametrize("later_first", [False, True])
def test_a_callback_may_wait_for_callbacks_of_later_calls(thread: CallbackThread, later_first: bool) -> None:
    first, second = Call(), Call()
    waits: list[Any] = []
    result = future_of(thread, first).then(lambda _: waits[0].wait() + 1)
    waits.append(future_of(thread, second, 1).then(lambda done: done.value() + 1))
    for call in (second, first) if later_first else (first, second):
        call.end()
    assert result.wait() == 3


def test_a_callback_may_wait_for_several_calls_at_once(thread: CallbackThread) -> None:
    first = Call()

    def wait_for_all(_: Any) -> list[int]:
        calls = [Call() for _ in range(3)]
        futures = [future_of(thread, call, number) for number, call in enumerate(calls)]
        threading.Thread(target=lambda: [call.end() for call in calls]).start()
        return torch.futures.wait_all(futures)

    result = future_of(thread, first).then(wait_for_all)
    first.end()
    assert result.wait() == [0, 1, 2]


def test_a_callback_that_fails_is_an_error_of_its_future_only(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call, 5)
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: sys.exit())
    failed, exits, well = (
        future.then(lambda _: 1 / 0),
        future.then(lambda _: sys.exit()),
        future.then(lambda done: done.value()),
    )
    call.end()
    assert well.wait() == 5
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    with pytest.raises(ZeroDivisionError):
        failed.then(lambda done: done.value()).wait()
    with pytest.raises(RuntimeError, match="SystemExit"):
        exits.wait()


def test_the_end_completes_what_is_left() -> None:
    thread, ready, call = CallbackThread("test"), Call(), Call()
    started = future_of(thread, ready)
    future = future_of(thread, call, 7)
    ready.end()
    started.wait()
    thread.stop()
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    call.end()  # after the end: completed by whoever ends the call
    assert future.wait() == 7
    assert future.then(lambda done: done.value()).wait() == 7


def test_a_callback_that_waits_learns_of_the_end() -> None:
    thread, first, never = CallbackThread("test"), Call(), Call()
    entered, unanswered = threading.Event(), []

    def wait(_: Any) -> Any:
        entered.set()
        return unanswered[0].wait()

    result = future_of(thread, first).then(wait)
    unanswered.append(future_of(thread, never))
    first.end()
    assert entered.wait(60)
    thread.stop()
    with pytest.raises(CommunicatorClosedError, match="closed while a callback waited"):
        result.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_the_call_is_its_parents(thread: CallbackThread) -> None:
    call = Call()
    future = future_of(thread, call)
    child = os.fork()
    if child == 0:
        try:
            future.wait()
        except CommunicatorClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_joined_works_tell_only_if_all_can() -> None:
    calls = [Call(), Call(tells=False)]
    assert not joined([call.work for call in calls], None).notify(lambda: None)
    told: list[int] = []
    calls = [Call(), Call()]
    assert joined([call.work for call in calls], None).notify(lambda: told.append(1))
    calls[0].end()
    assert told == []
    calls[1].end()
    assert told == [1]

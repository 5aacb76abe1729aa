"""Handles of started calls, and background threads: once, in order, and with their error each time."""

import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest

from bagua.comm.lifetime.background import BackgroundThread, Wake, bounded
from bagua.comm.work import Composite, Work, joined
from bagua.errors import CollectiveTimeoutError, ConcurrentUseError, ConfigurationError, PeerLostError
from tests.harness import in_threads
from tests.interpreters import interpreter
from tests.launching import finished


class Started:
    """A call that completes when it is told to."""

    def __init__(self, result=None, error=None):
        self.ready, self.waits = threading.Event(), []
        self.result, self.error = result, error

    def complete(self, timeout_s):
        self.waits.append(timeout_s)
        if self.error is not None:
            raise self.error
        return self.result

    def work(self):
        return Work(self.complete, self.ready.is_set)


def test_a_call_is_completed_once():
    started = Started(result="sum")
    work = started.work()
    assert not work.is_completed()
    assert work.exception() is None, "it does not wait"
    assert started.waits == []
    assert (work.wait(1.5), work.wait(), work.result(), work.is_completed()) == (True, True, "sum", True)
    assert started.waits == [1.5]


def test_an_error_is_raised_by_every_wait():
    started = Started(error=PeerLostError("gone"))
    work = started.work()
    for ask in (work.wait, work.result, work.wait):
        with pytest.raises(PeerLostError) as caught:
            ask()
        assert caught.value is work.exception() is started.error
    assert work.is_completed()
    assert len(started.waits) == 1


@pytest.mark.parametrize("wrong", [0, -1, "1"])
def test_a_wrong_timeout_leaves_the_call_alone(wrong):
    work = Started().work()
    with pytest.raises(ConfigurationError, match="timeout"):
        work.wait(wrong)
    assert work.wait() is True


def test_a_thread_that_waits_too_gets_the_same_answer():
    entered, go_on = threading.Event(), threading.Event()

    def complete(_):
        entered.set()
        assert go_on.wait(60)
        return 7

    work = Work(complete, lambda: False)
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(work.result) for _ in range(2)]
        assert entered.wait(60)
        go_on.set()
    assert [result.result() for result in results] == [7, 7]


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: joined([part], None)])
def test_a_timeout_holds_while_another_thread_waits(wrap):
    entered, broken, errors = threading.Event(), threading.Event(), []

    def complete(_):
        entered.set()
        assert broken.wait(60)
        raise errors[0]

    def give_up(timeout_s):
        errors.append(CollectiveTimeoutError("too late", timeout_s=timeout_s))
        broken.set()
        return errors[0]

    work = wrap(Work(complete, lambda: False, give_up=give_up))
    future = work.get_future()  # its thread waits
    assert entered.wait(60)
    with pytest.raises(CollectiveTimeoutError) as caught:
        work.wait(0.01)
    assert caught.value.timeout_s == 0.01
    with pytest.raises(RuntimeError):
        future.wait()
    assert caught.value is work.exception() is errors[0]


def test_works_that_are_waited_for_together_share_one_deadline():
    given = []

    def complete(timeout_s):
        given.append(timeout_s)
        time.sleep(0.02)

    joined([Work(complete, lambda: False) for _ in range(2)], None).wait(5)
    composite(Work(complete, lambda: False) for _ in range(2)).wait(5)
    for first, second in (given[:2], given[2:]):
        assert second <= first - 0.02 <= 4.98


def composite(steps, released=None):
    return Composite(steps, released).as_work()


def test_steps_are_taken_one_after_the_other():
    first, second, log = Started(), Started(), []

    def steps():
        log.append("first")
        yield first.work()
        log.append("second")
        yield second.work()
        return "both"

    work = composite(steps(), lambda: log.append("released"))
    assert log == ["first"]
    assert not work.is_completed()
    first.ready.set()
    assert not work.is_completed()
    assert log == ["first", "second"], "who asks also advances it"
    assert work.result() == "both"
    assert log == ["first", "second", "released"]


def test_an_error_in_a_step_ends_the_whole():
    log = []

    def steps():
        try:
            yield Started(error=PeerLostError("gone")).work()
        finally:
            log.append("closed")

    work = composite(steps(), lambda: log.append("released"))
    with pytest.raises(PeerLostError):
        work.wait()
    assert sorted(log) == ["closed", "released"]
    assert isinstance(work.exception(), PeerLostError)


class Part(Started):
    """A call whose wait lasts until it is ready; ``meanwhile`` happens once in it."""

    meanwhile = None

    def complete(self, timeout_s):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        assert self.ready.wait(60)
        return super().complete(timeout_s)


@pytest.fixture
def two_steps():
    """The first part of a composite, which is ready, and the composite, which says whether its second one was."""
    first, second = Part(), Part()
    second.meanwhile = second.ready.set

    def steps():
        yield first.work()
        yield second.work()
        return second.ready.is_set()

    work = composite(steps())
    first.ready.set()
    return first, work


@pytest.mark.parametrize("run", [partial(in_threads, 1), lambda poll: poll(0)], ids=["thread", "signal handler"])
def test_who_polls_does_not_advance_what_is_waited_for(run, two_steps):
    (first, work), answers = two_steps, []
    first.meanwhile = lambda: run(lambda _: answers.append(work.is_completed()))
    assert work.result() is True, "the second call was waited for"
    assert answers == [False]


def test_a_signal_handler_that_waits_completes_the_call(two_steps):
    first, work = two_steps
    first.meanwhile = work.wait
    assert work.result() is True


def ready_then(first, what, released=None):
    """A composite whose first call is ready when this returns, and which then does ``what``."""

    def steps():
        yield first.work()
        return what()

    work = composite(steps(), released)
    first.ready.set()
    return work


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_error_between_steps_is_raised_by_every_wait(interrupted):
    """Also by the wait in which a signal handler met it."""
    first = Part()
    work = ready_then(first, Mock(side_effect=ConfigurationError("no encoding", argument="obj")))
    if interrupted:
        first.meanwhile = work.is_completed
    else:
        assert work.is_completed()
        assert isinstance(work.exception(), ConfigurationError)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="obj"):
            work.wait()


def test_a_signal_handler_in_a_step_can_poll_but_not_wait():
    answers = []

    def poll():
        answers.extend([work.is_completed(), work.exception()])
        with pytest.raises(ConcurrentUseError, match="interrupted"):
            work.wait()
        return "done"

    work = ready_then(Part(), poll)
    assert work.result() == "done"
    assert answers == [False, None]


def test_a_step_that_was_interrupted_is_not_taken_for_complete():
    released = []
    work = ready_then(Part(), Mock(side_effect=KeyboardInterrupt), lambda: released.append(True))
    for ask in (work.is_completed, work.wait, work.result):
        with pytest.raises(KeyboardInterrupt):
            ask()
    assert released == [True]


def test_what_no_thread_can_do_is_left_out_or_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = BackgroundThread("bagua-test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert bounded(lambda: "said", 5.0) is None
        with pytest.raises(RuntimeError, match="can't start"):
            one.submit(lambda: None)
    assert one.submit(lambda: "runs").result(5) == "runs"
    assert one.stop()


def test_a_call_of_torch_under_way_does_not_take_the_process_down_at_its_end() -> None:
    """A thread that wants the interpreter back while that ends is ended in the middle of C++, which aborts."""
    script = """
        import contextlib, gc, sys, time
        from datetime import timedelta
        from bagua.comm.lifetime.background import beside
        from bagua.comm.store.serving import connect_store, serve_store

        server, port = serve_store()
        store = connect_store(port, 20.0)

        def talk():
            with contextlib.suppress(Exception):
                store.wait(["nobody sets it"], timedelta(seconds=0.5))

        assert beside(talk)
        pauses = iter([1.0])
        gc.callbacks.append(lambda *_: sys.is_finalizing() and time.sleep(next(pauses, 0)))
        """
    ended = finished(*interpreter(), "-c", textwrap.dedent(script))
    assert ended.returncode == 0, ended.stderr


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
        sys.setprofile(interrupt)  # Of this thread, which ends here.
        wake.wait(5.0)

    assert ends(look)
    assert interrupted


def test_a_call_between_two_waits_ends_the_next_one_only() -> None:
    wake, ended = Wake(), threading.Event()
    wake.set()
    wake.set()
    wake.wait(30.0)
    threading.Thread(target=lambda: (wake.wait(60.0), ended.set()), daemon=True).start()
    assert not ended.wait(0.05)
    wake.set()
    assert ended.wait(60)
    wake.set()
    wake.wait()
    wake.wait(-1.0)


def test_a_limit_that_passes_at_any_moment_ends_the_wait() -> None:
    """``SimpleQueue.get`` sleeps forever if that happens between its first and its second look."""
    wake = Wake()

    def look() -> None:
        for _ in range(20_000):
            wake.set()
            wake.wait(0.0)
            wake.wait(1e-9)

    assert ends(look)

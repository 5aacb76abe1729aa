"""Handles of started calls, and background threads: once, in order, and with their error each time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from bagua.comm.lifetime.background import BackgroundThread, Wake, bounded
from bagua.comm.work import Composite, Work, joined
from bagua.errors import CollectiveTimeoutError, ConcurrentUseError, ConfigurationError, PeerLostError
from tests.interpreters import interpreter


class Started:
    """A call that completes when it is told to."""

    def __init__(self, result=None, error=None):
        self.ready = threading.Event()
        self.result, self.error = result, error
        self.waits = []

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
    assert work.wait(1.5) is True
    assert work.wait() is True
    assert work.result() == "sum"
    assert work.is_completed()
    assert started.waits == [1.5]


def test_an_error_is_raised_by_every_wait():
    error = PeerLostError("gone")
    started = Started(error=error)
    work = started.work()
    for ask in (work.wait, work.result, work.wait):
        with pytest.raises(PeerLostError) as caught:
            ask()
        assert caught.value is error
    assert work.exception() is error
    assert work.is_completed()
    assert len(started.waits) == 1


@pytest.mark.parametrize("wrong", [0, -1, "1"])
def test_a_wrong_timeout_leaves_the_call_alone(wrong):
    started = Started()
    work = started.work()
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
    results = []
    threads = [threading.Thread(target=lambda: results.append(work.result())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert results == [7, 7]


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
    assert caught.value is errors[0]
    assert caught.value.timeout_s == 0.01
    with pytest.raises(RuntimeError):
        future.wait()
    assert work.exception() is errors[0]


def test_works_that_are_waited_for_together_share_one_deadline():
    given = []

    def complete(timeout_s):
        given.append(timeout_s)
        time.sleep(0.02)

    joined([Work(complete, lambda: False) for _ in range(2)], None).wait(5)
    composite(Work(complete, lambda: False) for _ in range(2)).wait(5)
    for first, second in (given[:2], given[2:]):
        assert second <= first - 0.02 <= 4.98


# Collectives made of others.


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

    released = []
    work = composite(steps(), lambda: released.append(True))
    assert log == ["first"]
    assert not work.is_completed()
    first.ready.set()
    assert not work.is_completed()
    assert log == ["first", "second"], "who asks also advances it"
    assert work.result() == "both"
    assert released == [True]


def test_an_error_in_a_step_ends_the_whole():
    closed = []

    def steps():
        try:
            yield Started(error=PeerLostError("gone")).work()
        finally:
            closed.append(True)

    released = []
    work = composite(steps(), lambda: released.append(True))
    with pytest.raises(PeerLostError):
        work.wait()
    assert released == [True]
    assert closed == [True]
    assert isinstance(work.exception(), PeerLostError)


def test_an_error_between_steps_is_kept_for_the_waiter():
    first = Started()

    def steps():
        yield first.work()
        raise ConfigurationError("no encoding", argument="obj")

    work = composite(steps())
    first.ready.set()
    assert work.is_completed()
    assert isinstance(work.exception(), ConfigurationError)
    with pytest.raises(ConfigurationError, match="obj"):
        work.wait()


# Several who wait for one, and signal handlers that interrupt them.


class Part(Started):
    """A call whose wait lasts until it is ready; ``meanwhile`` happens once in it."""

    def __init__(self, meanwhile=lambda: None):
        super().__init__()
        self.meanwhile = meanwhile

    def complete(self, timeout_s):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        assert self.ready.wait(60)
        return super().complete(timeout_s)


def ready_when_waited_for():
    part = Part()
    part.meanwhile = part.ready.set
    return part


def two_steps(first, second):
    """A composite of two, whose result says whether the second was complete when it was made."""

    def steps():
        yield first.work()
        yield second.work()
        return second.ready.is_set()

    return composite(steps())


def in_another_thread(poll):
    poller = threading.Thread(target=poll)
    poller.start()
    poller.join(60)  # Polling never waits.


@pytest.mark.parametrize("run", [in_another_thread, lambda poll: poll()], ids=["thread", "signal handler"])
def test_who_polls_does_not_advance_what_is_waited_for(run):
    answers = []
    first = Part(lambda: run(lambda: answers.append(work.is_completed())))
    work = two_steps(first, ready_when_waited_for())
    first.ready.set()
    assert work.result() is True, "the second call was waited for"
    assert answers == [False]


def test_a_signal_handler_that_waits_completes_the_call():
    first, second = Part(), ready_when_waited_for()
    work = two_steps(first, second)
    first.meanwhile = work.wait
    first.ready.set()
    assert work.result() is True


def test_an_error_that_a_signal_handler_met_is_raised_by_the_interrupted_wait():
    first = Part()

    def steps():
        yield first.work()
        raise ConfigurationError("no encoding", argument="obj")

    work = composite(steps())
    first.meanwhile = work.is_completed
    first.ready.set()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="obj"):
            work.wait()


def test_a_signal_handler_in_a_step_can_poll_but_not_wait():
    first, answers = Part(), []

    def steps():
        yield first.work()
        answers.append(work.is_completed())
        answers.append(work.exception())
        with pytest.raises(ConcurrentUseError, match="interrupted"):
            work.wait()
        return "done"

    work = composite(steps())
    first.ready.set()
    assert work.result() == "done"
    assert answers == [False, None]


def test_a_step_that_was_interrupted_is_not_taken_for_complete():
    first, released = Part(), []

    def steps():
        yield first.work()
        raise KeyboardInterrupt

    work = composite(steps(), lambda: released.append(True))
    first.ready.set()
    for ask in (work.is_completed, work.wait, work.result):
        with pytest.raises(KeyboardInterrupt):
            ask()
    assert released == [True]


def test_what_no_thread_can_do_is_left_out_or_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = BackgroundThread("bagua-test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert bounded(lambda: "said", 5.0) is None
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
    """``SimpleQueue.get`` sleeps forever if that happens between its first and its second look."""
    wake = Wake()

    def look() -> None:
        for _ in range(20_000):
            wake.set()
            wake.wait(0.0)
            wake.wait(1e-9)

    assert ends(look)

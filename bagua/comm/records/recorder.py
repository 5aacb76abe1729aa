"""What one rank did: each call with its times, and what its calls took in sum. Everything that observes reads this.

A call begins when it is made and ends when its result is there, no matter who waits for it. Its time has three parts.
*Waiting*: peers had not come yet. *Exposed*: the code that computes stood still, although all had come. *Hidden*: the
rest. Calls of one communicator that overlap are counted once.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeVar

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.store.asking import Beats


class KindStatistics(NamedTuple):
    """Totals of one kind of call.

    Attributes:
        calls: completed calls.
        bytes: bytes of this rank's inputs.
        sent_bytes: bytes that this rank sends when the call is done with the
            bandwidth-optimal algorithm (averaged over ranks for trees): what a link must
            carry at least, not what a network card counted.
        seconds: time spent inside calls and their ``wait``.
    """

    calls: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


#: Kinds in which every rank sends as much as the others, when trees are averaged over ranks.
EVEN = frozenset({"allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier"})


def sent_evenly(kind: str, volume: int, size: int) -> int:
    """Bytes sent for calls of an even kind whose inputs sum up to ``volume`` bytes."""
    if kind == "allreduce":
        return 2 * volume * (size - 1) // size
    if kind in ("reduce", "broadcast"):
        return volume * (size - 1) // size
    return volume * (size - 1)


def sent_by(call: Call, rank: int, size: int) -> int:
    """Bytes that ``rank`` sends for a call in which ranks do different things."""
    if call.kind == "alltoall_v":
        return call.nbytes - call.send_counts[rank] * call.dtype.itemsize
    if call.kind == "scatter":
        return call.nbytes * (size - 1) if rank == call.root else 0
    sends = call.kind == "send" or (call.kind != "recv" and rank != call.root)
    return call.nbytes if sends else 0


def merge(tables: list[dict[str, KindStatistics]]) -> dict[str, KindStatistics]:
    """Sum of several snapshots, by kind."""
    totals: dict[str, KindStatistics] = {}
    for table in tables:
        for kind, more in table.items():
            totals[kind] = KindStatistics._make(map(operator.add, totals.get(kind, KindStatistics()), more))
    return totals


T = TypeVar("T")
#: How many of the communicators that were closed may still count a call.
LATEST_LENGTH = 16
#: Calls remembered of each communicator, and how many of them the message of a failure shows.
RECORDS_LENGTH = 64
HISTORY_LENGTH = 16
#: Who comes last is late if it is waited for so large a part of the time from the end of one call to that of the next.
LATE_SHARE = 0.02
_NOTHING = (0, 0.0, 0, 0, 0.0, 0.0, 0.0)


class Place(NamedTuple):
    """Where a call is made.

    Attributes:
        label: name of the communicator.
        backend: name of the transport.
        rank: rank of this process in the communicator.
        ranks: global rank of each member.
    """

    label: str
    backend: str
    rank: int
    ranks: tuple[int, ...]


class CallRecord:
    """One call of one rank, from its beginning to its end.

    Attributes:
        call: description of the call.
        place: communicator and rank that made it.
        number: counts the calls of this rank on all communicators, from 0.
        begun: when it was made, by ``Recorder.clock``, in seconds.
        ended: when its result was there; 0.0 before that.
        waited_s: seconds until the last peer had come; 0.0 where the transport cannot tell.
        waited_for: global ranks of the peers that came last; empty if this rank did.
        state: ``started``; ``completed``; ``failed``; ``late``: peers had given up before this rank came; ``refused``:
            nothing was sent.
        thread: identity of the thread that made it.
        waiter: identity of the thread that waits for it, of an asynchronous one; 0 as long as none does.
    """

    # Values of the class until something happens: each call makes one of these.
    ended = waited_s = 0.0
    waited_for: tuple[int, ...] = ()
    state = "started"
    waiter: int
    #: What the recorder's clock of standing still showed when it began; None for a call of the code that computes.
    blocked_s: float | None = None

    def __init__(self, call: Call, place: Place, number: int, begun: float) -> None:
        self.call = call
        self.place = place
        self.number = number
        self.begun = begun
        self.thread = here.ident


class CallTimes(NamedTuple):
    """What calls took, in seconds, and how many they were.

    Attributes:
        time_s: while at least one call of a communicator was under way, summed over communicators.
        exposed_s: part of it in which the code that computes stood still and all peers had come.
        waiting_s: part of it in which peers had not come.
        of_collectives_s: part of it in collectives of all kinds.
        calls: how many ended.
    """

    time_s: float = 0.0
    exposed_s: float = 0.0
    waiting_s: float = 0.0
    of_collectives_s: float = 0.0
    calls: int = 0

    @property
    def hidden_s(self) -> float:
        """The rest: all peers had come, and this rank went on computing."""
        return self.time_s - self.exposed_s - self.waiting_s

    def plus(self, other: CallTimes) -> CallTimes:
        """The sums of both."""
        return CallTimes._make(map(operator.add, self, other))


class Statistics:
    """What one communicator did. Written by one thread at a time, read by any.

    Args:
        place: communicator and rank that make the calls.
        recorder: record of the calls of the rank; None for one of its own.

    Attributes:
        recent: the last calls, oldest first.
        times: seconds that its calls took.
        waits: seconds that this rank has waited for each other one that came last, by global rank.
        lasts: how often each of them came last, and late; those that come together share a call.
        gauges: latest values of what is measured on it and changes slowly, by the name of the metric.
        aside: True if no thread that computes stands still for its calls, so that no rank is late for them.
    """

    __slots__ = ("_busy_until", "_totals", "aside", "gauges", "lasts", "place", "recent", "recorder", "waits")

    def __init__(self, place: Place, recorder: Recorder | None = None) -> None:
        #: By kind: calls, seconds inside of them, bytes, bytes sent (0 for even kinds, where they follow from the
        #: bytes), and the three times of ``CallTimes``. Threads read all at once.
        self._totals: dict[str, tuple[int, float, int, int, float, float, float]] = {}
        self._busy_until = 0.0
        self.place = place
        self.recorder = recorder or Recorder()
        self.recent: deque[CallRecord] = deque(maxlen=RECORDS_LENGTH)
        self.waits: dict[int, float] = {}
        self.lasts: dict[int, float] = {}
        self.gauges: dict[str, float] = {}
        self.aside = False
        self.recorder.add(self)

    @property
    def times(self) -> CallTimes:
        """Seconds that its calls took."""
        found = CallTimes()
        for kind, (calls, *_, time_s, exposed_s, waiting_s) in list(self._totals.items()):
            of_collectives_s = 0.0 if self.aside or kind in POINT_TO_POINT else time_s
            found = found.plus(CallTimes(time_s, exposed_s, waiting_s, of_collectives_s, calls))
        return found

    def begin(self, call: Call, now: float) -> CallRecord:
        """A call is made."""
        recorder = self.recorder
        record = CallRecord(call, self.place, next(recorder.numbers), now)
        if here.background:
            record.blocked_s = recorder.blocked_s(now)
        self.recent.append(record)
        return record

    def end(self, record: CallRecord, ended: float, blocked_s: float, spent_s: float = 0.0) -> None:
        """Its result is there: count it.

        Args:
            record: record of the call.
            ended: since when, by the clock of the recorder.
            blocked_s: for how long the thread that made it has stood still for it.
            spent_s: seconds inside of the call and of its ``wait``.
        """
        recorder, call = self.recorder, record.call
        kind = call.kind
        calls, inside_s, volume, sent, time_s, exposed_s, waiting_s = self._totals.get(kind, _NOTHING)
        if kind in EVEN:
            volume += call.numel * call.dtype.itemsize
        else:
            volume += call.nbytes
            sent += sent_by(call, self.place.rank, len(self.place.ranks))
        record.ended, record.state = ended, "completed"
        if self.aside:
            record.waited_s, record.waited_for = 0.0, ()
        before = self._busy_until
        # In each call: a builtin takes twice as long as a comparison.
        begun = record.begun if record.begun > before else before  # noqa: FURB136
        if ended > begun:
            self._busy_until = ended
            took = ended - begun
            if record.blocked_s is not None:  # A background thread stands still for it, which does no harm.
                blocked_s = recorder.blocked_s(ended) - record.blocked_s
            waited = record.waited_s
            if waited:  # Not all calls wait, and each comes here.
                waited = min(waited, took)
                waiting_s += waited
            together = took - waited
            exposed_s += blocked_s if blocked_s < together else together  # noqa: FURB136
            time_s += took
        self._totals[kind] = (calls + 1, inside_s + spent_s, volume, sent, time_s, exposed_s, waiting_s)
        if record.waited_for:
            self._blame(record, record.waited_s > LATE_SHARE * (ended - before))
        if recorder.trace is not None:
            recorder.trace.call(record)
        if ended >= recorder.beat_at:
            recorder.beat()

    def _blame(self, record: CallRecord, late: bool) -> None:
        share = 1.0 / len(record.waited_for)
        for rank in record.waited_for:
            self.waits[rank] = self.waits.get(rank, 0.0) + record.waited_s * share
            if late:
                self.lasts[rank] = self.lasts.get(rank, 0.0) + share

    @property
    def kinds(self) -> dict[str, KindStatistics]:
        """Totals by kind."""
        return {
            kind: KindStatistics(
                calls, volume, sent_evenly(kind, volume, len(self.place.ranks)) if kind in EVEN else sent, seconds
            )
            for kind, (calls, seconds, volume, sent, *_) in list(self._totals.items())
        }

    def sent_bytes(self) -> int:
        """Bytes that this rank sent in calls of all kinds; see ``KindStatistics``."""
        return sum(entry.sent_bytes for entry in self.kinds.values())

    def history(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        return tuple(str(record.call) for record in list(self.recent)[-HISTORY_LENGTH:])


class Sums(NamedTuple):
    """What several communicators did together; the fields are those of ``Statistics``."""

    times: CallTimes
    waits: dict[int, float]
    lasts: dict[int, float]
    kinds: dict[str, KindStatistics]

    def plus(self, entry: Statistics) -> Sums:
        """The sums with those of ``entry``."""
        return Sums(
            self.times.plus(entry.times),
            _added(self.waits, entry.waits),
            _added(self.lasts, entry.lasts),
            merge([self.kinds, entry.kinds]),
        )


class Books(NamedTuple):
    """All communicators of a rank. Replaced as one value, so that threads which read count each of them once.

    Attributes:
        open: counters of those that are open.
        latest: counters of those that were closed last; a call that another thread makes may end a little later.
        earlier: sums of all that were closed before these.
    """

    open: tuple[Statistics, ...]
    latest: tuple[Statistics, ...]
    earlier: Sums

    def all(self) -> tuple[Sums | Statistics, ...]:
        """Everything to add up."""
        return (self.earlier, *self.latest, *self.open)


class TraceSink(Protocol):
    """Takes what happens, while it happens."""

    def call(self, record: CallRecord) -> None:
        """A call has ended."""

    def span(self, name: str, begun: float, ended: float, facts: dict[str, Any]) -> None:
        """Something of this rank took so long, by ``Recorder.clock``."""


class Recorder:
    """What one rank did on all of its communicators.

    Args:
        clock: gives seconds, from any start.

    Attributes:
        clock: gives seconds, from any start.
        job: name of what all ranks have begun together; empty for a record of its own.
        lost: global rank of the first peer that was lost, and what it did; None if none was.
        trace: takes every call; None while no trace is wanted.
        beat_at: when ``beat`` is called next, by ``clock``.
        beat: called now and then by the thread that ends a call; returns quickly and raises nothing.
        numbers: number of the next call.
        beside: identities of the threads that do something for the code that computes.
        thread: identity of the thread that connected the rank.
        steps: training steps that were made here, of any model, and the number of the last one; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began = clock()
        self.job = ""
        self.lost: tuple[int, str] | None = None
        self.trace: TraceSink | None = None
        self.beat_at = float("inf")
        self.beat: Callable[[], None] = lambda: None
        self.numbers = itertools.count()
        self.beside: set[int] = set()
        self.thread = get_ident()
        self.steps: tuple[int, int] | None = None
        self._books = Books((), (), Sums(CallTimes(), {}, {}, {}))
        self._writing = threading.RLock()
        #: Seconds for which the code that computes stood still, and since when it does now. One value, so that
        #: threads read both at once.
        self._blocked: tuple[float, float | None] = (0.0, None)

    def disown(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._writing = threading.RLock()

    def stepped(self, number: int) -> None:
        """Training step ``number`` of a model is over."""
        self.steps = (1 if self.steps is None else self.steps[0] + 1, number)

    # Standing still.

    def blocked_s(self, now: float) -> float:
        """Seconds for which the code that computes has stood still for results of background threads, until ``now``."""
        total, since = self._blocked
        return total if since is None else total + max(now - since, 0.0)

    @property
    def stands_still(self) -> bool:
        """Whether the code that computes waits for results of background threads now."""
        return self._blocked[1] is not None

    def while_blocked(self, wait: Callable[[], T]) -> T:
        """``wait()``, in which the code that computes stands still."""
        if self._blocked[1] is not None:  # A signal handler, or a wait inside a wait.
            return wait()
        self._blocked = (self._blocked[0], self.clock())
        try:
            return wait()
        finally:
            self._blocked = (self.blocked_s(self.clock()), None)

    # Sums.

    @property
    def open(self) -> tuple[Statistics, ...]:
        """Statistics of the communicators that are open."""
        return self._books.open

    def add(self, entry: Statistics) -> None:
        """A communicator was made."""
        with self._writing:
            self._books = self._books._replace(open=(*self._books.open, entry))

    def retire(self, entry: Statistics) -> None:
        """Keep the sums of a communicator that was closed, and forget the rest."""
        with self._writing:
            books = self._books
            if entry in books.open:
                others = tuple(one for one in books.open if one is not entry)
                latest, earlier = (*books.latest, entry), books.earlier
                if len(latest) > LATEST_LENGTH:
                    latest, earlier = latest[1:], earlier.plus(latest[0])
                self._books = Books(others, latest, earlier)

    def times(self) -> CallTimes:
        """Sums over all communicators."""
        return functools.reduce(CallTimes.plus, (one.times for one in self._books.all()))

    def waits(self) -> dict[int, float]:
        """Seconds that this rank has waited for each other one that came last, by global rank."""
        return _added(*(one.waits for one in self._books.all()))

    def lasts(self) -> dict[int, float]:
        """How often each other rank came last, and late, by global rank."""
        return _added(*(one.lasts for one in self._books.all()))

    def totals(self) -> dict[str, KindStatistics]:
        """Sums over all communicators, by kind of call."""
        return merge([one.kinds for one in self._books.all()])

    def sent_bytes(self) -> int:
        """Bytes that this rank sent on all communicators."""
        return sum(kind.sent_bytes for kind in self.totals().values())

    @property
    def gauges(self) -> dict[str, float]:
        """The latest values of what changes slowly, by the name of the metric, while what measures it is there."""
        found: dict[str, float] = {}
        for entry in self.open:
            found |= entry.gauges
        return found

    def records(self) -> list[CallRecord]:
        """The last calls on each communicator that is open, oldest first."""
        found = [record for entry in self.open for record in list(entry.recent)]
        return sorted(found, key=lambda record: record.number)

    def span(self, name: str, begun: float, **facts: Any) -> None:
        """Tell the trace, if there is one, of something that began at ``begun`` and ends now."""
        if self.trace is not None:
            self.trace.span(name, begun, self.clock(), facts)


def _added(*tables: dict[int, float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for table in tables:
        for rank, amount in dict(table).items():  # A copy: another thread may add a rank.
            total[rank] = total.get(rank, 0.0) + amount
    return total


class _Here(threading.local):
    """What is true of the calling thread.

    Attributes:
        background: it is inside ``in_background``.
        ident: its identity: one object, where asking anew makes one for each call.
    """

    background = False

    def __init__(self) -> None:
        self.ident = get_ident()


here = _Here()


@contextmanager
def in_background(recorder: Recorder | None = None) -> Iterator[None]:
    """Calls in this block are made beside the code that computes, which stands still only if it waits for them.

    Args:
        recorder: record of the rank, if the code that computes gave it this to do; None if it began by itself.
    """
    before, here.background = here.background, True
    beside = set[int]() if recorder is None else recorder.beside
    beside.add(get_ident())
    try:
        yield
    finally:
        here.background = before
        beside.discard(get_ident())


class Observer(Protocol):
    """Is told when a rank starts, fails and ends. What goes wrong there must not hide what it is told of."""

    def started(self, recorder: Recorder, place: Place, beats: Beats) -> None:
        """The rank is connected: ``place`` is that of all ranks, ``beats`` what they say of themselves.

        What it raises, because of a wrong option for example, reaches the user.
        """

    def failed(self, recorder: Recorder, error: BaseException) -> None:
        """A call ended with ``error``; the other ranks have been told. Raises nothing."""

    def ended(self, recorder: Recorder) -> None:
        """The rank closes all of its communicators. Raises nothing."""


#: Of this process.
observers: list[Observer] = []

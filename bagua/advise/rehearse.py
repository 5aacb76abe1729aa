"""A rehearsal: the engine runs an algorithm on a group of which one rank is there, and its record says what happened.

The bytes on the wire, the pattern of messages and the work between them are those of the exchanges themselves: nothing
here knows one algorithm from another. A twin stands in for the model: the same parameters, whose gradients arrive in
the order that was measured, and no computation.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bagua.advise.facts import Message, ModelFacts, Moment, ParameterFacts, Rehearsal, Run
from bagua.algorithms import Algorithm
from bagua.comm import CallRecord, rehearsal_group
from bagua.engine import DEFAULT_BUCKET_BYTES
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua

_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 2, 120
#: Small enough that no step changes what codecs see.
_RATE = 1e-6
#: A period is repeated for so many steps, but at least twice: flights of the first are folded in the second.
_STEPS_READ = 16
#: Calls whose bytes are those of one share of many.
_OF_SHARES = ("allgather", "gather", "scatter", "reduce_scatter", "alltoall")


class _Twin(torch.nn.Module):
    """Parameters without a computation.

    Args:
        parameters: parameters in the order in which their gradients arrive.
        arrived: called with the number of each gradient, when it is there.
    """

    def __init__(self, parameters: Sequence[ParameterFacts], arrived: Callable[[int], None]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.ordered = torch.nn.ParameterList()
        self.gradients: list[torch.Tensor] = []
        for number, one in enumerate(parameters):
            data, gradient = (torch.randn(one.shape, generator=generator) for _ in range(2))
            dtype = getattr(torch, one.dtype)
            self.ordered.append(torch.nn.Parameter(data.to(dtype)))
            self.gradients.append(gradient.to(dtype))
            self.ordered[-1].register_post_accumulate_grad_hook(lambda _, number=number: arrived(number))

    def forward(self) -> list[torch.Tensor]:
        """All parameters, the first one last: a backward pass begins with what was made last."""
        return [one.expand_as(one) for one in reversed(self.ordered)]


class _Span(NamedTuple):
    """What was shown: when it began and ended, in which thread, and how long that had been busy by its end."""

    name: str
    begun: float
    ended: float
    group: str
    thread: int
    busy_s: float


@dataclass
class _Journal:
    """A sink of the record, and of the marks that the twin sets.

    What a thread computes is told by the seconds for which it was on a core: a machine that is busy with other things,
    and waiting, are no part of it.

    Attributes:
        nodes: host of each rank.
        calls: calls, and how long their threads had been busy when they ended.
        spans: spans by their track; those of ``work`` are runs of exchanges.
        marks: moments of the twin.
        busy: moments, and how long the thread had been busy, by thread.
    """

    nodes: Sequence[int]
    calls: list[tuple[CallRecord, float]] = field(default_factory=list)
    spans: dict[str, list[_Span]] = field(default_factory=lambda: defaultdict(list))
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    busy: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def call(self, record: CallRecord) -> None:
        """See ``TraceSink``."""
        self.calls.append((record, self._look()))

    def span(self, name: str, begun: float, ended: float, facts: dict[str, Any]) -> None:
        """See ``TraceSink``."""
        track, group = str(facts.get("track")), str(facts.get("group"))
        self.spans[track].append(_Span(name, begun, ended, group, threading.get_ident(), self._look()))

    def mark(self, what: str, number: int = 0) -> None:
        """Note that the thread which computes has come somewhere."""
        self._look()
        self.marks.append((time.perf_counter(), what, number))

    def _look(self) -> float:
        busy_s = time.thread_time()
        self.busy[threading.get_ident()].append((time.perf_counter(), busy_s))
        return busy_s

    def _busy_before(self, work: _Span) -> float:
        """How long the thread of ``work`` had been busy when that began, as far as is known."""
        known = self.busy[work.thread]
        index = bisect(known, (work.begun, math.inf))
        return known[index - 1][1] if index else work.busy_s - (work.ended - work.begun)

    def read(self, steps: int) -> tuple[tuple[tuple[Moment, ...], ...], tuple[Run, ...], float]:
        """What happened in the last period, whose flights have all been started in it or in the one before.

        Args:
            steps: steps in a period.

        Returns:
            Moments of each step, all runs, and the seconds for which this thread ran exchanges itself, in all periods.
        """
        began = [at for at, what, _ in self.marks if what == "begins"][-steps:]
        work = sorted(self.spans["work"], key=lambda one: one.begun)
        blocked_s = sum(one.busy_s - self._busy_before(one) for one in work if one.thread == threading.get_ident())
        starts = {number: one.begun for number, one in enumerate(work)}  # of those that nobody has waited for yet
        starts |= self._spans_of(work, "exchanges")
        waits = self._spans_of(work, "waits", "wait for ")
        earlier = [number for number, at in starts.items() if at <= began[0]]
        now = [number for number, at in starts.items() if at > began[0]]
        runs = [self._run_of(work[number]) for number in [*earlier, *now]]
        if now and len(runs) % len(now) == 0:
            runs = [_usual(*runs[index :: len(now)]) for index in range(len(now))]
        events = [(at, Moment(what, number)) for at, what, number in self.marks if what != "begins"]  # type: ignore[arg-type]
        events += [(starts[number], Moment("start", index)) for index, number in enumerate(now)]
        order = [*earlier[-len(now) :], *now] if now else []
        for index, number in enumerate(order, start=len(now) - len(order)):
            if number in waits:
                events.append((waits[number], Moment("wait", index % len(now), int(index < 0))))
        events.sort(key=lambda event: event[0])
        moments = (
            tuple(moment for at, moment in events if begins < at < ends)
            for begins, ends in zip(began, [*began[1:], math.inf], strict=True)
        )
        return tuple(moments), tuple(runs[-len(now) :] if now else ()), blocked_s

    def _spans_of(self, work: Sequence[_Span], track: str, prefix: str = "") -> dict[int, float]:
        """When spans of a track began, by the number of the run that each is about: those of one name come in order."""
        found: dict[int, float] = {}
        for name in {one.name for one in work}:
            numbers = [number for number, one in enumerate(work) if one.name == name]
            about = prefix + name.removeprefix("run ")
            found.update(zip(numbers, [one.begun for one in self.spans[track] if one.name == about], strict=False))
        return found

    def _run_of(self, work: _Span) -> Run:
        items: list[Message | float] = []
        at = self._busy_before(work)
        for record, busy_s in self.calls:
            # In the group, or between or inside its hosts.
            group = record.place.label.removesuffix("/intra").removesuffix("/inter")
            if work.begun <= record.begun <= work.ended and group == work.group:
                # The call itself takes no time among real ranks that would not be theirs.
                items += [max(busy_s - (record.ended - record.begun) - at, 0.0), self._message(record)]
                at = busy_s
        items.append(max(work.busy_s - at, 0.0))
        return Run(tuple(items), "" if work.thread == threading.get_ident() else work.group)

    def _message(self, record: CallRecord) -> Message:
        call, ranks = record.call, record.place.ranks
        shares = len(ranks) if call.kind in _OF_SHARES else 1
        return Message(call.kind, float(call.nbytes) * shares, len(ranks), len({self.nodes[rank] for rank in ranks}))


def _usual(*runs: Run) -> Run:
    """A run of all periods, with the work as long as it took in the middle."""
    last = runs[-1]
    if any([type(item) for item in one.items] != [type(item) for item in last.items] for one in runs):
        return last
    columns = zip(*(one.items for one in runs), strict=True)
    items = (column[-1] if isinstance(column[-1], Message) else statistics.median(column) for column in columns)
    return Run(tuple(items), last.lane)


def rehearse(
    algorithm: Algorithm,
    facts: ModelFacts,
    host_sizes: Sequence[int],
    *,
    name: str = "",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Rehearsal:
    """Run the last phase of ``algorithm`` on a twin of the model, as one rank of many would.

    Args:
        algorithm: algorithm that is rehearsed; its warm-up is left out.
        facts: the model.
        host_sizes: number of ranks on each host.
        name: name of the algorithm in tables.
        bucket_bytes: size of buckets.

    Raises:
        ConfigurationError: ranks exchange in the background, at their own pace, or too seldom to be rehearsed.
    """
    run = functools.partial(_run, algorithm, host_sizes, bucket_bytes)
    log = logging.getLogger("bagua")
    log.disabled, before = True, log.disabled  # The engine has much to say of ranks that all do the same.
    try:
        found = run(facts.parameters)
    except (IndexError, RuntimeError):  # A codec finds no meaning in a share of another size.
        found = run([_divisible(one, sum(host_sizes)) for one in facts.parameters])
    finally:
        log.disabled = before
    kind = algorithm.optimizer_class
    needs_optimizer = "" if kind is None else getattr(kind, "__name__", repr(kind))
    return Rehearsal(name or repr(algorithm), *found, not algorithm.ranks_differ, needs_optimizer)


def _divisible(one: ParameterFacts, ranks: int) -> ParameterFacts:
    """A parameter of nearly the same shape, of which each rank can have an equal share."""
    first, *others = one.shape or (1,)
    unit = 8 * ranks // math.gcd(8 * ranks, math.prod(others))
    return dataclasses.replace(one, shape=(-(-first // unit) * unit, *others))


def _run(
    algorithm: Algorithm, host_sizes: Sequence[int], bucket_bytes: int, parameters: Sequence[ParameterFacts]
) -> tuple[tuple[tuple[Moment, ...], ...], tuple[Run, ...], float]:
    """Moments of each step, all runs, and the seconds of a step beside the runs and those without an engine."""
    steady = algorithm.exchanges(algorithm.phases[-1])
    if algorithm.in_background:
        raise ConfigurationError(
            "ranks exchange in the background, each at its own pace, so no step has a time of its own",
            argument="algorithm",
            expected="exchanges in lockstep",
            seen=repr(algorithm),
        )
    period = max((one.when.steps for one in steady if one.how is not None), default=1)
    if period > _MOST_STEPS:
        raise ConfigurationError(
            f"a period of {period} steps is too long to be rehearsed, at most {_MOST_STEPS} are", argument="algorithm"
        )
    steps = period * -(-_LEAST_STEPS // period)
    journal = _Journal([host for host, size in enumerate(host_sizes) for _ in range(size)])
    twin = _Twin(parameters, functools.partial(journal.mark, "arrival"))
    kind = algorithm.optimizer_class
    optimizer: torch.optim.Optimizer = (torch.optim.Adam if kind else torch.optim.SGD)(twin.parameters(), lr=_RATE)
    bare_s = statistics.median([_step(twin, optimizer, journal) for _ in range(_WARM_UP_STEPS + 9)][_WARM_UP_STEPS:])
    if kind is not None:
        optimizer = kind(list(twin.parameters()), lr=_RATE)
    # Before the engine's own, which starts exchanges.
    optimizer.register_step_post_hook(lambda *_: journal.mark("stepped"))
    group = rehearsal_group(host_sizes)
    try:
        declared = Algorithm.of(*steady)
        with_bagua(twin, [optimizer], declared, process_group=group, bucket_bytes=bucket_bytes, check_every=0)
        for _ in range(-(-_WARM_UP_STEPS // steps) * steps):
            _step(twin, optimizer, journal)
        group.recorder.trace = journal
        seconds = [_step(twin, optimizer, journal) for _ in range(steps * max(2, _STEPS_READ // steps))]
    finally:
        group.recorder.trace = None
        group.close()
    moments, runs, blocked_s = journal.read(steps)
    return moments, runs, max(statistics.fmean(seconds) - bare_s - blocked_s / len(seconds), 0.0)


def _step(twin: _Twin, optimizer: torch.optim.Optimizer, journal: _Journal) -> float:
    """Seconds for which the thread that computes was busy in it."""
    begun = time.thread_time()
    journal.mark("begins")
    torch.autograd.backward(twin(), twin.gradients[::-1])
    optimizer.step()
    optimizer.zero_grad()
    return time.thread_time() - begun

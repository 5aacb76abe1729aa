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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bagua.advise.facts import ModelFacts, ParameterFacts
from bagua.advise.trace import Message, Moment, Rehearsal, Run
from bagua.algorithms import Algorithm, Exchange
from bagua.comm import CallRecord, rehearsal_group
from bagua.engine import DEFAULT_BUCKET_BYTES
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua

_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 2, 120
#: A period is repeated for so many steps, but at least twice: flights of the first are folded in the second.
_STEPS_READ = 16
#: Calls whose bytes are those of one share of many.
_OF_SHARES = ("allgather", "gather", "scatter", "reduce_scatter", "alltoall")


class _Gradient(torch.autograd.Function):
    """Zero, whose gradient with respect to a parameter is given."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, _: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *chain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return chain[0], ctx.gradient.clone(), None


class _Twin(torch.nn.Module):
    """Parameters without a computation.

    Args:
        parameters: parameters in the order in which their gradients arrive.
        arrived: called with the number of each gradient, when it is there.
    """

    def __init__(self, parameters: Sequence[ParameterFacts], arrived: Callable[[int], None]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parameters_in_order = []
        self.gradients = []
        for number, one in enumerate(parameters):
            data = torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype))
            parameter = torch.nn.Parameter(data)
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: arrived(number))  # type: ignore[no-untyped-call]
            self.register_parameter(f"p{number}", parameter)
            self.parameters_in_order.append(parameter)
            self.gradients.append(torch.randn(one.shape, generator=generator).to(data.dtype))

    def forward(self) -> torch.Tensor:
        """Zero."""
        chain = torch.zeros((), requires_grad=True)
        for parameter, gradient in zip(reversed(self.parameters_in_order), reversed(self.gradients), strict=True):
            chain = _Gradient.apply(chain, parameter, gradient)  # type: ignore[no-untyped-call]
        return chain


class _Work(NamedTuple):
    """One run of an exchange: when it began and ended, in which thread, and how long that had been busy by its end."""

    name: str
    begun: float
    ended: float
    label: str
    thread: int
    busy_s: float


@dataclass
class _Journal:
    """A sink of the record, and of the marks that the twin sets.

    What a thread computes is told by the seconds for which it was on a core: a machine that is busy with other things,
    and waiting, are no part of it.

    Attributes:
        calls: calls, and how long their threads had been busy when they ended.
        work: runs of exchanges.
        spans: other spans that were shown: name, beginning and track.
        marks: moments of the twin.
        busy: moments, and how long the thread had been busy, by thread.
    """

    clock: Callable[[], float] = time.perf_counter
    busy_clock: Callable[[], float] = time.thread_time
    calls: list[tuple[CallRecord, float]] = field(default_factory=list)
    work: list[_Work] = field(default_factory=list)
    spans: list[tuple[str, float, str]] = field(default_factory=list)
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    busy: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def call(self, record: CallRecord) -> None:
        """See ``TraceSink``."""
        self.calls.append((record, self._look()))

    def span(self, name: str, begun: float, ended: float, facts: dict[str, Any]) -> None:
        """See ``TraceSink``."""
        track, busy_s = str(facts.get("track")), self._look()
        if track == "work":
            self.work.append(_Work(name, begun, ended, str(facts["group"]), threading.get_ident(), busy_s))
        else:
            self.spans.append((name, begun, track))

    def mark(self, what: str, number: int = 0) -> None:
        """Note that the thread which computes has come somewhere."""
        self._look()
        self.marks.append((self.clock(), what, number))

    def _look(self) -> float:
        busy_s = self.busy_clock()
        self.busy[threading.get_ident()].append((self.clock(), busy_s))
        return busy_s

    def busy_before(self, work: _Work) -> float:
        """How long the thread of ``work`` had been busy when that began, as far as is known."""
        known = self.busy[work.thread]
        index = bisect(known, (work.begun, math.inf))
        return known[index - 1][1] if index else work.busy_s - (work.ended - work.begun)

    def forget(self) -> None:
        """Begin anew."""
        for noted in (self.calls, self.work, self.spans, self.marks, self.busy):
            noted.clear()


#: What happened in the steps that are read, and seconds for which each kept its thread busy.
_Ran = tuple[_Journal, list[float]]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the engine has to say of ranks that all do the same."""
    log = logging.getLogger("bagua")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


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
    steady = algorithm.exchanges(algorithm.phases[-1])
    steps = _steps_of(algorithm, steady)
    kind = algorithm.optimizer_class
    with _quietly():
        run = functools.partial(_run, algorithm, steady, host_sizes, bucket_bytes, steps)
        journal, seconds = _run_somehow(run, facts.parameters, sum(host_sizes), algorithm)
        bare_s = _bare_step_s(facts, adaptive=kind is not None)
    found = _Reading(journal, steps, [host for host, size in enumerate(host_sizes) for _ in range(size)])
    beside_s = statistics.fmean(seconds) - bare_s - found.blocked_s / len(seconds)
    return Rehearsal(
        name or repr(algorithm),
        found.steps,
        found.runs,
        max(beside_s, 0.0),
        keeps_equal=not algorithm.ranks_differ,
        needs_optimizer="" if kind is None else getattr(kind, "__name__", repr(kind)),
    )


def _run_somehow(
    run: Callable[[Sequence[ParameterFacts]], _Ran], parameters: Sequence[ParameterFacts], ranks: int, algorithm: object
) -> _Ran:
    """``run``; where a codec finds no meaning in a share of another size, with shares of equal size."""
    try:
        return run(parameters)
    except (IndexError, RuntimeError):
        alike = [_divisible(one, ranks) for one in parameters]
    try:
        return run(alike)
    except (IndexError, RuntimeError) as error:
        raise ConfigurationError(
            f"what its peers would send cannot be made up: {type(error).__name__}: {error}",
            argument="algorithm",
            expected="one that takes in what another rank with the same gradients sends",
            seen=repr(algorithm),
        ) from error


def _divisible(one: ParameterFacts, ranks: int) -> ParameterFacts:
    """A parameter of nearly the same shape, of which each rank can have an equal share."""
    first, *others = one.shape or (1,)
    unit = 8 * ranks // math.gcd(8 * ranks, math.prod(others))
    return dataclasses.replace(one, shape=(-(-first // unit) * unit, *others))


def _steps_of(algorithm: Algorithm, steady: Sequence[Exchange]) -> int:
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
            "a period is too long to be rehearsed", argument="algorithm", expected=f"{_MOST_STEPS} steps", seen=period
        )
    return period * -(-_LEAST_STEPS // period)


def _optimizer(kind: Callable[..., torch.optim.Optimizer] | None, twin: _Twin) -> torch.optim.Optimizer:
    return (kind or torch.optim.SGD)(list(twin.parameters()), lr=1e-6)


def _run(
    algorithm: Algorithm,
    steady: Sequence[Exchange],
    host_sizes: Sequence[int],
    bucket_bytes: int,
    steps: int,
    parameters: Sequence[ParameterFacts],
) -> _Ran:
    journal = _Journal()
    group = rehearsal_group(host_sizes)
    try:
        twin = _Twin(parameters, lambda number: journal.mark("arrival", number))
        optimizer = _optimizer(algorithm.optimizer_class, twin)
        # Before the engine's own, which starts exchanges.
        optimizer.register_step_post_hook(lambda *_: journal.mark("stepped"))
        declared = Algorithm.of(*steady)
        with_bagua(twin, [optimizer], declared, process_group=group, bucket_bytes=bucket_bytes, check_every=0)
        for _ in range(-(-_WARM_UP_STEPS // steps) * steps):
            _step(twin, optimizer, journal)
        journal.forget()
        group.recorder.trace = journal
        seconds = [_step(twin, optimizer, journal) for _ in range(steps * max(2, _STEPS_READ // steps))]
    finally:
        group.recorder.trace = None
        group.close()
    return journal, seconds


def _step(twin: _Twin, optimizer: torch.optim.Optimizer, journal: _Journal) -> float:
    """Seconds for which the thread that computes was busy in it."""
    begun = time.thread_time()
    journal.mark("begins")
    twin().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.thread_time() - begun


def _bare_step_s(facts: ModelFacts, *, adaptive: bool) -> float:
    """Seconds for which a step of the twin without any engine keeps its thread busy."""
    journal = _Journal()
    twin = _Twin(facts.parameters, lambda number: journal.mark("arrival", number))
    optimizer = _optimizer(torch.optim.Adam if adaptive else None, twin)
    return statistics.median([_step(twin, optimizer, journal) for _ in range(_WARM_UP_STEPS + 9)][_WARM_UP_STEPS:])


def _usual(*runs: Run) -> Run:
    """A run of all periods, with the work as long as it took in the middle."""
    last = runs[-1]
    if any([type(item) for item in one.items] != [type(item) for item in last.items] for one in runs):
        return last
    columns = zip(*(one.items for one in runs), strict=True)
    items = (column[-1] if isinstance(column[-1], Message) else statistics.median(column) for column in columns)
    return Run(tuple(items), last.lane)


def _is_of(group: str, record: CallRecord) -> bool:
    """Whether a call was made in a group, or between or inside its hosts. A lane's label begins with the group's."""
    return record.place.label.removesuffix("/intra").removesuffix("/inter") == group


class _Reading:
    """What a journal says of the last period, whose flights have all been started in it or in the one before.

    Args:
        journal: the journal.
        steps: steps in a period.
        nodes: host of each rank.

    Attributes:
        steps: moments of each step.
        runs: all runs.
        blocked_s: seconds for which the thread that computes ran exchanges itself, in all periods.
    """

    def __init__(self, journal: _Journal, steps: int, nodes: Sequence[int]) -> None:
        self._main = threading.get_ident()
        self._nodes = nodes
        began = [at for at, what, _ in journal.marks if what == "begins"]
        self._began = began[-steps]
        work = sorted(journal.work, key=lambda one: one.begun)
        self._work = work
        self.blocked_s = sum(one.busy_s - journal.busy_before(one) for one in work if one.thread == self._main)
        starts, waits = self._starts_and_waits(journal)
        now = sorted(number for number, at in starts.items() if at > self._began)
        position = {number: index for index, number in enumerate(now)}
        earlier = [number for number in sorted(starts) if number not in position]
        known = [self._run_of(work[number], journal) for number in [*earlier, *now]]
        alike = len(known) % len(now) == 0 if now else False
        periods = [known[first : first + len(now)] for first in range(0, len(known), len(now))] if alike else []
        self.runs = tuple(map(_usual, *periods)) if alike else tuple(known[len(earlier) :])
        events: list[tuple[float, Moment]] = [
            (at, Moment(what, number))  # type: ignore[arg-type]
            for at, what, number in journal.marks
            if at > self._began and what != "begins"
        ]
        events += [(starts[number], Moment("start", position[number])) for number in now]
        for number, at in waits.items():
            if at > self._began:
                back = number not in position
                index = earlier.index(number) - (len(earlier) - len(now)) if back else position[number]
                if 0 <= index < len(now):
                    events.append((at, Moment("wait", index, int(back))))
        events.sort(key=lambda event: event[0])
        self.steps = tuple(
            tuple(moment for at, moment in events if begins < at < ends)
            for begins, ends in zip(began[-steps:], [*began[-steps:][1:], float("inf")], strict=True)
        )

    def _starts_and_waits(self, journal: _Journal) -> tuple[dict[int, float], dict[int, float]]:
        """When each run was started and waited for, by its number in the order of the work."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self._work):
            numbers[one.name.removeprefix("run ")].append(number)
        starts: dict[int, float] = {}
        waits: dict[int, float] = {}
        seen: dict[str, int] = defaultdict(int)
        for name, begun, track in journal.spans:
            if track == "waits":
                own = name.removeprefix("wait for ")
                if seen[own] < len(numbers[own]):
                    waits[numbers[own][seen[own]]] = begun
            elif track == "exchanges":
                if seen[name] < len(numbers[name]):
                    starts[numbers[name][seen[name]]] = begun
                seen[name] += 1
        for number, one in enumerate(self._work):  # Those that nobody has waited for yet.
            starts.setdefault(number, one.begun)
        return starts, waits

    def _run_of(self, work: _Work, journal: _Journal) -> Run:
        items: list[Message | float] = []
        at = journal.busy_before(work)
        for record, busy_s in journal.calls:
            if work.begun <= record.begun <= work.ended and _is_of(work.label, record):
                # The call itself takes no time among real ranks that would not be theirs.
                items += [max(busy_s - (record.ended - record.begun) - at, 0.0), self._message(record)]
                at = busy_s
        items.append(max(work.busy_s - at, 0.0))
        return Run(tuple(items), "" if work.thread == self._main else work.label)

    def _message(self, record: CallRecord) -> Message:
        call, ranks = record.call, record.place.ranks
        shares = len(ranks) if call.kind in _OF_SHARES else 1
        return Message(call.kind, float(call.nbytes) * shares, len(ranks), len({self._nodes[rank] for rank in ranks}))

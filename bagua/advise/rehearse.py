"""A rehearsal: the engine runs an algorithm on a group of which one rank is there, and its record says what happened.

The bytes on the wire, the pattern of messages and the work between them are those of the exchanges themselves: nothing
here knows one algorithm from another. A twin stands in for the model: the same parameters, whose gradients arrive in
the order that was measured, and no computation.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.advise.facts import ModelFacts, ParameterFacts
from bagua.advise.trace import Message, Moment, Rehearsal, Run
from bagua.algorithms import Algorithm, Exchange
from bagua.comm import CallRecord, ProcessGroup, rehearsal_group
from bagua.engine import DEFAULT_BUCKET_BYTES
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua

__all__ = ["rehearse"]

_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 2, 120
#: Calls whose bytes are those of one share of many.
_OF_SHARES = ("allgather", "gather", "scatter", "reduce_scatter", "alltoall")
#: Steps of an algorithm whose intervals are irregular.
_STEPS_OF_IRREGULAR = 32


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


@dataclass
class _Journal:
    """A sink of the record, and of the marks that the twin sets."""

    clock: Callable[[], float] = time.perf_counter
    calls: list[CallRecord] = field(default_factory=list)
    spans: list[tuple[str, float, float, dict[str, Any], int]] = field(default_factory=list)
    marks: list[tuple[float, str, int]] = field(default_factory=list)

    def call(self, record: CallRecord) -> None:
        """See ``TraceSink``."""
        self.calls.append(record)

    def span(self, name: str, begun: float, ended: float, facts: dict[str, Any]) -> None:
        """See ``TraceSink``."""
        self.spans.append((name, begun, ended, facts, threading.get_ident()))

    def mark(self, what: str, number: int = 0) -> None:
        """Note that the thread which computes has come somewhere."""
        self.marks.append((self.clock(), what, number))

    def forget(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.spans.clear()
        self.marks.clear()


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
        journal, seconds = _run_somehow(algorithm, steady, facts.parameters, host_sizes, bucket_bytes, steps)
        bare_s = _bare_step_s(facts, adaptive=kind is not None)
    found = _Reading(journal, steps, [host for host, size in enumerate(host_sizes) for _ in range(size)])
    beside_s = statistics.median(seconds) - bare_s - found.blocked_s / len(seconds)
    return Rehearsal(
        name or repr(algorithm),
        found.steps,
        found.runs,
        max(beside_s, 0.0),
        keeps_equal=not algorithm.ranks_differ,
        needs_optimizer="" if kind is None else getattr(kind, "__name__", repr(kind)),
    )


def _run_somehow(
    algorithm: Algorithm,
    steady: Sequence[Exchange],
    parameters: Sequence[ParameterFacts],
    host_sizes: Sequence[int],
    bucket_bytes: int,
    steps: int,
) -> tuple[_Journal, list[float]]:
    """``_run``; where a codec finds no meaning in a share of another size, with shares of equal size."""
    try:
        return _run(algorithm, steady, parameters, host_sizes, bucket_bytes, steps)
    except (IndexError, RuntimeError):
        alike = [_divisible(one, sum(host_sizes)) for one in parameters]
    try:
        return _run(algorithm, steady, alike, host_sizes, bucket_bytes, steps)
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
    regular = [one.when.steps for one in steady if one.how is not None and one.when.regular]
    period = max(regular, default=1)
    if any(not one.when.regular for one in steady):
        period = max(period, _STEPS_OF_IRREGULAR)
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
    parameters: Sequence[ParameterFacts],
    host_sizes: Sequence[int],
    bucket_bytes: int,
    steps: int,
) -> tuple[_Journal, list[float]]:
    journal = _Journal()
    group = rehearsal_group(host_sizes)
    try:
        twin = _Twin(parameters, lambda number: journal.mark("arrival", number))
        optimizer = _optimizer(algorithm.optimizer_class, twin)
        # Before the engine's own, which starts exchanges.
        optimizer.register_step_post_hook(lambda *_: journal.mark("stepped"))
        _wrap(twin, optimizer, Algorithm.of(*steady), group, bucket_bytes)
        for _ in range(-(-_WARM_UP_STEPS // steps) * steps):
            _step(twin, optimizer, journal)
        journal.forget()
        group.recorder.trace = journal
        seconds = [_step(twin, optimizer, journal) for _ in range(2 * steps)]
    finally:
        group.recorder.trace = None
        group.close()
    return journal, seconds


def _wrap(
    twin: _Twin, optimizer: torch.optim.Optimizer, algorithm: Algorithm, group: ProcessGroup, bucket_bytes: int
) -> None:
    with_bagua(
        twin, [optimizer], algorithm, process_group=group, bucket_bytes=bucket_bytes, autotune=False, check_every=0
    )


def _step(twin: _Twin, optimizer: torch.optim.Optimizer, journal: _Journal) -> float:
    begun = journal.clock()
    journal.mark("begins")
    twin().backward()
    optimizer.step()
    optimizer.zero_grad()
    return journal.clock() - begun


def _bare_step_s(facts: ModelFacts, *, adaptive: bool) -> float:
    """Seconds of a step of the twin without any engine."""
    journal = _Journal()
    twin = _Twin(facts.parameters, lambda number: journal.mark("arrival", number))
    optimizer = _optimizer(torch.optim.Adam if adaptive else None, twin)
    return statistics.median([_step(twin, optimizer, journal) for _ in range(_WARM_UP_STEPS + 5)][_WARM_UP_STEPS:])


def _quicker(one: Run, other: Run) -> Run:
    """The same run, with the work as long as it took at least: what else goes on in the machine only adds to it."""
    if [type(item) for item in one.items] != [type(item) for item in other.items]:
        return other
    items = (
        min(first, second) if isinstance(first, float) and isinstance(second, float) else second
        for first, second in zip(one.items, other.items, strict=True)
    )
    return Run(tuple(items), other.lane)


class _Reading:
    """What a journal of two periods says of the second, whose flights have all been started in it or in the first.

    Args:
        journal: the journal.
        steps: steps in a period.
        nodes: host of each rank.

    Attributes:
        steps: moments of each step.
        runs: all runs.
        blocked_s: seconds for which the thread that computes ran exchanges, or waited for them, in both periods.
    """

    def __init__(self, journal: _Journal, steps: int, nodes: Sequence[int]) -> None:
        self._main = threading.get_ident()
        self._nodes = nodes
        began = [at for at, what, _ in journal.marks if what == "begins"]
        self._began = began[steps]
        work = sorted((one for one in journal.spans if one[3].get("track") == "work"), key=lambda one: one[1])
        self._work = work
        self.blocked_s = sum(ended - begun for _, begun, ended, _, thread in work if thread == self._main)
        self.blocked_s += sum(
            ended - begun for _, begun, ended, facts, _ in journal.spans if facts.get("track") == "waits"
        )
        starts, waits = self._starts_and_waits(journal)
        now = sorted(number for number, at in starts.items() if at > self._began)
        position = {number: index for index, number in enumerate(now)}
        earlier = [number for number in sorted(starts) if number not in position]
        runs = [[self._run_of(work[number], journal) for number in numbers] for numbers in (earlier, now)]
        self.runs = tuple(map(_quicker, *runs)) if len(earlier) == len(now) else tuple(runs[1])
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
            for begins, ends in zip(began[steps:], [*began[steps + 1 :], float("inf")], strict=True)
        )

    def _starts_and_waits(self, journal: _Journal) -> tuple[dict[int, float], dict[int, float]]:
        """When each run was started and waited for, by its number in the order of the work."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self._work):
            numbers[one[0].removeprefix("run ")].append(number)
        starts: dict[int, float] = {}
        waits: dict[int, float] = {}
        seen: dict[str, int] = defaultdict(int)
        for name, begun, _, facts, _ in journal.spans:
            if facts.get("track") == "waits":
                own = name.removeprefix("wait for ")
                if seen[own] < len(numbers[own]):
                    waits[numbers[own][seen[own]]] = begun
            elif facts.get("track") == "exchanges":
                if seen[name] < len(numbers[name]):
                    starts[numbers[name][seen[name]]] = begun
                seen[name] += 1
        for number, one in enumerate(self._work):  # Those that nobody has waited for yet.
            starts.setdefault(number, one[1])
        return starts, waits

    def _run_of(self, work: tuple[str, float, float, dict[str, Any], int], journal: _Journal) -> Run:
        _, begun, ended, facts, thread = work
        label = str(facts["group"])
        items: list[Message | float] = []
        at = begun
        for record in journal.calls:
            if begun <= record.begun <= ended and record.place.label.startswith(label):
                items += [max(record.begun - at, 0.0), self._message(record)]
                at = record.ended
        items.append(max(ended - at, 0.0))
        return Run(tuple(items), "" if thread == self._main else label)

    def _message(self, record: CallRecord) -> Message:
        call, ranks = record.call, record.place.ranks
        shares = len(ranks) if call.kind in _OF_SHARES else 1
        return Message(call.kind, float(call.nbytes) * shares, len(ranks), len({self._nodes[rank] for rank in ranks}))

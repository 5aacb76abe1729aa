"""From a rehearsal and a network to the time of a step, with an interval.

In the event loop one rank computes, its exchanges run beside it, and both share the cores and the link.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.advise.facts import MachineFacts, Message, ModelFacts, Rehearsal
from bagua.advise.network import Cluster, Cost, cost_of

#: Calls that Gloo carries out at the same time.
_GLOO_CALLS = 2
_NOTHING = 1e-12
#: More bytes per second than any link has: infinity cannot be subtracted from.
_NO_LIMIT = 1e15
#: Nine in ten predictions of docs/advise.md are off by less than this part of the measured time.
_ERROR = 0.2
#: What was measured there.
_RATES_MBIT_S, _DELAY_MS, _HOSTS = (10.0, 10_000.0), 20.0, (2, 4)
_DRAWS = 5
#: The slowest of more ranks is hardly slower, and their draws would fill the memory.
_MOST_DRAWN = 10_000
_LEAST_SIMULATED_STEPS = 12


@dataclass(frozen=True)
class Prediction:
    """The time of a step of one algorithm.

    Attributes:
        name: name of the algorithm.
        step_s: seconds of a step.
        low_s: lower end of the interval that holds nine of ten measured times.
        high_s: upper end of it.
        sent_bytes: bytes of one rank that enter calls in each step.
        keeps_equal: True if all ranks hold equal weights after each step.
        needs_optimizer: optimizer without which the algorithm does not work; empty if any will do.
        options: options of the algorithm, if it is not used with its defaults.
    """

    name: str
    step_s: float
    low_s: float
    high_s: float
    sent_bytes: float
    keeps_equal: bool
    needs_optimizer: str
    options: dict[str, Any] = field(default_factory=dict)


def predict(
    rehearsal: Rehearsal, facts: ModelFacts, cluster: Cluster, machine: MachineFacts, *, seed: int = 0
) -> Prediction:
    """The time of a step.

    The slowest of those who wait for each other is drawn from the steps that were measured.

    Args:
        rehearsal: runs of one rank.
        facts: the model.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        seed: seed of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    arrivals_s = [one.arrival_s for one in facts.parameters]
    length = len(rehearsal.steps)
    count = length * (1 + -(-_LEAST_SIMULATED_STEPS // length))
    draws = [_stretches(rehearsal, facts, cluster, count, generator) for _ in range(_DRAWS)]
    found = [step_seconds(rehearsal, arrivals_s, facts.step_s, cluster, machine, stretches) for stretches in draws]
    mean_s, low_s, high_s = sum(found) / len(found), min(found) / (1 + _ERROR), max(found) / (1 - _ERROR)
    of = rehearsal
    return Prediction(of.name, mean_s, low_s, high_s, of.sent_bytes, of.keeps_equal, of.needs_optimizer, of.options)


def _stretches(
    rehearsal: Rehearsal, facts: ModelFacts, cluster: Cluster, count: int, generator: torch.Generator
) -> list[float]:
    """By how much the slowest of those who meet is slower than the median, for each step."""
    ratios = torch.tensor(facts.ratios, dtype=torch.float64)
    together = max(1, min(rehearsal.meeting, cluster.size, _MOST_DRAWN))
    alone = max(1, min(round(rehearsal.steps_alone), count))
    found: list[float] = []
    while len(found) < count:
        drawn = torch.randint(len(ratios), (together, alone), generator=generator)
        found += [float(ratios[drawn].mean(1).max())] * alone
    return found[:count]


def outside_calibration(cluster: Cluster) -> tuple[str, ...]:
    """A phrase for each way in which ``cluster`` is none of those on which the model was tried.

    Example:
        >>> from bagua.link import parse_link
        >>> outside_calibration(Cluster(1000, 1, parse_link("1gbit")))
        ('1000 hosts, tried with 2 to 4',)
    """
    link, rate = cluster.link, cluster.rate_mbit_s
    (few, many), (slow, fast) = _HOSTS, _RATES_MBIT_S
    told = f"{rate:g} Mbit/s" if math.isfinite(rate) else "unlimited"
    phrases = {
        f"{cluster.hosts} hosts, tried with {few} to {many}": not few <= cluster.hosts <= many,
        f"{cluster.ranks_per_host} ranks per host, tried with 1": cluster.ranks_per_host > 1,
        f"a link of {told}, tried with {slow:g} to {fast:g} Mbit/s": not slow <= rate <= fast,
        "a link that is not symmetric": link.send_mbit_s != link.receive_mbit_s,
        f"a delay of {link.delay_ms:g} ms, tried with up to {_DELAY_MS:g} ms": link.delay_ms > _DELAY_MS,
        "a link that loses packets": bool(link.loss),
    }
    return tuple(phrase for phrase, applies in phrases.items() if applies)


def max_min_shares(capacity: float, limits: Sequence[float]) -> list[float]:
    """What each of several flows gets of a link: as much as any other, unless it wants less.

    Args:
        capacity: rate of the link.
        limits: highest rate of each flow.

    Example:
        >>> max_min_shares(10.0, [2.0, 100.0, 100.0])
        [2.0, 4.0, 4.0]
    """
    shares = [0.0] * len(limits)
    left, open_flows = capacity, len(limits)
    for index in sorted(range(len(limits)), key=limits.__getitem__):
        shares[index] = min(limits[index], left / open_flows)
        left -= shares[index]
        open_flows -= 1
    return shares


@dataclass(eq=False)
class _Activity:
    """Something that takes time: work of a core, or bytes on a link, or neither.

    Attributes:
        left: seconds of work, or bytes, or seconds, that are left.
        kind: number among them.
        load: cores that a byte keeps busy, in seconds.
        limit: highest rate, in bytes per second.
    """

    left: float
    kind: str
    load: float = 0.0
    limit: float = math.inf
    rate: float = 1.0


Process = Generator["_Activity | Callable[[], bool]", None, None]


@dataclass
class _World:
    """All processes of one rank, and its clock.

    Attributes:
        cores: cores that the rank has for itself; it was measured with one.
        link_bytes_per_s: rate of its host's link.
        burst_bytes: bytes that pass the link at any rate after it was idle.
    """

    cores: float
    link_bytes_per_s: float
    burst_bytes: float = 0.0
    now: float = 0.0
    waiting: list[tuple[Process, _Activity | Callable[[], bool]]] = field(default_factory=list)
    #: Bytes by which the credit shrinks in a second; it grows where that is negative.
    _spending: float = 0.0

    def __post_init__(self) -> None:
        self._credit = self.burst_bytes

    def start(self, process: Process) -> None:
        """Let ``process`` go on until it waits for something."""
        wanted = next(process, None)
        if wanted is not None:
            self.waiting.append((process, wanted))

    def run(self) -> None:
        """Until all processes have ended."""
        while self.waiting:
            if self._wake():
                continue
            active = [wanted for _, wanted in self.waiting if isinstance(wanted, _Activity)]
            self._set_rates(active)
            step = min(one.left / one.rate for one in active)
            if self._spending > 0.0:
                step = min(step, self._credit / self._spending)
            self._credit = min(self._credit - step * self._spending, self.burst_bytes)
            if self._credit <= _NOTHING * self.burst_bytes:
                self._credit = 0.0
            self.now += step
            for one in active:
                one.left -= step * one.rate
                if one.left <= _NOTHING * max(1.0, one.rate):
                    one.left = 0.0

    def _wake(self) -> bool:
        """Let those go on that wait for nothing any more."""
        ready = [
            item for item in self.waiting if (item[1].left <= 0.0 if isinstance(item[1], _Activity) else item[1]())
        ]
        for item in ready:
            self.waiting.remove(item)
            self.start(item[0])
        return bool(ready)

    def _set_rates(self, active: Sequence[_Activity]) -> None:
        flows = [one for one in active if one.kind == "bytes"]
        limits = [min(flow.limit, _NO_LIMIT) for flow in flows]
        free = self._credit > 0.0
        shares = max_min_shares(_NO_LIMIT if free else min(self.link_bytes_per_s, _NO_LIMIT), limits)
        load = sum(share * flow.load for flow, share in zip(flows, shares, strict=True))
        working = [one for one in active if one.kind == "work"]
        for_bytes = self.cores / 2 if working else self.cores
        for flow, share in zip(flows, shares, strict=True):
            flow.rate = share if load <= for_bytes else share * for_bytes / load
        limited = self.burst_bytes > 0.0 and math.isfinite(self.link_bytes_per_s)
        spending = sum(flow.rate for flow in flows) - self.link_bytes_per_s if limited else 0.0
        self._spending = spending if free else min(spending, 0.0)
        for one in working:
            one.rate = min(1.0, (self.cores - min(load, for_bytes)) / len(working))


@dataclass
class _Rank:
    """One rank that goes through the steps of a rehearsal.

    Args:
        world: its clock and resources.
        rehearsal: moments and runs.
        costs: costs of the messages of all runs.
        arrivals_s: seconds from the beginning of a step to each gradient.
        rest_s: seconds from the last gradient to the end of the step.
        after_calls: factor on what is computed in a step that follows a call.
    """

    world: _World
    rehearsal: Rehearsal
    costs: dict[Message, Cost]
    arrivals_s: Sequence[float]
    rest_s: float
    after_calls: float = 1.0
    done: set[tuple[int, int]] = field(default_factory=set)
    ended_at: list[float] = field(default_factory=list)
    calls: int = 0
    lanes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def compute(self, stretches: Sequence[float]) -> Process:
        """The thread that computes.

        Args:
            stretches: factor on what is computed, for each step.
        """
        called = False
        for index, factor in enumerate(stretches):
            period, place = divmod(index, len(self.rehearsal.steps))
            moments = self.rehearsal.steps[place]
            reached_s, stretch = 0.0, factor * (self.after_calls if called else 1.0)
            called = any(moment.what in ("start", "wait") for moment in moments)
            for moment in moments:
                if moment.what == "arrival":
                    arrival_s = self.arrivals_s[min(moment.number, len(self.arrivals_s) - 1)]
                    yield _Activity(max(arrival_s - reached_s, 0.0) * stretch, "work")
                    reached_s = max(arrival_s, reached_s)
                elif moment.what == "stepped":
                    yield _Activity(self.rest_s * stretch + self.rehearsal.extra_s, "work")
                elif moment.what == "start":
                    yield from self._start(period, moment.number)
                else:
                    yield self._is_done(period - moment.periods_ago, moment.number)
            self.ended_at.append(self.world.now)

    def _is_done(self, period: int, number: int) -> Callable[[], bool]:
        return lambda: period < 0 or (period, number) in self.done

    def _start(self, period: int, number: int) -> Iterator[_Activity]:
        run = self.rehearsal.runs[number]
        items = list(run.items)
        while not run.lane and items and not isinstance(items[0], Message):
            yield _Activity(float(items.pop(0)), "work")  # type: ignore[arg-type]
        self.world.start(self._run((period, number), items, run.lane))

    def _run(self, key: tuple[int, int], items: Sequence[Message | float], lane: str) -> Process:
        queue = self.lanes[lane]
        queue.append(key)
        if lane:
            yield lambda: queue[0] == key
        for item in items:
            if isinstance(item, Message):
                yield from self._send(self.costs[item])
            else:
                yield _Activity(item, "work")
        queue.remove(key)
        self.done.add(key)

    def _send(self, cost: Cost) -> Process:
        yield lambda: self.calls < _GLOO_CALLS
        self.calls += 1
        yield _Activity(cost.work_s, "work")
        own = cost.own_bytes / cost.link_bytes if cost.link_bytes else 0.0
        limit = 1.0 / (cost.byte_s * own) if cost.byte_s * own else math.inf
        for _ in range(cost.rounds):  # While one call waits for its next message, others have the link.
            yield _Activity(cost.latency_s / cost.rounds, "seconds")
            if own:
                yield _Activity(cost.link_bytes / cost.rounds, "bytes", load=cost.byte_work_s * own, limit=limit)
        self.calls -= 1


def step_seconds(
    rehearsal: Rehearsal,
    arrivals_s: Sequence[float],
    step_s: float,
    cluster: Cluster,
    machine: MachineFacts,
    stretches: Sequence[float],
) -> float:
    """Mean seconds of a step, after the first period.

    Args:
        rehearsal: runs of the rank.
        arrivals_s: seconds from the beginning of a step to each gradient, in the order in which they come.
        step_s: seconds of a step without communication.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        stretches: factor on what is computed, for each step of two periods or more.
    """
    cores = machine.cores / (cluster.size if cluster.shared else cluster.ranks_per_host)
    world = _World(cores, cluster.bytes_per_s, cluster.burst_bytes)
    idle_s = rehearsal.steps_alone * step_s
    messages = {message for run in rehearsal.runs for message in run.messages}
    costs = {message: cost_of(message, cluster, machine, idle_s) for message in messages}
    rank = _Rank(world, rehearsal, costs, arrivals_s, max(step_s - arrivals_s[-1], 0.0), machine.after_calls)
    world.start(rank.compute(stretches))
    world.run()
    length = len(rehearsal.steps)
    return (rank.ended_at[-1] - rank.ended_at[length - 1]) / (len(stretches) - length)

"""Measuring the steps of a model, by time that belongs to a thread; and what calls cost between ranks over Gloo.

That time is without the seconds in which it was ready, and other threads had its core. What else goes on in a machine,
ranks measured beside each other included, is then no part of what is measured. Linux says how long each thread has
stood in the queue of a core; elsewhere nothing is taken off.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bagua.advise.facts import ALIKE, CallFacts, MachineFacts, Message, ModelFacts, ParameterFacts
from bagua.advise.network import SMALL_CALL_BYTES, pattern_of
from bagua.checks import check_numbers
from bagua.comm import Communicator, Membership, create_transport, thread_store
from bagua.errors import ConfigurationError
from bagua.link import usable_cores

_FILE = "/proc/thread-self/schedstat"
_LONGEST_BYTES = 128


class _Queue:
    """The file in which Linux writes how long the calling thread has stood in the queue of a core."""

    def __init__(self) -> None:
        self.descriptor = os.open(_FILE, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


#: Ends with its thread.
_own = threading.local()


def own_time() -> float:
    """A clock that stands while the calling thread has no core. Only differences within one thread have a meaning."""
    thread = threading.get_native_id()  # A forked process has another, and would read of its parent's thread.
    try:
        if getattr(_own, "thread", None) != thread:
            _own.queue, _own.thread = _Queue(), thread
        queued = int(os.pread(_own.queue.descriptor, _LONGEST_BYTES, 0).split()[1])
    except (OSError, IndexError):  # The system does not count.
        queued = 0
    return time.perf_counter() - queued * 1e-9


#: Steps that are left out: memory is allocated in them.
_FIRST_STEPS = 2
LEAST_STEPS = 5


class StepMeter:
    """Notes when steps begin and when gradients arrive. Between two steps it costs a few microseconds a parameter.

    Args:
        module: module that is trained.
        optimizer: optimizer that steps it.
        clock: clock of the seconds that the calling thread computes.

    Raises:
        ConfigurationError: parameters on another device than the CPU.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = own_time
    ) -> None:
        self._clock = clock
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        devices = {one.device.type for one in self._parameters.values()} - {"cpu"}
        if devices:
            raise ConfigurationError(
                "predictions are made for tensors on the CPU, over Gloo",
                argument="module",
                expected="parameters on the CPU",
                seen=", ".join(sorted(devices)),
                advice="Measure the script itself on such hosts: bagua lab, or BAGUA_TRACE.",
            )
        self._optimizer = type(optimizer).__name__
        self._began: list[float] = []
        self._arrived: dict[str, list[float]] = {name: [] for name in self._parameters}
        self._now: dict[str, float] = {}
        self._stepping = False
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._forward),
            optimizer.register_step_post_hook(self._stepped),
        ]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrival(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    @property
    def steps(self) -> int:
        """Steps that have been measured."""
        return max(len(self._began) - 1 - _FIRST_STEPS, 0)

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._stepping:
            self._stepping = True
            self._began.append(self._clock())

    def _arrival(self, name: str) -> None:
        if self._began:
            self._now[name] = self._clock() - self._began[-1]

    def _stepped(self, *_: Any) -> None:
        self._stepping = False
        if len(self._began) > _FIRST_STEPS:
            for name, seconds in self._now.items():
                self._arrived[name].append(seconds)
        self._now.clear()

    def end(self) -> None:
        """Take all hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def facts(self) -> ModelFacts:
        """What was measured.

        Raises:
            ConfigurationError: too few steps, or no gradient.
        """
        began = self._began[_FIRST_STEPS:]
        steps_s = tuple(later - earlier for earlier, later in itertools.pairwise(began))
        arrivals = {name: statistics.median(found) for name, found in self._arrived.items() if found}
        parameters = []
        for name in sorted(arrivals, key=arrivals.__getitem__):
            one = self._parameters[name]
            dtype = str(one.dtype).removeprefix("torch.")
            parameters.append(ParameterFacts(name, tuple(one.shape), dtype, arrivals[name]))
        return ModelFacts(tuple(parameters), steps_s, self._optimizer)


def measure_model(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object], *, seconds: float = 10.0
) -> ModelFacts:
    """Call ``step`` for a while, and say what its steps are like.

    Args:
        module: plain module, that no wrapper trains.
        optimizer: optimizer that ``step`` steps.
        step: makes one training step.
        seconds: how long; at least 7 steps are made.

    Raises:
        ConfigurationError: no finite number of seconds, or steps that cannot be measured.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     layer(torch.ones(2, 4)).sum().backward()
        ...     optimizer.step()
        >>> [one.name for one in measure_model(layer, optimizer, step, seconds=0.0).parameters]
        ['bias', 'weight']
    """
    check_numbers(lambda number: 0 <= number < math.inf, "a finite number >= 0", seconds=seconds)
    meter = StepMeter(module, optimizer)
    until = time.monotonic() + seconds
    try:
        while meter.steps < LEAST_STEPS or time.monotonic() < until:
            before = len(meter._began)  # noqa: SLF001 - the other half of this file
            step()
            if len(meter._began) == before:  # noqa: SLF001
                raise ConfigurationError(
                    "the step does not call the module in training mode",
                    argument="step",
                    expected="module(...), backward() and optimizer.step()",
                    seen=repr(step),
                )
    finally:
        meter.end()
    return meter.facts()


#: A measurement has the machine for itself if others have less of its cores.
ALONE = 0.05
_CORES_FILE = Path("/proc/stat")
#: Bytes of the calls that show what bytes cost: within a core's cache, and beyond it.
_LARGE = (256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
#: Calls of each kind and size, and of the smallest size. Some of those take ten times as long as the others: Gloo's
#: thread that reads connections asks again and again for a message, and keeps the core from the thread that takes it.
_ROUNDS, _SMALL_ROUNDS = 40, 160
#: Parts of all calls of a kind and size; of their means, the middle one counts.
_PARTS = 3
_TIMEOUT_S = 120.0
#: Seconds between two lines about how far the measurement is.
_TELL_S = 4.0

#: Kind and bytes of a call.
CallKey = tuple[str, int]


class Others:
    """Counts what processes that are none of ours have of the cores, from its beginning on; nothing outside Linux."""

    def __init__(self) -> None:
        self._begun = self._look()

    def share(self) -> float:
        """Part of all cores. Child processes of ours must have ended."""
        busy_s, own_s, passed_s = (now - then for now, then in zip(self._look(), self._begun, strict=True))
        return max(busy_s - own_s, 0.0) / (passed_s * (os.cpu_count() or 1))

    @staticmethod
    def _look() -> tuple[float, float, float]:
        """Processor seconds of all processes, of ours, and the time."""
        own_s = sum(os.times()[:4])  # user and system, of this process and of its children
        if not _CORES_FILE.exists():
            return own_s, own_s, time.monotonic()
        # User, nice and system; what interrupts take is that of packets, and ours.
        busy_s = sum(map(int, _CORES_FILE.read_text().split()[1:4])) / os.sysconf("SC_CLK_TCK")
        return busy_s, own_s, time.monotonic()


@dataclass(frozen=True)
class UsualCall:
    """What calls of one kind and size took.

    Attributes:
        mean_s: seconds on an average, which is what they add to steps.
        median_s: seconds of the one in the middle: chance has less of a say in what bytes add to it.
        busy_s: seconds for which each rank kept a core busy, on an average.
    """

    mean_s: float
    median_s: float
    busy_s: float


def _model() -> Callable[[], float]:
    """A stand-in for the step of a model: reads and writes more than a core's cache holds, for some milliseconds.

    Returns:
        A function that makes one, and returns the seconds for which that kept a core busy.
    """
    rows = torch.ones(64, 512)
    layers = [(torch.ones(512, 512), torch.zeros(512, 512)) for _ in range(4)]

    def step() -> float:
        begun = time.thread_time()
        for weight, change in layers:
            torch.mm(rows, weight)
            torch.mm(rows.T, rows, out=change)
            weight.add_(change, alpha=0.0)
        return time.thread_time() - begun

    return step


def probe_machine(cores: int | None = None, tell: Callable[[str], object] = lambda _: None) -> MachineFacts:
    """Measure what messages cost on the loopback device, between two threads of this process.

    Args:
        cores: processor cores of a host; None for those that this process may use.
        tell: is called every few seconds with how many calls are measured.

    Raises:
        TransportUnavailableError: Gloo cannot connect anything on this machine.
    """
    store, others = thread_store(), Others()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_rank, store, *rank) for rank in ((0, tell), (1, lambda _: None))]
    return replace(machine_facts(*ranks[0].result(), cores), others=others.share())


def machine_facts(
    calls: tuple[CallFacts, ...], after_calls: float, cores: int | None = None, ranks: int = 2
) -> MachineFacts:
    """Facts of this machine.

    Args:
        calls: calls that ranks have measured together.
        after_calls: factor on the time of what is computed after a call.
        cores: processor cores of a host; None for those that this process may use.
        ranks: how many ranks.
    """
    large = _LARGE[1]
    copied = torch.empty(large // 4)
    source = torch.ones_like(copied)
    local_s = statistics.median(_seconds(lambda: copied.copy_(source)) for _ in range(_ROUNDS))
    message_s, byte_s = calls[0].message_s, calls[0].byte_s(large)
    local_message_s, cores = min(20e-6, message_s), cores or usable_cores()
    return MachineFacts(message_s, byte_s, local_message_s, local_s / large, cores, calls, after_calls, ranks=ranks)


def _rank(store: object, rank: int, tell: Callable[[str], object]) -> tuple[tuple[CallFacts, ...], float]:
    membership = Membership(store, rank, (0, 1), (0, 1), _TIMEOUT_S, "probe")  # type: ignore[arg-type]
    communicator = Communicator(create_transport("gloo", membership), _TIMEOUT_S)
    try:
        return call_facts(communicator, tell=tell)
    finally:
        communicator.close()


def call_facts(
    communicator: Communicator,
    busy_clock: Callable[[], float] | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[tuple[CallFacts, ...], float]:
    """Measure calls as steps make them, after computing: then caches are cold, and other threads sleep.

    Args:
        communicator: ranks on this machine, all of which call this.
        busy_clock: clock of the seconds for which this rank, and nothing else, keeps cores busy; without one, it is
            taken to be busy while a call lasts.
        tell: is called every few seconds with how many calls are measured.

    Returns:
        Facts of the calls, and how much longer computing takes that comes after a call.
    """
    step = _model()
    after_s: list[float] = []
    alone_s = [_usual_step_s(step)]
    wanted = {(kind, nbytes): _ROUNDS for kind in ALIKE for nbytes in _LARGE}
    wanted |= {(kind, SMALL_CALL_BYTES): _SMALL_ROUNDS for kind in ALIKE}
    calls, told = sum(rounds + 1 for rounds in wanted.values()), time.monotonic()

    def before() -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            tell(f"measured {len(after_s)} of {calls} calls")
        after_s.append(step())

    usual = usual_calls(communicator, wanted, before, busy_clock)
    found = facts_of_calls(usual, communicator.size, _LARGE, of_cores=busy_clock is not None)
    alone_s.append(_usual_step_s(step))
    return found, max(statistics.fmean(after_s) / min(alone_s), 1.0)


def _usual_step_s(step: Callable[[], float]) -> float:
    """Seconds of a step that follows others at once."""
    return statistics.fmean([step() for _ in range(2 * _ROUNDS)][_ROUNDS:])


def facts_of_calls(
    usual: Mapping[CallKey, UsualCall], ranks: int, large: Sequence[int], *, of_cores: bool
) -> tuple[CallFacts, ...]:
    """Facts of all kinds of calls.

    Args:
        usual: times of calls.
        ranks: how many, each on a host of its own.
        large: bytes of the calls that show what bytes cost; those that were not made are left out.
        of_cores: True if the time was measured for which ranks kept cores busy.
    """
    most = min(1.0, usable_cores() / ranks)  # more of a core than that is not there for each
    found = []
    for kind in ALIKE:
        small = usual[kind, SMALL_CALL_BYTES]
        sizes = [nbytes for nbytes in large if (kind, nbytes) in usual]
        sent = [pattern_of(Message(kind, float(one), ranks, ranks)).sent for one in sizes]
        points = tuple((of, usual[kind, one].median_s - small.median_s) for of, one in zip(sent, sizes, strict=True))
        message_s = small.mean_s / pattern_of(Message(kind, float(SMALL_CALL_BYTES), ranks, ranks)).messages
        busy, busy_bytes = most, most
        if of_cores:
            busy = min(small.busy_s / small.mean_s, most)
            added_s = points[-1][1]
            busy_s = usual[kind, sizes[-1]].busy_s - small.busy_s
            busy_bytes = min(max(busy_s, 0.0) / added_s, most) if added_s > 0 else most
        found.append(CallFacts(kind, message_s, points, busy, busy_bytes))
    return tuple(found)


def usual_calls(
    communicator: Communicator,
    wanted: Mapping[CallKey, int],
    before: Callable[[], object] | None = None,
    busy_clock: Callable[[], float] | None = None,
) -> dict[CallKey, UsualCall]:
    """What calls take by kind and size, from the moment when the last rank has come. They take turns.

    Args:
        communicator: ranks, all of which call this.
        wanted: how many calls are made of each kind and size.
        before: called before each call; without it, each begins as the one before it ends.
        busy_clock: see ``call_facts``.
    """
    calls = {key: _call(communicator, *key) for key in wanted if wanted[key]}
    seconds: dict[CallKey, list[float]] = {key: [] for key in calls}
    busy_s = dict.fromkeys(calls, 0.0)
    look = busy_clock or (lambda: 0.0)
    for number in range(-1, max(wanted.values(), default=0)):  # The first one of each is not timed.
        for key, act in calls.items():
            if number < wanted[key]:
                if before:
                    before()
                begun = look()
                seconds[key].append(_seconds(act))
                busy_s[key] += (look() - begun) * (number >= 0)
    found = {}
    for key, own in seconds.items():
        numbers = len(own) - 1
        of_all = torch.empty(communicator.size * (numbers + 1))
        communicator.allgather(of_all, torch.tensor([*own[1:], busy_s[key] / numbers]))
        by_rank = of_all.view(communicator.size, -1)
        times = by_rank[:, :-1].min(0).values if before else by_rank[:, :-1].mean(0)
        middle_s = statistics.median(float(part.mean()) for part in times.chunk(_PARTS))
        found[key] = UsualCall(middle_s, float(times.median()), float(by_rank[:, -1].mean()))
    return found


def _call(communicator: Communicator, kind: str, nbytes: int) -> Callable[[], object]:
    """A call of ``kind``, in which ``nbytes`` are reduced, gathered or sent."""
    ranks, rank = communicator.size, communicator.rank
    share = max(nbytes // 4 // ranks, 1)
    given, taken = torch.zeros(share * ranks), torch.zeros(share * ranks)
    part = torch.zeros(share)
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: communicator.allreduce(given),
        "allgather": lambda: communicator.allgather(taken, part),
        "alltoall": lambda: communicator.alltoall(taken, given),
        "sendrecv": lambda: communicator.sendrecv(taken, given, (rank - 1) % ranks, (rank + 1) % ranks),
    }
    return calls[kind]


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun

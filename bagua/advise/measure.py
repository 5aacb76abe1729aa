"""Measuring the steps of a model, without communication, by time that belongs to a thread.

That is without the seconds in which it was ready, and other threads had its core. What else goes on in a machine,
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
from collections.abc import Callable
from typing import Any

import torch

from bagua.advise.facts import ModelFacts, ParameterFacts
from bagua.checks import check_numbers
from bagua.errors import ConfigurationError

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

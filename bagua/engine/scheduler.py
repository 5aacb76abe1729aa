"""The time-keeping of exchanges: which bucket, in which step, waits for what."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.buckets import Bucket
from bagua.comm import ProcessGroup
from bagua.engine.executor import Wait, create_executor, nothing
from bagua.errors import ConfigurationError

__all__ = ["Scheduler", "Slot"]


class Slot:
    """One parameter in its bucket, as the hooks see it.

    Attributes:
        lane: the bucket's place in the schedule.
        view: the parameter's part of the flat gradients; None if they are not gathered.
        ready: number of the last backward pass that brought its gradient.
    """

    __slots__ = ("lane", "name", "parameter", "ready", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, lane: Lane, view: torch.Tensor | None) -> None:
        self.name = name
        self.parameter = parameter
        self.lane = lane
        self.view = view
        self.ready = -1


class Lane:
    """One bucket on its way through the steps.

    Attributes:
        bucket: the bucket.
        slots: one for each parameter.
        pending: gradients that are still missing in this backward pass.
        due: whether the bucket is exchanged in this step.
        fusion: whether parameters get their part of the flat gradients.
        scale: factor on gradients that are gathered in this step; None for 1.
        wait: ends the exchange that is under way; None if there is none.
        exchanged: the step of that exchange.
    """

    __slots__ = (
        "_factor",
        "_factor_tensor",
        "bucket",
        "due",
        "exchanged",
        "fusion",
        "pending",
        "scale",
        "slots",
        "wait",
    )

    def __init__(self, bucket: Bucket, *, gathers: bool) -> None:
        gathers = gathers and bucket.gradients is not None
        views: Sequence[torch.Tensor | None] = bucket.gradient_views if gathers else [None] * len(bucket.names)
        self.bucket = bucket
        self.slots = [
            Slot(name, parameter, self, view)
            for name, parameter, view in zip(bucket.names, bucket.parameters, views, strict=True)
        ]
        self.pending = len(self.slots)
        self.due = True
        self.fusion = bucket.fusion
        self.scale: torch.Tensor | None = None
        self.wait: Wait | None = None
        self.exchanged = -1
        self._factor = 1.0
        self._factor_tensor: torch.Tensor | None = None

    def factor(self, factor: float) -> torch.Tensor | None:
        """``factor`` as a tensor, which multiplies in a third of the time that a Python number takes."""
        if factor != self._factor:
            exact = self.bucket.dtype in (torch.float32, torch.float64)
            self._factor = factor
            self._factor_tensor = torch.tensor(factor, dtype=self.bucket.dtype if exact else torch.float64)
        return None if factor == 1.0 else self._factor_tensor


class Scheduler:
    """Starts exchanges in bucket order and applies their results when the algorithm wants them.

    Args:
        buckets: in the order in which their gradients become complete.
        algorithm: bound to the user's group.
        group: private to this model.
        delay: start no exchange before the end of backward.

    Attributes:
        slots: by ``id`` of the parameter.
        launched: buckets started in the backward pass that is under way.
        active: whether a synchronized backward pass is under way.
        executors: that run exchanges.
    """

    def __init__(
        self, buckets: Sequence[Bucket], algorithm: AlgorithmImpl, group: ProcessGroup, *, delay: bool
    ) -> None:
        self._algorithm = algorithm
        self._group = group
        self._delay = delay
        self._gathers = algorithm.traits.gathers_gradients
        self._at_once = not delay and not algorithm.traits.needs_gradients
        self._lanes = [Lane(bucket, gathers=self._gathers) for bucket in buckets]
        self._executors = {
            bucket.device: create_executor(group, bucket.device, blocking=algorithm.blocking) for bucket in buckets
        }
        self.executors = list(self._executors.values())
        self.slots = {id(slot.parameter): slot for lane in self._lanes for slot in lane.slots}
        self.launched = 0
        self.active = False
        self._launching = threading.Lock()
        self._step = -1
        self._backward = 0
        self._owed: int | None = None

    # One backward pass.

    def begin(self, step: int) -> None:
        """A synchronized backward pass starts."""
        self.active = True
        self._step = step
        self._backward += 1
        self.launched = 0
        now = time.monotonic()
        factor = self._algorithm.gradient_scale
        for lane in self._lanes:
            lane.pending = len(lane.slots)
            lane.due = self._algorithm.is_due(step, lane.bucket, now)
            lane.scale = lane.factor(factor) if lane.due else None

    def take(self, parameter: torch.Tensor) -> None:
        """Take the gradient of ``parameter``, and start the exchange of its bucket if it was the last one.

        Runs once for each parameter in each step, so it is written for speed.
        """
        slot = self.slots[id(parameter)]
        if slot.ready == self._backward:
            raise twice(slot.name)
        slot.ready = self._backward
        lane, view = slot.lane, slot.view
        if view is not None:
            gradient = parameter.grad
            if gradient is not view:
                if gradient is None or gradient.layout is not torch.strided:
                    raise unusable(slot.name, gradient)
                if lane.scale is None:
                    view.copy_(gradient)
                else:
                    torch.mul(gradient, lane.scale, out=view)
                if lane.fusion:
                    parameter.grad = view
            elif lane.scale is not None:
                view.mul_(lane.scale)
        lane.pending -= 1
        if lane.pending == 0 or (self._at_once and not self.launched):
            self.launch_ready()

    def launch_ready(self, *, everything: bool = False) -> None:
        """Start the exchanges of complete buckets, in order, up to the first incomplete one.

        Exchanges that do not need gradients all start with the first gradient.
        """
        if self._delay and not everything:
            return
        with self._launching:  # Autograd has one thread for each device.
            while self.launched < len(self._lanes) and (self._at_once or self._lanes[self.launched].pending == 0):
                lane = self._lanes[self.launched]
                self.launched += 1
                self._launch(lane)

    def _launch(self, lane: Lane) -> None:
        if lane.wait is not None:
            self._finish(lane)
        if self._algorithm.traits.owns_optimizers:
            self._algorithm.local_step(lane.bucket, self._step)
        if lane.due and not self._algorithm.traits.after_optimizer:
            self._start(lane)

    def _start(self, lane: Lane) -> None:
        bucket, step = lane.bucket, self._step
        self._algorithm.fill(bucket, step)
        lane.exchanged = step
        lane.wait = self._executors[bucket.device].run(
            functools.partial(self._algorithm.exchange, bucket, self._group, step)
        )

    def _finish(self, lane: Lane) -> None:
        wait, lane.wait = lane.wait, None
        if wait is not None:
            wait()
            self._algorithm.apply(lane.bucket, lane.exchanged)

    def missing(self) -> list[Slot]:
        """Parameters that have brought no gradient in this backward pass."""
        return [slot for lane in self._lanes if lane.pending for slot in lane.slots if slot.ready != self._backward]

    def fill_missing(self, missing: Sequence[Slot]) -> list[Slot]:
        """Count missing gradients as zero; return the slots that had none."""
        without = [slot for slot in missing if slot.parameter.grad is None]
        for slot in missing:
            if slot.parameter.grad is not None:  # accumulated before, without synchronization
                self.take(slot.parameter)
                continue
            slot.ready = self._backward
            slot.lane.pending -= 1
            if slot.view is not None:
                slot.view.zero_()
                if slot.lane.fusion:
                    slot.parameter.grad = slot.view
        return without

    def complete(self) -> None:
        """The backward pass is over and every bucket is complete: start and finish what this step needs."""
        self.active = False
        self.launch_ready(everything=True)
        if self._algorithm.traits.after_optimizer:
            self._owed = self._step
        elif self._algorithm.lag == 0:
            self.finish()
        if self._gathers:
            for lane in self._lanes:
                if lane.due and not lane.fusion:
                    _return_gradients(lane)

    # Between backward passes.

    def finish(self) -> None:
        """Wait for every exchange under way, and apply its result."""
        for lane in self._lanes:
            self._finish(lane)

    @property
    def owes(self) -> bool:
        """Whether an exchange waits for the optimizers."""
        return self._owed is not None and any(lane.due for lane in self._lanes)

    def after_optimizers(self) -> None:
        """The optimizers have stepped, or it is known that they will not: exchange what waited for that."""
        if self._owed is None:
            return
        self._owed = None
        for lane in self._lanes:
            self._finish(lane)
            if lane.due:
                self._start(lane)
        if self._algorithm.lag == 0:
            self.finish()

    def flush(self) -> None:
        """Nothing owed, nothing under way."""
        self.after_optimizers()
        self.finish()

    def owe_nothing(self) -> None:
        """Nothing that waits for the optimizers is exchanged any more."""
        self._owed = None

    def forget(self) -> None:
        """Forget what is under way and what is owed: it is not wanted any more, or the communicator is broken."""
        self.owe_nothing()
        for lane in self._lanes:
            lane.wait = None

    def settle(self) -> list[int]:
        """Wait for exchanges under way, but apply nothing; the step of each bucket's result, or -1."""
        for lane in self._lanes:
            if lane.wait is not None:
                lane.wait()
                lane.wait = nothing
        return [-1 if lane.wait is None else lane.exchanged for lane in self._lanes]

    def resume(self, exchanged: Sequence[int]) -> None:
        """Take results in the buckets' buffers as those of the given steps, as ``settle`` left them."""
        for lane, step in zip(self._lanes, exchanged, strict=True):
            if step >= 0:
                lane.exchanged, lane.wait = step, nothing

    def dissolve(self) -> None:
        """Give back threads, and the buckets now: lanes and slots know each other, and their memory is large."""
        for executor in self.executors:
            executor.close()
        for lane in self._lanes:
            lane.slots.clear()
        self.slots.clear()


def _return_gradients(lane: Lane) -> None:
    """Without fusion, the exchanged gradients go back to where the optimizer looks for them."""
    for slot in lane.slots:
        assert slot.view is not None
        if slot.parameter.grad is None:
            slot.parameter.grad = slot.view.clone()
        else:
            slot.parameter.grad.copy_(slot.view)


def twice(name: str) -> ConfigurationError:
    """The error for a parameter whose gradient was accumulated twice in one backward pass."""
    return ConfigurationError(
        f"the gradient of {name} was accumulated twice in one backward pass",
        argument="module",
        expected="one gradient for each parameter",
        seen="a second one after the first was taken for the exchange",
        advice="A parameter used in several reentrant checkpoints does that: use checkpoint(use_reentrant=False).",
    )


def unusable(name: str, gradient: torch.Tensor | None) -> ConfigurationError:
    """The error for a gradient that cannot be put into a bucket."""
    if gradient is None:
        seen, advice = "None", "A hook that steps the parameter and drops its gradient cannot be combined with bagua."
    else:
        seen = str(gradient.layout)
        advice = "Use sparse=False, or name it in module._ddp_params_and_buffers_to_ignore."
    return ConfigurationError(
        f"the gradient of {name} cannot be put into a bucket",
        argument="module",
        expected="a dense gradient",
        seen=seen,
        advice=advice,
    )

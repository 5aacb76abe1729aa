"""Lanes: who runs exchanges, on connections of its own: the thread that computes, a background thread, or a stream.

What goes on beside other exchanges has a lane for itself.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bagua.algorithms import Exchange
from bagua.buckets import Bucket
from bagua.comm import BackgroundThread, Communicator, ProcessGroup, Work, in_background
from bagua.errors import CommunicationError
from bagua.torch_private import profiler_range

T = TypeVar("T")
#: Communicates; what it returns is waited for.
Run = Callable[[], Work | None]
Wait = Callable[[], object]
_POLL_S = 0.001


def nothing() -> None:
    """Wait for something that is over."""


class Lane:
    """Runs exchanges in the order in which they are given to it, on connections of its own: in the calling thread.

    What an exchange returns is waited for later.

    Args:
        group: private to the lane.

    Attributes:
        at_work: bucket that is exchanged, or waited for; None if there is none.
        thread: thread that runs them; None for the one that calls.
    """

    thread: BackgroundThread | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.recorder = group, group.recorder
        self.at_work: Bucket | None = None

    def run(self, exchange: Run, bucket: Bucket | None = None) -> Wait:
        """Start ``exchange``, of ``bucket``; the returned function waits for its end and raises its error."""
        self.at_work = bucket
        work = exchange()
        return nothing if work is None else work.wait

    def close(self) -> None:
        """Let the thread end, if there is one. Idempotent."""
        if self.thread is not None:
            self.thread.stop()


class ThreadLane(Lane):
    """In one background thread, which is told while the thread that computes waits.

    On a GPU the thread works on the stream of whom it works for: else it would read values before they are computed.
    """

    thread: BackgroundThread

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self.thread = BackgroundThread(f"bagua-{group.label}")

    def run(self, exchange: Run, bucket: Bucket | None = None) -> Wait:
        """Queue ``exchange``."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def complete() -> None:
            # Not torch.cuda.stream(None): where there is a GPU, it would make a CUDA context for tensors of the CPU.
            with (
                in_background(self.recorder),
                contextlib.nullcontext() if stream is None else torch.cuda.stream(stream),
            ):
                self.at_work = bucket
                work = exchange()
                if work is not None:
                    work.wait()

        result = self.thread.submit(complete).result
        if stream is None:
            return functools.partial(self.recorder.while_blocked, result)

        def wait() -> None:
            self.recorder.while_blocked(result)
            torch.cuda.current_stream(self._device).wait_stream(stream)

        return wait


@functools.cache
def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all models of the process, so that all ranks issue exchanges in one order."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StreamLane(Lane):
    """On a CUDA stream of its own: the host never blocks."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._stream = _communication_stream(device)

    def run(self, exchange: Run, bucket: Bucket | None = None) -> Wait:
        """Issue ``exchange`` behind everything that the current stream was given so far."""
        self.at_work = bucket
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work = exchange()
            if work is not None:
                work.wait()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def create_lane(group: ProcessGroup, device: torch.device, *, blocking: bool) -> Lane:
    """The lane that the group's transport prefers for tensors on ``device``.

    Args:
        group: group whose exchanges will run.
        device: device on which the buckets lie.
        blocking: exchanges wait for calls that they start, so they cannot run where
            gradients are computed.
    """
    preferred = group.global_communicator.executor
    if device.type == "cuda" and preferred == "stream":
        return StreamLane(group, device)
    if not blocking and (group.size == 1 or preferred == "caller"):
        return Lane(group)
    return ThreadLane(group, device)


def describe(group: ProcessGroup, activity: Callable[[], str] | None) -> None:
    """Have messages about calls on ``group`` say what they were made for: what ``activity`` returns then."""
    for communicator in (group.global_communicator, group.intra_node_communicator, group.inter_node_communicator):
        if isinstance(communicator, Communicator):
            communicator.activity.describe = activity


class ModelLanes:
    """The lanes of a model: threads and connections of its own, which it gives back when it is closed or dropped.

    Args:
        group: private to the model.

    Attributes:
        lanes: lanes of the exchanges, while there are buckets.
        groups: private to the model. Once they are being closed there are none, and no lanes: an error that broke one
            of them may know the frames of the training loop, and so the model.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._apart: dict[str, ProcessGroup] = {}
        self.lanes: list[Lane] = []
        #: Apart from the lanes, which know the groups: they are forgotten first, and threads stopped then.
        self._threads: list[BackgroundThread] = []
        self.groups = [group]

    @property
    def apart(self) -> list[ProcessGroup]:
        """Connections beside those of the model."""
        return list(self._apart.values())

    def of(
        self,
        group: ProcessGroup,
        exchanges: Sequence[Exchange],
        buckets: Sequence[Bucket],
        blocks: Callable[[Exchange, ProcessGroup], bool],
    ) -> dict[tuple[str, torch.device], list[Lane]]:
        """The lanes of each exchange, by label and device. Collective the first time one has connections of its own.

        What goes on beside other exchanges has connections and threads of its own; the others share.

        Args:
            group: ranks of the model.
            exchanges: the exchanges of the plan.
            buckets: memory that they exchange.
            blocks: function that says whether an exchange waits on a group for calls that it starts.
        """
        devices = {bucket.device for bucket in buckets}
        sent = [one for one in exchanges if one.how is not None]
        apart = [one for one in sent if one.lag > 0] if len(sent) > 1 else []
        together = [one for one in sent if one not in apart]

        def made(on: ProcessGroup, members: Sequence[Exchange]) -> dict[torch.device, list[Lane]]:
            # A rank alone waits for others where it is an island.
            beside = [one for one in members if on.size > 1 or (one.lag and one.how is not None and one.how.alone)]
            waits = any(blocks(one, on) for one in beside)
            return {device: [create_lane(on, device, blocking=waits)] for device in devices}

        lanes = {one.label: made(self._group_of(group, one.label), [one]) for one in apart}
        if together:
            shared = made(group, together)
            if len(together) == 1 and _takes_turns(together[0], shared, buckets):
                # Labels are unique, so no other lane has connections under this one.
                for device, several in made(self._group_of(group, together[0].label), together).items():
                    shared[device] += several
            lanes.update({one.label: shared for one in together})
        found = {(label, device): several for label, of in lanes.items() for device, several in of.items()}
        self.lanes = list(dict.fromkeys(one for several in found.values() for one in several))
        self._threads = [lane.thread for lane in self.lanes if lane.thread is not None]
        return found

    def stop(self) -> None:
        """Let the threads end, after what was queued. Idempotent."""
        for thread in self._threads:
            thread.stop()

    def _group_of(self, group: ProcessGroup, label: str) -> ProcessGroup:
        if label not in self._apart:
            self._apart[label] = made = group.duplicate(f"lane-{label}")
            describe(made, group.global_communicator.activity.describe)
            self.groups.append(made)
        return self._apart[label]

    def idle(self) -> bool:
        """Whether no exchange is under way."""
        return all(thread.idle() for thread in self._threads) and all(group.idle() for group in self.groups)

    def end(self, end_exchanges: weakref.WeakMethod[Callable[[], object]]) -> None:
        """The group is closing: a slower rank may still need what this one sends in its last step.

        Args:
            end_exchanges: waits for what is under way, while the model is there.
        """
        wait = end_exchanges()
        if wait is not None:
            with contextlib.suppress(CommunicationError):  # What this rank would have received is not used.
                wait()
        while wait is None and not self.idle():  # Each exchange ends by its own deadline at the latest.
            time.sleep(_POLL_S)
        self.groups.clear()
        self.lanes.clear()
        self._apart.clear()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.stop()
        for group in list(self.groups):
            group.close()


def _takes_turns(exchange: Exchange, lanes: dict[torch.device, list[Lane]], buckets: Sequence[Bucket]) -> bool:
    """Whether buckets take turns on two lanes: one is compressed, or added up, while another is on its way.

    Not where calls are work for the processor themselves.
    """
    several = exchange.parts.by == "arrival" and len({bucket for bucket in buckets if bucket.by_arrival}) > 1
    if not several or exchange.how is None or not exchange.how.side_by_side:
        return False
    threads = [one for several in lanes.values() for one in several if isinstance(one, ThreadLane)]
    return bool(threads) and threads[0].group.global_communicator.overlaps


def shown(name: str, lane: Lane, start: Callable[[Run, Bucket], Wait], exchange: Run, bucket: Bucket) -> Wait:
    """Start an exchange so that timeline and profiler show it.

    Args:
        name: name of the exchange and its bucket.
        lane: lane that runs it.
        start: ``run`` of the lane, or of one without a thread.
        exchange: communicates, in whatever thread that happens.
        bucket: bucket that is exchanged.

    Returns:
        What waits for its end.
    """
    recorder = lane.recorder

    def run() -> Work | None:
        running = recorder.clock()
        try:
            return exchange()
        finally:
            recorder.span(f"run {name}", running, track="work", group=lane.group.label)

    begun = recorder.clock()
    inner = _in_range(name, lambda: start(run, bucket))

    def wait() -> None:
        waiting = recorder.clock()
        _in_range(f"wait for {name}", inner)
        recorder.span(f"wait for {name}", waiting, track="waits")
        recorder.span(name, begun, track="exchanges")

    return wait


def _in_range(name: str, act: Callable[[], T]) -> T:
    end_range = profiler_range(name)
    try:
        return act()
    finally:
        end_range()

"""Exchanges at work: for each bucket of each exchange what it remembers, and the flights that are under way."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bagua.algorithms import OF_BUCKETS, Exchange, Flight, Model, Then
from bagua.buckets import Bucket
from bagua.comm import Communicator
from bagua.engine.schedule.lanes import Lane, nothing, shown
from bagua.engine.state.saving import key_of, paste, propose_again
from bagua.errors import BaguaError
from bagua.primitives import MatrixBlock, ReducerMemory
from bagua.torch_private import profiling


def sends_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether anything is made of gradients."""
    return any("gradients" in one.needs for one in exchanges)


def gathers(exchanges: Iterable[Exchange]) -> bool:
    """Whether gradients are gathered in flat memory as they arrive."""
    return sends_gradients(one for one in exchanges if one.parts.by == "arrival")


def is_chunked(exchanges: Iterable[Exchange]) -> bool:
    """Whether buckets have to split evenly over the ranks."""
    return any(one.how is not None and one.how.chunked for one in exchanges)


def is_between_steps(exchanges: Iterable[Exchange]) -> bool:
    """Whether ranks exchange between steps, each at its own pace, and not in them."""
    return any(one.how is not None and not one.how.lockstep for one in exchanges)


def follows_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether something happens as gradients arrive; otherwise a backward pass only counts as a step."""
    return any(
        "gradients" in one.needs | one.writes or not {one.at, one.until}.isdisjoint(OF_BUCKETS) for one in exchanges
    )


def layout_of(exchanges: Sequence[Exchange]) -> Hashable:
    """What changes when buckets must be formed anew."""
    return is_chunked(exchanges), is_between_steps(exchanges), gathers(exchanges)


_log = logging.getLogger("bagua")


class Clock(NamedTuple):
    """What time it is in training.

    Attributes:
        step: number of the training step, from 0.
        t: its number in the phase, from 1; of several, that of the last one.
        loss_scale: factor by which the loss is multiplied in it.
        stride: steps of the fastest member for which it stands.
    """

    step: int = -1
    t: int = 0
    loss_scale: float = 1.0
    stride: int = 1


def memory_for(bucket: Bucket) -> ReducerMemory:
    """An empty memory for tensors laid out like ``bucket``."""
    dense = [torch.empty_like(one, device="meta", memory_format=torch.preserve_format) for one in bucket.parameters]
    blocks = [block for block in map(MatrixBlock.of, dense, bucket.offsets) if block is not None]
    return ReducerMemory(bucket.communicator, bucket.numel, bucket.dtype, bucket.device, blocks, bucket.padding())


class Course:
    """One exchange in one bucket, on its way through the steps. Holds what is remembered of it.

    What follows from the exchange alone is found out here, once, and not in each step.

    Args:
        exchange: the exchange; its label is that of the state.
        part: part of the model that the bucket belongs to.
        bucket: the bucket.
        memory: state that is remembered of it; all of it is declared.
        model: model whose parameters they are.
        lane: lane that runs it; None for a local action.
        prepared: return value of ``How.prepare``.

    Attributes:
        others: courses that start and are folded with this one, in the first of a part; none by arrival.
        flights: under way, in the order of their starts.
        due: True if it starts in this step.
        blocks: True if nothing is computed between its start and its end.
        gathering_scale: factor on gradients, by which they are multiplied when they are gathered; None where the factor
            is on what is made of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        part: int,
        bucket: Bucket,
        memory: ReducerMemory,
        model: Model,
        lane: Lane | None,
        prepared: Any,
    ) -> None:
        self.exchange, self.part, self.bucket, self.memory, self.lane = exchange, part, bucket, memory, lane
        self.label = exchange.label
        self.names: Sequence[str] = bucket.names
        self.others: list[Course] = []
        self.flights: deque[Flight] = deque()
        self.due = exchange.when.steps == 1
        self._model, self._prepared = model, prepared
        self._buffers: list[torch.Tensor] = []
        # On a host, to map a new page costs several times what it takes to write it.
        self._keeps_buffers = bucket.by_arrival or bucket.device.type == "cpu"
        what, how, then = exchange.what, exchange.how, exchange.then
        arrives = exchange.parts.by == "arrival"
        ranks = 1 if lane is None else lane.group.size
        self._shift = 0 if arrives else exchange.parts.shift(part, exchange.when.steps)
        self._each_step = exchange.when.steps == 1 and exchange.when.offset == 0
        self._scale = 1.0 if lane is None or how is None else how.scale(lane.group)
        self._sent_by = how if ranks > 1 or (how is not None and how.alone and lane is not None) else None
        self._starts = None if type(then).start is Then.start else then.start
        #: The scale of the loss is in gradients, and in nothing else that is sent.
        self._scaled = "gradients" in exchange.needs
        gathered = self._scaled and what is not None and what.in_place
        self.gathering_scale = self._scale if how is not None and gathered and arrives else None
        self._in_place = gathered and exchange.lag == 0
        self._gathers = gathered and not arrives
        self._multiplies = what is not None and not gathered and self._scale != 1.0
        self._from_anchor = "anchor" in exchange.needs
        self._at_once = exchange.at_once
        self.blocks = False
        self._awaited = self._at_once or (lane is not None and lane.thread is not None)
        self._delays = self._sent_by is None and self._at_once and self._from_anchor and self._scale == 1.0
        self._settles = how is not None and bool(memory.declared)
        self._looks = self._from_anchor or ((ranks > 1 or exchange.alone) and self._is_dropped_by_all())

    def _is_dropped_by_all(self) -> bool:
        """Whether weights that are not finite on one rank would end the exchange between all, where a look is cheap."""
        one = self.exchange
        uniform = one.how is not None and one.how.uniform and "weights" in one.writes and not self._from_anchor
        return uniform and (one.when.steps > 1 or self.bucket.device.type == "cpu")

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        return self.bucket.views(flat)

    def take_buffer(self) -> torch.Tensor:
        """Memory for one flight."""
        return self._buffers.pop() if self._buffers else self.bucket.empty()

    # When.

    def begin(self, clock: Clock) -> None:
        """A step begins: find out whether it starts in it, unless it does in every step."""
        self.due = self.exchange.when.due(clock.t, self._shift, clock.stride)

    def idle_steps(self, clock: Clock) -> int:
        """Steps from this one to the next in which it starts, or is folded."""
        when = self.exchange.when
        left = when.steps - (clock.t - when.offset - self._shift) % when.steps
        return min(left, self.flights[0].t + self.exchange.lag - clock.t) if self.flights else left

    # From start to fold.

    def set_off(self, clock: Clock) -> None:
        """Start it and those that are folded with it; at once, if nothing comes in between."""
        for one in (self, *self.others):
            one.start(clock)
        if self._at_once:
            self.fold(clock)

    def start(self, clock: Clock) -> None:
        """Send what the bucket holds now."""
        flight, what, lane = self._flight(clock), self.exchange.what, self.lane
        if self._gathers:
            self.bucket.gather_gradients(flight.scale)
        if self._delays:
            flight.delay()
        elif what is not None:
            what.fill(flight)
        if self._starts is not None:
            self._starts(flight)
        if self._multiplies:
            flight.flat.mul_(flight.scale)
        if self._sent_by is not None and lane is not None:
            run = functools.partial(self._sent_by.run, flight, lane.group)
            here = self.blocks and lane.thread is not None and lane.thread.idle()
            start = functools.partial(Lane.run, lane) if here else lane.run
            if lane.recorder.trace is not None or profiling():
                name = " ".join(filter(None, ("exchange", self.label, f"of bucket {self.bucket.index}")))
                flight.wait = shown(name, lane, start, run, self.bucket)
            else:
                flight.wait = start(run, self.bucket)
        self.flights.append(flight)

    def _flight(self, clock: Clock) -> Flight:
        bucket = self.bucket
        taken: list[torch.Tensor] = []
        flat = _NOTHING
        if self._in_place:
            flat = bucket.allocate_gradients() if bucket.gradients is None else bucket.gradients
        elif self.exchange.how is not None:
            flat = self.take_buffer()
            taken = [flat]
        return Flight(
            step=clock.step,
            t=clock.t,
            round=clock.t if self._each_step else self.exchange.when.round(clock.t, self._shift),
            loss_scale=clock.loss_scale if self._scaled else 1.0,
            scale=self._scale,
            bucket=bucket,
            memory=self.memory,
            model=self._model,
            flat=flat,
            taken=taken,
            supply=self.take_buffer,
            what=self.exchange.what,
            prepared=self._prepared,
            wait=nothing,
            awaited=self._awaited or self.blocks,
        )

    def returned(self, saved: Mapping[str, Any]) -> Flight:
        """A flight that was saved when its result was there."""
        flight = self._flight(Clock(saved["step"], saved["t"], saved["loss_scale"]))
        flight.round = saved["round"]
        paste(self, "flat", flight.flat, saved["parameters"])
        if any(key_of(self, "sent") in parts for parts in saved["parameters"].values()):
            flight.sent = flight.take()
            paste(self, "sent", flight.sent, saved["parameters"])
        propose_again(self, saved)
        return flight

    def fold(self, clock: Clock) -> None:
        """Take in the first flight of this course, and of each of those that are folded with it."""
        courses = [one for one in (self, *self.others) if one.flights]
        flights = [one.flights.popleft() for one in courses]
        for course, flight in zip(courses, flights, strict=True):
            if course.lane is not None:
                course.lane.at_work = course.bucket
            flight.wait()
            if course.lane is not None:
                course.lane.at_work = None
        finite = not self._looks or all(flight.is_finite() for flight in flights)
        if not finite:
            self._tell_why(flights)
        try:
            for course, flight in zip(courses, flights, strict=True):
                course.take_in(flight, clock, finite=finite)
        except BaguaError:  # It is raised before anything changes.
            raise
        except BaseException as error:
            for flight in flights:
                if flight.state and self.exchange.how is not None:  # It may be of two moments now.
                    flight.memory.tear(error)
            raise

    def take_in(self, flight: Flight, clock: Clock, *, finite: bool) -> None:
        """What is remembered and what is trained change here, together."""
        flight.finite = finite
        flight.early = clock.t < flight.t + self.exchange.lag
        flight.rescale = clock.loss_scale / flight.loss_scale if self._scaled else 1.0
        if self._settles and not flight.unfilled:
            flight.memory.settle(flight.flat)
        self.exchange.then.fold(flight)
        if self._gathers:
            self.bucket.return_gradients()
        self._end(flight)

    def _end(self, flight: Flight) -> None:
        """The flight is over. Its memory is kept for others, where new memory is dear, or steps often need it."""
        if self._keeps_buffers:
            self._buffers += flight.taken

    def _tell_why(self, flights: Sequence[Flight]) -> None:
        """No rank takes in a result that is not finite, and all say whose weights are to blame. Collective."""
        own = [one.weights(torch.zeros_like(one.flat)) if one.sent is None else one.sent for one in flights]
        spoilt = [not all(bool(torch.isfinite(weights).all()) for weights in own)]
        group = None if self.lane is None else self.lane.group
        ranks: Sequence[int] = [0 if group is None else group.ranks[group.rank]]
        uniform = self.exchange.how is not None and self.exchange.how.uniform
        if uniform and self.lane is not None and self.lane.group.size > 1:  # Then all ranks are here.
            ranks = self.lane.group.ranks
            self.lane.run(functools.partial(_ask, self.lane.group.global_communicator, spoilt))()
        guilty = ", ".join(str(rank) for rank, flag in zip(ranks, spoilt, strict=True) if flag)
        reason = f"weights that are not finite on rank {guilty}" if guilty else "what was sent overflowed"
        advice = "" if self._from_anchor else ". Go on from a checkpoint"
        _log.warning(
            "The exchange that started in step %d was dropped on all ranks: %s%s", flights[0].step, reason, advice
        )

    def drop(self) -> None:
        """Wait for all flights, and take none of them in."""
        while self.flights:
            flight = self.flights.popleft()
            flight.wait()
            flight.memory.forget_proposals()
            self._end(flight)

    def cut(self, clock: Clock) -> None:
        """Training is interrupted: leave nothing under way here, and in courses that are folded with this one."""
        # No optimizer will step with gradients of a step that is over.
        drops = self.exchange.lag > 0 and "gradients" in self.exchange.writes
        courses = (self, *self.others)
        for one in courses if drops else ():
            one.drop()
        while any(one.flights for one in courses):
            self.fold(clock)


def put_together(courses: Sequence[Course]) -> list[Course]:
    """Courses of one exchange; those of one part will be folded together, but for buckets by arrival.

    Returns:
        The first of each part.
    """
    first: dict[int, Course] = {}
    for one in courses:
        leader = first.setdefault(one.part, one)
        if leader is not one:
            leader.others.append(one)
    return list(first.values())


def _ask(communicator: Communicator, flags: list[bool]) -> None:
    """Replace the flag of this rank by those of all."""
    flags[:] = communicator.allgather_object(flags[0])


_NOTHING = torch.empty(0, device="cpu")

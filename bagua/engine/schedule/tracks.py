"""Exchanges at work: for each bucket of each exchange what it remembers, and the flights that are under way."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bagua.algorithms import Exchange, Flight, How, Model
from bagua.buckets import Bucket
from bagua.comm import Communicator, ProcessGroup, Work
from bagua.engine.buckets.layout import unusable
from bagua.engine.schedule.lanes import Lane, is_watched, nothing, shown
from bagua.engine.state.saving import key_of, paste, propose_again
from bagua.errors import BaguaError
from bagua.primitives import MatrixBlock, ReducerMemory

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


class Track:
    """One bucket of one exchange.

    Args:
        label: label of the exchange.
        part: part of the model that the bucket belongs to.
        bucket: the bucket.
        memory: state that is remembered of it.

    Attributes:
        flights: under way, in the order of their starts.
    """

    __slots__ = ("_buffers", "bucket", "flights", "label", "memory", "part")

    def __init__(self, label: str, part: int, bucket: Bucket, memory: ReducerMemory) -> None:
        self.label = label
        self.part = part
        self.bucket = bucket
        self.memory = memory
        self.flights: deque[Flight] = deque()
        self._buffers: list[torch.Tensor] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""
        return self.bucket.names

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        return self.bucket.views(flat)

    def take_buffer(self) -> torch.Tensor:
        """Memory for one flight."""
        return self._buffers.pop() if self._buffers else self.bucket.empty()

    def give_back(self, flight: Flight) -> None:
        """The flight is over. Its memory is kept for those to come, where new memory is dear, or steps often need it.

        On a host, to map a new page costs several times what it takes to write it.
        """
        if self.bucket.by_arrival or self.bucket.device.type == "cpu":
            for flat in flight.kept():
                if flat is not self.bucket.gradients and flat is not _NOTHING:
                    self._buffers.append(flat)


def memory_for(bucket: Bucket) -> ReducerMemory:
    """An empty memory for tensors laid out like ``bucket``."""
    dense = [torch.empty_like(one, device="meta", memory_format=torch.preserve_format) for one in bucket.parameters]
    blocks = [block for block in map(MatrixBlock.of, dense, bucket.offsets) if block is not None]
    return ReducerMemory(bucket.communicator, bucket.numel, bucket.dtype, bucket.device, blocks, bucket.padding())


class Course:
    """One exchange on its way through the steps.

    Args:
        exchange: the exchange.
        tracks: one for each bucket.
        model: model whose parameters they are.
        lanes: lanes that run it, its tracks in turn; none for local actions.
        prepared: return value of ``How.prepare``.

    Attributes:
        together: tracks that are folded together; for buckets by arrival, one list for each bucket.
        due: parts that start in this step.
        at_work: the bucket that is being exchanged, or waited for; None if there is none.
        gathering_scale: factor on gradients, by which they are multiplied when they are gathered; None where the factor
            is on what is made of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        tracks: Sequence[Track],
        model: Model,
        lanes: Sequence[Lane],
        prepared: Any,
    ) -> None:
        self.exchange = exchange
        self.tracks = list(tracks)
        self.lanes = tuple(lanes)
        self._parts = frozenset(range(exchange.parts.n))
        self.due = self._parts if exchange.when.steps == 1 else frozenset[int]()
        self.at_work: Bucket | None = None
        self._model = model
        self._prepared = prepared
        lane = lanes[0] if lanes else None  # All have groups of the same ranks.
        self._lane = lane
        self._ranks = 1 if lane is None else lane.group.size
        parts = exchange.parts
        self._of_arrival = parts.by == "arrival"
        self.together = _together(self.tracks, of_arrival=self._of_arrival)
        self._shifts = [parts.shift(part, exchange.when.steps) for part in range(parts.n)]
        how = exchange.how
        self._scale = 1.0 if lane is None or how is None else how.scale(lane.group)
        self._uniform = how is not None and how.uniform
        #: The scale of the loss is in gradients, and in nothing else that is sent.
        self._scaled = "gradients" in exchange.needs
        self._gathered = self._scaled and exchange.what is not None and exchange.what.in_place
        self.gathering_scale = self._scale if how is not None and self._gathered and self._of_arrival else None
        self._in_place = self._gathered and exchange.lag == 0
        self._gathers = self._gathered and not self._of_arrival
        self._from_anchor = "anchor" in exchange.needs
        self._at_once = exchange.at_once
        self._all_drop = (self._ranks > 1 or exchange.alone) and self._is_dropped_by_all()

    def _is_dropped_by_all(self) -> bool:
        """Whether weights that are not finite on one rank would end the exchange between all, where a look is cheap."""
        one = self.exchange
        uniform = one.how is not None and one.how.uniform and "weights" in one.writes and not self._from_anchor
        return uniform and (one.when.steps > 1 or all(track.bucket.device.type == "cpu" for track in self.tracks))

    # When.

    def begin(self, clock: Clock) -> None:
        """A step begins: find out what is due in it, unless that is so in every step."""
        when, shifts = self.exchange.when, enumerate(self._shifts)
        self.due = frozenset([part for part, shift in shifts if when.due(clock.t, shift, clock.stride)])

    def is_due(self, track: Track) -> bool:
        """Whether ``track`` starts in this step."""
        return (0 if self._of_arrival else track.part) in self.due

    def note_rates(self) -> None:
        """Keep the learning rates of this step for an outer step: it may come after the next schedule."""
        if self._from_anchor:
            self._model.note_rates()

    # From start to fold.

    def set_off(self, tracks: Sequence[Track], clock: Clock) -> None:
        """Start ``tracks``, which are folded together; at once, if nothing comes in between."""
        for track in tracks:
            self._start(track, clock)
        if self._at_once:
            self.fold(tracks, clock)

    def _start(self, track: Track, clock: Clock) -> None:
        """Send what ``track`` holds now."""
        flight = self._flight(track, clock)
        what, how = self.exchange.what, self.exchange.how
        if self._gathers:
            _gather(track.bucket, flight.scale)
        sent_by = how if self._lane is not None and how is not None and (self._ranks > 1 or how.alone) else None
        if what is not None:
            if sent_by is None and self._at_once and self._from_anchor and flight.scale == 1.0:
                flight.delay()
            else:
                what.fill(flight)
        self.exchange.then.start(flight)
        if what is not None and not self._gathered and flight.scale != 1.0:
            flight.flat.mul_(flight.scale)
        if sent_by is not None:
            lane = self.lanes[track.part % len(self.lanes)]
            executor = lane.executors[track.bucket.device]
            run = functools.partial(self._run, sent_by, flight, lane.group)
            if is_watched(lane.recorder):
                name = " ".join(filter(None, ("exchange", self.exchange.label, f"of bucket {track.bucket.index}")))
                flight.wait = shown(name, lane.group, executor.run, run)
            else:
                flight.wait = executor.run(run)
        track.flights.append(flight)

    def _run(self, how: How, flight: Flight, group: ProcessGroup) -> Work | None:
        """Communicate, in whatever thread that happens."""
        self.at_work = flight.bucket
        return how.run(flight, group)

    def _flight(self, track: Track, clock: Clock) -> Flight:
        shift = 0 if self._of_arrival else self._shifts[track.part]
        bucket = track.bucket
        local = self.exchange.how is None
        return Flight(
            step=clock.step,
            t=clock.t,
            round=self.exchange.when.round(clock.t, shift),
            loss_scale=clock.loss_scale if self._scaled else 1.0,
            scale=self._scale,
            bucket=bucket,
            memory=track.memory,
            model=self._model,
            flat=bucket.allocate_gradients() if self._in_place else _NOTHING if local else track.take_buffer(),
            take=track.take_buffer,
            what=self.exchange.what,
            prepared=self._prepared,
            wait=nothing,
        )

    def returned(self, track: Track, saved: Mapping[str, Any]) -> Flight:
        """A flight that was saved when its result was there."""
        flight = self._flight(track, Clock(saved["step"], saved["t"], saved["loss_scale"]))
        flight.round = saved["round"]
        paste(track, "flat", flight.flat, saved["parameters"])
        if any(key_of(track, "sent") in parts for parts in saved["parameters"].values()):
            flight.sent = track.take_buffer()
            paste(track, "sent", flight.sent, saved["parameters"])
        propose_again(track, saved)
        return flight

    def is_back(self, track: Track, clock: Clock) -> bool:
        """Whether the first flight of ``track`` is to be folded in this step."""
        return bool(track.flights) and track.flights[0].t + self.exchange.lag <= clock.t

    def fold(self, tracks: Sequence[Track], clock: Clock) -> None:
        """Take in the first flight of each of ``tracks``."""
        flights = [track.flights.popleft() for track in tracks]
        for flight in flights:
            self.at_work = flight.bucket
            flight.wait()
        self.at_work = None
        finite = not (self._from_anchor or self._all_drop) or all(flight.is_finite() for flight in flights)
        if not finite:
            self._tell_why(flights)
        try:
            self._take_in(tracks, flights, clock, finite=finite)
        except BaguaError:  # It is raised before anything changes.
            raise
        except BaseException as error:
            self._tear(flights, error)
            raise

    def _tear(self, flights: Sequence[Flight], error: BaseException) -> None:
        """What is remembered may be of two moments now."""
        if self.exchange.how is not None:
            for flight in flights:
                if flight.state:
                    flight.memory.tear(error)

    def _take_in(self, tracks: Sequence[Track], flights: Sequence[Flight], clock: Clock, *, finite: bool) -> None:
        """What is remembered and what is trained change here, together."""
        for track, flight in zip(tracks, flights, strict=True):
            flight.finite = finite
            flight.early = clock.t < flight.t + self.exchange.lag
            flight.rescale = clock.loss_scale / flight.loss_scale if self._scaled else 1.0
            if self.exchange.how is not None and not flight.unfilled:
                flight.memory.settle(flight.flat)
            self.exchange.then.fold(flight)
            if self._gathers:
                track.bucket.return_gradients()
            track.give_back(flight)

    def _tell_why(self, flights: Sequence[Flight]) -> None:
        """No rank takes in a result that is not finite, and all say whose weights are to blame. Collective."""
        own = [one.weights(torch.zeros_like(one.flat)) if one.sent is None else one.sent for one in flights]
        spoilt = [not all(bool(torch.isfinite(weights).all()) for weights in own)]
        group = None if self._lane is None else self._lane.group
        ranks: Sequence[int] = [0 if group is None else group.ranks[group.rank]]
        if self._uniform and self._lane is not None and self._ranks > 1:  # Then all ranks are here.
            ranks = self._lane.group.ranks
            run = functools.partial(_ask, self._lane.group.global_communicator, spoilt)
            self._lane.executors[flights[0].bucket.device].run(run)()
        guilty = ", ".join(str(rank) for rank, flag in zip(ranks, spoilt, strict=True) if flag)
        reason = f"weights that are not finite on rank {guilty}" if guilty else "what was sent overflowed"
        advice = "" if self._from_anchor else ". Go on from a checkpoint"
        _log.warning(
            "The exchange that started in step %d was dropped on all ranks: %s%s", flights[0].step, reason, advice
        )

    def drop(self, track: Track) -> None:
        """Wait for all flights of ``track``, and take none of them in."""
        while track.flights:
            flight = track.flights.popleft()
            flight.wait()
            flight.memory.forget_proposals()
            track.give_back(flight)

    def cut(self, clock: Clock) -> None:
        """Training is interrupted: leave nothing under way."""
        # No optimizer will step with gradients of a step that is over.
        drops = self.exchange.lag > 0 and "gradients" in self.exchange.writes
        for tracks in self.together:
            for track in tracks if drops else ():
                self.drop(track)
            while any(track.flights for track in tracks):
                self.fold([track for track in tracks if track.flights], clock)


def _together(tracks: Sequence[Track], *, of_arrival: bool) -> list[list[Track]]:
    """Tracks that are folded together: those of one part; buckets by arrival each by itself."""
    if of_arrival:
        return [[track] for track in tracks]
    parts: dict[int, list[Track]] = {}
    for track in tracks:
        parts.setdefault(track.part, []).append(track)
    return list(parts.values())


def _gather(bucket: Bucket, factor: float) -> None:
    """Put the gradients of parts that do not lie where gradients arrive together."""
    for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise unusable(name, parameter.grad)
    bucket.gather_gradients(factor)


def _ask(communicator: Communicator, flags: list[bool]) -> None:
    """Replace the flag of this rank by those of all."""
    flags[:] = communicator.allgather_object(flags[0])


_NOTHING = torch.empty(0)

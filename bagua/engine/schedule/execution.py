"""The buckets of a model, the exchanges that are executed in them, and what these remember from phase to phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import Exchange, Flight, How, Model, Parts
from bagua.buckets import Bucket, form_buckets
from bagua.comm import ProcessGroup
from bagua.engine.gradients import Unused
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.facts import gathers
from bagua.engine.schedule.lanes import CallerExecutor, Lane, ModelLanes
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.schedule.tracks import Clock, Course, Track, memory_for
from bagua.engine.state.saving import Remembered, collect, cut, followed, key_of, restore
from bagua.primitives import State


class Execution:
    """The buckets of a model, and the exchanges in them.

    Args:
        group: private to the model.
        lanes: its threads and connections.

    Attributes:
        lanes: as given.
        buckets: none before they are formed.
        scheduler: timing of the exchanges in the buckets; None before there are any.
        courses: the exchanges of the phase.
        fresh: names of the parameters whose state wants to start from the weights, by place and name of the state.
        unused: parameters that got no gradient since the buckets were formed.
    """

    def __init__(self, group: ProcessGroup, lanes: ModelLanes) -> None:
        self._group = group
        self.lanes = lanes
        self.buckets: list[Bucket] = []
        self.scheduler: Scheduler | None = None
        self.courses: list[Course] = []
        self.fresh: dict[tuple[Track, str], list[str]] = {}
        self.unused = Unused()
        self._prepared: dict[tuple[str, str], Any] = {}
        self._parts: dict[tuple[Parts, bool], list[tuple[int, Bucket]]] = {}
        self._places: dict[tuple[str, int], Track] = {}
        self._remembered: Remembered | None = None
        self._flights: list[dict[str, Any]] = []

    @property
    def places(self) -> list[Track]:
        """What is remembered now, once for each label and bucket."""
        return list(self._places.values())

    def take(self, buckets: list[Bucket]) -> None:
        """Take other buckets, in which nothing is executed yet, and everything begins from its start."""
        self.buckets = buckets
        self._parts.clear()
        self._places.clear()
        self.fresh = {}

    def begin(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions) -> None:
        """Give the buckets the memory that ``exchanges`` need, and execute these. Collective."""
        sent = any(one.what is not None and one.what.in_place and "weights" in one.needs for one in exchanges)
        for bucket in self.buckets:
            bucket.fuse_weights(exchangeable=sent)
            if gathers(exchanges):
                bucket.allocate_gradients()
        self.enter(exchanges, model, options)

    def enter(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions) -> None:
        """Execute ``exchanges`` in the buckets as they are. Collective."""
        self._make_courses(exchanges, model, options)
        self.scheduler = Scheduler(self.buckets, self.courses, delay=options.delay_reduce)

    def leave(self) -> None:
        """Leave no exchange owed or under way, and give their threads back. Collective."""
        if self.scheduler is not None:
            self.scheduler.flush()
            self.scheduler.dissolve()

    @property
    def remembers(self) -> bool:
        """Whether something is remembered from step to step."""
        return any(place.memory.state for place in self._places.values())

    def settle(self) -> None:
        """Wait for what is under way, and apply nothing."""
        if self.scheduler is not None:
            self.scheduler.settle()

    def suspend(self) -> list[tuple[Track, Flight]]:
        """Wait for what is under way, and set it aside for ``resume``; later steps do not fold it."""
        if self.scheduler is None:
            return []
        flights = self.scheduler.settle()
        self.scheduler.forget()
        return flights

    def resume(self, flights: list[tuple[Track, Flight]]) -> None:
        """Fold the results that ``suspend`` set aside when their time comes, after all."""
        if self.scheduler is not None:
            self.scheduler.resume(flights)

    # Exchanges made ready.

    def _make_courses(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions) -> None:
        """Make the courses of ``exchanges``. What is remembered under a label stays, if the label does.

        Collective the first time that an exchange has connections of its own.
        """
        executed = [one for one in exchanges if one.how is None or one.how.lockstep]
        labels = {one.label for one in executed}
        self._places = {key: track for key, track in self._places.items() if key[0] in labels}
        self.fresh = {place: names for place, names in self.fresh.items() if place[0].label in labels}
        lanes = self.lanes.of(self._group, executed, self.buckets, self._blocks)
        self.courses = [
            self._course(one, self._buckets_of(one, model, options), model, lanes.get(one.label, ()))
            for one in executed
        ]

    def once(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions, clock: Clock) -> None:
        """Have ``exchanges`` made now, from start to fold, in this thread. They remember nothing. Collective."""
        for one in exchanges:
            found = self._buckets_of(one, model, options)
            made = [Track(one.label, part, bucket, memory_for(bucket)) for part, bucket in found]
            lane = Lane(self._group, {bucket.device: CallerExecutor() for _, bucket in found})
            prepared = None if one.how is None else one.how.prepare(self._group)
            course = Course(one, made, model, (lane,), prepared)
            for tracks in course.together:
                course.set_off(tracks, clock)
            course.cut(clock)

    def _course(
        self, exchange: Exchange, buckets: Sequence[tuple[int, Bucket]], model: Model, lanes: Sequence[Lane]
    ) -> Course:
        tracks = [self._track(exchange, part, bucket) for part, bucket in buckets]
        lanes = () if exchange.how is None else lanes
        prepared = None if not lanes or exchange.how is None else self._prepare(exchange, exchange.how, lanes[0].group)
        exchange.then.enter([bucket for _, bucket in buckets], model)
        return Course(exchange, tracks, model, lanes, prepared)

    def _track(self, exchange: Exchange, part: int, bucket: Bucket) -> Track:
        key = (exchange.label, id(bucket))
        known = self._places.get(key)
        track = Track(exchange.label, part, bucket, memory_for(bucket) if known is None else known.memory)
        self._places.setdefault(key, track)
        new = [one for one in exchange.states() if one.name not in track.memory.declared]
        track.memory.declare(new)
        self._note_fresh(track, new)
        return track

    def prepare(self, exchanges: Sequence[Exchange]) -> None:
        """Have exchanges that share the connections of the model make what they need. Collective."""
        for one in exchanges:
            if one.how is not None and one.how.lockstep:
                self._prepare(one, one.how, self._group)

    def _prepare(self, exchange: Exchange, how: How, group: ProcessGroup) -> Any:
        key = (exchange.label, repr(how))
        if key not in self._prepared:
            self._prepared[key] = how.prepare(group)
        return self._prepared[key]

    def _blocks(self, exchange: Exchange, group: ProcessGroup) -> bool:
        """Whether ``exchange`` waits on ``group`` for calls that it starts."""
        how = exchange.how
        return how is not None and how.blocking(group, self._prepare(exchange, how, group))

    # Buckets.

    def _buckets_of(self, exchange: Exchange, model: Model, options: EngineOptions) -> list[tuple[int, Bucket]]:
        parts, of_buffers = exchange.parts, "buffers" in exchange.needs
        if parts.by == "arrival":
            return list(enumerate(self.buckets))
        if (parts, of_buffers) not in self._parts:
            named: Mapping[str, Any] = model.buffers() if of_buffers else model.parameters
            # In float64 the mean of equal constants is the constant, also of the largest of float32.
            dtype = torch.float64 if of_buffers else None
            self._parts[parts, of_buffers] = list(self._cut(parts, named, options, dtype)) if named else []
        return self._parts[parts, of_buffers]

    def _cut(
        self, parts: Parts, named: Mapping[str, Any], options: EngineOptions, dtype: torch.dtype | None
    ) -> Iterable[tuple[int, Bucket]]:
        """One bucket for each part, dtype (or all as ``dtype``) and device; tensors stay where they are."""
        for part, names in enumerate(parts.cut(named)):
            kinds = form_buckets(
                names,
                key=lambda name: (dtype or named[name].dtype, named[name].device),
                nbytes=lambda name: int(named[name].nbytes),
                bucket_bytes=2**63,
            )
            for members in kinds:
                yield (
                    part,
                    Bucket(
                        part,
                        members,
                        [named[name] for name in members],
                        self._group.global_communicator,
                        align_bytes=options.align_bytes,
                        fusion=False,
                        by_arrival=False,
                        dtype=dtype,
                    ),
                )

    # What starts from weights.

    @property
    def fresh_and_shared(self) -> list[str]:
        """Names of the parameters of which something starts from the weights that must be equal on all ranks."""
        found = [
            names for (track, state), names in self.fresh.items() if track.memory.declared[state].scope == "shared"
        ]
        return list(dict.fromkeys(name for names in found for name in names))

    def begin_from_weights(self) -> None:
        """Make what starts from weights: when it is new, and when the weights were replaced from outside."""
        fresh, self.fresh = self.fresh, {}
        for (track, state), names in fresh.items():
            chosen = set(names)
            weights = track.views(track.bucket.read_weights(track.bucket.empty()))
            for name, begun, weight in zip(track.names, track.views(track.memory.state[state]), weights, strict=True):
                if name in chosen:
                    begun.copy_(weight)

    def _note_fresh(self, track: Track, states: Iterable[State]) -> None:
        self.fresh.update({(track, one.name): list(track.names) for one in states if one.start == "weights"})

    def check_loads(self) -> None:
        """Refuse weights from outside where that is too late; see ``How.check_loads``."""
        for course in self.courses:
            if course.exchange.how is not None:
                course.exchange.how.check_loads()

    def weights_were_replaced(self) -> None:
        """Begin again from the weights: what was remembered of others, and flights from them, say nothing of these."""
        for track in self.places:
            declared = track.memory.declared.values()
            if any(one.start == "weights" for one in declared):
                track.memory.begin_again()
                self._note_fresh(track, declared)
        for course in self.courses:
            if "weights" in course.exchange.writes:
                for track in course.tracks:
                    course.drop(track)

    # From one set of buckets to the next.

    def take_apart(self) -> None:
        """Leave the exchanges, give up the buckets, and keep what is remembered. Collective."""
        self.leave()
        if self.scheduler is not None:
            self._remembered = self._collected()
        self.scheduler = None
        self.unused = Unused()
        self.buckets = []

    def follow(self, names: Mapping[str, str]) -> list[str]:
        """Forget what is remembered of all parameters but those in ``names``, which says what they are called now.

        Returns:
            The parameters of which something is forgotten.
        """
        before = self._remembered or collect(())
        self._remembered = followed(before, names)
        owners = {*before["parameters"], *(name for other in before["others"] for name in other["names"])}
        return sorted(owners - names.keys())

    def keep_parts(self) -> None:
        """Let flights of parts, which are no buckets, go on in the buckets to come."""
        if self.scheduler is not None:
            self._flights = _saved(self.scheduler.withdraw_parts())

    def save(self, *, copy: bool) -> tuple[Remembered, list[dict[str, Any]]]:
        """What is remembered, and flights that are over and not folded; copies, if ``copy``."""
        if self.scheduler is None:
            return self._remembered or collect(()), self._flights
        flights = _saved(self.scheduler.settle())
        return self._collected(copy=copy), flights

    def load(self, remembered: Remembered, flights: list[dict[str, Any]]) -> None:
        """Go on in the buckets to come with what ``save`` returned."""
        self._remembered, self._flights = remembered, flights

    def go_on(self) -> None:
        """Put back what was remembered, and flights where the buckets are those that they started from."""
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            self._restore(remembered)
            self._board()
            self._flights = []

    def _collected(self, *, copy: bool = True) -> Remembered:
        """Everything that is remembered, but for what has yet to start from the weights; copies, if ``copy``."""
        found = collect(self.places, copy=copy)
        for (track, state), names in self.fresh.items():
            for name in names:
                found["parameters"][name].pop(key_of(track, state), None)
        return found

    def _restore(self, remembered: Remembered) -> None:
        """Put what was remembered back. Only the rest starts from the weights."""
        restore(self.places, remembered)
        known = remembered["parameters"]
        lacking = {
            place: [name for name in names if key_of(*place) not in known.get(name, {})]
            for place, names in self.fresh.items()
        }
        self.fresh = {place: names for place, names in lacking.items() if names}

    def _board(self) -> None:
        """Put saved flights under way again, where the buckets are those that they started from."""
        places = {(track.label, track.names): (course, track) for course in self.courses for track in course.tracks}
        for one in self._flights:
            place = places.get((one["label"], tuple(one["names"])))
            if place is not None:
                course, track = place
                track.flights.append(course.returned(track, one))


def _saved(flights: Sequence[tuple[Track, Flight]]) -> list[dict[str, Any]]:
    """Copies of flights that are over and not folded, for a checkpoint."""
    saved = []
    for track, flight in flights:
        memory = flight.memory
        flats = {"flat": flight.flat} if flight.sent is None else {"flat": flight.flat, "sent": flight.sent}
        next_ones = {name: value for name, value in memory.proposed.items() if memory.is_elementwise(name)}
        flats |= {f"next.{name}": value for name, value in next_ones.items()}
        saved.append(
            {
                "label": track.label,
                "names": list(track.names),
                **{name: getattr(flight, name) for name in ("step", "t", "round", "loss_scale")},
                "parameters": cut(track, flats),
                "proposed": {name: one.clone() for name, one in memory.proposed.items() if name not in next_ones},
            }
        )
    return saved

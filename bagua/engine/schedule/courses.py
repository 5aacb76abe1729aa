"""Making exchanges ready to be executed: their buckets, what they remember, and who runs them on which connections."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import OF_BUCKETS, Exchange, How, Model, Parts
from bagua.buckets import Bucket, form_buckets
from bagua.comm import Communicator, ProcessGroup
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.belongings import Belongings
from bagua.engine.schedule.executor import CallerExecutor, ThreadExecutor, create_executor
from bagua.engine.schedule.tracks import Clock, Course, Lane, Track, memory_for
from bagua.engine.state.saving import Remembered, collect, key_of, restore
from bagua.primitives import State


def describe(group: ProcessGroup, activity: Callable[[], str] | None) -> None:
    """Have messages about calls on ``group`` say what they were made for: what ``activity`` returns then."""
    for communicator in (group.global_communicator, group.intra_node_communicator, group.inter_node_communicator):
        if isinstance(communicator, Communicator):
            communicator.activity.describe = activity


def sends_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether anything is made of gradients."""
    return any("gradients" in one.needs for one in exchanges)


def gathers(exchanges: Iterable[Exchange]) -> bool:
    """Whether gradients are gathered in flat memory as they arrive."""
    return sends_gradients(one for one in exchanges if one.parts.by == "arrival")


def lag_of_gradients(exchanges: Iterable[Exchange]) -> int:
    """How many steps late gradients come at most."""
    return max((one.lag for one in exchanges if "gradients" in one.needs), default=0)


def brings_lost_gradients(exchanges: Iterable[Exchange]) -> bool:
    """Whether what an exchange of gradients has lost may come with a later one."""
    return any(one.how is not None and one.how.state() for one in exchanges if "gradients" in one.needs)


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


class Courses:
    """Makes the courses of the exchanges of each phase, and keeps what must last longer than one.

    Args:
        group: private to the model.
        belongings: threads and groups of the model, to be given back with it.

    Attributes:
        places: state that is remembered now, once for each label and bucket.
        fresh: names of the parameters whose state wants to start from the weights, by place and name of the state.
    """

    def __init__(self, group: ProcessGroup, belongings: Belongings) -> None:
        self._group = group
        self._belongings = belongings
        self._groups: dict[str, ProcessGroup] = {}
        self._prepared: dict[tuple[str, str], Any] = {}
        self._parts: dict[tuple[Parts, bool], list[tuple[int, Bucket]]] = {}
        self._places: dict[tuple[str, int], Track] = {}
        self.courses: list[Course] = []
        self.fresh: dict[tuple[Track, str], list[str]] = {}

    @property
    def groups(self) -> list[ProcessGroup]:
        """Connections beside those of the model."""
        return list(self._groups.values())

    @property
    def places(self) -> list[Track]:
        """What is remembered now, once for each label and bucket."""
        return list(self._places.values())

    def forget(self) -> None:
        """Buckets are formed anew, and everything begins from its start."""
        self._parts.clear()
        self._places.clear()
        self.fresh = {}

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

    def remembered(self, *, copy: bool = True) -> Remembered:
        """Everything that is remembered, but for what has yet to start from the weights; copies, if ``copy``."""
        found = collect(self.places, copy=copy)
        for (track, state), names in self.fresh.items():
            for name in names:
                found["parameters"][name].pop(key_of(track, state), None)
        return found

    def restore(self, remembered: Remembered) -> None:
        """Put what was remembered back. Only the rest starts from the weights."""
        restore(self.places, remembered)
        known = remembered["parameters"]
        lacking = {
            place: [name for name in names if key_of(*place) not in known.get(name, {})]
            for place, names in self.fresh.items()
        }
        self.fresh = {place: names for place, names in lacking.items() if names}

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

    def of(
        self, exchanges: Sequence[Exchange], buckets: Sequence[Bucket], model: Model, options: EngineOptions
    ) -> list[Course]:
        """The courses of ``exchanges``. What is remembered under a label stays, if the label does.

        Collective the first time that an exchange has connections of its own.
        """
        executed = [one for one in exchanges if one.how is None or one.how.lockstep]
        labels = {one.label for one in executed}
        self._places = {key: track for key, track in self._places.items() if key[0] in labels}
        self.fresh = {place: names for place, names in self.fresh.items() if place[0].label in labels}
        lanes = self._lanes(executed, buckets)
        self.courses = [
            self._course(one, self._buckets_of(one, buckets, model, options), model, lanes.get(one.label, ()))
            for one in executed
        ]
        return self.courses

    def once(
        self,
        exchanges: Sequence[Exchange],
        buckets: Sequence[Bucket],
        model: Model,
        options: EngineOptions,
        clock: Clock,
    ) -> None:
        """Have ``exchanges`` made now, from start to fold, in this thread. They remember nothing. Collective."""
        for one in exchanges:
            found = self._buckets_of(one, buckets, model, options)
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
        prepared = None if not lanes or exchange.how is None else self._prepare(exchange, exchange.how, lanes[0])
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
        lane = Lane(self._group, {})
        for one in exchanges:
            if one.how is not None and one.how.lockstep:
                self._prepare(one, one.how, lane)

    def _prepare(self, exchange: Exchange, how: How, lane: Lane) -> Any:
        key = (exchange.label, repr(how))
        if key not in self._prepared:
            self._prepared[key] = how.prepare(lane.group)
        return self._prepared[key]

    # Buckets.

    def _buckets_of(
        self, exchange: Exchange, buckets: Sequence[Bucket], model: Model, options: EngineOptions
    ) -> list[tuple[int, Bucket]]:
        parts, of_buffers = exchange.parts, "buffers" in exchange.needs
        if parts.by == "arrival":
            return list(enumerate(buckets))
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

    # Lanes.

    def _lanes(self, exchanges: Sequence[Exchange], buckets: Sequence[Bucket]) -> dict[str, list[Lane]]:
        """By label. What goes on beside other exchanges has connections and threads of its own; the others share."""
        devices = {bucket.device for bucket in buckets}
        sent = [one for one in exchanges if one.how is not None]
        apart = [one for one in sent if one.lag > 0] if len(sent) > 1 else []
        together = [one for one in sent if one not in apart]
        lanes = {one.label: [self._lane(self._group_of(one.label), [one], devices)] for one in apart}
        if together:
            shared = [self._lane(self._group, together, devices)]
            if len(together) == 1 and self._takes_turns(together[0], shared[0], buckets):
                # Labels are unique, so no other lane has connections under this one.
                shared.append(self._lane(self._group_of(together[0].label), together, devices))
            lanes.update({one.label: shared for one in together})
        distinct = {id(lane): lane for several in lanes.values() for lane in several}.values()
        self._belongings.executors = [executor for lane in distinct for executor in lane.executors.values()]
        return lanes

    def _takes_turns(self, exchange: Exchange, lane: Lane, buckets: Sequence[Bucket]) -> bool:
        """Whether buckets take turns on two lanes: one is compressed, or added up, while another is on its way.

        Not where calls are work for the processor themselves.
        """
        several = exchange.parts.by == "arrival" and len(buckets) > 1
        if not several or exchange.how is None or not exchange.how.side_by_side:
            return False
        waits = any(isinstance(executor, ThreadExecutor) for executor in lane.executors.values())
        return waits and lane.group.global_communicator.overlaps

    def _group_of(self, label: str) -> ProcessGroup:
        if label not in self._groups:
            self._groups[label] = made = self._group.duplicate(f"lane-{label}")
            describe(made, self._group.global_communicator.activity.describe)
            self._belongings.groups.append(self._groups[label])
        return self._groups[label]

    def _lane(self, group: ProcessGroup, exchanges: Sequence[Exchange], devices: set[torch.device]) -> Lane:
        lane = Lane(group, {})
        waits = group.size > 1 and any(
            one.how.blocking(group, self._prepare(one, one.how, lane)) for one in exchanges if one.how is not None
        )
        executors = {device: create_executor(group, device, blocking=waits) for device in devices}
        return Lane(group, executors)

    # Checkpoints.

    def board(self, saved: Sequence[dict[str, Any]]) -> None:
        """Put saved flights under way again, where the buckets are those that they started from."""
        places = {(track.label, track.names): (course, track) for course in self.courses for track in course.tracks}
        for one in saved:
            place = places.get((one["label"], tuple(one["names"])))
            if place is not None:
                course, track = place
                track.flights.append(course.returned(track, one))

"""Which exchanges are executed in which buckets, and what starts and what is folded at each point of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import OF_BUCKETS, OF_GRADIENTS, POINTS, Exchange, Flight, How, Model, Parts, Point
from bagua.buckets import Bucket, form_buckets
from bagua.comm import ProcessGroup
from bagua.engine.buckets.layout import twice
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.courses import Clock, Course, follows_gradients, gathers, memory_for, put_together
from bagua.engine.schedule.lanes import Lane, ModelLanes, nothing
from bagua.engine.state.saving import Remembered, collect, cut, followed, key_of, restore
from bagua.errors import CommunicatorClosedError
from bagua.primitives import State

#: The last bucket waits for the end of a backward pass if the last pass went on for less than this after its bucket:
#: an exchange would overlap with next to nothing, and to hand it to another thread takes as long.
_REST_S = 200e-6


class _Agenda:
    """What happens at one point of a step, in this order.

    Attributes:
        folds: exchanges whose results are taken in.
        starts: local actions, and exchanges that go from start to fold; then exchanges that only start.
    """

    __slots__ = ("folds", "starts")

    def __init__(self, point: Point, courses: Sequence[Course]) -> None:
        here = [one for one in courses if one.exchange.at == point]
        self.folds = [one for one in courses if not one.exchange.at_once and one.exchange.until == point]
        self.starts = sorted(here, key=lambda one: not one.exchange.at_once)

    def __bool__(self) -> bool:
        return bool(self.folds or self.starts)


class Scheduler:
    """The exchanges in the buckets of a model: starts and folds them at the points of a step where they say so.

    Args:
        group: private to the model.
        lanes: its threads and connections.

    Attributes:
        lanes: as given.
        buckets: buckets by arrival, in the order in which their gradients become complete; none before they are formed.
        formed: True if exchanges are executed in the buckets.
        courses: the exchanges of the phase, in each bucket.
        fresh: names of the parameters whose state wants to start from the weights, by place and name of the state.
        slots: bucket of each parameter, and its position there, by ``id`` of the parameter.
        ends: the last parameters of what is gathered at once, by ``id``: until their gradients come, nothing is to be
            done with those before them. None where something is to be done with each.
        launched: buckets that are ready in the backward pass that is under way.
        active: True if a synchronized backward pass is under way.
        clock: the step under way, or the last one in which something was done.
        owes: True if an exchange waits for the optimizers.
        has_safe_points: True if an exchange starts or is folded at safe points.
        rests_until: step before which there is nothing to do, whatever comes; 0 if that is not known.
    """

    def __init__(self, group: ProcessGroup, lanes: ModelLanes) -> None:
        self._group = group
        self.lanes = lanes
        self.buckets: list[Bucket] = []
        self.fresh: dict[tuple[Course, str], list[str]] = {}
        self._prepared: dict[tuple[str, str], Any] = {}
        self._parts: dict[tuple[Parts, bool], list[tuple[int, Bucket]]] = {}
        self._places: dict[tuple[str, int], Course] = {}
        self._remembered: Remembered | None = None
        self._flights: list[dict[str, Any]] = []
        self._launching = threading.Lock()
        self.ends: frozenset[int] | None = None
        self._plan(())
        self.formed = False

    # Which exchanges.

    @property
    def places(self) -> list[Course]:
        """What is remembered now, once for each label and bucket."""
        return list(self._places.values())

    def take_buckets(self, buckets: list[Bucket]) -> None:
        """Take other buckets, in which nothing is executed yet, and everything begins from its start."""
        self.buckets = buckets
        self._parts.clear()
        self._places.clear()
        self.fresh = {}

    def execute(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions) -> None:
        """Give the buckets the memory that ``exchanges`` need, and execute these. Collective."""
        sent = any(one.what is not None and one.what.in_place and "weights" in one.needs for one in exchanges)
        for bucket in self.buckets:
            bucket.fuse_weights(exchangeable=sent)
            if gathers(exchanges):
                bucket.allocate_gradients()
        self.enter(exchanges, model, options)

    def enter(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions) -> None:
        """Execute ``exchanges`` in the buckets as they are. What is remembered under a label stays, if the label does.

        Collective the first time that an exchange has connections of its own.
        """
        executed = [one for one in exchanges if one.how is None or one.how.lockstep]
        labels = {one.label for one in executed}
        self._places = {key: place for key, place in self._places.items() if key[0] in labels}
        self.fresh = {place: names for place, names in self.fresh.items() if place[0].label in labels}
        found = [self._buckets_of(one, model, options) for one in executed]
        lanes = self.lanes.of(self._group, executed, [one for several in found for _, one in several], self._blocks)
        self._plan(
            [self._courses_of(one, several, model, lanes) for one, several in zip(executed, found, strict=True)],
            model,
            delay=options.delay_reduce,
        )

    def _plan(self, courses: Sequence[Sequence[Course]], model: Model | None = None, *, delay: bool = False) -> None:
        """Find out what happens at which point of a step. Nothing is under way.

        Args:
            courses: those of each exchange.
            model: model whose parameters they are.
            delay: start no exchange of buckets before the end of backward.
        """
        self.formed = True
        self.courses = [one for several in courses for one in several]
        exchanges = [several[0].exchange for several in courses if several]
        first = [one for several in courses for one in put_together(several)]
        self._first, self._delay, self._model = first, delay, model
        agendas = {point: _Agenda(point, first) for point in POINTS if point not in OF_BUCKETS}
        self._agendas = {point: agenda for point, agenda in agendas.items() if agenda}
        self.has_safe_points = "safe" in self._agendas
        of_each = [[one for one in first if one.bucket is bucket] for bucket in self.buckets]
        self._of_buckets = [[agenda for point in OF_BUCKETS if (agenda := _Agenda(point, here))] for here in of_each]
        last = [one for one in (of_each or [[]])[-1] if one.exchange.at in OF_BUCKETS]
        inside = all(one.exchange.lag == 0 and one.exchange.until in OF_GRADIENTS for one in last)
        #: The exchanges of the last bucket, if they may wait for the end of the pass, whether they do, and since when.
        self._last = last if inside and not any(one.bucket.device.type == "cuda" for one in last) else []
        self._held, self._ready_at = bool(self._last), 0.0
        self._sometimes = [one for one in first if one.exchange.when.steps > 1]
        self._from_anchor = any("anchor" in one.needs for one in exchanges)
        self._gathering = [one for one in first if one.bucket.by_arrival and "gradients" in one.exchange.needs]
        self._scales = [
            (one, one.gathering_scale) for one in self._gathering if one.part == 0 and one.gathering_scale is not None
        ]
        for bucket in self.buckets:
            bucket.expect_gradients(gather=bool(self._gathering))
        self._awaited = self.buckets if follows_gradients(exchanges) else []
        self._unfused = [bucket for bucket in self.buckets if not bucket.fusion]
        self.slots = {id(one): (bucket, at) for bucket in self.buckets for at, one in enumerate(bucket.parameters)}
        self._find_ends()
        self.launched = 0
        self.active = False
        self.clock = Clock()
        self._was_safe = -1
        self._backward = 0
        self._begun = True
        #: The step in which it became due, by course.
        self._owed: dict[Course, Clock] = {}
        self.owes = False
        paced = any(one.when.pace is not None for one in exchanges)
        self._may_rest = not (self._awaited or paced or self.has_safe_points)
        self.rests_until = 0

    def _find_ends(self) -> None:
        # Autograd has one thread for each device: with one device, gradients can wait without a lock.
        one_device = len({bucket.device for bucket in self.buckets}) == 1
        can_wait = one_device and self._gathering and "backward begins" not in self._agendas
        ends = frozenset(id(last) for one in self.buckets if can_wait for last in one.gathering_ends()) or None
        self.ends = self.ends if ends == self.ends else ends  # Each step asks whether it is another object.

    def leave(self) -> None:
        """Leave no exchange owed or under way, and give threads back. Collective."""
        self.flush()
        self.lanes.stop()

    def once(self, exchanges: Sequence[Exchange], model: Model, options: EngineOptions, clock: Clock) -> None:
        """Have ``exchanges`` made now, from start to fold, in this thread. They remember nothing. Collective."""
        lane = Lane(self._group)
        for one in exchanges:
            prepared = None if one.how is None else one.how.prepare(self._group)
            found = self._buckets_of(one, model, options)
            made = [Course(one, part, bucket, memory_for(bucket), model, lane, prepared) for part, bucket in found]
            for course in put_together(made):
                course.set_off(clock)
                course.cut(clock)

    def _courses_of(
        self,
        exchange: Exchange,
        buckets: Sequence[tuple[int, Bucket]],
        model: Model,
        lanes: Mapping[tuple[str, torch.device], Sequence[Lane]],
    ) -> list[Course]:
        how, prepared = exchange.how, None
        if how is not None and buckets:
            prepared = self._prepare(exchange, how, lanes[exchange.label, buckets[0][1].device][0].group)
        exchange.then.enter([bucket for _, bucket in buckets], model)
        made = []
        for part, bucket in buckets:
            several = lanes[exchange.label, bucket.device] if how is not None else ()
            lane = several[part % len(several)] if several else None
            key = (exchange.label, id(bucket))
            known = self._places.get(key)
            memory = memory_for(bucket) if known is None else known.memory
            new = [one for one in exchange.states() if one.name not in memory.declared]
            memory.declare(new)
            self._places[key] = course = Course(exchange, part, bucket, memory, model, lane, prepared)
            self._note_fresh(course, new)
            made.append(course)
        return made

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
            names for (place, state), names in self.fresh.items() if place.memory.declared[state].scope == "shared"
        ]
        return list(dict.fromkeys(name for names in found for name in names))

    def begin_from_weights(self) -> None:
        """Make what starts from weights: when it is new, and when the weights were replaced from outside."""
        fresh, self.fresh = self.fresh, {}
        for (place, state), names in fresh.items():
            chosen = set(names)
            weights = place.views(place.bucket.read_weights(place.bucket.empty()))
            for name, begun, weight in zip(place.names, place.views(place.memory.state[state]), weights, strict=True):
                if name in chosen:
                    begun.copy_(weight)

    def _note_fresh(self, place: Course, states: Iterable[State]) -> None:
        self.fresh.update({(place, one.name): list(place.names) for one in states if one.start == "weights"})

    def check_loads(self) -> None:
        """Refuse weights from outside where that is too late; see ``How.check_loads``."""
        for course in self.courses:
            if course.exchange.how is not None:
                course.exchange.how.check_loads()

    def weights_were_replaced(self) -> None:
        """Begin again from the weights: what was remembered of others, and flights from them, say nothing of these."""
        for place in self.places:
            declared = place.memory.declared.values()
            if any(one.start == "weights" for one in declared):
                place.memory.begin_again()
                self._note_fresh(place, declared)
        for course in self.courses:
            if "weights" in course.exchange.writes:
                course.drop()

    # One backward pass.

    def safe_point(self, clock: Clock) -> None:
        """A training forward begins; later ones of the same step change nothing: graphs need the weights."""
        if clock.step != self._was_safe:
            self._was_safe = clock.step
            for course in self._sometimes:
                course.begin(clock)
            agenda = self._agendas["safe"]
            self._fold(agenda, clock)
            under_way = any(course.flights for course in self._first)
            for course in agenda.starts:
                if course.due and not (under_way and course.exchange.how is None):
                    course.set_off(clock)

    def begin(self, clock: Clock) -> None:
        """A synchronized backward pass starts."""
        self.active = True
        self.clock = clock
        self._backward += 1
        self.launched = 0
        self._begun = "backward begins" not in self._agendas
        for course in self._sometimes:
            course.begin(clock)
        factor = next((scale for course, scale in self._scales if course.due), 1.0) if self._scales else 1.0
        for bucket in self._awaited:
            bucket.begin_backward(factor)

    def take(self, parameter: torch.Tensor) -> None:
        """Take the gradient of ``parameter``; if it was the last one of its bucket, the bucket is ready.

        Runs once for each parameter in each step, so it is written for speed.
        """
        bucket, position = self.slots[id(parameter)]
        if bucket.arrived_in[position] == self._backward:
            raise twice(bucket.names[position])
        bucket.arrived_in[position] = self._backward
        bucket.pending = pending = bucket.pending - 1
        if bucket.gathers:
            bucket.waiting.append(position)
            if not pending or bucket.gathers_at[position]:
                bucket.gather_waiting()
        if not pending or not self._begun:
            self.launch_ready()

    def take_run(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Take the gradients of several parameters, if these are a run of a bucket, in its order; whether they are."""
        bucket, last = self.slots[id(parameters[-1])]
        is_run = bucket.take_run(parameters, last, self._backward)
        if is_run and not bucket.pending:
            self.launch_ready()
        return is_run

    def launch_ready(self, *, everything: bool = False) -> None:
        """Bring complete buckets to their points, in order, up to the first incomplete one."""
        if self._delay and not everything:
            return
        with self._launching:  # Autograd has one thread for each device.
            if not self._begun:
                self._begun = True
                self._reach("backward begins", self.clock)
            while self.launched < len(self.buckets) and self.buckets[self.launched].pending == 0:
                if self.launched == len(self.buckets) - 1 and self._holds_last(everything):
                    return
                self.launched += 1
                for agenda in self._of_buckets[self.launched - 1]:
                    self._go_through(agenda, self.clock)

    def _holds_last(self, ended: bool) -> bool:
        """Whether the last bucket, which is complete, waits for the end of the pass."""
        for one in self._last:
            one.blocks = ended
        if not ended:
            self._ready_at = time.perf_counter()
        return self._held and not ended

    def _reach(self, point: Point, clock: Clock) -> None:
        if point in self._agendas:
            self._go_through(self._agendas[point], clock)

    def _go_through(self, agenda: _Agenda, clock: Clock) -> None:
        self._fold(agenda, clock)
        for course in agenda.starts:
            if course.due:
                course.set_off(clock)

    def _fold(self, agenda: _Agenda, clock: Clock) -> None:
        for course in agenda.folds:
            while course.flights and course.flights[0].t + course.exchange.lag <= clock.t:
                course.fold(clock)

    def missing(self) -> list[tuple[Bucket, int]]:
        """Parameters that have brought no gradient in this backward pass: their buckets, and their positions there."""
        return [
            (bucket, position)
            for bucket in self.buckets
            if bucket.pending
            for position, number in enumerate(bucket.arrived_in)
            if number != self._backward
        ]

    def fill_missing(self, missing: Sequence[tuple[Bucket, int]]) -> set[str]:
        """Count missing gradients as zero; return the names of the parameters that had none."""
        without = [one for one in missing if one[0].parameters[one[1]].grad is None]
        for bucket, position in without:
            bucket.arrived_in[position] = self._backward
            bucket.zero_gradient(position)
        for bucket, position in missing:
            if bucket.arrived_in[position] != self._backward:  # accumulated before, without synchronization
                self.take(bucket.parameters[position])
        return {bucket.names[position] for bucket, position in without}

    def complete(self) -> None:
        """The backward pass is over and every bucket is complete: start and finish what this step needs."""
        self.active = False
        self._held = bool(self._last) and time.perf_counter() - self._ready_at < _REST_S
        try:
            self.launch_ready(everything=True)
        except CommunicatorClosedError:
            try:
                self.settle()  # An exchange that failed before knows why.
            except BaseException as reason:
                reason.__context__ = None  # It is the cause of the refusal: neither may lead back to itself.
                raise
            raise
        self._reach("backward ends", self.clock)
        if "stepped" in self._agendas:
            self._owe(self._agendas["stepped"])
        if self._unfused and any(course.due or course.exchange.lag for course in self._gathering):
            for bucket in self._unfused:
                bucket.return_gradients()
        if self._may_rest:
            left = (course.idle_steps(self.clock) for course in self._first)
            self.rests_until = 0 if self.owes else self.clock.step + min(left, default=1)

    # Between backward passes.

    def _owe(self, agenda: _Agenda) -> None:
        """What is due when the optimizers have stepped stays owed until then, whatever further backward passes do."""
        self._owed.update({course: self.clock for course in agenda.starts if course.due})
        t = self.clock.t
        back = any(one.flights and one.flights[0].t + one.exchange.lag <= t for one in agenda.folds)
        self.owes = bool(self._owed) or back
        if self.owes and self._from_anchor and self._model is not None:
            self._model.note_rates()  # For an outer step: it may come after the next schedule.

    def after_optimizers(self) -> None:
        """The optimizers have stepped, or it is known that they will not: exchange what waited for that."""
        if not self.owes:
            return
        owed, agenda = dict(self._owed), self._agendas["stepped"]
        self.owe_nothing()
        self._fold(agenda, self.clock)
        for course in agenda.starts:
            if (due := owed.get(course)) is not None:  # Backward passes may have followed that one.
                course.set_off(due)

    def owe_nothing(self) -> None:
        """Nothing that waits for the optimizers is exchanged any more."""
        self.owes = False
        self._owed.clear()

    def flush(self) -> None:
        """Nothing owed, nothing under way."""
        self.after_optimizers()
        for course in self._first:
            course.cut(self.clock)

    def forget(self) -> None:
        """Forget what is under way and what is owed: it is not wanted any more, or the communicator is broken."""
        self.owe_nothing()
        for course in self.courses:
            course.flights.clear()

    def settle(self) -> list[tuple[Course, Flight]]:
        """Wait for exchanges under way, but fold nothing; the flights, by course."""
        flights = [(course, flight) for course in self.courses for flight in course.flights]
        for _, flight in flights:
            flight.wait()
            flight.wait = nothing
        return flights

    def suspend(self) -> list[tuple[Course, Flight]]:
        """Wait for what is under way, and set it aside for ``resume``; later steps do not fold it."""
        flights = self.settle()
        self.forget()
        return flights

    def resume(self, flights: Sequence[tuple[Course, Flight]]) -> None:
        """Fold the results that ``suspend`` set aside when their time comes, after all."""
        here, self.rests_until = set(self.courses), 0
        for course, flight in flights:
            if course in here:
                course.flights.append(flight)

    # From one set of buckets to the next.

    def take_apart(self) -> None:
        """Leave the exchanges, give up the buckets, and keep what is remembered. Collective."""
        self.leave()
        if self.formed:
            self._remembered = self._collected()
        self.buckets = []
        self._plan(())
        self.formed = False

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
        self.after_optimizers()
        flights = [(course, flight) for course, flight in self.settle() if not course.bucket.by_arrival]
        for course, _ in flights:
            course.flights.clear()
        if self.formed:
            self._flights = _saved(flights)

    def save(self, *, copy: bool) -> tuple[Remembered, list[dict[str, Any]]]:
        """What is remembered, and flights that are over and not folded; copies, if ``copy``."""
        if not self.formed:
            return self._remembered or collect(()), self._flights
        flights = _saved(self.settle())
        return self._collected(copy=copy), flights

    def load(self, remembered: Remembered, flights: list[dict[str, Any]]) -> None:
        """Go on in the buckets to come with what ``save`` returned."""
        self._remembered, self._flights = remembered, flights

    def go_on(self) -> None:
        """Put back what was remembered, and flights where the buckets are those that they started from."""
        remembered, self._remembered = self._remembered, None
        if remembered is None:
            return
        restore(self.places, remembered)
        known = remembered["parameters"]
        lacking = {
            place: [name for name in names if key_of(*place) not in known.get(name, {})]
            for place, names in self.fresh.items()
        }
        self.fresh = {place: names for place, names in lacking.items() if names}  # Only these start from the weights.
        courses = {(course.label, course.names): course for course in self.courses}
        for one in self._flights:
            course = courses.get((one["label"], tuple(one["names"])))
            if course is not None:
                course.flights.append(course.returned(one))
        self._flights = []

    def _collected(self, *, copy: bool = True) -> Remembered:
        """Everything that is remembered, but for what has yet to start from the weights; copies, if ``copy``."""
        found = collect(self.places, copy=copy)
        for (place, state), names in self.fresh.items():
            for name in names:
                found["parameters"][name].pop(key_of(place, state), None)
        return found


def _saved(flights: Sequence[tuple[Course, Flight]]) -> list[dict[str, Any]]:
    """Copies of flights that are over and not folded, for a checkpoint."""
    saved = []
    for course, flight in flights:
        memory = flight.memory
        flats = {"flat": flight.flat} if flight.sent is None else {"flat": flight.flat, "sent": flight.sent}
        next_ones = {name: value for name, value in memory.proposed.items() if memory.is_elementwise(name)}
        flats |= {f"next.{name}": value for name, value in next_ones.items()}
        saved.append(
            {
                "label": course.label,
                "names": list(course.names),
                **{name: getattr(flight, name) for name in ("step", "t", "round", "loss_scale")},
                "parameters": cut(course, flats),
                "proposed": {name: one.clone() for name, one in memory.proposed.items() if name not in next_ones},
            }
        )
    return saved

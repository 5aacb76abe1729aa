"""The time-keeping of exchanges: what starts and what is folded at each point of a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bagua.algorithms import OF_BUCKETS, POINTS, Flight, Point
from bagua.buckets import Bucket
from bagua.engine.buckets.layout import twice, unusable
from bagua.engine.schedule.lanes import nothing
from bagua.engine.schedule.tracks import Clock, Course, Track

_ALL = slice(None)
#: Gradients are put into a bucket together when they are so many bytes: from autograd's code to a copy and back costs
#: microseconds. They are still in the processor's cache then, and take little memory beside the bucket.
_TOGETHER_BYTES = 64 * 1024


class Slot:
    """One parameter in its bucket, as the hooks see it.

    Attributes:
        arrival: arrival of the gradients of the bucket.
        view: the parameter's part of the flat gradients; None if they are not gathered.
        nbytes: bytes of ``view``.
        ready: number of the last backward pass that brought its gradient.
    """

    __slots__ = ("arrival", "name", "nbytes", "parameter", "ready", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, arrival: Arrival, view: torch.Tensor | None) -> None:
        self.name = name
        self.parameter = parameter
        self.arrival = arrival
        self.view = view
        self.nbytes = 0 if view is None else view.nbytes
        self.ready = -1


class Arrival:
    """The gradients of one bucket, as they arrive in a backward pass.

    Attributes:
        bucket: the bucket.
        slots: one for each parameter.
        pending: gradients that are still missing in this backward pass.
        fusion: True if parameters get their part of the flat gradients.
        scale: factor on gradients that are gathered in this step; None for 1.
        waiting: slots whose gradients are there, and not yet in the bucket.
        waiting_bytes: bytes of these gradients.
    """

    __slots__ = (
        "_factor",
        "bucket",
        "fusion",
        "pending",
        "scale",
        "slots",
        "waiting",
        "waiting_bytes",
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
        self.fusion = bucket.fusion
        self.scale: torch.Tensor | None = None
        self._factor = 1.0
        self.waiting: list[Slot] = []
        self.waiting_bytes = 0

    def begin(self, factor: float) -> None:
        """A backward pass starts, whose gradients are multiplied by ``factor``."""
        self.pending = len(self.slots)
        if factor != self._factor:
            self.scale = self._as_tensor(factor)
        self.waiting, self.waiting_bytes = [], 0

    def gather(self) -> None:
        """Put the gradients that are waiting into the bucket."""
        waiting, self.waiting, self.waiting_bytes = self.waiting, [], 0
        parameters, gradients, views = [], [], []
        for slot in waiting:
            gradient, view = slot.parameter.grad, slot.view
            assert view is not None
            if gradient is not view:
                if gradient is None or gradient.layout is not torch.strided:
                    raise unusable(slot.name, gradient)
                parameters.append(slot.parameter)
                gradients.append(gradient)
                views.append(view)
            elif self.scale is not None:
                view.mul_(self.scale)
        if self.scale is not None:
            for gradient, view in zip(gradients, views, strict=True):
                torch.mul(gradient, self.scale, out=view)
        elif views:
            torch._foreach_copy_(views, gradients)
        if self.fusion:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

    def _as_tensor(self, factor: float) -> torch.Tensor | None:
        """``factor`` as a tensor, which multiplies in a third of the time that a Python number takes."""
        self._factor = factor
        exact = self.bucket.dtype in (torch.float32, torch.float64)
        return None if factor == 1.0 else torch.tensor(factor, dtype=self.bucket.dtype if exact else torch.float64)


class _Agenda:
    """What happens at one point of a step, in this order.

    Attributes:
        folds: exchanges whose results are taken in.
        at_once: local actions, and exchanges that go from start to fold.
        starts: exchanges that start.
    """

    __slots__ = ("at_once", "folds", "starts")

    def __init__(self, point: Point, courses: Sequence[Course]) -> None:
        on_way = [course for course in courses if not course.exchange.at_once]
        self.at_once = [course for course in courses if course.exchange.at_once and course.exchange.at == point]
        self.folds = [course for course in on_way if course.exchange.until == point]
        self.starts = [course for course in on_way if course.exchange.at == point]

    def __bool__(self) -> bool:
        return bool(self.folds or self.at_once or self.starts)


class Scheduler:
    """Starts and folds exchanges at the points of a step where they say so.

    Args:
        buckets: buckets by arrival, in the order in which their gradients become complete.
        courses: the exchanges of the phase.
        delay: start no exchange of buckets before the end of backward.

    Attributes:
        slots: slots, by ``id`` of the parameter.
        launched: buckets that are ready in the backward pass that is under way.
        active: True if a synchronized backward pass is under way.
        clock: the step under way, or the last one.
        courses: the exchanges.
        owes: True if an exchange waits for the optimizers.
        has_safe_points: True if an exchange starts or is folded at safe points.
    """

    def __init__(self, buckets: Sequence[Bucket], courses: Sequence[Course], *, delay: bool) -> None:
        self.courses = list(courses)
        self._delay = delay
        agendas = {point: _Agenda(point, self.courses) for point in POINTS}
        self._agendas = {point: agenda for point, agenda in agendas.items() if agenda}
        self.has_safe_points = "safe" in self._agendas
        self._of_buckets = [self._agendas[point] for point in OF_BUCKETS if point in self._agendas]
        self._sometimes = [course for course in self.courses if course.exchange.when.steps > 1]
        self._gathering = [
            course
            for course in courses
            if course.exchange.parts.by == "arrival" and "gradients" in course.exchange.needs
        ]
        self._scales = [(course, scale) for course in self._gathering if (scale := course.gathering_scale) is not None]
        self._arrivals = [Arrival(bucket, gathers=bool(self._gathering)) for bucket in buckets]
        self._unfused = [arrival.bucket for arrival in self._arrivals if not arrival.fusion]
        self.slots = {id(slot.parameter): slot for arrival in self._arrivals for slot in arrival.slots}
        self.launched = 0
        self.active = False
        self.clock = Clock()
        self._was_safe = -1
        self._launching = threading.Lock()
        self._backward = 0
        self._begun = True
        #: The step in which it became due, by ``id`` of the track.
        self._owed: dict[int, Clock] = {}
        self.owes = False

    # One backward pass.

    def safe_point(self, clock: Clock) -> None:
        """A training forward begins; later ones of the same step change nothing: graphs need the weights."""
        if clock.step != self._was_safe:
            self._was_safe = clock.step
            for course in self._sometimes:
                course.begin(clock)
            self._reach("safe", clock)

    def begin(self, clock: Clock) -> None:
        """A synchronized backward pass starts."""
        self.active = True
        self.clock = clock
        self._backward += 1
        self.launched = 0
        self._begun = "backward begins" not in self._agendas
        factor = 1.0
        for course in self._sometimes:
            course.begin(clock)
        for course, scale in self._scales:
            if course.due:
                factor = scale
                break
        for arrival in self._arrivals:
            arrival.begin(factor)

    def take(self, parameter: torch.Tensor) -> None:
        """Take the gradient of ``parameter``; if it was the last one of its bucket, the bucket is ready.

        Runs once for each parameter in each step, so it is written for speed.
        """
        slot = self.slots[id(parameter)]
        if slot.ready == self._backward:
            raise twice(slot.name)
        slot.ready = self._backward
        arrival = slot.arrival
        arrival.pending -= 1
        if slot.view is not None:
            arrival.waiting.append(slot)
            arrival.waiting_bytes += slot.nbytes
            if arrival.pending == 0 or arrival.waiting_bytes > _TOGETHER_BYTES:
                arrival.gather()
        if arrival.pending == 0 or not self._begun:
            self.launch_ready()

    def launch_ready(self, *, everything: bool = False) -> None:
        """Bring complete buckets to their points, in order, up to the first incomplete one."""
        if self._delay and not everything:
            return
        with self._launching:  # Autograd has one thread for each device.
            if not self._begun:
                self._begun = True
                self._reach("backward begins", self.clock)
            while self.launched < len(self._arrivals) and self._arrivals[self.launched].pending == 0:
                self.launched += 1
                self._bucket_is_ready(self.launched - 1)

    def _bucket_is_ready(self, index: int) -> None:
        for agenda in self._of_buckets:
            self._go_through(agenda, self.clock, slice(index, index + 1))

    def _reach(self, point: Point, clock: Clock) -> None:
        if point in self._agendas:
            self._go_through(self._agendas[point], clock, _ALL)

    def _go_through(self, agenda: _Agenda, clock: Clock, which: slice) -> None:
        self._fold(agenda, clock, which)
        for course in (*agenda.at_once, *agenda.starts):
            for tracks in course.together[which]:
                if course.is_due(tracks[0]):
                    course.set_off(tracks, clock)

    def _fold(self, agenda: _Agenda, clock: Clock, which: slice) -> None:
        for course in agenda.folds:
            for tracks in course.together[which]:
                while course.is_back(tracks[0], clock):
                    course.fold(tracks, clock)

    def missing(self) -> list[Slot]:
        """Parameters that have brought no gradient in this backward pass."""
        return [
            slot
            for arrival in self._arrivals
            if arrival.pending
            for slot in arrival.slots
            if slot.ready != self._backward
        ]

    def fill_missing(self, missing: Sequence[Slot]) -> list[Slot]:
        """Count missing gradients as zero; return the slots that had none."""
        without = [slot for slot in missing if slot.parameter.grad is None]
        for slot in missing:
            if slot.parameter.grad is not None:  # accumulated before, without synchronization
                self.take(slot.parameter)
                continue
            slot.ready = self._backward
            slot.arrival.pending -= 1
            if slot.view is not None:
                slot.view.zero_()
                if slot.arrival.fusion:
                    slot.parameter.grad = slot.view
        for arrival in self._arrivals:
            arrival.gather()
        return without

    def complete(self) -> None:
        """The backward pass is over and every bucket is complete: start and finish what this step needs."""
        self.active = False
        self.launch_ready(everything=True)
        self._reach("backward ends", self.clock)
        if "stepped" in self._agendas:
            self._owe(self._agendas["stepped"])
        if self._unfused and any(course.due or course.exchange.lag for course in self._gathering):
            for bucket in self._unfused:
                bucket.return_gradients()

    # Between backward passes.

    def _owe(self, agenda: _Agenda) -> None:
        """What is due when the optimizers have stepped stays owed until then, whatever further backward passes do."""
        for course in (*agenda.at_once, *agenda.starts):
            self._owed.update({id(track): self.clock for track in course.tracks if course.is_due(track)})
        back = any(course.is_back(track, self.clock) for course in agenda.folds for track in course.tracks)
        self.owes = bool(self._owed) or back
        for course in self.courses if self.owes else ():
            course.note_rates()

    def after_optimizers(self) -> None:
        """The optimizers have stepped, or it is known that they will not: exchange what waited for that."""
        if not self.owes:
            return
        owed, agenda = dict(self._owed), self._agendas["stepped"]
        self.owe_nothing()
        self._fold(agenda, self.clock, _ALL)
        for course in (*agenda.at_once, *agenda.starts):
            for tracks in course.together:
                if (due := owed.get(id(tracks[0]))) is not None:  # Backward passes may have followed that one.
                    course.set_off(tracks, due)

    def owe_nothing(self) -> None:
        """Nothing that waits for the optimizers is exchanged any more."""
        self.owes = False
        self._owed.clear()

    def flush(self) -> None:
        """Nothing owed, nothing under way."""
        self.after_optimizers()
        for course in self.courses:
            course.cut(self.clock)

    def forget(self) -> None:
        """Forget what is under way and what is owed: it is not wanted any more, or the communicator is broken."""
        self.owe_nothing()
        for track in self.tracks:
            track.flights.clear()

    def settle(self) -> list[tuple[Track, Flight]]:
        """Wait for exchanges under way, but fold nothing; the flights, by track."""
        flights = [(track, flight) for track in self.tracks for flight in track.flights]
        for _, flight in flights:
            flight.wait()
            flight.wait = nothing
        return flights

    def withdraw_parts(self) -> list[tuple[Track, Flight]]:
        """Take out the flights of parts, which go on when buckets are formed anew, once what is owed has started."""
        self.after_optimizers()
        flights = [(track, flight) for track, flight in self.settle() if not track.bucket.by_arrival]
        for track, _ in flights:
            track.flights.clear()
        return flights

    def resume(self, flights: Sequence[tuple[Track, Flight]]) -> None:
        """Fold flights when their time comes, after all, as ``settle`` returned them."""
        here = {id(track) for track in self.tracks}
        for track, flight in flights:
            if id(track) in here:
                track.flights.append(flight)

    @property
    def tracks(self) -> list[Track]:
        """Of all exchanges."""
        return [track for course in self.courses for track in course.tracks]

    @property
    def waits_for(self) -> Bucket | None:
        """The bucket that the thread which trains exchanges, or waits for; None if there is none."""
        return next((course.at_work for course in self.courses if course.at_work is not None), None)

    def dissolve(self) -> None:
        """Give back threads, and the buckets now: arrivals and slots know each other, and their memory is large."""
        for course in self.courses:
            for lane in course.lanes:
                for executor in lane.executors.values():
                    executor.close()
        for arrival in self._arrivals:
            arrival.slots.clear()
        self.slots.clear()

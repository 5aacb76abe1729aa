"""The exchanges of a phase, executed in buckets; what they remember outlives the buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua.algorithms import Exchange, Flight, Model
from bagua.buckets import Bucket
from bagua.engine.gradients import Unused
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.courses import Courses, gathers
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.schedule.tracks import Track
from bagua.engine.state.saving import Remembered, collect, cut, followed


class Execution:
    """The buckets of a model, and the exchanges in them.

    Args:
        courses: courses of the exchanges of each phase.

    Attributes:
        courses: as given.
        buckets: none before they are formed.
        scheduler: timing of the exchanges in the buckets; None before there are any.
        unused: parameters that got no gradient since the buckets were formed.
    """

    def __init__(self, courses: Courses) -> None:
        self.courses = courses
        self.buckets: list[Bucket] = []
        self.scheduler: Scheduler | None = None
        self.unused = Unused()
        self._remembered: Remembered | None = None
        self._flights: list[dict[str, Any]] = []

    def take(self, buckets: list[Bucket]) -> None:
        """Take other buckets, in which nothing is executed yet."""
        self.buckets = buckets
        self.courses.forget()

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
        own = self.courses.of(exchanges, self.buckets, model, options)
        self.scheduler = Scheduler(self.buckets, own, delay=options.delay_reduce)

    def leave(self) -> None:
        """Leave no exchange owed or under way, and give their threads back. Collective."""
        if self.scheduler is not None:
            self.scheduler.flush()
            self.scheduler.dissolve()

    @property
    def owes(self) -> bool:
        """Whether an exchange waits for the optimizers."""
        return self.scheduler is not None and self.scheduler.owes

    @property
    def remembers(self) -> bool:
        """Whether something is remembered from step to step."""
        return any(place.memory.state for place in self.courses.places)

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

    # From one set of buckets to the next.

    def take_apart(self) -> None:
        """Leave the exchanges, give up the buckets, and keep what is remembered. Collective."""
        self.leave()
        if self.scheduler is not None:
            self._remembered = self.courses.remembered()
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
        return self.courses.remembered(copy=copy), flights

    def load(self, remembered: Remembered, flights: list[dict[str, Any]]) -> None:
        """Go on in the buckets to come with what ``save`` returned."""
        self._remembered, self._flights = remembered, flights

    def go_on(self) -> None:
        """Put back what was remembered, and flights where the buckets are those that they started from."""
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            self.courses.restore(remembered)
            self.courses.board(self._flights)
            self._flights = []


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

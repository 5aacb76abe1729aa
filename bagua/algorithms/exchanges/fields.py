"""What the fields of an exchange are: points of a step, what is sent, how, what becomes of it, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch

from bagua.algorithms.exchanges.flight import Flight, Model
from bagua.buckets import Bucket
from bagua.checks import check_kind, check_whole
from bagua.comm import ProcessGroup, Work
from bagua.membership import Pace
from bagua.primitives import State

#: The moments of a step, in their order.
Point = Literal["safe", "backward begins", "bucket ready", "bucket stepped", "backward ends", "stepped"]
POINTS: tuple[Point, ...] = get_args(Point)
#: Points that each bucket reaches by itself.
OF_BUCKETS: tuple[Point, ...] = ("bucket ready", "bucket stepped")
#: What must be kept at least of the square of any block, where weights become what was sent.
LEAST_CONTRACTION = 0.5


class What(ABC):
    """What is sent. Subclasses are frozen dataclasses.

    Attributes:
        reads: ``weights``, ``gradients``, ``anchor`` where it is a difference, or names of other things.
        in_place: it is sent from where it lies. Weights are put into memory that the transport can read without a copy.
            Gradients have been multiplied by ``flight.scale`` when they were gathered; with no lag the result stays
            in their place.
    """

    reads: ClassVar[frozenset[str]]
    in_place: ClassVar[bool] = False

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    @abstractmethod
    def fill(self, flight: Flight) -> None:
        """Write ``flight.flat``. In the thread, and on the stream, that compute."""


class How(ABC):
    """How ranks communicate. Subclasses are frozen dataclasses.

    Attributes:
        lockstep: all ranks take part in each round, at the same step, and wait for its result when it is due. Otherwise
            exchanges go on in the background, and the bound form of the algorithm makes them and takes results in.
        chunked: buckets are padded so that they split evenly over the ranks.
        side_by_side: flights of several buckets may run at a time, each on a group of its own: each needs only its
            bucket, its memory, and the group that ``run`` is given.
    """

    lockstep: ClassVar[bool] = True
    chunked: ClassVar[bool] = False
    side_by_side: ClassVar[bool] = False

    @property
    def alone(self) -> bool:
        """Whether it does something on a group of one rank, too, as one with a momentum of its own does."""
        return False

    @property
    def uniform(self) -> bool:
        """Whether all ranks end with the same result."""
        return True

    @property
    def tells_lost(self) -> bool:
        """Whether it writes to ``flight.lost`` what is lost of what this rank sends, and feeds none of it back."""
        return False

    @property
    def contraction(self) -> float | None:
        """Which part of the square of any block reaches the others at least: 1.0 if all of it; None if unknown."""
        return 1.0

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    def check(self, group: ProcessGroup) -> None:
        """Refuse a group that it cannot work on. Not collective.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse parameters of a dtype that cannot be sent.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def check_loads(self) -> None:
        """Weights or state are replaced from outside, between two steps. Not collective.

        Raises:
            ConfigurationError: others count on what was there before, and cannot be asked.
        """
        return

    def prepare(self, group: ProcessGroup) -> Any:
        """What ``run`` needs on ``group``, the private one: ``flight.prepared``. May be collective."""
        return None

    def blocking(self, group: ProcessGroup, prepared: Any) -> bool:
        """Whether ``run`` waits for a call that it starts, instead of returning its ``Work``."""
        return True

    def scale(self, group: ProcessGroup) -> float:
        """Factor on what is sent, as one over the number of ranks for a mean; costs nothing where it is copied."""
        return 1.0

    @abstractmethod
    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        """Replace ``flight.flat`` by the result.

        Runs wherever the transport likes it best: in the thread that computes, in a background thread, or on a
        communication stream. So it touches the flight and the communicators of ``group`` only.

        Returns:
            What the engine waits for before ``fold``; None when there is nothing to wait for.
        """


class Then(ABC):
    """What becomes of the result. Subclasses are frozen dataclasses.

    Attributes:
        replaces: True if the values that were there before are lost, with what optimizers have done since the start.
    """

    replaces: ClassVar[bool] = False

    def check(self, exchange: Any) -> None:
        """Refuse an exchange whose results it cannot take in.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    def check_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that it cannot work on, before training begins.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """The buckets were formed, or the exchange has become part of the algorithm."""
        return

    def start(self, flight: Flight) -> None:
        """The flight is about to start. ``flight.keep`` keeps what is sent."""
        return

    @abstractmethod
    def fold(self, flight: Flight) -> None:
        """Take in the result, ``flight.flat``. In the thread, and on the stream, that compute."""


@dataclass(frozen=True)
class Every:
    """In every ``steps``-th step: those whose number in the phase, from 1, is ``offset`` more than a multiple of it.

    Args:
        steps: from one start to the next.
        offset: shift of the steps; negative ones start that much earlier.
        pace: pace of a member whose steps each stand for some of the fastest one, which are counted then; None where
            all make the same steps.

    Example:
        >>> [t for t in range(1, 10) if Every(3).due(t)], [t for t in range(1, 10) if Every(3, offset=1).due(t)]
        ([3, 6, 9], [1, 4, 7])
    """

    steps: int = 1
    offset: int = 0
    pace: Pace | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole(1, steps=self.steps)
        check_kind(int, "a whole number", offset=self.offset)

    def due(self, t: int, shift: int = 0, stride: int = 1) -> bool:
        """Whether it starts in step ``t`` of the phase, from 1; ``shift`` steps later for some parts.

        Args:
            t: number of the step; of several that are made as one, of the last one.
            shift: steps by which a part is later.
            stride: how many steps are made as one.
        """
        return (t - self.offset - shift) % self.steps < stride

    def round(self, t: int, shift: int = 0) -> int:
        """How many times it has started in the phase up to step ``t``."""
        begin = -self.offset - shift
        return (t + begin) // self.steps - begin // self.steps

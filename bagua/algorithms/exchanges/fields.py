"""What the fields of an exchange are: points of a step, what is sent, how, and what becomes of it.

They are given a flight: one start of an exchange, with the model that it belongs to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch

from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, Work
from bagua.primitives import ReducerMemory, State

__all__ = ["Flight", "How", "Model", "Then", "What"]

#: The moments of a step, in their order.
Point = Literal["safe", "backward begins", "bucket ready", "bucket stepped", "backward ends", "stepped"]
POINTS: tuple[Point, ...] = get_args(Point)
#: Points that each bucket reaches by itself.
OF_BUCKETS: tuple[Point, ...] = ("bucket ready", "bucket stepped")
#: Points at which gradients are sent, and replaced: before the optimizers step.
OF_GRADIENTS: tuple[Point, ...] = (*OF_BUCKETS, "backward ends")
#: What must be kept at least of the square of any block, where weights become what was sent.
LEAST_CONTRACTION = 0.5


class Model:
    """The trainable parameters, the optimizers that step them, and the buffers.

    Args:
        parameters: trainable parameters, by name.
        optimizers: optimizers of the model.
        buffers: returns the floating-point buffers as they are now, by name.

    Attributes:
        noted_rates: learning rates that were kept by ``note_rates``, by ``id`` of the optimizer; empty where those that
            optimizers have now count.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        buffers: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self.buffers = buffers
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self.noted_rates: dict[int, list[float]] = {}
        self._owners = {
            id(parameter): (optimizer, number)
            for optimizer in self.optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def note_rates(self) -> None:
        """Keep the learning rates of this step: a schedule may go on before the step's exchange is made."""
        self.noted_rates = {id(one): [float(group["lr"]) for group in one.param_groups] for one in self.optimizers}

    def rate_of(self, parameter: torch.Tensor) -> float:
        """The learning rate of ``parameter``, as noted or as it is now; 0.0 if it has no optimizer."""
        if id(parameter) not in self._owners:
            return 0.0
        optimizer, number = self._owners[id(parameter)]
        return (
            self.noted_rates[id(optimizer)][number] if self.noted_rates else float(optimizer.param_groups[number]["lr"])
        )

    def owner_of(self, parameter: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
        """The optimizer of ``parameter``, and its parameter group there; None if there is none."""
        if id(parameter) not in self._owners:
            return None
        optimizer, number = self._owners[id(parameter)]
        return optimizer, optimizer.param_groups[number]


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Flight:
    """One start of one exchange, for one bucket of parameters. Made, kept and saved by the engine.

    Attributes:
        step: number of the training step in which it started, from 0.
        t: number of that step in its phase, from 1.
        round: how many times this exchange has started in its phase, this time included.
        loss_scale: factor by which the loss was multiplied in that step; 1.0 without a ``GradScaler``, and where no
            gradients are sent.
        scale: factor on what is sent; see ``How.scale``.
        rescale: at the fold, what brings gradients of that step to the loss scale of this one.
        early: at the fold, whether training was interrupted before its time.
        finite: at the fold, whether the results of the whole part are finite; looked at for outer steps, and
            where all ranks get the same weights.
        diverged: True if something of the same model that other ranks hold was not finite when it was sent.
        bucket: bucket of the parameters.
        memory: state that is remembered of them, and buffers.
        what: is sent; None for a local action.
        model: names, parameters and optimizers.
        flat: values to send, laid out like the bucket; after ``How.run`` the result.
        unfilled: ``flat`` is written when it is read for the first time; see ``delay``.
        sent: a copy of what was sent, before the factor, if ``Then.start`` has kept it.
        lost: after ``How.run`` what was lost of what this rank sent, with the factor, if ``Then.start`` wants it.
        supply: gives memory like ``flat``.
        taken: memory like ``flat`` that it has until it is over.
        prepared: return value of ``How.prepare``.
        wait: ends ``How.run``.
        awaited: True if ``How.run`` is waited for as soon as it returns, so that it need not return a ``Work``.
    """

    step: int
    t: int
    round: int
    loss_scale: float
    scale: float
    bucket: Bucket
    memory: ReducerMemory
    model: Model
    what: Any
    prepared: Any
    wait: Callable[[], object]
    awaited: bool
    flat: torch.Tensor
    supply: Callable[[], torch.Tensor]
    taken: list[torch.Tensor]
    rescale: float = 1.0
    early: bool = False
    finite: bool = True
    diverged: bool = False
    unfilled: bool = False
    sent: torch.Tensor | None = None
    lost: torch.Tensor | None = None
    _delayed: torch.Tensor = field(init=False)

    def delay(self) -> None:
        """Write ``flat`` when it is read for the first time, if it ever is."""
        self.unfilled, self._delayed = True, self.flat
        del self.flat

    def __getattr__(self, name: str) -> torch.Tensor:
        """``flat``, which was delayed; every other name is there, or unknown."""
        if name != "flat" or not self.unfilled or self.what is None:
            raise AttributeError(f"a flight has no {name}", name=name, obj=self)
        self.unfilled, self.flat = False, self._delayed
        self.what.fill(self)
        return self.flat

    def take(self) -> torch.Tensor:
        """Memory like ``flat``, until the flight is over."""
        memory = self.supply()
        self.taken.append(memory)
        return memory

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """What is remembered, by name."""
        return self.memory.state

    def is_finite(self) -> bool:
        """Whether ``flat`` has no Inf or NaN; waits for the device."""
        # If even the squares of the weights are finite, so are differences between them and an anchor.
        if self.unfilled and all(math.isfinite(torch.dot(weights, weights)) for weights in self.bucket.memory()):
            return True
        total = self.flat.sum(dtype=torch.promote_types(self.flat.dtype, torch.float32))
        return bool(total.isfinite()) or bool(self.flat.isfinite().all())  # A sum may overflow.

    def keep(self) -> None:
        """Keep what is sent, without the factor, by which gradients in their place are multiplied already."""
        self.sent = self.take().copy_(self.flat)
        what = self.what
        if what is not None and what.in_place and "gradients" in what.reads and self.scale != 1.0:
            self.sent.div_(self.scale)

    def scratch(self, name: str) -> torch.Tensor:
        """Memory like ``flat``, whose contents do not matter."""
        return self.memory.buffer(name, self.flat.numel(), self.flat.dtype)

    def weights(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the weights into ``flat``."""
        return self.bucket.read_weights(flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        return self.bucket.views(flat)

    def learning_rates(self) -> list[float]:
        """For each parameter the learning rate of its optimizer in the step that the exchange follows.

        For outer steps; others see those that optimizers have now. 0.0 where there is no optimizer.
        """
        return [self.model.rate_of(parameter) for parameter in self.bucket.parameters]


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

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse parameters of a dtype that cannot be sent.

        Raises:
            ConfigurationError: it cannot.
        """

    def check_loads(self) -> None:
        """Weights or state are replaced from outside, between two steps. Not collective.

        Raises:
            ConfigurationError: others count on what was there before, and cannot be asked.
        """

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

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    def check_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that it cannot work on, before training begins.

        Raises:
            ConfigurationError: it cannot.
        """

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """The buckets were formed, or the exchange has become part of the algorithm."""

    def start(self, flight: Flight) -> None:
        """The flight is about to start. ``flight.keep`` keeps what is sent."""

    @abstractmethod
    def fold(self, flight: Flight) -> None:
        """Take in the result, ``flight.flat``. In the thread, and on the stream, that compute."""

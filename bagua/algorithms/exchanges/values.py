"""The exchanges that algorithms are made of: gradients, weights and differences; means and sums; what they become."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Flight, How, Then, What
from bagua.buckets import write_finite
from bagua.checks import check_choice, check_flags, check_kind, check_numbers
from bagua.comm import Communicator, ProcessGroup, Work
from bagua.errors import ConfigurationError
from bagua.primitives import State, SumReducer, on_leaders, through_leaders

__all__ = ["Add", "Blend", "Buffers", "Difference", "Gradients", "Mean", "Replace", "Sum", "Weights"]

# What.


@dataclass(frozen=True)
class Gradients(What):
    """The gradients of this step, as they lie in flat memory.

    With a lag they are taken out of this step: its gradients are zero, until those of an earlier step are folded in.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"gradients"})
    in_place: ClassVar[bool] = True

    def fill(self, flight: Flight) -> None:
        """Nothing where they are sent from where they lie."""
        if flight.flat is not flight.bucket.gradients:
            gradients = flight.bucket.allocate_gradients()
            flight.flat.copy_(gradients)
            gradients.zero_()


@dataclass(frozen=True)
class Weights(What):
    """The weights."""

    reads: ClassVar[frozenset[str]] = frozenset({"weights"})

    def fill(self, flight: Flight) -> None:
        """Copy them."""
        flight.bucket.read_weights(flight.flat)


@dataclass(frozen=True)
class Buffers(What):
    """The buffers of the module that have means, as running means; with ``Parts(1, "strided")`` all at once."""

    reads: ClassVar[frozenset[str]] = frozenset({"buffers"})

    def fill(self, flight: Flight) -> None:
        """Copy them, as they are now: a module may have put others in their places."""
        flight.bucket.follow(flight.model.buffers())
        flight.bucket.read_weights(flight.flat)


@dataclass(frozen=True)
class Difference(What):
    """What has been learned since the last outer step: the anchor, which are the weights after it, minus the weights.

    Points uphill, as a gradient does.

    Args:
        scope: ``shared`` if it is equal on all ranks, which makes weights equal when it is made; or ``local``.
        dtype: dtype of the anchor: ``float32``, or wider where weights are; or ``weights`` for theirs.
        device: device on which the anchor lies and is stepped: ``cpu``, in pinned memory where weights are on a GPU;
            None for where the weights are.
    """

    scope: Literal["shared", "local"] = "shared"
    dtype: Literal["float32", "weights"] = "float32"
    device: Literal["cpu"] | None = None

    reads: ClassVar[frozenset[str]] = frozenset({"weights", "anchor"})

    def __post_init__(self) -> None:
        check_choice(("shared", "local"), scope=self.scope)
        check_choice(("float32", "weights"), dtype=self.dtype)
        check_choice(("cpu", None), device=self.device)

    def state(self) -> tuple[State, ...]:
        """The anchor."""
        narrow = self.dtype == "weights"
        return (State("anchor", "weights", scope=self.scope, narrow=narrow, device=self.device),)

    def fill(self, flight: Flight) -> None:
        """Subtract."""
        anchor, flat = flight.state["anchor"], flight.flat
        if anchor.dtype == flat.dtype and anchor.device == flat.device:
            flight.bucket.subtract_weights(anchor, out=flat)
        else:
            weights = flight.bucket.read_weights(flat)
            flat.copy_(anchor.to(weights.device) - weights)


# How.

#: Among whom a sum is made.
Over = Literal["ranks", "inside", "between"]


@dataclass(frozen=True)
class Sum(How):
    """The sum over all ranks: exact, or what a reducer makes of it.

    Args:
        reducer: as ``ScatterGatherReducer(MinMaxUInt8())``; None for the exact sum.
        hierarchical: sum inside each host in full precision first, and between hosts then. With a single
            host, or a single rank on each, all ranks sum together.
        over: ``ranks``: all. ``inside``: those of each host, so that hosts differ. ``between``: hosts, whose ranks hold
            the same: one rank of each sends it, and gives the result to the others. A host alone keeps what it has.

    Raises:
        ConfigurationError: an option of a wrong type, or ``hierarchical`` not over all ranks.

    Example:
        >>> from bagua.compression import TopK
        >>> from bagua.primitives import AllGatherReducer
        >>> Sum(AllGatherReducer(TopK(0.1))).contraction
        0.1
    """

    reducer: SumReducer | None = None
    hierarchical: bool = False
    over: Over = "ranks"

    side_by_side: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_kind((SumReducer, type(None)), "a SumReducer of bagua.primitives, or None", reducer=self.reducer)
        check_flags(hierarchical=self.hierarchical)
        check_choice(get_args(Over), over=self.over)
        if self.hierarchical and self.over != "ranks":
            raise ConfigurationError(
                "hosts are told apart already", argument="hierarchical", expected=f"False with {self.over=}", seen=True
            )

    @property
    def uniform(self) -> bool:
        """Not over the ranks of one host."""
        return self.over != "inside"

    @property
    def tells_lost(self) -> bool:
        """Where each rank sends for itself, through a reducer without error feedback."""
        feeds_back = self.reducer is not None and self.reducer.feeds_back
        return self.over == "ranks" and not self.hierarchical and not feeds_back

    @property
    def contraction(self) -> float | None:
        """That of the reducer."""
        return 1.0 if self.reducer is None else self.reducer.contraction

    @property
    def alone(self) -> bool:
        """Whether the reducer does something on one rank, too."""
        return self.reducer is not None and self.reducer.alone

    def state(self) -> tuple[State, ...]:
        """What the reducer remembers, for example the residual of error feedback; between hosts, one rank of each."""
        found = () if self.reducer is None else self.reducer.state()
        of_leaders = self.hierarchical or self.over != "ranks"
        return tuple(dataclasses.replace(one, scope="local") for one in found) if of_leaders else found

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the reducer refuses."""
        if self.reducer is not None:
            self.reducer.check_dtype(dtype)

    def blocking(self, group: ProcessGroup, prepared: object) -> bool:
        """Only with several calls, one after the other."""
        return self.reducer is not None or self.over == "between" or bool(prepared)

    def prepare(self, group: ProcessGroup) -> bool:
        """Whether hosts matter."""
        return self.hierarchical and group.has_two_levels

    def scale(self, group: ProcessGroup) -> float:
        """That of as many contributions as there are ranks, or ranks of this host, or hosts like this one."""
        if self.over == "ranks":
            return self.share(group.size)
        return self.share(group.local_size if self.over == "inside" else group.size / group.local_size)

    def share(self, contributions: float) -> float:
        """Factor on each of so many contributions."""
        return 1.0

    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        """Sum what lies in the flight."""
        if self.over == "inside":
            return self._sum(flight, group.intra_node_communicator, wait=flight.awaited)
        if self.over == "between":
            through_leaders(flight.flat, group, lambda _, leaders: self._sum(flight, leaders, wait=True))
            return None
        by_host = self.prepare(group) if flight.prepared is None else flight.prepared
        if by_host:
            on_leaders(flight.flat, group, lambda _, leaders: self._sum(flight, leaders, wait=True))
            return None
        return self._sum(flight, group.global_communicator, wait=flight.awaited)

    def _sum(self, flight: Flight, communicator: Communicator, *, wait: bool) -> Work | None:
        """Sum over the ranks of ``communicator``; a single one loses nothing to a reducer, but for its momentum."""
        if self.reducer is None or (communicator.size == 1 and not self.reducer.alone):
            return communicator.allreduce(flight.flat, async_op=not wait)
        flight.memory.step, flight.memory.loss_scale = flight.step, flight.loss_scale
        self.reducer.reduce(flight.flat, communicator, flight.memory, flight.lost)
        flight.memory.clear_padding(flight.flat)
        return None


@dataclass(frozen=True)
class Mean(Sum):
    """The mean over all ranks: exact, or what a reducer makes of it.

    Args:
        reducer: as for ``Sum``.
        hierarchical: as for ``Sum``; the mean over ranks stays exact when hosts are of different size.
        over: as for ``Sum``; between hosts each counts by its number of ranks.

    Example:
        >>> Mean(over="between")
        Mean(reducer=None, hierarchical=False, over='between')
    """

    def share(self, contributions: float) -> float:
        """Dividing before the sum keeps 16-bit values in range."""
        return 1.0 / contributions


# Then.


@dataclass(frozen=True)
class Replace(Then):
    """The result takes the place of what was sent; of weights only if all is finite, of buffers each that is."""

    replaces: ClassVar[bool] = True

    def check(self, exchange: Exchange) -> None:
        """Refuse differences: they take the place of nothing."""
        if exchange.what is None or "anchor" in exchange.needs:
            raise ConfigurationError(
                "a difference takes the place of nothing", argument="then", expected="OuterStep(...)", seen=repr(self)
            )

    def fold(self, flight: Flight) -> None:
        """Write it, where it does not lie there already."""
        bucket = flight.bucket
        if flight.flat is bucket.gradients:
            return
        reads = frozenset() if flight.what is None else flight.what.reads
        if "gradients" in reads:
            torch.mul(flight.flat, flight.rescale, out=bucket.allocate_gradients())
        elif "buffers" in reads:
            write_finite(dict(zip(bucket.names, bucket.parameters, strict=True)), flight.views(flight.flat))
        else:
            write_if_finite(flight)


@dataclass(frozen=True)
class Add(Then):
    """What the exchange has changed is added: ``x <- x + gain * (result - sent)``. What came meanwhile is kept.

    Args:
        gain: factor on the change, above 0 and at most 1.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(lambda gain: 0 < gain <= 1, "a number above 0 and at most 1", gain=self.gain)

    def check(self, exchange: Exchange) -> None:
        """Refuse differences, which point the other way, and gradients, which belong to one step."""
        _refuse_all_but_weights(exchange)

    def start(self, flight: Flight) -> None:
        """Know what was sent."""
        flight.keep()

    def fold(self, flight: Flight) -> None:
        """Add it, if it is finite."""
        assert flight.sent is not None
        change = flight.flat.sub_(flight.sent)
        if self.gain != 1.0:
            change.mul_(self.gain)
        _add(flight, change)


@dataclass(frozen=True)
class Blend(Then):
    """A part of what is there is kept: ``x <- keep * x + (1 - keep) * result``.

    Args:
        keep: part that is kept, from 0 to 1.
    """

    keep: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(lambda keep: 0 <= keep <= 1, "a number from 0 to 1", keep=self.keep)

    @property
    def replaces(self) -> bool:  # type: ignore[override]
        """Only if nothing is kept."""
        return self.keep == 0

    def check(self, exchange: Exchange) -> None:
        """Refuse differences, which point the other way, and gradients, which belong to one step."""
        _refuse_all_but_weights(exchange)

    def fold(self, flight: Flight) -> None:
        """Blend, if the result is finite."""
        now = flight.weights(torch.zeros_like(flight.flat))
        _add(flight, flight.flat.sub_(now).mul_(1.0 - self.keep))


def _refuse_all_but_weights(exchange: Exchange) -> None:
    if not isinstance(exchange.what, Weights):
        raise ConfigurationError(
            f"{exchange.then!r} takes weights in",
            argument="then",
            expected="Replace(), or OuterStep(...)",
            seen=repr(exchange.what),
        )


def _add(flight: Flight, change: torch.Tensor) -> None:
    if not flight.finite:
        return
    finite = _is_finite(change)
    if change.device.type != "cpu":  # Reading the flag would wait for the device.
        change = torch.where(finite, change, torch.zeros_like(change))
    elif not finite and not torch.isfinite(change).all():
        return
    with torch.no_grad():
        torch._foreach_add_(list(flight.bucket.parameters), flight.views(change))


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))


def write_if_finite(flight: Flight) -> None:
    """Make the result the weights of the bucket, unless there is an Inf or NaN in it.

    A neighbour whose weights are spoilt must not spoil these.
    """
    bucket, weights = flight.bucket, flight.flat
    if not flight.finite:
        return
    finite = _is_finite(weights)
    if weights.device.type != "cpu":  # Reading the flag would wait for the device.
        kept = bucket.read_weights(torch.empty_like(weights))
        bucket.write_weights(torch.where(finite, weights, kept))
    elif finite or torch.isfinite(weights).all():
        bucket.write_weights(weights)

"""Outer steps by a quorum: members train each at its own pace, and what enough of them have learned is merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch

from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, How, Then, What
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.outer import OuterStep, go_back
from bagua.algorithms.exchanges.parts import Named
from bagua.algorithms.exchanges.values import WHOLE, Add, Difference
from bagua.buckets import Bucket
from bagua.checks import check_choice, check_kind, check_numbers, check_whole
from bagua.comm import ProcessGroup, Work
from bagua.compression import Codec, Metadata
from bagua.errors import ConfigurationError
from bagua.membership import Fragment, Islands, QuorumRule
from bagua.primitives import State, radial_directional_mean, summing_dtype, weighted_mean

Weighting = Literal["tokens", "equal"]
Merging = Literal["rda", "mean"]


@dataclass(frozen=True)
class ByQuorum(How):
    """Differences are merged when a quorum of them is there, and those who come later are part of the next merge.

    Args:
        quorum: differences that must be there.
        grace: seconds to wait for more then; ``auto`` for the time that training hides anyway.
        weight: ``tokens``: a difference counts by the tokens behind it, times those of each step. ``equal``: all count
            the same.
        merge: ``rda``: radial-directional mean of each tensor, and the plain mean of embeddings. ``mean``: plain mean.
        embeddings: pattern of the names of more tensors whose plain mean is taken; None for none.
        overlap: steps until a result is taken in.
        codec: codec for differences and results; None for all bits.
        feedback: part of what the codec loses that is added to the next difference, and by the owner to its next
            result; 0 for nothing.
        islands: members; None until the model is wrapped with ``between=islands``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range; when the model is wrapped, no islands.
    """

    quorum: int = 1
    grace: float | Literal["auto"] = "auto"
    weight: Weighting = "tokens"
    merge: Merging = "rda"
    embeddings: str | None = None
    overlap: int = 0
    codec: Codec | None = None
    feedback: float = 0.0
    islands: Islands | None = None

    apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(1, quorum=self.quorum)
        if self.grace != "auto":
            check_numbers(lambda grace: grace >= 0, "'auto', or seconds from 0", grace=self.grace)
        check_choice(get_args(Weighting), weight=self.weight)
        check_choice(get_args(Merging), merge=self.merge)
        check_kind((str, type(None)), "a pattern of names, as '*head*', or None", embeddings=self.embeddings)

    @property
    def alone(self) -> bool:
        """A member may be one process."""
        return True

    @property
    def exact(self) -> bool:
        """It depends on who comes when."""
        return False

    def state(self) -> tuple[State, ...]:
        """What the codec has lost, if it is fed back."""
        return (State("residual"),) if self.feedback else ()

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        if self.codec is not None:
            self.codec.compressed_bytes(Metadata(2**40, summing_dtype(dtype)))

    def check(self, group: ProcessGroup) -> None:
        """Refuse ranks that cannot come and go."""
        if self.islands is None:
            raise ConfigurationError(
                "ranks of one group wait for all of them: a quorum is for islands",
                argument="quorum",
                expected="with_bagua(..., between=islands), or quorum=None",
                seen=self.quorum,
            )

    def check_loads(self) -> None:
        """Refuse what would give this member an anchor of its own."""
        assert self.islands is not None
        self.islands.merges.check_loads()

    def blocking(self, group: ProcessGroup, prepared: object) -> bool:
        """It leaves waiting to who folds."""
        return False

    @property
    def rule(self) -> QuorumRule:
        """When fragments are merged."""
        return QuorumRule(self.quorum, None if self.grace == "auto" else float(self.grace), self.overlap)

    def ranks(self, group: ProcessGroup) -> float:
        """Each contributes by itself."""
        return 1.0

    def run(self, flight: Flight, group: ProcessGroup) -> Work:
        """Contribute what lies in the flight."""
        assert self.islands is not None
        merges, name, fragment = self.islands.merges, name_of(flight.bucket), self.fragment(flight.bucket, flight.model)
        sent = self._encoded(flight, fragment, self.islands.seat) if flight.is_finite() else None
        void = sent is None
        if sent is None:  # What this member has learned is lost, and it begins again from the anchor.
            go_back(flight, flight.state["anchor"])
            nothing = flight.flat.zero_()
            sent = fragment.encode(nothing.to(fragment.dtype))
            if flight.sent is not None:
                flight.sent.zero_()
        merges.contribute(name, sent, equal=self.weight == "equal", void=void)
        group.gauges.update(self.islands.metrics())
        return Work(lambda _: merges.wait(name), lambda: merges.is_merged(name))

    def _encoded(self, flight: Flight, fragment: Fragment, seat: int) -> torch.Tensor | None:
        """What is sent of a flight; None if the codec makes of it what is not finite."""
        if self.codec is None:
            return flight.flat
        exact = flight.flat.to(fragment.dtype)
        if self.feedback:
            exact = exact.add(flight.state["residual"], alpha=self.feedback)
        sent = fragment.encode(exact, seat, flight.step)
        lost = exact - fragment.decode(sent)
        if not lost.isfinite().all():
            return None
        if self.feedback:
            flight.memory.clear_padding(flight.memory.propose("residual").copy_(lost))
        return sent

    def fragment(self, bucket: Bucket, model: Model) -> Fragment:
        """How differences of a bucket are merged."""
        merge: Any = weighted_mean
        if self.merge == "rda":
            named = None if self.embeddings is None else Named(self.embeddings)
            plain = frozenset(
                number
                for number, (name, one) in enumerate(zip(bucket.names, bucket.parameters, strict=True))
                if name in model.embeddings or (named is not None and named.takes(name, one))
            )
            merge = partial(radial_directional_mean, views=bucket.views, plain=plain)
        dtype = bucket.dtype if self.codec is None else summing_dtype(bucket.dtype)
        parameters = tuple((name, tuple(one.shape)) for name, one in zip(bucket.names, bucket.parameters, strict=True))
        return Fragment(name_of(bucket), bucket.numel, dtype, merge, self.codec, self.feedback, parameters)


def name_of(bucket: Bucket) -> str:
    """The name of the fragment that is a bucket."""
    return bucket.names[0]


@dataclass(frozen=True)
class MergedStep(Then):
    """An outer step with the merged difference to which this member has contributed, after those without it.

    Args:
        step: outer step of the anchor.
        how: exchange that brings the differences.
    """

    step: OuterStep
    how: ByQuorum

    alone: ClassVar[bool] = True

    @property
    def overwrites(self) -> bool:
        """As the weights follow."""
        return self.step.overwrites

    @property
    def keeps_sent(self) -> bool:  # type: ignore[override]
        """As the weights follow."""
        return self.step.keeps_sent

    def check(self, what: What | None) -> None:
        """Refuse what has no anchor."""
        self.step.check(what)

    def state(self) -> tuple[State, ...]:
        """That of the outer step."""
        return self.step.state()

    def check_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse what the outer step refuses."""
        self.step.check_parameters(parameters)

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """Say what is merged, and when."""
        assert self.how.islands is not None
        self.how.islands.merges.open([self.how.fragment(bucket, model) for bucket in buckets], self.how.rule)

    def fold(self, flight: Flight) -> None:
        """Take in what has come before, and then this."""
        assert self.how.islands is not None
        _take_in_others(self.how.islands, self.step, flight, before_own=True)
        merged = self.how.islands.merges.own(name_of(flight.bucket))
        if merged is not None:
            _take_in(flight, self.step, merged)


@dataclass(frozen=True)
class TakeIn(Then):
    """Outer steps with differences of others: the weights move as the anchor does, and keep what is learned here.

    Args:
        step: outer step of the anchor.
        what: has the anchor.
        islands: members.
        ends: training ends here, and everything has been contributed: wait for the others, and let the weights of all
            become the anchor.
    """

    step: OuterStep
    what: Difference
    islands: Islands
    ends: bool = False

    alone: ClassVar[bool] = True

    def writes(self, what: What | None) -> frozenset[str]:
        """Weights, and the anchor."""
        return self.what.reads

    def state(self) -> tuple[State, ...]:
        """What it shares with the exchange of the same label."""
        return (*self.what.state(), *self.step.state())

    def fold(self, flight: Flight) -> None:
        """Take them in, in the order of the merges."""
        if self.ends:
            self.islands.merges.come_together()
        _take_in_others(self.islands, self.step, flight)
        if self.ends:
            flight.bucket.write_weights(flight.state["anchor"])


@dataclass(frozen=True)
class GiveState(Then):
    """Between two steps, members that give newcomers the state do so.

    Args:
        islands: islands that the newcomers join.
    """

    islands: Islands

    alone: ClassVar[bool] = True

    def fold(self, flight: Flight) -> None:
        """Give it, if there are any."""
        self.islands.merges.between_steps(flight.step)


def _take_in_others(islands: Islands, step: OuterStep, flight: Flight, *, before_own: bool = False) -> None:
    moved = OuterStep(step.optimizer, Add())
    own, flight.sent = flight.sent, None  # It stays in the weights until it is merged.
    for difference in islands.merges.others(name_of(flight.bucket), before_own=before_own):
        _take_in(flight, moved, difference)
    flight.sent = own


def _take_in(flight: Flight, step: OuterStep, difference: torch.Tensor) -> None:
    own, flight.flat = flight.flat, difference.to(flight.bucket.device, flight.bucket.dtype)
    step.fold(flight)
    flight.flat = own  # The engine keeps it for flights to come.


def decoupled(exchange: Exchange, islands: Islands) -> tuple[Exchange, ...]:
    """The exchanges of members that merge by a quorum, made of ``exchange``.

    Args:
        exchange: differences of ``ByQuorum``, with an outer step.
        islands: members.
    """
    how, then, what = exchange.how, exchange.then, exchange.what
    assert isinstance(how, ByQuorum)
    assert isinstance(then, OuterStep)
    assert isinstance(what, Difference)
    how = dataclasses.replace(how, islands=islands)
    local = Exchange(
        None, Every(), None, TakeIn(then, what, islands), at="stepped", parts=exchange.parts, label=exchange.label
    )
    give = Exchange(None, Every(), None, GiveState(islands), at="safe", parts=WHOLE, label="newcomers")
    return (local, dataclasses.replace(exchange, how=how, then=MergedStep(then, how)), give)


def ending(exchange: Exchange, islands: Islands) -> tuple[Exchange, ...]:
    """What makes one model of those of all members: of everything that they have learned.

    Args:
        exchange: as for ``decoupled``.
        islands: members.
    """
    local, sent, _ = decoupled(exchange, islands)
    assert isinstance(local.then, TakeIn)
    together = dataclasses.replace(local.then, ends=True)
    # All parts start before any is waited for: no member may wait for one that another has yet to contribute.
    last = dataclasses.replace(sent, when=Every(), at="backward ends", until="stepped", lag=0)
    return (last, dataclasses.replace(local, then=together))

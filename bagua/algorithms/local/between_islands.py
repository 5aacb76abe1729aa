"""Exchanges between islands: those of another algorithm, over the islands that take part."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, WithInner
from bagua.algorithms.exchanges.exchange import WHOLE, Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, How, Model, Then
from bagua.algorithms.exchanges.values import Sum
from bagua.algorithms.gradients.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.checks import check_flags, check_kind
from bagua.comm import Communicator, ProcessGroup
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.membership import Announced, Islands, contributions
from bagua.primitives import State

__all__ = ["BetweenIslands", "LetIn", "OverIslands"]

#: Steps from one look at the weights to the next, where islands hold equal ones; and the first steps of those, of which
#: the second shows what optimizers have done differently.
_COMPARE_EVERY, _AT_THE_BEGINNING = 100, 2


@dataclass(frozen=True)
class BetweenIslands(How):
    """Sums or means over the islands of the epoch. A result counts for all of them, or for none.

    An exchange that fails is repeated by those who are left, from the same contributions. The ranks of an island hold
    the same, so each of them sends a share, and they put the results together. What a reducer loses must be the same on
    all of them, so there the first rank sends everything.

    Args:
        inner: how they communicate.
        islands: who may take part.
        of_ranks: the ranks of an island hold different things, whose sum or mean it contributes.
        period: steps of the fastest member from one outer step to the next, where each trains at its own pace: members
            count by what they have trained on. 0 where all make the same steps, and count alike.
        purpose: purpose in words, which members compare before each exchange; empty where all exchanges have the same.

    Raises:
        ConfigurationError: islands cannot communicate like that.
    """

    inner: Sum
    islands: Islands
    of_ranks: bool = False
    purpose: str = ""
    period: int = 0
    alone = True  # An island may be one rank.

    def __post_init__(self) -> None:
        check_kind(Islands, "what join_islands returned", islands=self.islands)
        if not isinstance(self.inner, Sum):
            raise _refused("members that come and go have no neighbours: only sums and means", self.inner)
        _check_memory(self.inner)

    @property
    def contraction(self) -> float | None:
        """As between ranks."""
        return self.inner.contraction

    def state(self) -> tuple[State, ...]:
        """As between ranks."""
        return self.inner.state()

    def check_loads(self) -> None:
        """Refuse what would give this island an anchor, or weights, of its own."""
        self.islands.check_loads()

    def check_dtype(self, dtype: torch.dtype) -> None:
        """As between ranks."""
        self.inner.check_dtype(dtype)

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Exchange what lies in the flight with the islands; ``group`` is this one alone."""
        whole = flight.flat
        if self.of_ranks and group.size > 1:
            group.global_communicator.allreduce(whole.mul_(self.inner.share(group.size)))
        contribution = self._share(whole, group)
        part = None if self.of_ranks else (self.purpose, *flight.bucket.names)
        own = self.islands.announce(part, self.period) if self.period else Announced()
        told: dict[int, Announced] = {}

        def attempt(members: ProcessGroup) -> None:
            # A call that failed may still write to the memory that it was given.
            flight.flat = contribution.clone()
            flight.memory.forget_proposals()
            if self.period or (self.purpose and flight.flat.numel()):
                told.clear()
                told.update(_tell(self.purpose, own, members.global_communicator))
            if not flight.flat.numel():
                return
            scale = self.inner.share(contributions(told, self.islands.seat) if self.period else members.size)
            if scale != 1.0:
                flight.flat.mul_(scale)
            work = self.inner.run(flight, members)
            if work is not None:
                work.wait()

        self.islands.exchange(attempt, self._alike(flight))
        if self.period and part is not None:
            self.islands.pace.agree(told, part, self.period)
        flight.flat = self._put_together(flight.flat, whole, group)
        if self.of_ranks and flight.flat is not whole:  # What follows works on gradients where they lie.
            flight.flat = whole.copy_(flight.flat)
        group.gauges.update(self.islands.metrics())

    def _alike(self, flight: Flight) -> list[torch.Tensor]:
        """What all islands must hold before this exchange; weights in each step would cost more than they tell."""
        alike = [tensor for _, tensor in flight.memory.shared()]
        if self.of_ranks and not self.purpose and flight.step % _COMPARE_EVERY < _AT_THE_BEGINNING:
            alike += flight.bucket.parameters
        return alike

    def _share(self, whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """What this rank exchanges with its counterparts."""
        if group.size == 1:
            return whole.clone()
        if self.inner.reducer is not None:
            return whole.clone() if group.rank == 0 else whole.new_empty(0)
        length = -(-whole.numel() // group.size)
        share, own = whole.new_zeros(length), whole[group.rank * length : (group.rank + 1) * length]
        share[: own.numel()] = own
        return share

    def _put_together(self, share: torch.Tensor, whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """The result of all ranks of the island, from the shares of each."""
        if group.size == 1:
            return share
        if self.inner.reducer is not None:
            if group.rank == 0:
                whole.copy_(share)
            group.global_communicator.broadcast(whole, 0)
            return whole
        shares = share.new_empty(share.numel() * group.size)
        group.global_communicator.allgather(shares, share)
        return whole.copy_(shares[: whole.numel()])


@dataclass(frozen=True)
class LetIn(Then):
    """Between two steps, newcomers receive the state.

    Args:
        islands: islands that the newcomers join.
    """

    islands: Islands

    def fold(self, flight: Flight) -> None:
        """Let them in, if there are any."""
        self.islands.rest()


@dataclass(frozen=True, repr=False)
class OverIslands(WithInner):
    """Another algorithm, whose ranks are islands. Made by ``with_bagua(..., between=islands)``.

    Args:
        inner: lets its ranks train alone, and takes means every so often, as ``diloco`` does.
        islands: islands that take part.
        elastic: gradients may be exchanged between islands in each step, all at once when the backward pass ends.
        sharded: ranks of an island hold shards of the model, whose gradients are summed already; each rank exchanges
            its own with its counterparts.

    Raises:
        ConfigurationError: an algorithm that cannot run between islands.
    """

    islands: Islands
    elastic: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        check_kind(Algorithm, "an Algorithm", inner=self.inner)
        check_flags(elastic=self.elastic, sharded=self.sharded)
        for one in self.inner.every_exchange():
            _check(one, elastic=self.elastic)
            if one.lag and (self._period or self.islands.deals_samples):
                what, cure = ("steps", "pace='equal'") if self._period else ("samples", "no ElasticSampler")
                problem = f"members agree on the {what} of each, which go on while an exchange is under way"
                raise _refused(problem, one, f"Use overlap=0, or {cure}.")

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Those of the inner algorithm, over the islands; inside an island of several ranks, gradients in each step."""
        inside = [one.labelled("inside the island") for one in GradientAllReduceAlgorithm().exchanges()]
        found = [one if one.how is None else self._between(one, one.how) for one in self.inner.exchanges(phase)]
        if self.sharded or not self.islands.ranks or any("gradients" in one.needs for one in found):
            inside = []
        let_in = Exchange(None, Every(), None, LetIn(self.islands), at="safe", parts=WHOLE)
        return (*inside, *found, let_in.labelled("newcomers"))

    def closing(self) -> tuple[Exchange, ...]:
        """The means over all ranks of all members."""
        return tuple(self._mean(one, one.how) for one in self.inner.closing() if isinstance(one.how, Sum))

    def _mean(self, exchange: Exchange, how: Sum) -> Exchange:
        purpose = f"the mean of all {exchange.label}"
        return dataclasses.replace(exchange, how=BetweenIslands(how, self.islands, True, purpose, self._period))

    def check(self, model: Model) -> None:
        """What the inner algorithm refuses, but for a pace of its own, which needs islands."""
        inner: Any = self.inner
        (dataclasses.replace(inner, pace="equal") if self._period else inner).check(model)

    @property
    def _period(self) -> int:
        """``sync_every``, where each member trains at its own pace; else 0."""
        return self.inner.sync_every if isinstance(self.inner, LocalUpdates) and self.inner.pace == "own" else 0

    def _between(self, exchange: Exchange, how: How) -> Exchange:
        assert isinstance(how, Sum)
        purpose = exchange.label or "an outer step" if self.inner.ranks_differ else ""
        if "gradients" not in exchange.needs:
            when = dataclasses.replace(exchange.when, pace=self.islands.pace) if self._period else exchange.when
            between = BetweenIslands(how, self.islands, purpose=purpose, period=self._period)
            return dataclasses.replace(exchange, when=when, how=between)
        # One barrier for each step, when nothing else is on its way.
        between = BetweenIslands(how, self.islands, of_ranks=True, purpose=purpose)
        return dataclasses.replace(exchange, how=between, at="backward ends", until="backward ends", parts=WHOLE)

    def __repr__(self) -> str:
        return f"{'elastic ' if self.elastic else ''}{self.inner!r} between {self.islands!r}"


def _check(exchange: Exchange, *, elastic: bool) -> None:
    how = exchange.how
    if how is None:
        return
    if not how.lockstep or not isinstance(how, Sum):
        raise _refused("members that come and go have no neighbours: only sums and means", how)
    _check_memory(how)
    if "gradients" in exchange.needs and not elastic:
        advice = "Pass elastic=True, or use diloco without start_after."
        raise _refused("gradients would be exchanged in each step", exchange, advice)
    most = exchange.when.steps // exchange.parts.n - 1
    if exchange.lag > max(most, 0):
        advice = f"Use overlap={most} or less: less than sync_every / fragments." if most > 0 else "Use overlap=0."
        raise _refused("newcomers come in when nothing is on its way, and something always is", exchange, advice)


def _tell(purpose: str, own: Announced, communicator: Communicator) -> dict[int, Announced]:
    """What each member says, by seat. Refuses to mix what islands exchange for different reasons. Collective."""
    said = torch.tensor([zlib.crc32(purpose.encode()), *own], dtype=torch.float64, device="cpu")
    heard = torch.empty(communicator.size * said.numel(), dtype=said.dtype, device="cpu")
    communicator.allgather(heard, said)
    rows = dict(zip(communicator.ranks, heard.view(communicator.size, -1).tolist(), strict=True))
    others = [seat for seat, (reason, *_) in rows.items() if reason != said[0].item()]
    if others:
        raise CollectiveMismatchError(
            "islands exchange different things",
            rank=communicator.ranks[communicator.rank],
            peers=others,
            expected=purpose,
            seen=f"something else from seats {others}",
            advice="Make equally many steps on all islands before bagua_finish() and bagua_global_average(): see "
            "model.bagua_step.",
        )
    return {seat: Announced(*row) for seat, (_, *row) in rows.items()}


def _check_memory(how: Sum) -> None:
    """What belongs to one rank goes with it, and what is equal on all is sent to those who come; sums are neither."""
    sums = [] if how.reducer is None else [one.name for one in how.reducer.state() if one.of_members]
    if sums:
        problem = f"its reducer remembers a sum over those who took part before: {', '.join(sums)}"
        raise _refused(problem, how, "Use ErrorFeedback, whose residuals belong to one rank each.")


def _refused(problem: str, seen: object, advice: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"this cannot run between islands: {problem}",
        argument="algorithm",
        expected="diloco, local_sgd or slowmo, or with elastic=True an algorithm that sums gradients in each step",
        seen=repr(seen),
        advice=advice,
    )

"""Exchanges between islands: those of another algorithm, over the islands that take part."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.algorithms.base import Algorithm, WithInner
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, How, Then
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.parts import Parts
from bagua.algorithms.exchanges.values import WHOLE, Sum
from bagua.algorithms.gradients.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.checks import check_flags, check_kind
from bagua.comm import Communicator, ProcessGroup
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.membership import Islands
from bagua.primitives import State


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
        purpose: purpose in words, which members compare before each exchange; empty where all exchanges have the same.

    Raises:
        ConfigurationError: islands cannot communicate like that.
    """

    inner: Sum
    islands: Islands
    of_ranks: bool = False
    purpose: str = ""

    def __post_init__(self) -> None:
        check_kind(Islands, "what join_islands returned", islands=self.islands)
        if not isinstance(self.inner, Sum):
            raise _refused("members that come and go have no neighbours: only sums and means", self.inner)
        _check_memory(self.inner)

    @property
    def alone(self) -> bool:
        """An island may be one rank."""
        return True

    @property
    def exact(self) -> bool:
        """As between ranks."""
        return self.inner.exact

    @property
    def contraction(self) -> float | None:
        """As between ranks."""
        return self.inner.contraction

    def state(self) -> tuple[State, ...]:
        """As between ranks."""
        return self.inner.state()

    def check_dtype(self, dtype: torch.dtype) -> None:
        """As between ranks."""
        self.inner.check_dtype(dtype)

    def ranks(self, group: ProcessGroup) -> float:
        """An island contributes once, whatever its size."""
        return 1.0

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Exchange what lies in the flight with the islands; ``group`` is this one alone."""
        whole = flight.flat
        if self.of_ranks and group.size > 1:
            group.global_communicator.allreduce(whole.mul_(self.inner.scale(group.size)))
        contribution = self._share(whole, group)

        def attempt(members: ProcessGroup) -> None:
            # A call that failed may still write to the memory that it was given.
            flight.flat = contribution.clone()
            flight.memory.forget_proposals()
            if not flight.flat.numel():
                return
            if self.purpose:
                _require_same(self.purpose, members.global_communicator)
            scale = self.inner.scale(members.size)
            if scale != 1.0:
                flight.flat.mul_(scale)
            work = self.inner.run(flight, members)
            if work is not None:
                work.wait()

        self.islands.exchange(attempt)
        flight.flat = self._put_together(flight.flat, whole, group)
        if self.of_ranks and flight.flat is not whole:  # What follows works on gradients where they lie.
            flight.flat = whole.copy_(flight.flat)
        group.gauges.update(self.islands.metrics())

    def _share(self, whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """What this rank exchanges with its counterparts."""
        if group.size == 1:
            return whole.clone()
        if not self.inner.exact:
            return whole.clone() if group.rank == 0 else whole.new_empty(0)
        length = -(-whole.numel() // group.size)
        share, own = whole.new_zeros(length), whole[group.rank * length : (group.rank + 1) * length]
        share[: own.numel()] = own
        return share

    def _put_together(self, share: torch.Tensor, whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """The result of all ranks of the island, from the shares of each."""
        if group.size == 1:
            return share
        if not self.inner.exact:
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

    alone: ClassVar[bool] = True

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

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Those of the inner algorithm, over the islands; inside an island of several ranks, gradients in each step."""
        inside = [one.labelled("inside the island") for one in GradientAllReduceAlgorithm().exchanges()]
        found = [one if one.how is None else self._between(one, one.how) for one in self.inner.exchanges(phase)]
        if self.sharded or not self.islands.ranks or any("gradients" in one.needs for one in found):
            inside = []
        let_in = Exchange(None, Every(), None, LetIn(self.islands), at="safe", parts=Parts(1, "strided"))
        return (*inside, *found, let_in.labelled("newcomers"))

    def closing(self) -> tuple[Exchange, ...]:
        """The means over all ranks of all members."""
        return tuple(
            dataclasses.replace(one, how=BetweenIslands(one.how, self.islands, True, f"the mean of all {one.label}"))
            for one in self.inner.closing()
            if isinstance(one.how, Sum)
        )

    def _between(self, exchange: Exchange, how: How) -> Exchange:
        assert isinstance(how, Sum)
        purpose = exchange.label or "an outer step" if self.inner.ranks_differ else ""
        if "gradients" not in exchange.needs:
            return dataclasses.replace(exchange, how=BetweenIslands(how, self.islands, purpose=purpose))
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
    if exchange.lag:
        raise _refused("newcomers come in when nothing is on its way", exchange, "Use overlap=0.")


def _require_same(purpose: str, communicator: Communicator) -> None:
    """Refuse to mix what islands exchange for different reasons, before anything is sent. Collective."""
    own = torch.tensor([zlib.crc32(purpose.encode())])
    told = torch.empty(communicator.size, dtype=own.dtype)
    communicator.allgather(told, own)
    others = [seat for seat, one in zip(communicator.ranks, told.tolist(), strict=True) if one != own.item()]
    if others:
        raise CollectiveMismatchError(
            "islands exchange different things",
            rank=communicator.ranks[communicator.rank],
            peers=others,
            expected=purpose,
            seen=f"something else from seats {others}",
            advice="Make equally many steps on all islands before bagua_finish() and global_average(): see "
            "model.bagua_step.",
        )


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

"""The ranks of one island act as one: the first decides, all do it, and it has happened if it has on all of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bagua import errors
from bagua.comm import Cells, ProcessGroup
from bagua.errors import CommunicationError, LeftOutError, PeerLostError, StoreLostError, TooFewMembersError

#: What each rank does when it is told to, with what it is told, and which errors say that it has not happened.
Acts = Mapping[str, tuple[Callable[[Any], None], tuple[type[CommunicationError], ...]]]
_NO_ACTS: Acts = {}
#: How long the ranks of an island wait for each other. Who dies or stops is noticed long before.
_PATIENCE_S = 7 * 24 * 3600.0
#: How long a rank that raises what ends the island waits for those that have yet to come there.
_MEETING_S = 60.0
#: What ends a call on all ranks of an island.
_ENDS = (LeftOutError, TooFewMembersError, StoreLostError, errors.CollectiveMismatchError)
#: What an order is called that ends a call.
_RETURN, _RAISE = "return", "raise"


class FailedAct(NamedTuple):
    """Why an act has not happened.

    Attributes:
        problem: reason of the first rank that failed, in words.
        lost: seats whose connections refused some rank.
    """

    problem: str
    lost: tuple[int, ...] = ()


class Island:
    """The ranks of this island. The first one leads, the others do what it says, each call long.

    Args:
        group: ranks of the island, over connections of their own; None for a process alone.
        acts: function that each rank calls, by the name of the order, and which errors say that it has not happened.

    Attributes:
        rank: number of this process in the island.
        size: ranks of the island.
    """

    def __init__(self, group: ProcessGroup | None, acts: Acts = _NO_ACTS) -> None:
        self._group = group
        self._acts = acts
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    # On the first rank.

    def do(self, name: str, value: object = None) -> FailedAct | None:
        """Have all ranks carry an act out; why it has not happened, if it has not on some rank.

        Raises:
            PeerLostError: a rank of the island is lost.
        """
        self._tell(name, value)
        return self._carry_out(name, value)

    @contextlib.contextmanager
    def leading(self, result: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A call that the other ranks ``follow``: they return ``result()``, or raise what ends it here."""
        try:
            yield
        except _ENDS as error:
            with contextlib.suppress(CommunicationError):  # Whatever becomes of them, this is what has ended it here.
                self._tell(_RAISE, _described(error))
            self._meet()  # Who leaves then takes the connections away, and with them what was told.
            raise
        self._tell(_RETURN, result())

    # On the others.

    def follow(self) -> Any:
        """Do what the first rank says, until its call is over; what that one returns.

        Raises:
            CommunicationError: the call ended on the first rank with it.
        """
        while True:
            name, value = self._heard()
            if name == _RETURN:
                return value
            if name == _RAISE:
                self._meet()
                kinds = {kind.__name__: kind for kind in _ENDS}
                raise kinds[value.pop("kind")](**value)
            self._carry_out(name, value)

    # On all.

    def compare(self, facts: list[str], problem: str) -> tuple[int, list[str], str] | None:
        """The first rank with other facts, or with a problem: its number, facts and problem. Collective."""
        if self._group is None:
            return None
        told = self._group.global_communicator.allgather_object([facts, problem])
        strange = ((rank, theirs, why) for rank, (theirs, why) in enumerate(told) if why or theirs != facts)
        return next(strange, None)

    def share(self, make: Callable[[], object]) -> Any:
        """What ``make`` returns on the first rank, on all of them. Collective."""
        if not self.leads:
            return self.follow()
        made: list[object] = []
        with self.leading(lambda: made[0]):
            made.append(make())
        return made[0]

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of the values of all ranks. Collective."""
        told = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self._group is not None:
            self._group.global_communicator.allreduce(told, timeout=_PATIENCE_S)
        return told.tolist()

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Break the connections of the island, from any thread. A reason for a ``culprit`` begins with "it"."""
        if self._group is not None:
            self._group.abort(reason, None if culprit is None else self._group.ranks[culprit])

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        if self._group is not None:
            self._group.close()

    def _carry_out(self, name: str, value: object) -> FailedAct | None:
        act, failures = self._acts[name]
        own: FailedAct | None = None
        try:
            act(value)
        except failures as error:
            own = FailedAct(error.problem, error.peers if isinstance(error, PeerLostError) else ())
        if self._group is None:
            return own
        told = self._group.global_communicator.allgather_object(own and tuple(own), timeout=_PATIENCE_S)
        failed = [(rank, FailedAct(*one)) for rank, one in enumerate(told) if one is not None]
        if not failed:
            return None
        rank, first = failed[0]
        lost = sorted({seat for _, one in failed for seat in one.lost})
        return FailedAct(f"rank {rank} of this island: {first.problem}", tuple(lost))

    def _meet(self) -> None:
        if self._group is not None:
            with contextlib.suppress(CommunicationError):
                self._group.global_communicator.barrier(timeout=_MEETING_S)

    def _tell(self, name: str, value: object) -> None:
        if self._group is not None:
            self._group.global_communicator.broadcast_object([name, value], timeout=_PATIENCE_S)

    def _heard(self) -> tuple[str, Any]:
        assert self._group is not None
        name, value = self._group.global_communicator.broadcast_object(timeout=_PATIENCE_S)
        return name, value


def first_difference(facts: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first fact that is another one there, and that one; the numbers of facts, if one list only is longer."""
    counts = (f"{len(facts)} facts", f"{len(theirs)} facts")
    return next((pair for pair in zip(facts, theirs, strict=False) if pair[0] != pair[1]), counts)


def different(
    problem: str, call: str, rank: int, facts: list[str], theirs: list[str], advice: str
) -> errors.CollectiveMismatchError:
    """The error of ranks of an island with different facts; see ``Island.compare``."""
    here, there = first_difference(facts, theirs)
    return errors.CollectiveMismatchError(problem, call=call, peers=[rank], expected=here, seen=there, advice=advice)


def this_process() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def require_same(cells: Cells, topic: str, facts: Sequence[str], what: str) -> None:
    """Refuse to join islands that have other facts under ``topic``: cells say what all have, and who began."""
    first, *theirs = cells.claim(topic, [this_process(), *facts])
    if theirs == list(facts):
        return
    here, there = first_difference(facts, theirs)
    raise errors.CollectiveMismatchError(
        f"these islands have different {what} than {first}, which came first; the first difference",
        call="join_islands" if topic == "job" else "with_bagua",
        expected=here,
        seen=there,
        advice="Start all processes with the same program, version and options, or choose another name=.",
    )


_TOLD = ("problem", "advice", "peers", "expected", "seen", "elapsed_s", "timeout_s")


def _described(error: CommunicationError) -> dict[str, object]:
    return {"kind": type(error).__name__, **{name: getattr(error, name) for name in _TOLD}}

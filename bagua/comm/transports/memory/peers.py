"""The ranks of one shared-memory communicator as one of them sees them: waiting, and giving up."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bagua.comm.call import Call
from bagua.comm.long_wait import Judge, LongWait
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.memory.lanes import Lanes
from bagua.comm.transports.memory.line import (
    Deadline,
    FaultHook,
    Line,
    LineState,
    Notice,
    RankKilled,
    Slots,
    Step,
    Words,
)
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
    blame,
    relayed,
)

#: Read in every barrier. ``LineState.OPEN`` is 0.
_ARRIVED, _STATE = Words.ARRIVED, Words.STATE
#: The error, if the ranks wait for each other in vain in a call.
Suspicion = Callable[[Call], CommunicationError | None]
#: Those for which a rank waits now, by their number in the communicator.
Missing = Callable[[], tuple[int, ...]]
#: Looks at the others, one right after the other, before a rank that spins begins to wait: for a few microseconds.
_LOOKS = 100
#: A sleeper looks up at least so often: deaths ring no bell.
SLICE_S = 0.02


class Peers(ABC):
    """Publishes this rank's line, reads the others', and waits for them.

    A kind of memory supplies ``publish``, ``stage``, ``pause``, ``wake`` and ``lost``, and a
    ``Line`` for each rank; waiting and failing are written here, once.

    Args:
        lines: one per rank; the own one is written.
        membership: the ranks, as the one sees them whose view this is.
        fault: called at every step.
    """

    #: Seconds of busy waiting before ``pause`` in a background thread, beside computation; for memory whose ranks do
    #: not share an interpreter.
    spin_s: float = 0.0
    #: The same in the calling thread, which has nothing else to do. Those waited for are often busy with a part of the
    #: same size: a rank that slept would wake late, and make the others sleep in turn.
    spin_inline_s: float = 0.0

    def __init__(self, lines: Sequence[Line], membership: Membership, fault: FaultHook | None) -> None:
        self.lines = lines
        self.rank = rank = membership.rank
        self.ranks = membership.ranks
        self.global_rank = self.ranks[rank]
        self.size = len(lines)
        self.label = membership.label
        self.own = lines[rank]
        self.slots = Slots(self.size)
        self.places = Words(self.size)
        self.lanes = Lanes(f"bagua-{self.label}-{rank}")
        self.fault = fault
        self.activity = membership.activity
        self._judge = membership.judge
        self._left: dict[str, tuple[int, int, str]] = {}
        self._steps = itertools.count(1)
        self._words = [line.words for line in lines]
        self._peer_words = [words for other, words in enumerate(self._words) if other != rank]
        self._others = tuple(other for other in range(self.size) if other != rank)

    @abstractmethod
    def publish(self, slot: int, call: Call, source: torch.Tensor | None, private: bool) -> None:
        """Show ``call`` and the first piece of ``source`` in the own line, in ``slot``.

        Args:
            slot: number of the slot; no rank reads it any more.
            call: call of this rank.
            source: data that others may read; None if this rank gives nothing.
            private: True if the data must stay as it is when the caller changes ``source``.
                It is small then.
        """

    def notices(self, slot: int) -> list[Notice]:
        """What each rank published in ``slot``, by rank."""
        return [line.notice(slot) for line in self.lines]

    def copies(self, slot: int, own: torch.Tensor) -> list[torch.Tensor] | None:
        """What all ranks copied into ``slot``, by rank; None unless they copied all of the same call's data.

        Args:
            slot: number of the slot in which they published.
            own: data of this rank, which is flat; stands for its copy.
        """
        notices = self.notices(slot)
        agreed = notices[self.rank].agreement
        if not all(one.agreement == agreed and not one.lent and one.piece >= one.call.numel for one in notices):
            return None
        parts = [own] * self.size
        for other in self._others:
            parts[other] = self.lines[other].view(slot, 0, own.numel())
        return parts

    def stage(  # noqa: B027 - most memory shows all at once
        self, slot: int, start: int, stop: int, kept: tuple[int, int] | None = None
    ) -> None:
        """Bring columns ``start`` to ``stop`` of the source published in ``slot`` into view.

        Called only where ``Notice.piece`` is smaller than a row, before the barrier (or
        the counter) that announces the piece. The piece before may still be read.

        Args:
            slot: number of the slot.
            start: first column.
            stop: the one behind the last.
            kept: bounds of what need not be shown, and must stay where it lay in earlier pieces: peers may still
                read there what this rank has reduced.
        """

    def conclude(self, slot: int) -> None:  # noqa: B027 - most memory keeps no reference of this kind
        """This rank has shown and read all: forget the sources, but let others see what was copied."""

    def withdraw(self, slot: int) -> None:  # noqa: B027 - most memory keeps no reference
        """Forget the tensor that was lent in ``slot``; every rank has read it."""

    def fence(self) -> None:  # noqa: B027 - ranks of one interpreter take turns anyway
        """Make what this rank wrote visible before it reads what others wrote."""

    def give_way(self) -> None:  # noqa: B027 - only memory whose ranks spin has something to give
        """Called while spinning: let another rank run that waits for this processor."""

    @abstractmethod
    def pause(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until woken, at most ``seconds``; do not, if ``ready`` once a wake-up is sure to come."""

    @abstractmethod
    def wake(self, rank: int) -> None:
        """Wake the sleepers of ``rank``. Never blocks, never raises."""

    def wake_others(self) -> None:
        """Wake the sleepers of all other ranks. What they wait for was written before a ``fence``."""
        for other in self._others:
            self.wake(other)

    def release(self) -> None:  # noqa: B027 - most memory holds nothing but memory
        """Give back what the kernel holds. No thread is inside a call, and none comes. Idempotent."""

    @abstractmethod
    def lost(self, rank: int) -> bool:
        """Whether ``rank`` is known to be dead although its line says OPEN."""

    # Steps and waits.

    def step(self, call: Call, name: str) -> None:
        """Let the fault hook, if there is one, do its worst here."""
        if self.fault is not None:
            self.fault(Step(self.rank, self.label, call, name, next(self._steps)))

    def arrive(self, call: Call) -> int:
        """Say that this rank has come to the next barrier, and return the number of that.

        A rank that is gone before this one arrives is an error: what it lent may have
        changed since. Who was there when this rank arrived has arrived, whatever
        becomes of it later.

        Args:
            call: for the fault hook.
        """
        if self.fault is not None:
            self.step(call, "arrive")
        words = self._words
        for line in words:
            if line[_STATE]:
                self.require_open(self._others)
                break
        own = words[self.rank]
        own[_ARRIVED] = mine = own[_ARRIVED] + 1
        # Of two ranks that arrive last together, one must see the other and wake the rest.
        self.fence()
        for line in self._peer_words:
            if line[_ARRIVED] < mine:
                return mine
        self.wake_others()
        return mine

    def pass_barrier(
        self, call: Call, mine: int, deadline: Deadline, spin_s: float = 0.0, suspect: Suspicion | None = None
    ) -> tuple[int, ...]:
        """Return when every rank has come to barrier ``mine``; the ranks that came last, or none if this one did.

        Args:
            call: for the fault hook.
            mine: number of the barrier, from ``arrive``.
            deadline: moment at which the call must be over.
            spin_s: seconds of busy waiting.
            suspect: the error, if this rank and another one wait for each other in vain.
        """
        last: tuple[int, ...] = ()
        looks = _LOOKS if spin_s else 0
        for line in self._peer_words:
            while line[_ARRIVED] < mine:
                looks -= 1
                if looks < 0:
                    last = self.wait(lambda: self._not_at(mine), deadline, spin_s, suspect and partial(suspect, call))
        if self.fault is not None:
            self.step(call, "pass")
        return last

    def _not_at(self, barrier: int) -> tuple[int, ...]:
        """The ranks that have yet to come to ``barrier``."""
        words = self._words
        for line in words:
            if line[_ARRIVED] < barrier:
                return tuple([other for other in self._others if words[other][_ARRIVED] < barrier])
        return ()

    def wait(
        self, missing: Missing, deadline: Deadline, spin_s: float = 0.0, suspect: Judge | None = None
    ) -> tuple[int, ...]:
        """Return when ``missing`` names no rank any more; the ranks that it named last.

        Raises:
            CollectiveTimeoutError: the deadline passed; ``peers`` are the missing ranks.
            PeerLostError: one of the missing is gone, or someone broke the communicator.
            CollectiveMismatchError: some ranks found that they disagree.
            CommunicatorClosedError: this rank aborted or closed in another thread.
        """

        def ready() -> bool:
            return not missing()

        spin_until = time.perf_counter() + spin_s if spin_s else 0.0
        last: tuple[int, ...] = ()
        wait: LongWait | None = None
        while waited := missing():
            last = waited
            now = time.perf_counter()
            if now < spin_until:
                self.give_way()
                continue
            # A rank that is found gone may have arrived before: look again before giving up.
            trouble = self._trouble(waited)
            if trouble is None and now >= deadline.at:
                trouble = self._timeout(waited, deadline)
            if trouble is not None:
                if ready():
                    return last
                raise trouble
            if suspect is not None:
                trouble = suspect()
            if trouble is None and wait is not None:
                trouble = wait.trouble()
            if trouble is not None:
                raise trouble
            wait = self._sleep(wait, ready, waited, max(deadline.at - now, 0.0))
        return last

    def _sleep(
        self, wait: LongWait | None, ready: Callable[[], bool], waited: tuple[int, ...], left_s: float
    ) -> LongWait:
        if wait is None:
            wait = LongWait(judge=self._judge)
        elif wait.is_over():
            wait.warn(self.global_rank, self.named(waited), self._told_of(waited))
        self.pause(ready, min(SLICE_S, left_s))
        return wait

    def _told_of(self, waited: Sequence[int]) -> str:
        """Where this rank waits, and where those are that it waits for, as far as their lines show."""
        own = [text for text in (str(self.activity), self.own.latest(), f"on {self.label}") if text]
        others = [f"rank {self.ranks[other]} was last in {self.lines[other].latest()}" for other in waited]
        return f"in {', '.join(own)}; {'; '.join(others)}"

    def require_open(self, needed: Sequence[int]) -> None:
        """Raise if a rank in ``needed`` has left, or if any rank broke the communicator."""
        for words in self._words:
            if words[_STATE]:
                break
        else:
            return
        trouble = self._trouble(needed)
        if trouble is not None:
            raise trouble

    def _trouble(self, needed: Sequence[int]) -> CommunicationError | None:
        own, culprit = self._words[self.rank][Words.STATE], self._words[self.rank][Words.CULPRIT]
        if own == LineState.BROKEN and culprit != self.global_rank:
            # Another call of this rank that was under way has found it first.
            return relayed(culprit, self.own.reason, self.global_rank)
        if own != LineState.OPEN:
            return CommunicatorClosedError(f"this rank ended the communicator during the call: {self.own.reason}")
        for other in self._others:
            state = self._words[other][Words.STATE]
            if state >= LineState.BROKEN:
                return self._broken_by(other, state)
        for other in needed:
            state = self._words[other][Words.STATE]
            if state == LineState.LEFT or self.lost(other):
                reason = self.lines[other].reason or "it ended without closing its communicator"
                return PeerLostError.of(self.ranks[other], reason)
        return None

    def _broken_by(self, other: int, state: int) -> CommunicationError:
        line = self.lines[other]
        culprit = line.words[Words.CULPRIT]
        if state == LineState.MISMATCHED:
            return CollectiveMismatchError("ranks disagree on what they are doing", peers=(culprit,), seen=line.reason)
        return relayed(culprit, line.reason, self.global_rank, teller=self.ranks[other])

    def _timeout(self, waited: tuple[int, ...], deadline: Deadline) -> CollectiveTimeoutError:
        late = self.named(waited)
        return CollectiveTimeoutError.of(late, deadline.timeout_s, self.global_rank, timeout_s=deadline.timeout_s)

    def named(self, members: Sequence[int]) -> tuple[int, ...]:
        """Global ranks of ``members``."""
        return tuple(self.ranks[member] for member in members)

    # The end of this rank's part.

    def leave(self, state: int, culprit: int, reason: str) -> None:
        """Leave ``LineState.OPEN`` for good, and wake everyone. The first reason stays.

        Without a lock: a signal handler may interrupt this at any place, and call it. The first one decides, at
        once; then all write the same.

        Args:
            state: a value of ``LineState``.
            culprit: global rank to blame.
            reason: deed of the culprit; begins with "it".
        """
        state, culprit, reason = self._left.setdefault("first", (state, culprit, reason))
        self.own.reason = reason
        self.own.words[Words.CULPRIT] = culprit
        self.own.words[Words.STATE] = state
        for rank in range(self.size):
            self.wake(rank)

    def leave_with(self, error: BaseException, call: Call) -> None:
        """Leave because ``error`` ended ``call``; who is to blame is passed on."""
        if isinstance(error, RankKilled):
            self.leave(LineState.LEFT, self.global_rank, f"it was killed in {call}")
            return
        if isinstance(error, CollectiveMismatchError):
            sides = "; ".join(side for side in (error.expected, error.seen) if side)
            self.leave(LineState.MISMATCHED, self.global_rank, sides)
            return
        self.leave(LineState.BROKEN, *blame(error, self.global_rank, str(call)))

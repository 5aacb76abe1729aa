"""Merges between members that train each at its own pace: what one has learned counts when enough others have come."""

from __future__ import annotations

import contextvars
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua.comm import Communicator, ProcessGroup, family, forked_error
from bagua.errors import CommunicatorClosedError, ConfigurationError
from bagua.membership.counterparts import Attempt
from bagua.membership.merging.fragments import Arrived, Fragment, Merge, Sent
from bagua.membership.merging.quorum import Choice, QuorumRule, Said, choose

__all__ = ["Merges"]

#: Merges that are remembered for those who ask.
_TAPE = 4096
#: Members look around so many times while the training of the fastest goes on beside a merge.
_LOOKS = 16
#: Longest pause between two looks, in seconds.
_PAUSE_S = 0.25
#: How long to wait for the thread when this process leaves. Its calls have been ended by then.
_JOIN_S = 30.0
#: Part of the measured time of a step that each step replaces.
_FRESH = 0.25


class Merges:
    """Contributions of this member, and what all make of them. One thread exchanges, another one trains.

    The members' threads make one exchange after the other, so all have one order of merges. In each they look around
    until a merge is due by ``choose``. The owner of the fragment receives the differences, merges them, and gives the
    result to everybody. It counts as any exchange does: for all members, or for none.

    Args:
        seat: seat of this member.
        exchange: has an exchange happen; see ``Islands.exchange``.
        rest: lets newcomers in; see ``Islands.rest``.
        poll_s: shortest pause between two looks, in seconds.
        clock: seconds.
    """

    def __init__(
        self,
        seat: int,
        exchange: Callable[[Attempt], None],
        rest: Callable[[], None],
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seat = seat
        self._exchange = exchange
        self._rest = rest
        self._poll_s = poll_s
        self._clock = clock
        self._rule = QuorumRule(1)
        self._fragments: list[Fragment] = []
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: By number of the fragment.
        self._sent: dict[int, Sent] = {}
        self._arrived: dict[int, deque[Arrived]] = {}
        self._counted: dict[int, tuple[int, float]] = {}
        self._proposed: tuple[Choice, torch.Tensor | None] | None = None
        #: Fragment whose merge the training waits for.
        self._awaited: int | None = None
        self._ended = self._together = False
        self._number = 0
        self._step, self._steps, self._tokens = -1, 0, 0.0
        self._step_s = self._idle_s = self._look_s = self._merge_s = self._chosen_at = 0.0
        self._stepped_at: float | None = None
        self._give: Callable[[], Mapping[str, object]] | None = None
        self._asked = False
        self._given: Any = None
        self._tape: deque[Merge] = deque(maxlen=_TAPE)
        family.add(self)

    @property
    def last(self) -> Merge | None:
        """The latest merge."""
        return self._tape[-1] if self._tape else None

    def tape(self) -> tuple[Merge, ...]:
        """The latest merges, the oldest first."""
        with self._changed:
            return tuple(self._tape)

    # Before training.

    @property
    def opened(self) -> bool:
        """Whether there is anything to merge."""
        return bool(self._fragments)

    def open(self, fragments: Sequence[Fragment], rule: QuorumRule) -> None:
        """Merge these fragments from now on, as ``rule`` says.

        Raises:
            ConfigurationError: differences of other fragments are on their way.
        """
        names = [one.name for one in fragments]
        if self._sent and names != [one.name for one in self._fragments]:
            raise _on_its_way("parameters of the model have changed")
        self._fragments, self._rule = list(fragments), rule

    def start(self) -> None:
        """Make exchanges from now on, if there is anything to merge: this process is a member."""
        if self.opened:
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._run,), name="bagua-merges", daemon=True)
            self._thread.start()

    # In the thread that trains.

    def count(self, tokens: float) -> None:
        """This member has trained on so many tokens more."""
        self._tokens += tokens

    def between_steps(self, step: int) -> None:
        """Step number ``step`` begins: measure how long one takes, and give newcomers the state if asked to."""
        if step == self._step:
            return
        self._step = step
        now = self._clock()
        if self._stepped_at is not None:
            step_s = max(0.0, now - self._stepped_at - self._idle_s)
            self._step_s += (_FRESH if self._step_s else 1.0) * (step_s - self._step_s)
        self._stepped_at, self._idle_s = now, 0.0
        self._steps += 1
        with self._changed:
            self._check()
            self._go_on()
        self._answer()

    def contribute(self, name: str, difference: torch.Tensor, *, equal: bool = False, void: bool = False) -> None:
        """Give what this member has learned of a fragment. ``difference`` stays as it is until it is merged.

        Args:
            name: name of the fragment.
            difference: flat tensor, finite.
            equal: each member counts the same; otherwise by its tokens, times its tokens for each step.
            void: it does not count, because what was learned was lost.

        Raises:
            ConfigurationError: its last difference has not been merged.
        """
        fragment = self._number_of(name)
        steps, tokens = self._steps, self._tokens
        steps_before, tokens_before = self._counted.get(fragment, (0, 0.0))
        made = steps - steps_before
        learned_from = tokens - tokens_before if tokens else float(made)
        weight = 0.0 if void or not made else 1.0 if equal else learned_from**2 / made
        with self._changed:
            self._check()
            if fragment in self._sent:
                raise _on_its_way("a state was loaded")
            self._counted[fragment] = steps, tokens
            # Flights that were dropped, because weights were loaded, take nothing in.
            dropped = [one._replace(own=False) for one in self._arrived.get(fragment, ())]
            self._arrived[fragment] = deque(dropped)
            self._sent[fragment] = Sent(difference.detach().cpu(), weight, self._clock())
            self._go_on()

    def wait(self, name: str) -> None:
        """Until the difference of this member is merged.

        Raises:
            CommunicationError: this process is no longer a member.
        """
        fragment = self._number_of(name)
        self._wait_while(lambda: fragment in self._sent, fragment)

    def is_merged(self, name: str) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._error is not None or self._number_of(name) not in self._sent

    def others(self, name: str) -> list[torch.Tensor]:
        """Merged differences to take in now, in order: up to the next one to which this member has contributed."""
        arrived = self._of(name)
        with self._changed:
            self._check()
            found = []
            while arrived and not arrived[0].own:
                found.append(arrived.popleft().difference)
        return [one for one in found if one is not None]

    def own(self, name: str) -> torch.Tensor | None:
        """The merged difference to which this member has contributed, when the others before it are taken in.

        None if none of those who contributed has learned anything.
        """
        with self._changed:
            one = self._of(name).popleft()
        assert one.own
        return one.difference

    def come_together(self) -> None:
        """Training ends here, and everything has been contributed: wait until it has ended on all members.

        Raises:
            CommunicationError: this process is no longer a member.
        """
        with self._changed:
            self._ended = not self._together
        self._wait_while(lambda: not self._together)

    def _wait_while(self, waits: Callable[[], bool], fragment: int | None = None) -> None:
        begun = self._clock()
        try:
            while True:
                with self._changed:
                    while waits() and not self._asked:
                        self._check()
                        self._awaited = fragment
                        self._changed.wait()
                    self._awaited = None
                    if not waits():
                        return
                self._answer()
        finally:
            self._idle_s += self._clock() - begun

    def _go_on(self) -> None:
        self._together = False
        self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _number_of(self, name: str) -> int:
        return next(number for number, one in enumerate(self._fragments) if one.name == name)

    def _of(self, name: str) -> deque[Arrived]:
        return self._arrived.setdefault(self._number_of(name), deque())

    # What a newcomer needs.

    def giving(self, give: Callable[[], Mapping[str, object]]) -> Callable[[], Mapping[str, object]]:
        """What returns the state, from any thread: the one that trains makes it, between two of its steps."""
        self._give = give

        def ask() -> Mapping[str, object]:
            if threading.current_thread() is not self._thread:
                return self._state()
            with self._changed:
                self._asked = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._asked or self._stopped.is_set())
                self._require_here()
                given: Any
                given, self._given = self._given, None
                if isinstance(given, BaseException):
                    raise given
                told: Mapping[str, object] = given
                return told

        return ask

    def _answer(self) -> None:
        if not self._asked:
            return
        given: Any
        try:
            given = copy.deepcopy(self._state())  # Training goes on while it is sent.
        except BaseException as error:  # noqa: BLE001 - the thread that asked ends with it, and then this one
            given = error
        with self._changed:
            self._given, self._asked = given, False
            self._changed.notify_all()

    def _state(self) -> dict[str, object]:
        assert self._give is not None
        # What this member has contributed itself is for the newcomer a merge as any other.
        pending = [[number, one.difference] for number, queue in self._arrived.items() for one in queue]
        pending = [one for one in pending if one[1] is not None]
        return {"state": self._give(), "number": self._number, "pending": pending}

    def taking(self, take: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """What replaces the state by that which another member gave."""

        def replace(given: Mapping[str, Any], step: int) -> None:
            take(given["state"], step)
            self._number = given["number"]
            self._arrived.clear()
            for number, difference in given["pending"]:
                self._arrived.setdefault(number, deque()).append(Arrived(difference, own=False))

        return replace

    # In the thread that exchanges.

    def _run(self) -> None:
        try:
            while True:
                self._exchange(self._attempt)
                self._count()
                self._rest()
                with self._changed:  # After the end nobody waits for this member, until it trains on.
                    self._changed.wait_for(lambda: not self._together or self._stopped.is_set())
        except BaseException as error:  # noqa: BLE001 - the thread that trains raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _attempt(self, group: ProcessGroup) -> None:
        communicator = group.global_communicator
        looked_at = self._clock()
        while True:
            self._require_here()
            said = self._look_around(communicator)
            choice = choose(said, self._rule)
            if choice is not None:
                break
            fastest_s = min(one.step_s for one in said.values())
            pause_s = min(_PAUSE_S, max(self._poll_s, max(self._rule.overlap, 1) * fastest_s / _LOOKS))
            self._stopped.wait(pause_s)
            looked_at, before = self._clock(), looked_at
            self._look_s = looked_at - before
        self._chosen_at = self._clock()
        difference = self._merge(choice, communicator) if any(choice.weights) else None
        self._proposed = choice, difference

    def _require_here(self) -> None:
        if self._stopped.is_set():
            raise CommunicatorClosedError("this process has left its islands", rank=self._seat)

    def _look_around(self, communicator: Communicator) -> dict[int, Said]:
        own = torch.tensor(self._say().numbers(), dtype=torch.float64)
        told = torch.empty(communicator.size * own.numel(), dtype=own.dtype)
        communicator.allgather(told, own)
        rows = told.view(communicator.size, -1).tolist()
        return {seat: Said.of(row) for seat, row in zip(communicator.ranks, rows, strict=True)}

    def _say(self) -> Said:
        with self._changed:
            now, sent = self._clock(), self._sent
            numbers = range(len(self._fragments))
            ages_s = tuple(max(0.0, now - sent[one].since) if one in sent else -1.0 for one in numbers)
            weights = tuple(sent[one].weight if one in sent else 0.0 for one in numbers)
            # Not whether the thread that trains waits: it may have yet to wake up.
            held_up = self._awaited in sent
            return Said(ages_s, weights, self._step_s, self._merge_s + self._look_s, held_up, self._ended)

    def _merge(self, choice: Choice, communicator: Communicator) -> torch.Tensor:
        """The merged difference, on all members. Its owner makes it; the next members own what one had that is gone."""
        fragment, owner = self._fragments[choice.fragment], choice.fragment % communicator.size
        own = self._sent[choice.fragment].difference if self._seat in choice.seats else None
        result = torch.empty(fragment.numel, dtype=fragment.dtype)
        if communicator.rank == owner:
            differences = []
            for seat in choice.seats:
                if seat == self._seat and own is not None:
                    differences.append(own)
                    continue
                differences.append(torch.empty_like(result))
                communicator.recv(differences[-1], communicator.ranks.index(seat))
            result = fragment.merge(differences, choice.weights)
            if not result.isfinite().all():  # It overflowed.
                result.zero_()
        elif own is not None:
            communicator.send(own, owner)
        communicator.broadcast(result, owner)
        return result

    def _count(self) -> None:
        """The exchange counts: all members take its result in, and a contribution to it is no longer on its way."""
        assert self._proposed is not None
        (choice, difference), self._proposed = self._proposed, None
        with self._changed:
            if choice.ends:
                self._ended, self._together = False, True
            else:
                own = self._seat in choice.seats
                self._arrived.setdefault(choice.fragment, deque()).append(Arrived(difference, own))
                if own:
                    del self._sent[choice.fragment]
                self._number += 1
                self._merge_s = self._clock() - self._chosen_at
                self._tape.append(Merge(self._number, *choice))
            self._changed.notify_all()

    def stop(self, abort: Callable[[str], None]) -> None:
        """This process leaves: end the thread. Idempotent.

        Args:
            abort: ends what the thread waits for.
        """
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            abort("it left")
            self._thread.join(_JOIN_S)

    def disown(self) -> None:
        """In a forked child: the thread, and what it exchanges, are the parent's."""
        self._changed, self._thread, self._error = threading.Condition(), None, forked_error()


def _on_its_way(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{why} while differences were on their way to be merged",
        argument="model",
        expected="no such change between two steps",
        seen=why,
        advice="Call bagua_finish() on all members first.",
    )

"""Merges between members that train each at its own pace: what one has learned counts when enough others have come."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua.comm import ProcessGroup, family, forked_error
from bagua.errors import CommunicationError, CommunicatorClosedError, ConfigurationError
from bagua.membership.counterparts import LOSSES, Attempt, Samples
from bagua.membership.island import Island
from bagua.membership.merging.choosing import Chooser
from bagua.membership.merging.fragments import Arrived, Fragment, Merge, MergeResult, Sent
from bagua.membership.merging.handover import Handover
from bagua.membership.merging.merger import Merger
from bagua.membership.merging.pace import Pace
from bagua.membership.merging.quorum import Choice, QuorumRule, Said

#: Merges that are remembered for those who ask.
_TAPE = 4096
#: How long to wait for the end of the thread that exchanges, when its calls have been ended.
_JOIN_S = 30.0


class Merges:
    """Contributions of this member, and what all make of them. One thread exchanges, another one trains.

    The members' threads make one exchange after the other, so all have one order of merges. In each they look around
    until a merge is due by ``choose``. The owner of the fragment receives the differences, merges them, and gives the
    result to everybody. It counts as any exchange does: for all members, or for none. In an island of several ranks the
    first one does that, and the others do the same with what it tells them, in the same steps.

    Args:
        seat: seat of this member.
        exchange: has an exchange happen; see ``Islands.exchange``.
        rest: lets newcomers in; see ``Islands.rest``.
        poll_s: shortest pause between two looks, in seconds.
        island: ranks of the island; None for a process alone.
    """

    def __init__(
        self,
        seat: int,
        exchange: Callable[[Attempt], None],
        rest: Callable[[], None],
        poll_s: float,
        island: Island | None = None,
    ) -> None:
        self._seat = seat
        self._exchange = exchange
        self._rest = rest
        self._island = Island(None) if island is None else island
        self._rule = QuorumRule(1)
        self._merger = Merger(seat)
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: By number of the fragment.
        self._sent: dict[int, Sent] = {}
        self._arrived: dict[int, deque[Arrived]] = {}
        self._merged_samples: dict[int, int] = {}
        self._samples: Samples | None = None
        self._proposed: MergeResult | None = None
        #: Fragment whose merge the training waits for.
        self._awaited: int | None = None
        self._started = self._ended = self._together = False
        #: The anchor here is what merges, or another member, have made of it.
        self._shares = False
        self._number = 0
        #: Number of the last merge that may be taken in in this step, on all ranks of the island.
        self._bound: float = math.inf if self._island.size == 1 else 0
        self._step = -1
        self._pace = Pace()
        self._chooser = Chooser(self._say, self._require_here, self._stopped.wait, time.monotonic, poll_s)
        self._chosen_at = 0.0
        self._give: Callable[[], Mapping[str, object]] | None = None
        self._handover = Handover(self._changed, self._state, self._island)
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

    def open(self, fragments: Sequence[Fragment], rule: QuorumRule) -> None:
        """Merge these fragments from now on, as ``rule`` says.

        Raises:
            ConfigurationError: differences of other fragments are on their way.
        """
        if not self._merger.has(fragments):
            with self._changed:
                arrived = self._merger.fragments and any(self._arrived.values())  # Else it came with the state.
                if self._sent or arrived:
                    raise _on_its_way("parameters of the model have changed")
                # What counts already goes on to count.
                counts = min(self._merged_samples.values(), default=0)
                self._merged_samples = dict.fromkeys(range(len(fragments)), counts)
        self._merger.open(fragments)
        self._rule = rule
        self._begin()

    def start(self, samples: Samples | None = None) -> None:
        """This process is a member: make exchanges as soon as there is anything to merge.

        Args:
            samples: deals out samples; None if there is no sampler.
        """
        self._samples = samples
        self._started = True
        self._begin()

    def _begin(self) -> None:
        if self._started and self._merger.fragments and self._thread is None:
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(self._run,), name="bagua-merges", daemon=True)
            thread.start()
            self._thread = thread  # Not earlier: who has not started cannot be waited for.

    # In the thread that trains.

    def count(self, tokens: float) -> None:
        """This member has trained on so many tokens more."""
        self._pace.count(tokens)

    def between_steps(self, step: int) -> None:
        """Step number ``step`` begins: measure how long one takes, and give newcomers the state if asked to."""
        if step == self._step:
            return
        self._step = step
        self._pace.step(time.monotonic())
        with self._changed:
            self._check()
            self._go_on()
        self._keep_step()

    def _keep_step(self) -> None:
        """What the ranks of an island take in in a step, and whether they give the state then, the first one says."""
        if self._island.size == 1:
            self._handover.answer()
            return
        with self._changed:
            told = [self._number, self._handover.asks if self._handover.asked else 0]
        try:
            self._bound, asks = self._island.spread(told, beside=True)
        except CommunicationError:  # The connections end with the exchanges, whose thread knows why.
            self.await_end()
            self._check()
            raise
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_heard(asks))
            self._check()
        self._handover.answer(asks)

    def _has_heard(self, asks: int) -> bool:
        """Whether this rank knows what the first one knew when this step began."""
        return self._number >= self._bound and self._handover.asks >= asks

    def contribute(self, name: str, difference: torch.Tensor, *, equal: bool = False, void: bool = False) -> None:
        """Give what this member has learned of a fragment. ``difference`` stays as it is until it is merged.

        Args:
            name: name of the fragment.
            difference: flat tensor, finite, as ``Fragment.encode`` makes it.
            equal: each member counts the same; otherwise by its tokens, times its tokens for each step.
            void: it does not count, because what was learned was lost.

        Raises:
            ConfigurationError: its last difference has not been merged.
        """
        fragment = self._merger.number_of(name)
        samples = 0 if self._samples is None else self._samples.recorded
        with self._changed:
            self._check()
            if fragment in self._sent:
                raise _on_its_way("a state was loaded")
            self._shares = True
            weight = self._pace.weight(fragment, equal=equal, void=void)
            # Flights that were dropped, because weights were loaded, take nothing in.
            self._arrived[fragment] = deque(one._replace(own=False) for one in self._arrived.get(fragment, ()))
            # What the others of an island have is the same.
            kept = difference.detach().cpu() if self._island.leads else torch.empty(0)
            self._sent[fragment] = Sent(kept, weight, time.monotonic(), samples)
            self._go_on()

    def wait(self, name: str) -> None:
        """Until the difference of this member is merged.

        Raises:
            CommunicationError: this process is no longer a member.
        """
        fragment = self._merger.number_of(name)
        self._wait_while(lambda: fragment in self._sent, fragment)

    def is_merged(self, name: str) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._error is not None or self._merger.number_of(name) not in self._sent

    def others(self, name: str, *, before_own: bool = False) -> list[torch.Tensor]:
        """Merged differences to take in now, in order: up to the next one to which this member has contributed.

        Args:
            name: name of the fragment.
            before_own: True if that one is there, so that all before it are; otherwise an island takes those that all
                its ranks have.
        """
        arrived, bound = self._of(name), math.inf if before_own else self._bound
        with self._changed:
            self._check()
            found = []
            while arrived and not arrived[0].own and arrived[0].number <= bound:
                found.append(arrived.popleft().difference)
            self._shares = self._shares or bool(found)
        return [one for one in found if one is not None]

    def own(self, name: str) -> torch.Tensor | None:
        """The merged difference to which this member has contributed, when the others before it are taken in.

        None if none of those who contributed has learned anything.
        """
        with self._changed:
            one = self._of(name).popleft()
        assert one.own
        return one.difference

    def check_loads(self) -> None:
        """Weights are loaded here: refuse it but before this member has shared anything, and where all have ended.

        Its anchor would be another than that of the others, who go on to merge what it has contributed.

        Raises:
            ConfigurationError: it is too late, or too early.
        """
        with self._changed:
            if self._shares and not self._together:
                raise _on_its_way("weights were loaded")

    def come_together(self) -> None:
        """Training ends here, and everything has been contributed: wait until it has ended on all members.

        Raises:
            CommunicationError: this process is no longer a member.
        """
        with self._changed:
            self._ended = not self._together
        self._wait_while(lambda: not self._together)
        self._bound = math.inf

    def await_end(self) -> BaseException | None:
        """What has ended the exchanges, where they have ended, or are about to; None where they go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, 0.0 if self._thread is None else _JOIN_S)
            return self._error

    def _wait_while(self, waits: Callable[[], bool], fragment: int | None = None) -> None:
        begun = time.monotonic()
        try:
            while True:
                with self._changed:
                    while waits() and not self._handover.asked:
                        self._check()
                        self._awaited = fragment
                        self._changed.wait()
                    self._awaited = None
                    if not waits():
                        return
                self._handover.answer()
        finally:
            self._pace.idle(time.monotonic() - begun)

    def _go_on(self) -> None:
        self._together = False
        self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _of(self, name: str) -> deque[Arrived]:
        return self._arrived.setdefault(self._merger.number_of(name), deque())

    # What a newcomer needs.

    def giving(
        self, give: Callable[[], Mapping[str, object]], needed: Callable[[], bool]
    ) -> Callable[[], Mapping[str, object] | None]:
        """What returns the state, from any thread: the one that trains makes it, between two of its steps.

        Args:
            give: returns the state of the training.
            needed: returns whether a newcomer waits for it; if none does, there is nothing to return.
        """
        self._give = give

        def ask() -> Mapping[str, object] | None:
            if threading.current_thread() is not self._thread:
                return self._state()
            return self._handover.ask(self._require_here, needed)

        return ask

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
            self._shares = self._number > 0
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
        if not self._island.leads:
            self._proposed = self._hear()
            return
        try:
            choice = self._chooser.choose(group.global_communicator, self._rule)
            self._chosen_at = time.monotonic()
            own = self._sent[choice.fragment].difference if self._seat in choice.seats else None
            self._proposed = self._merger.merge(choice, group.global_communicator, own, self._number)
        except LOSSES:
            self._island.spread(None)
            raise
        self._island.spread([*choice, self._proposed.difference])

    def _hear(self) -> MergeResult:
        """What the first rank of the island has received."""
        told = self._island.spread()
        if told is None:
            raise CommunicatorClosedError("the exchange of the first rank of its island failed", rank=self._seat)
        fragment, seats, weights, difference = told
        choice = Choice(fragment, tuple(seats), tuple(weights))
        with self._changed:  # This rank may be some steps behind the first one.
            own = self._seat in choice.seats
            self._changed.wait_for(lambda: not own or fragment in self._sent or self._stopped.is_set())
        self._require_here()
        return MergeResult(choice, difference)

    def _require_here(self) -> None:
        if self._stopped.is_set():
            raise CommunicatorClosedError("this process has left its islands", rank=self._seat)

    def _say(self) -> Said:
        with self._changed:
            now, sent = time.monotonic(), self._sent
            numbers = range(len(self._merger.fragments))
            ages_s = tuple(max(0.0, now - sent[one].since) if one in sent else -1.0 for one in numbers)
            weights = tuple(sent[one].weight if one in sent else 0.0 for one in numbers)
            # Not whether the thread that trains waits: it may have yet to wake up.
            held_up = self._awaited in sent
            return Said(
                ages_s, weights, self._pace.step_s, self._pace.merge_s + self._chooser.look_s, held_up, self._ended
            )

    def counting(self) -> int:
        """Samples that count if the exchange that is under way does: all fragments of what they taught are merged."""
        assert self._proposed is not None
        choice = self._proposed.choice
        merged = dict(self._merged_samples)
        if self._seat in choice.seats:
            merged[choice.fragment] = self._sent[choice.fragment].samples
        return min(merged.values())

    def _count(self) -> None:
        """The exchange counts: all members take its result in, and a contribution to it is no longer on its way."""
        assert self._proposed is not None
        self._merger.count(self._proposed)
        (choice, difference, _), self._proposed = self._proposed, None
        with self._changed:
            if choice.ends:
                self._ended, self._together = False, True
            else:
                own = self._seat in choice.seats
                arrived = Arrived(difference, own, self._number + 1)
                self._arrived.setdefault(choice.fragment, deque()).append(arrived)
                if own:
                    self._merged_samples[choice.fragment] = self._sent.pop(choice.fragment).samples
                self._number += 1
                self._pace.merge_s = time.monotonic() - self._chosen_at
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
        f"{why} while members merge by a quorum what they learn",
        argument="model",
        expected="no such change between two steps",
        seen=why,
        advice="Call bagua_finish() on all members first, and make the same change on all of them; or undo it here.",
    )

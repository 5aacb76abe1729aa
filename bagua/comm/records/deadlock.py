"""Ranks that wait for each other in different calls, forever: found by what each of them says in the store.

A rank whose code that computes stands still begins no call until one of those that it waits in is over. It says which
these are, and how many calls it has begun on each communicator, again and again. Two looks that find the same, with
each rank having spoken in between, show one moment. A rank that waits there only for ranks that stand still as well
never goes on; nor do ranks whose calls of one number differ.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store

from bagua.comm.call import POINT_TO_POINT
from bagua.comm.lifetime.background import bounded
from bagua.comm.long_wait import Activity
from bagua.comm.records.recorder import CallRecord, Recorder, Statistics
from bagua.comm.store.keys import job_board, read_present
from bagua.errors import CollectiveMismatchError

#: How long the store may take for one look, in seconds. It includes the time that the others get to see the verdict.
_LIMIT_S = 5.0
_OTHERS_S = 3.0
_PAUSE_S = 0.02
_ADVICE = (
    "All ranks must make the same collective calls in the same order. If one had more batches, give all ranks as many, "
    "or train inside model.join()."
)


class AwaitedCall(NamedTuple):
    """A call that a rank waits in. All ranks are global ranks.

    Attributes:
        where: name of the communicator, and its ranks.
        sequence: number of the collective there; 0 for a call between two ranks.
        peers: ranks that the call needs.
        text: the call in words.
        agreement: numbers on which all ranks of the collective must agree; empty for a call between two ranks.
    """

    where: str
    sequence: int
    peers: tuple[int, ...]
    text: str
    agreement: tuple[int, ...] = ()


class Standstill(NamedTuple):
    """What a rank says of itself while it stands still.

    Attributes:
        number: how many calls it has begun on all communicators.
        waits: calls that are under way, at least one.
        begun: how many collectives it has begun on each communicator.
    """

    number: int
    waits: tuple[AwaitedCall, ...]
    begun: dict[str, int]


def _waits_for(wait: AwaitedCall, rank: int, report: Standstill) -> bool:
    """Whether the call ``wait`` of ``rank`` needs one that the rank with this report has not begun, or that differs."""
    if wait.sequence:
        others = [one for one in report.waits if one[:2] == wait[:2]]
        missing = report.begun.get(wait.where, wait.sequence) < wait.sequence
        return missing or any(one.agreement != wait.agreement for one in others)
    # Both ends of a message that takes its time are under way.
    return not any(one.where == wait.where and not one.sequence and rank in one.peers for one in report.waits)


def stuck(reports: Mapping[int, Standstill]) -> list[int]:
    """The ranks that never go on: all their calls wait for one of them.

    Args:
        reports: reports of ranks that stand still, at one moment.

    Example:
        >>> begun = {"a": 0, "b": 0}
        >>> first = Standstill(1, (AwaitedCall("a", 1, (0, 1), "allreduce"),), {**begun, "a": 1})
        >>> second = Standstill(1, (AwaitedCall("b", 1, (0, 1), "barrier"),), {**begun, "b": 1})
        >>> stuck({0: first, 1: second}), stuck({0: first, 1: first})
        ([0, 1], [])
    """
    ranks = set(reports)

    def is_stuck(wait: AwaitedCall, rank: int) -> bool:
        return any(_waits_for(wait, rank, reports[other]) for other in ranks.intersection(wait.peers) - {rank})

    while free := {rank for rank in ranks if not all(is_stuck(wait, rank) for wait in reports[rank].waits)}:
        ranks -= free
    return sorted(ranks)


class Deadlocks:
    """Looks whether this rank waits forever, while it waits on one communicator.

    Args:
        recorder: record of the calls of the rank.
        store: any store of the job.
        activity: purpose of the calls of that communicator.
        label: name of that communicator.
    """

    def __init__(self, recorder: Recorder, store: Store, activity: Activity, label: str) -> None:
        self._recorder = recorder
        self._store = store
        self._connection: Store | None = None
        self._unanswered = False
        self._activity = activity
        self._label = label
        self._seen: dict[int, tuple[Standstill, int]] = {}

    def look(self) -> CollectiveMismatchError | None:
        """The error if this rank and others wait for each other; the same on all of them.

        The second look after the last of them began to look finds it. A store that does not answer finds nothing.
        """
        own = None if self._unanswered else self._report()
        if own is None:
            self._seen = {}
            return None
        found = bounded(lambda: (self._judge(*own),), _LIMIT_S)
        if found is None:
            self._unanswered = True  # Another question would cost as much time, and another thread.
            return None
        return found[0]

    # What this rank says.

    def _report(self) -> tuple[int, Standstill] | None:
        """The rank, and its report; None while it may begin a call by itself."""
        recorder = self._recorder
        if not recorder.job:
            return None
        waits, begun, made = list[tuple[Statistics, CallRecord]](), dict[str, int](), list[CallRecord]()
        for entry in recorder.open:
            if not entry.aside:
                records = list(entry.recent)
                made += records
                waits += [(entry, one) for one in records if one.state == "started" and not one.ended]
                begun |= _begun(entry, records)
        if not waits or not _stands_still(recorder, [one for _, one in waits], made):
            return None
        place = waits[0][0].place
        return place.ranks[place.rank], Standstill(
            max(one.number for one in made), tuple(self._wait(entry, one) for entry, one in waits), begun
        )

    def _wait(self, entry: Statistics, record: CallRecord) -> AwaitedCall:
        call, ranks = record.call, entry.place.ranks
        activity = str(self._activity) if entry.place.label == self._label else ""
        text = ", ".join(part for part in (str(call), f"on {entry.place.label}", activity and f"in {activity}") if part)
        if call.kind not in POINT_TO_POINT:
            return AwaitedCall(_where(entry), call.sequence, ranks, text, call.numbers())
        return AwaitedCall(_where(entry), 0, tuple(ranks[one] for one in (call.root, call.source) if one >= 0), text)

    # What all ranks say.

    def _judge(self, rank: int, own: Standstill) -> CollectiveMismatchError | None:
        self._connection = self._connection or job_board(self._store)
        store = PrefixStore(f"bagua/waits/{self._recorder.job}", self._connection)
        store.set(str(rank), json.dumps([own, time.monotonic_ns()]))
        found = self._read(store, rank)
        same = {one: report for one, (report, beat) in found.items() if self._is_same(one, report, beat)}
        self._seen = found
        verdict = self._agreed(store, rank, own, {one: same[one] for one in stuck(same)})
        return None if verdict is None else _error(rank, verdict)

    def _is_same(self, rank: int, report: Standstill, beat: int) -> bool:
        before = self._seen.get(rank)
        # With the same number of calls the waits can only get fewer. Their words may differ between threads.
        return before is not None and before[1] != beat and _state(before[0]) == _state(report)

    def _read(self, store: Store, rank: int) -> dict[int, tuple[Standstill, int]]:
        """The reports of ``rank``, of all that it needs, of all that these need, and so on, with their beats."""
        found: dict[int, tuple[Standstill, int]] = {}
        wanted = {rank}
        while new := sorted(wanted - found.keys()):
            for one, text in zip(new, read_present(store, [str(one) for one in new]), strict=True):
                found[one] = (Standstill(-1, (), {}), 0) if text is None else _parsed(json.loads(text))
            wanted |= {peer for one in new for wait in found[one][0].waits for peer in wait.peers}
        return {one: spoken for one, spoken in found.items() if spoken[0].waits}

    def _agreed(
        self, store: Store, rank: int, own: Standstill, found: Mapping[int, Standstill]
    ) -> dict[int, str] | None:
        """What each rank of the circle waits in, which the first one that finds it says for all; None if there is none.

        They have time to read it, before this rank leaves, and looks lost. A rank that the first one did not know yet
        says what it found itself.
        """
        new: list[tuple[int, int, str]] = []
        if rank in found:
            new = [(one, report.number, report.waits[0].text) for one, report in found.items()]
        said = store.compare_set("verdict", "", json.dumps(new)) if new else read_present(store, ["verdict"])[0]
        verdict = json.loads(said or "[]")
        named = {(one, number) for one, number, _ in verdict}
        if (rank, own.number) in named:
            store.add("readers", 1)
        elif named.isdisjoint((one, number) for one, number, _ in new):  # None, or an earlier one of this job.
            return {one: text for one, _, text in new} or None
        else:
            verdict = new
        until = time.monotonic() + _OTHERS_S
        while store.add("readers", 0) < len(named) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return {one: text for one, _, text in verdict}


def _state(report: Standstill) -> tuple[int, int]:
    return report.number, len(report.waits)


def _begun(entry: Statistics, records: Sequence[CallRecord]) -> dict[str, int]:
    """How many collectives were begun on a communicator; empty if its latest calls do not tell."""
    numbers = [one.call.sequence for one in records if one.call.kind not in POINT_TO_POINT]
    return {_where(entry): numbers[-1] if numbers else 0} if numbers or not records else {}


def _where(entry: Statistics) -> str:
    return f"{entry.place.label} {list(entry.place.ranks)}"


def _stands_still(recorder: Recorder, waits: Iterable[CallRecord], made: Iterable[CallRecord]) -> bool:
    """Whether no thread of this rank begins a call before one of ``waits`` is over.

    One thread makes all calls, beside those that do what it gives them. It waits here, or for results of theirs.
    """
    living = {thread.ident for thread in threading.enumerate()}
    callers = {recorder.thread, *(record.thread for record in made if record.blocked_s is None)} & living
    waiters = {getattr(record, "waiter", record.thread) for record in waits}  # A synchronous call has none.
    return recorder.beside <= waiters and len(callers) <= 1 and (recorder.stands_still or bool(callers & waiters))


def _parsed(said: list[Any]) -> tuple[Standstill, int]:
    (number, waits, begun), beat = said
    calls = (AwaitedCall(where, count, tuple(peers), text, tuple(same)) for where, count, peers, text, same in waits)
    return Standstill(number, tuple(calls), begun), beat


def _error(rank: int, verdict: Mapping[int, str]) -> CollectiveMismatchError:
    others = [f"{text} on rank {one}" for one, text in sorted(verdict.items()) if one != rank]
    return CollectiveMismatchError(
        "ranks wait for each other in different calls",
        peers=sorted(verdict),
        expected=f"{verdict[rank]} on rank {rank}",
        seen="; ".join(others),
        advice=_ADVICE,
    )

"""What ranks say through the store: asked together, what rank 0 makes of it, who refuses, and their beats."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from bagua.comm.lifetime.background import beside, within
from bagua.comm.long_wait import LongWait
from bagua.comm.store.keys import (
    NoAnswerError,
    as_bytes,
    bounded,
    job_board,
    missing_keys,
    read_all,
    read_present,
    wait_for_keys,
)
from bagua.comm.store.serving import connect_store
from bagua.errors import CollectiveTimeoutError, PeerLostError, TransportUnavailableError

#: What to do about ranks that did not come.
_ADVICE = "Look at the output of those ranks first; did they start at all, and with the same BAGUA_TOKEN?"
#: Outcome of an attempt that a rank has left; otherwise it is the number of ranks that met.
_LEFT = "0"


def gather_values(
    store: dist.Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    timeout_s: float,
    look: Callable[[], None] | None = None,
    advice: str = _ADVICE,
) -> list[Any]:
    """What every member posted under ``topic``, in rank order. A barrier that names who is missing.

    Args:
        store: key-value store of the group.
        topic: used once per store.
        rank: this member's rank in the group.
        ranks: global rank of each member, for messages.
        value: anything JSON can hold.
        timeout_s: how long to wait for the others, in seconds.
        look: called again and again meanwhile; what it raises ends the wait.
        advice: sentence about members that do not come.

    Raises:
        CollectiveTimeoutError: with the missing ranks as ``peers``.
    """
    keys = [f"{topic}/{member}" for member in range(len(ranks))]
    waiting = _Waiting(topic, rank, ranks, timeout_s, advice)
    with meeting(topic, rank, ranks), bounded(store, timeout_s) as asked:
        asked.set(keys[rank], json.dumps(value))
        waiting.for_all(asked, keys, look)
        return [json.loads(text) for text in read_all(asked, keys)]


def come_together(store: dist.Store, topic: str, rank: int, ranks: Sequence[int], timeout_s: float) -> int:
    """Wait until all ranks have come to one attempt, and return its number: no earlier one has written to its keys.

    Each rank counts its attempts. One that was started anew, or tries again, counts others than those that wait. So
    each attempt has an outcome, which is written once: that all ranks met, or that one of them has left. Who finds that
    it was left goes on to the next attempt, where that rank is, or will be.

    Args:
        store: key-value store, as ``bounded`` gives it.
        topic: subject of the meeting.
        rank: this member's rank in the group.
        ranks: global rank of each member, for messages.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        CollectiveTimeoutError: with the missing ranks as ``peers``.
    """
    waiting = _Waiting(topic, rank, ranks, timeout_s, _ADVICE)
    while True:
        attempt = store.add(f"bagua/generation/{rank}", 1)
        earlier = attempt - 1
        while earlier and not store.check([_outcome_of(earlier)]):  # Others may wait for this rank there.
            store.compare_set(_outcome_of(earlier), "", _LEFT)
            earlier -= 1
        keys = [f"bagua/{attempt}/here/{member}" for member in range(len(ranks))]
        store.set(keys[rank], "")
        size = int(_meet_in(store, _outcome_of(attempt), keys, waiting))
        if rank < size:  # This rank was there: no other one writes its key.
            return attempt


def _outcome_of(attempt: int) -> str:
    return f"bagua/{attempt}/outcome"


def _meet_in(store: dist.Store, outcome: str, keys: list[str], waiting: _Waiting) -> bytes | str:
    """What is written as the outcome of an attempt, in the end."""
    try:
        waiting.for_all(store, keys, lambda: store.check([outcome]))
    except CollectiveTimeoutError:
        written = store.compare_set(outcome, "", _LEFT)
        if as_bytes(written) == _LEFT.encode():
            raise
        return written
    return store.compare_set(outcome, "", str(len(keys)))


def consult(
    store: dist.Store,
    topic: str,
    number: int,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    decide: Callable[[list[Any]], Any],
    timeout_s: float,
) -> Any:
    """What the group's rank 0 decides from the values that all members post.

    Args:
        store: key-value store of the group.
        topic: subject of the question, a part of its keys.
        number: 1 the first time, then one more each time; what the time before left in the store is deleted.
        rank: this member's rank in the group.
        ranks: global rank of each member, for messages.
        value: anything JSON can hold.
        decide: called on rank 0 with the values in rank order; returns anything JSON can hold.
            It must not raise: the others would wait for an answer.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        CollectiveTimeoutError: with the missing ranks as ``peers``.
    """
    keys = [f"{topic}{number}/{member}" for member in range(len(ranks))]
    answer = f"{topic}{number}/answer"
    waiting = _Waiting(topic, rank, ranks, timeout_s, _ADVICE)
    with meeting(topic, rank, ranks), bounded(store, timeout_s) as asked:
        asked.set(keys[rank], json.dumps(value))
        if rank == 0:
            waiting.for_all(asked, keys)
            for member in (*range(len(ranks)), "answer") if number > 1 else ():
                asked.delete_key(f"{topic}{number - 1}/{member}")  # Who is here has read that.
            asked.set(answer, json.dumps(decide([json.loads(text) for text in read_all(asked, keys)])))
        elif not wait_for_keys(asked, [answer], waiting.until):
            waiting.for_all(asked, keys)
            raise waiting.in_vain([ranks[0]])
        return json.loads(asked.get(answer))


class _Waiting:
    """A member waits for the others to come, from now on."""

    def __init__(self, topic: str, rank: int, ranks: Sequence[int], timeout_s: float, advice: str) -> None:
        self._topic, self._rank, self._ranks = topic, ranks[rank], ranks
        self._timeout_s, self._advice = timeout_s, advice
        self._wait = LongWait()
        self.until = time.monotonic() + timeout_s

    def for_all(self, store: dist.Store, keys: list[str], look: Callable[[], object] | None = None) -> None:
        """Wait until every member's key is there, or ``look()`` is true."""

        def missing() -> list[int]:
            return [self._ranks[member] for member in missing_keys(store, keys)]

        def tell() -> bool:
            over = look is not None and bool(look())
            if self._wait.is_over():
                self._wait.warn(self._rank, missing(), f"to come to {self._topic}")
            return over

        if not wait_for_keys(store, keys, self.until, tell):
            raise self.in_vain(missing())

    def in_vain(self, missing: list[int]) -> CollectiveTimeoutError:
        """The error to raise because ``missing`` did not come."""
        return CollectiveTimeoutError(
            f"{len(missing)} of {len(self._ranks)} ranks did not come",
            rank=self._rank,
            call=self._topic,
            peers=missing,
            elapsed_s=self._wait.waited_s(),
            timeout_s=self._timeout_s,
            advice=self._advice,
        )


@contextlib.contextmanager
def meeting(topic: str, rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Ranks meet at the store inside: if its host ends or is stopped, the error says so.

    Args:
        topic: subject of the meeting.
        rank: this member's rank in the group.
        ranks: global rank of each member.

    Raises:
        PeerLostError: the store is lost.
        CollectiveTimeoutError: the store exists, and does not answer.
    """
    started = time.monotonic()
    host = [first for first in ranks[:1] if first == 0]
    try:
        yield
    except NoAnswerError as error:
        raise CollectiveTimeoutError(
            f"the store through which the ranks meet does not answer rank {ranks[rank]}",
            rank=ranks[rank],
            call=topic,
            peers=host,
            elapsed_s=time.monotonic() - started,
            advice="It is hosted by rank 0 or by the launcher: was that process stopped, or its machine?",
        ) from error
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"rank {ranks[rank]} lost the store through which the ranks meet",
            rank=ranks[rank],
            call=topic,
            peers=host,
            advice="It is hosted by rank 0 or by the launcher: look at its output first.",
        ) from error


def refuse_together(
    store: dist.Store, topic: str, rank: int, ranks: Sequence[int], refusal: Exception | None, timeout_s: float
) -> None:
    """Raise on every member if one of them has a reason not to go on.

    Raises:
        TransportUnavailableError: naming the ranks that refuse and why.
    """
    answers = gather_values(store, topic, rank, ranks, str(refusal) if refusal else "", timeout_s)
    raise_refusals(answers, rank, ranks, refusal)


def raise_refusals(
    reasons: Sequence[str],
    rank: int,
    ranks: Sequence[int],
    refusal: Exception | None = None,
    *,
    problem: str = "",
    advice: str = "",
) -> None:
    """Raise on every member, which knows the reasons of all, if one of them has a reason not to go on.

    Args:
        reasons: reason of each member, empty where there is none.
        rank: this member's rank in the group.
        ranks: global rank of each member, for messages.
        refusal: error of this member, behind its own reason; None for that of the others.
        problem: verb and object of what they cannot do, for messages.
        advice: sentence that says what to do next.

    Raises:
        TransportUnavailableError: naming the ranks that refuse and why.
    """
    refusing = [(ranks[member], reason) for member, reason in enumerate(reasons) if reason]
    error = refusal
    if error is None and refusing:
        refused = "" if problem else " refused"
        told = "; ".join(f"rank {member}{refused}: {reason}" for member, reason in refusing)
        error = TransportUnavailableError(
            f"{problem}: {told}" if problem else told,
            rank=ranks[rank],
            peers=[member for member, _ in refusing],
            advice=advice,
        )
    if isinstance(error, TransportUnavailableError):
        error.agreed = tuple(ranks)
    if error is not None:
        raise error


class Beats:
    """The beats of a job: what each rank last said of itself, for everybody who reaches the store of the job.

    The keys do not depend on groups or restarts: the latest job of a store is the one that is seen.

    Args:
        store: any store of the job; its server is what counts.
        rank: number of the process that posts; -1 for one that only reads.

    Example:
        >>> from torch.distributed import HashStore
        >>> beats = Beats(HashStore(), rank=0)
        >>> beats.read()
        {}
        >>> beats.post_now({"world_size": 1})
        >>> beats.read()
        {0: {'world_size': 1}}
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._busy = False

    def post(self, beat: dict[str, Any], then: Callable[[], None]) -> None:
        """Post ``beat`` beside what the caller does; drop it if the one before has not arrived. Raises nothing.

        Args:
            beat: anything JSON can hold.
            then: is called when it is there, in the thread that posted it.
        """
        if self._busy:
            return
        self._busy = True
        if not beside(lambda: self._post(beat, then)):
            self._busy = False  # This beat is lost; a thread may be found for the next one.

    def _post(self, beat: dict[str, Any], then: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(Exception):
                self.post_now(beat)
                then()
        finally:
            self._busy = False

    def post_now(self, beat: dict[str, Any]) -> None:
        """Post ``beat`` and wait until it is there.

        Args:
            beat: anything JSON can hold, with ``world_size``.
        """
        self._connection.set(f"bagua/beat/{self._rank}", json.dumps(beat))

    def read(self) -> dict[int, dict[str, Any]]:
        """The last beat of each rank that has posted one."""
        store = self._connection
        first = self._read_some(store, [0])
        if not first:
            return {}
        return {**first, **self._read_some(store, range(1, int(first[0]["world_size"])))}

    def read_within(self, limit_s: float) -> dict[int, dict[str, Any]]:
        """``read`` for somebody who has no thread to lose: a store whose host was stopped never answers.

        Args:
            limit_s: seconds that it may take.

        Raises:
            TimeoutError: it takes longer.
        """
        return within(limit_s, self.read)

    def _read_some(self, store: Store, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        texts = read_present(store, [f"bagua/beat/{rank}" for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True) if text is not None}

    @functools.cached_property
    def _connection(self) -> Store:
        """Made when it is needed first."""
        return job_board(self._store)


def connect_beats(host: str, port: int, limit_s: float = 10.0) -> Beats:
    """The beats of a running job, for reading.

    Args:
        host: address of the store, the ``MASTER_ADDR`` of the job.
        port: port of the store, the ``MASTER_PORT`` of the job.
        limit_s: seconds that it may take.

    Raises:
        RuntimeError: who answers is no store, or nothing answers.
        TimeoutError: it takes longer.
    """
    return Beats(connect_store(port, limit_s, host), -1)

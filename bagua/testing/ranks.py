"""Pools of ranks run one function on n ranks, and say how each of them ended; here with threads of this process."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import bagua.comm
from bagua.comm import FaultHook, RankKilled, Store, become_rank, inject_fault, thread_store
from bagua.errors import CommunicationError, CommunicatorClosedError, ConfigurationError, PeerLostError

__all__ = ["Outcome", "RankDiedError", "RankHangsError", "RankPool", "ThreadRanks", "die", "fall_silent"]


class RankDiedError(RuntimeError):
    """A rank ended without returning and without raising."""


class RankHangsError(RuntimeError):
    """A rank was still busy at the deadline; the message holds the stacks of its threads."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: number of the rank.
        value: value that the function returned.
        error: error that it raised, or ``RankDiedError``, or ``RankHangsError``; None if it returned.
        trace: the traceback as text; empty if nothing was raised.
        seconds: from the start of the function to its end; 0 where it did not end.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """One run, as every rank of it must know it.

    Attributes:
        function: function that each rank calls.
        arguments: arguments of the function, the same on all ranks.
        size: number of ranks.
        backend: backend that ``init_process_group`` gets; None where ranks do not initialize at all.
        nodes: index of the host of each rank, or None to let the ranks find out.
        timeout_s: default deadline of the collectives, in seconds.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    size: int
    backend: str | None
    nodes: tuple[int, ...] | None
    timeout_s: float

    def join(self, rank: int, store: Store) -> None:
        """Initialize the default group of a rank."""
        bagua.comm.init_process_group(
            backend=self.backend,
            timeout=timedelta(seconds=self.timeout_s),
            store=store,
            rank=rank,
            world_size=self.size,
            _nodes=self.nodes,
        )


def leave(rank: int) -> Outcome | None:
    """Leave the default group; what went wrong, if anything."""
    try:
        if bagua.comm.is_initialized():
            bagua.comm.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  # it goes to the pool, whatever it is
        return Outcome(rank, None, error, traceback.format_exc())
    return None


class ThisRank(NamedTuple):
    """What the function running on a rank can do to its own rank.

    Attributes:
        rank: its number.
        die: ends it at once.
        fall_silent: has it stay without a word.
        report: sends an object to the pool; None where the ranks are threads, which have the pool's objects.
        port: port of the store that the pool serves; 0 for threads.
    """

    rank: int
    die: Callable[[], None]
    fall_silent: Callable[[], None]
    report: Callable[[object], None] | None = None
    port: int = 0


this_rank: ContextVar[ThisRank] = ContextVar("bagua.testing.this_rank")


def die() -> None:
    """End the calling rank at once, as ``kill -9`` would. For functions that run on a pool."""
    this_rank.get().die()


def fall_silent() -> None:
    """Keep the calling rank alive but silent until the run is over, as a stopped process is."""
    this_rank.get().fall_silent()


def nodes_of(hosts: Sequence[int]) -> tuple[int, ...]:
    """Index of the host of each rank, for hosts with the given numbers of ranks.

    Example:
        >>> nodes_of([2, 1])
        (0, 0, 1)
    """
    return tuple(node for node, count in enumerate(hosts) for _ in range(count))


class RankPool(ABC):
    """Runs one function on several ranks that have a default process group.

    Args:
        size: number of ranks of a run that does not say otherwise, and the most there can be.
        backend: backend that ``init_process_group`` gets. None: the ranks do not initialize.
        timeout_s: default deadline of collectives, in seconds.
        deadline_s: a run takes at most so many seconds; then it ends with ``RankHangsError``.
    """

    def __init__(self, size: int, *, backend: str | None, timeout_s: float = 20.0, deadline_s: float = 240.0) -> None:
        self.size = size
        self.backend = backend
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        hosts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank, and return what each returned.

        Args:
            function: it finds its process group with ``bagua.comm.get_default_group()``.
            arguments: the same for all ranks; not to be modified.
            size: number of ranks.
            hosts: number of ranks on each host, as the ranks are told; None for the truth.
            timeout_s: default deadline of collectives, in seconds.
            deadline_s: longest time of the whole run, in seconds.

        Raises:
            Exception: a rank raised it: of several the likeliest cause, so that the ``PeerLostError`` of survivors does
                not hide why they lost a peer.
        """
        __tracebackhide__ = True  # pytest shows what failed, not how it got here
        outcomes = self.outcomes(
            function, *arguments, size=size, hosts=hosts, timeout_s=timeout_s, deadline_s=deadline_s
        )
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            ordered = sorted(failed, key=_distance)
            error = ordered[0].error
            assert error is not None
            lines = [f"rank {ordered[0].rank} failed:\n{ordered[0].trace}"]
            lines += [f"rank {other.rank}: {type(other.error).__name__}: {other.error}" for other in ordered[1:]]
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("\n".join(lines))
            raise error
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        hosts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        """Like ``run``, but say how each rank ended instead of raising."""
        size = (self.size if hosts is None else sum(hosts)) if size is None else size
        if not 1 <= size <= self.size or (hosts is not None and sum(hosts) != size):
            raise ConfigurationError(
                "the pool cannot run so many ranks",
                argument="size" if hosts is None else "hosts",
                expected=f"1 to {self.size} ranks, as many as the hosts hold",
                seen=f"{size} ranks on hosts {hosts}",
            )
        nodes = None if hosts is None else nodes_of(hosts)
        job = Job(function, arguments, size, self.backend, nodes, timeout_s or self.timeout_s)
        return self._outcomes(job, deadline_s or self.deadline_s)

    @abstractmethod
    def _outcomes(self, job: Job, deadline_s: float) -> list[Outcome]:
        """Run ``job`` and leave nothing behind."""


#: Kinds of errors, the farther from the cause the later: errors of survivors say little, a death much.
_KINDS = (RankDiedError, RankHangsError, CommunicationError, PeerLostError, CommunicatorClosedError)


def _distance(outcome: Outcome) -> int:
    """How far this error is from the cause."""
    return max((place for place, kind in enumerate(_KINDS, 1) if isinstance(outcome.error, kind)), default=0)


#: How long the ranks of a run that failed may take to end.
_FAREWELL_S = 5.0


class ThreadRanks(RankPool):
    """A pool of ranks that are threads, each with a default process group of its own.

    Args:
        size: the most ranks of a run.
        backend: ``threads``, or a registered transport that connects threads of one process.
        timeout_s: default deadline of collectives, in seconds.
        deadline_s: longest time of a run, in seconds.
        fault: called at each step of each collective of each rank; it raises ``RankKilled`` to
            kill that rank there, or delays it. See ``bagua.comm.transports.threads``.

    Example:
        >>> import torch, bagua.comm
        >>> def total():
        ...     tensor = torch.tensor([float(bagua.comm.get_rank())])
        ...     bagua.comm.allreduce(tensor)
        ...     return tensor.item()
        >>> ThreadRanks(3).run(total)
        [3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str | None = "threads",
        timeout_s: float = 20.0,
        deadline_s: float = 240.0,
        fault: FaultHook | None = None,
    ) -> None:
        super().__init__(size, backend=backend, timeout_s=timeout_s, deadline_s=deadline_s)
        self._fault = fault

    def _outcomes(self, job: Job, deadline_s: float) -> list[Outcome]:
        return _ThreadRun(job, self._fault).outcomes(time.monotonic() + deadline_s)


class _ThreadRun:
    """One job and its threads."""

    def __init__(self, job: Job, fault: FaultHook | None) -> None:
        self._job = job
        self._fault = fault
        self._store = thread_store()
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._outcomes: dict[int, Outcome] = {}
        self._abort: dict[int, Callable[[str], None]] = {}
        self._threads = [
            threading.Thread(target=Context().run, args=(self._rank, rank), name=f"rank {rank}", daemon=True)
            for rank in range(job.size)
        ]

    def outcomes(self, deadline: float) -> list[Outcome]:
        for thread in self._threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._outcomes) == self._job.size, timeout=deadline - time.monotonic())
            hanging = [rank for rank in range(self._job.size) if rank not in self._outcomes]
            stacks = {rank: self._stack(rank) for rank in hanging}
            outcomes = {rank: _hangs(rank, stack) for rank, stack in stacks.items()} | self._outcomes
        self._over.set()
        for rank in hanging:
            if rank in self._abort:
                self._abort[rank]("the run of the pool took too long")
        self._join(outcomes)
        return [outcomes[rank] for rank in range(self._job.size)]

    def _join(self, outcomes: dict[int, Outcome]) -> None:
        """Wait for the threads; those that stay although they had ended have not ended."""
        until = time.monotonic() + _FAREWELL_S
        for rank, thread in enumerate(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
            if outcomes[rank].error is None:
                alive = thread.is_alive()
                outcomes[rank] = _hangs(rank, self._stack(rank)) if alive else self._outcomes[rank]

    def _stack(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads[rank].ident or -1)  # noqa: SLF001  # there is no other way
        return "" if frame is None else "".join(traceback.format_stack(frame))

    # On the threads.

    def _rank(self, rank: int) -> None:
        this_rank.set(ThisRank(rank, _die, functools.partial(self._fall_silent, rank)))
        become_rank()
        job, started = self._job, time.monotonic()
        try:
            if job.backend is not None:
                with inject_fault(self._fault):
                    job.join(rank, self._store)
                self._abort[rank] = bagua.comm.get_default_group().abort
            started = time.monotonic()
            value = job.function(*job.arguments)
        except RankKilled:
            self.report(Outcome(rank, error=RankDiedError(f"rank {rank} died")))
        except BaseException as error:  # noqa: BLE001  # it goes to the pool, whatever it is
            spent_s = time.monotonic() - started
            self.report(Outcome(rank, None, error, traceback.format_exc(), spent_s))
        else:
            self.report(Outcome(rank, value, seconds=time.monotonic() - started))
            self._over.wait()  # No rank leaves a group that others still use.
        if failure := leave(rank):
            self.report(failure)

    def report(self, outcome: Outcome) -> None:
        with self._changed:
            before = self._outcomes.get(outcome.rank)
            if before is None or before.error is None:
                self._outcomes[outcome.rank] = outcome
            self._changed.notify_all()

    def _fall_silent(self, rank: int) -> None:
        self.report(Outcome(rank, error=RankHangsError(f"rank {rank} fell silent")))
        self._over.wait()
        _die()


def _die() -> None:
    raise RankKilled


def _hangs(rank: int, stack: str) -> Outcome:
    return Outcome(rank, error=RankHangsError(f"rank {rank} was still busy at the deadline:\n{stack}"))

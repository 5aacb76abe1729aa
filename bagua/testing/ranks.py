"""What all pools of ranks have in common: run one function on n ranks, and say how each of them ended."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import bagua.comm
from bagua.comm import Store
from bagua.errors import CommunicationError, CommunicatorClosedError, ConfigurationError, PeerLostError


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
            raise _with_account(failed)
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


def _with_account(failed: list[Outcome]) -> BaseException:
    """The error nearest to the cause; how all ranks ended is noted on it."""
    ordered = sorted(failed, key=_distance)
    error = ordered[0].error
    assert error is not None
    lines = [f"rank {ordered[0].rank} failed:\n{ordered[0].trace}"]
    lines += [f"rank {other.rank}: {type(other.error).__name__}: {other.error}" for other in ordered[1:]]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("\n".join(lines))
    return error

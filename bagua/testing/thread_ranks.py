"""Ranks that are threads of this process: they start in milliseconds and can be looked into."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import Context

import bagua.comm
from bagua.comm import FaultHook, RankKilled, become_rank, inject_fault, thread_store
from bagua.testing.ranks import Job, Outcome, RankDiedError, RankHangsError, RankPool, ThisRank, leave, this_rank

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
            self._changed.wait_for(self._all_ended, timeout=deadline - time.monotonic())
            hanging = [rank for rank in range(self._job.size) if rank not in self._outcomes]
            stacks = {rank: self._stack(rank) for rank in hanging}
            outcomes = {rank: _hangs(rank, stack) for rank, stack in stacks.items()} | self._outcomes
        self._over.set()
        for rank in hanging:
            if rank in self._abort:
                self._abort[rank]("the run of the pool took too long")
        self._join(outcomes)
        return [outcomes[rank] for rank in range(self._job.size)]

    def _all_ended(self) -> bool:
        return len(self._outcomes) == self._job.size

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

"""Ranks that are processes of this machine.

A fork server imports torch and bagua once per test session. Every run then gets
fresh processes, forked from it in milliseconds: a rank may be killed, its memory
ruined, its environment changed, and the next run knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Literal, NoReturn

import torch

from bagua import env
from bagua.comm import connect_store, serve_store
from bagua.errors import ConfigurationError, how_it_ended
from bagua.testing.ranks import Job, Outcome, RankDiedError, RankHangsError, RankPool, ThisRank, leave, this_rank

#: What the pool says to a rank.
END, STACKS = b"end", b"stacks"
#: A busy machine may take so long to connect to the pool's store; collectives have deadlines of their own.
_CONNECT_S = 30.0
#: How long a process may take to tell its stacks, and to end after its last word.
_ANSWER_S = 2.0
_FAREWELL_S = 10.0
#: Ranks are looked after so often at least.
_LOOK_S = 60.0
#: What a fork server imports. Tests name hypothesis and pytest at their top, every optimizer of torch imports
#: torch._dynamo at its first step, and models are trained with bagua.parallel: a rank without them takes up to three
#: seconds longer. The algorithm brings the codecs with it.
PRELOADED = [__name__, "hypothesis", "pytest", "torch._dynamo", "bagua.parallel", "bagua.algorithms.local.diloco"]


class ProcessRanks(RankPool):
    """A pool of ranks that are processes, each with a default process group.

    Args:
        size: the most ranks of a run.
        backend: backend that ``init_process_group`` gets. None: the ranks do not initialize.
        environment: variables that bagua finds in each rank, ``{"BAGUA_DEBUG": "1"}`` for example.
        modules: names of modules that each rank imports first, to register a backend for example.
        timeout_s: default deadline of collectives, in seconds.
        deadline_s: longest time of a run, in seconds.

    The function and its arguments travel by pickle, so the function is one at the top
    level of a module that the ranks can import. A script that makes a pool needs the
    ``if __name__ == "__main__"`` guard, as for all of ``multiprocessing``.

    Example:
        >>> import bagua.comm
        >>> ProcessRanks(2).run(bagua.comm.get_rank)
        [0, 1]
    """

    #: How processes are started, whether warnings are errors there, and how long others go on when one has failed.
    method: ClassVar[Literal["fork", "spawn", "forkserver"]] = "forkserver"
    strict: ClassVar[bool] = True
    grace_s: ClassVar[float] = math.inf

    def __init__(
        self,
        size: int,
        *,
        backend: str | None = "gloo",
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        timeout_s: float = 20.0,
        deadline_s: float = 240.0,
    ) -> None:
        super().__init__(size, backend=backend, timeout_s=timeout_s, deadline_s=deadline_s)
        self._environment = dict(environment or {})
        self._modules = tuple(modules)
        #: Called with what a rank reports while it runs.
        self.take_report: Callable[[object], object] = lambda _: None
        self._context: Any = multiprocessing.get_context(self.method)
        self._context.set_forkserver_preload(PRELOADED)

    def _outcomes(self, job: Job, deadline_s: float) -> list[Outcome]:
        deadline = time.monotonic() + deadline_s
        job_bytes = _pickled(job)
        store, port = serve_store()
        ranks: list[_Rank] = []
        try:
            for number in range(job.size):
                place = RankAddress(number, port, self._environment, self._modules, self.strict)
                ranks.append(self._start(place, job_bytes))
            self._listen(ranks, deadline, lambda rank: rank.outcome is None)
            for rank in ranks:
                rank.say(END)
            self._listen(ranks, time.monotonic() + _FAREWELL_S, lambda rank: rank.finishing)
            return [rank.outcome for rank in ranks if rank.outcome is not None]
        finally:
            _end(ranks)
            del store  # The ranks needed it until now.

    def _start(self, place: RankAddress, job_bytes: bytes) -> _Rank:
        here, there = self._context.Pipe()
        process = self._context.Process(target=rank_main, args=(there, place), name=f"rank {place.rank}", daemon=True)
        process.start()
        there.close()  # So that the end of the process is the end of its messages.
        rank = _Rank(place.rank, process, here, self.take_report)
        rank.say(job_bytes)
        return rank

    def _listen(self, ranks: Sequence[_Rank], deadline: float, awaited: Callable[[_Rank], bool]) -> None:
        """Hear all ranks until none is awaited any more; give up those that still are at the deadline."""
        while waiting := [rank for rank in ranks if awaited(rank)]:
            left_s = deadline - time.monotonic()
            ready = wait([rank.messages for rank in waiting], min(max(0.0, left_s), _LOOK_S))
            for rank in waiting:
                if rank.messages in ready:
                    rank.hear()
                    if rank.outcome is not None and rank.outcome.error is not None:
                        deadline = min(deadline, time.monotonic() + self.grace_s)
            if not ready and left_s <= _LOOK_S:
                for rank in waiting:
                    rank.give_up()
                return


@dataclass(eq=False)
class _Rank:
    """A process, as the pool sees it."""

    rank: int
    process: BaseProcess
    messages: Connection
    take_report: Callable[[object], object]
    outcome: Outcome | None = None
    ended: bool = False

    @property
    def finishing(self) -> bool:
        """Whether it has returned and has yet to leave its group and end."""
        return self.outcome is not None and self.outcome.error is None and not self.ended

    def say(self, command: bytes) -> None:
        with contextlib.suppress(OSError):  # Its end is noticed where it is listened to.
            self.messages.send_bytes(command)

    def hear(self) -> str:
        """Take one message. Returns stacks if that is what was sent."""
        try:
            message = pickle.loads(self.messages.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_ANSWER_S)
            self.ended = True
            if self.outcome is None or (self.outcome.error is None and self.process.exitcode != 0):
                died = RankDiedError(f"rank {self.rank} {how_it_ended(self.process.exitcode)}")
                self.outcome = Outcome(self.rank, error=died)
            return ""
        if isinstance(message, str):
            return message
        if isinstance(message, Report):
            self.take_report(message.value)
        elif self.outcome is None or (self.outcome.error is None and message is not None):
            self.outcome = message
        return ""

    def give_up(self) -> None:
        """Ask where it hangs, and note that as its end."""
        self.say(STACKS)
        until, stacks = time.monotonic() + _ANSWER_S, ""
        while not self.ended and not stacks and self.messages.poll(max(0.0, until - time.monotonic())):
            stacks = self.hear()
        if self.outcome is None or self.finishing:
            where = stacks or "It does not say where."
            hangs = RankHangsError(f"rank {self.rank} was still busy at the deadline.\n{where}")
            self.outcome = Outcome(self.rank, error=hangs)


def _end(ranks: Sequence[_Rank]) -> None:
    """Leave no process, whatever has happened. A stopped one is killed as well."""
    for rank in ranks:
        if not rank.ended:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(_FAREWELL_S)
        rank.process.close()
        rank.messages.close()


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as problem:  # pickle lets anything through
        raise ConfigurationError(
            "a job for processes must survive pickling",
            argument="function, arguments",
            expected="a function at the top level of a module, and arguments that pickle",
            seen=repr(job.function),
            advice="Move the function to the top level and pass it what it needs.",
        ) from problem


# In the process of a rank, from its first line to its last.


@dataclass(frozen=True)
class RankAddress:
    """What one process must know besides the job.

    Attributes:
        rank: its rank.
        port: port of the store that the pool serves.
        environment: variables that bagua must find in its environment.
        modules: imported first, to register backends for example.
        strict: True if warnings are errors.
    """

    rank: int
    port: int
    environment: dict[str, str]
    modules: Sequence[str] = ()
    strict: bool = True


@dataclass(frozen=True)
class Report:
    """What a rank reports while it runs."""

    value: object


class _Line:
    """The connection to the pool. Its end, or that of the pool's process, is the end of this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._main = threading.get_ident()
        self._sending = threading.Lock()
        self.commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="bagua pool", daemon=True).start()

    def _listen(self) -> NoReturn:
        parent = multiprocessing.parent_process()
        ends: list[Any] = [self._connection, *([] if parent is None else [parent.sentinel])]
        with contextlib.suppress(EOFError, OSError):
            while self._connection in wait(ends):
                command = self._connection.recv_bytes()
                if command == STACKS:
                    self.send(_stacks(self._main))
                else:
                    self.commands.put(command)
        os._exit(1)

    def send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(message))

    def tell(self, value: object) -> None:
        self.send(Report(value))

    def fall_silent(self, rank: int) -> None:
        self.send(Outcome(rank, error=RankHangsError(f"rank {rank} fell silent")))
        os.kill(os.getpid(), signal.SIGSTOP)

    def report(self, outcome: Outcome) -> None:
        """Send ``outcome``; what does not survive pickling travels as text."""
        try:
            pickle.loads(pickle.dumps(outcome))
        except Exception as problem:  # noqa: BLE001  # pickle lets anything through
            text = f"rank {outcome.rank} cannot send {outcome.error or outcome.value!r}: {problem}"
            outcome = Outcome(outcome.rank, None, RuntimeError(text), outcome.trace, outcome.seconds)
        self.send(outcome)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stacks(main: int) -> str:
    frames = sys._current_frames()  # noqa: SLF001  # there is no other way
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    ordered = sorted(frames, key=lambda ident: ident != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in ordered
    )


def rank_main(connection: Connection, place: RankAddress) -> None:
    """Run the job that the pool sends, report how it went, and end with it.

    Args:
        connection: connection to the pool, which sends the pickled job first.
        place: address of this rank.
    """
    gc.freeze()  # Walking through all that was imported, a collection would copy the fork server's memory.
    line = _Line(connection)
    job_bytes = connection.recv_bytes()
    line.listen()
    this_rank.set(ThisRank(place.rank, _die, functools.partial(line.fall_silent, place.rank), line.tell, place.port))
    torch.set_num_threads(1)
    env.overlay(place.environment)
    if place.strict:
        warnings.simplefilter("error")
    started = time.monotonic()
    try:
        for module in place.modules:
            importlib.import_module(module)
        job: Job = pickle.loads(job_bytes)
        if job.backend is not None:
            job.join(place.rank, connect_store(place.port, max(job.timeout_s, _CONNECT_S)))
        started = time.monotonic()
        value = job.function(*job.arguments)
    except BaseException as error:  # noqa: BLE001  # it goes to the pool, whatever it is
        spent_s = time.monotonic() - started
        line.report(Outcome(place.rank, None, error, traceback.format_exc(), spent_s))
    else:
        line.report(Outcome(place.rank, value, seconds=time.monotonic() - started))
        line.commands.get()  # No rank leaves a group that others still use.
    line.send(leave(place.rank))

"""What a process that is a rank does from its first line to its last. See ``process_ranks``."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from bagua import env
from bagua.comm import connect_store
from bagua.testing.ranks import Job, Outcome, RankHangsError, ThisRank, leave, this_rank

#: What the pool says to a rank.
END, STACKS = b"end", b"stacks"
#: A busy machine may take so long to connect to the pool's store; collectives have deadlines of their own.
_CONNECT_S = 30.0


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

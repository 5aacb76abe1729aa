"""Run one function on a few processes of this machine, and leave none of them behind."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import torch

from bagua import comm, env
from bagua.cli.interrupts import held_back
from bagua.cli.lab.network import INTERFACE, Host, Network, enter
from bagua.comm import connect_store, serve_store
from bagua.errors import CommunicationError, how_it_ended

# After one rank has failed the others have this long to notice and to say so themselves.
GRACE_S = 10.0
STOP_S = 3.0
PORT_ON_HOST = 29500  # Nobody else is there.
#: Hosts of a lab have no names, of which torch would warn.
NAMELESS = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Rank:
    """What a started function knows about its own process.

    Args:
        rank: its number, from 0.
        world_size: how many processes were started.
        port: port of the store for the rendezvous. The launching process keeps it; on the hosts of a lab, rank 0.
        report: sends any picklable object to the launching process.
        local_world_size: how many of the processes share its host.
        host: host of a lab on which it lives; None on the machine itself.
        first_address: address of the host of rank 0 in a lab.
    """

    rank: int
    world_size: int
    port: int
    report: Callable[[object], None]
    local_world_size: int
    host: Host | None = None
    first_address: str = ""

    def join(self, backend: str | None, timeout_s: float) -> None:
        """Initialize bagua's process group with the other started processes."""
        comm.init_process_group(
            backend=backend,
            timeout=timedelta(seconds=timeout_s),
            store=self._store(timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
        )

    def _store(self, timeout_s: float) -> comm.Store:
        if self.host is None:
            return connect_store(self.port, timeout_s)
        if self.rank == 0:
            return serve_store(self.first_address, self.port)[0]
        return connect_store(self.port, timeout_s, self.first_address)

    def move_in(self) -> None:
        """Move this process to its host."""
        if self.host is not None:
            enter(self.host.namespace)
            env.overlay({"GLOO_SOCKET_IFNAME": INTERFACE})


@dataclass(frozen=True)
class Failure:
    """How one rank ended, if not by returning.

    Args:
        rank: number of the rank.
        error: error that it raised, or None when the process died without a word.
        trace: the traceback as text; empty when it died.
        exit_code: exit code of the process, negative for a signal, when it died.
    """

    rank: int
    error: Exception | None = None
    trace: str = ""
    exit_code: int | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} failed: {type(self.error).__name__}: {self.error}"
        return f"rank {self.rank} {how_it_ended(self.exit_code)}"


class RanksFailedError(RuntimeError):
    """At least one started process did not return.

    Args:
        failures: failure of each rank that failed by itself, in the order in which they were seen.
    """

    def __init__(self, failures: list[Failure]) -> None:
        # A failure of communication only says that another rank failed.
        self.failures = sorted(failures, key=lambda failure: isinstance(failure.error, CommunicationError))
        super().__init__("; ".join(map(str, self.failures)))


@dataclass(frozen=True)
class Returned:
    """A rank's last message: what its function returned."""

    value: Any


class Started(NamedTuple):
    """A running process, as the launching process sees it."""

    rank: int
    process: BaseProcess
    messages: Connection

    def receive(self) -> object:
        """The next message, or the failure if the process ended without a last one."""
        try:
            return self.messages.recv()
        except (EOFError, OSError):  # The second in the middle of a message.
            self.process.join(STOP_S)
            return Failure(self.rank, exit_code=self.process.exitcode)


def gather(ranks: Sequence[Started], on_report: Callable[[object], None]) -> list[Any]:
    """Take the messages of all ranks until each has returned or failed; what they returned."""
    values: dict[int, Any] = {}
    failures: list[Failure] = []
    waiting: dict[Any, Started] = {rank.messages: rank for rank in ranks}
    give_up_at_s = float("inf")
    while waiting and (left_s := give_up_at_s - time.monotonic()) > 0:
        for messages in wait(list(waiting), timeout=min(left_s, 60.0)):
            rank = waiting[messages]
            message = rank.receive()
            if isinstance(message, Returned):
                values[rank.rank] = message.value
            elif isinstance(message, Failure):
                failures.append(message)
                give_up_at_s = min(give_up_at_s, time.monotonic() + GRACE_S)
            else:
                on_report(message)
                continue
            del waiting[messages]
    if failures:
        raise RanksFailedError(failures)
    return [values[rank.rank] for rank in ranks]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...] = (),
    on_report: Callable[[object], None] = lambda _: None,
    network: Network | None = None,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``world_size`` new processes with one compute thread each.

    Args:
        function: found by its name in the new processes, so defined at the top of a module. Its first argument is a
            :class:`Rank`.
        world_size: how many processes to start.
        arguments: picklable, the same for all ranks.
        on_report: called here with each object that a rank reports.
        network: hosts on which the processes live, as many on each, neighbours together; None for this machine itself.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        RanksFailedError: a rank raised, died, or was ended because another one did. No process is left.
        KeyboardInterrupt: as usual; no process is left either.
    """
    store, port = serve_store()
    ranks: list[Started] = []
    patience_s = 0.0
    try:
        # Ranks inherit this and never see Ctrl-C: a terminal sends it to all, and only this process must answer.
        with held_back(signal.SIGINT), env.with_defaults(NAMELESS if network is not None else {}):
            for rank in range(world_size):
                ranks.append(start(function, rank, world_size, port, arguments, network))  # noqa: PERF401  # seen by finally
        values = gather(ranks, on_report)
        patience_s = STOP_S
    finally:
        with held_back(signal.SIGINT):
            stop([rank.process for rank in ranks], patience_s)
        del store  # the ranks needed it until now
    return values


def take_place(
    number: int, world_size: int, port: int, report: Callable[[object], None], network: Network | None
) -> Rank:
    """One of the processes to be started, with its place on the network."""
    if network is None:
        return Rank(number, world_size, port, report, world_size)
    on_each = world_size // len(network.hosts)
    host, first = network.hosts[number // on_each], network.hosts[0]
    return Rank(number, world_size, PORT_ON_HOST, report, on_each, host, first.address)


def start(
    function: Callable[..., Any],
    number: int,
    world_size: int,
    port: int,
    arguments: tuple[Any, ...],
    network: Network | None,
) -> Started:
    """Start one process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    rank = take_place(number, world_size, port, sender.send, network)
    process = context.Process(
        target=run_one, args=(function, rank, arguments), name=f"bagua rank {number}", daemon=True
    )
    process.start()
    sender.close()  # so that the end of the process is the end of the messages
    return Started(number, process, receiver)


def run_one(function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> None:
    """What a started process does from its first line to its last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # threads of libraries may have lifted what held_back did
    threading.Thread(target=end_with_parent, name="bagua end with parent", daemon=True).start()
    torch.set_num_threads(1)
    try:
        rank.move_in()
        answer: object = Returned(function(rank, *arguments))
    except Exception as error:  # noqa: BLE001  # it goes to the launching process, whatever it is
        answer = Failure(rank.rank, error, traceback.format_exc())
    rank.report(fit_to_send(answer, rank.rank))


def fit_to_send(answer: object, rank: int) -> object:
    """``answer`` itself, or a failure that says that it does not survive pickle (many exceptions do not)."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(answer))
    except Exception as error:  # noqa: BLE001  # pickle lets anything through
        trace = answer.trace if isinstance(answer, Failure) else traceback.format_exc()
        return Failure(rank, RuntimeError(f"{answer!r} cannot be sent to the launching process: {error}"), trace)
    return answer


def end_with_parent() -> NoReturn:
    """End this process at once when the launching process is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def stop(processes: list[BaseProcess], patience_s: float) -> None:
    """End all processes: wait for a while, then politely, then not."""
    end_s = time.monotonic() + patience_s
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                end(process)
        for process in processes:
            process.join(STOP_S)

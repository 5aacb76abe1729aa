"""Run one function on a few processes of this machine, and leave none of them behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bagua import comm, env
from bagua.cli.interrupts import held_back
from bagua.cli.lab.network import INTERFACE, Host, Network, enter
from bagua.comm import connect_store, serve_store
from bagua.errors import CommunicationError
from bagua.testing import Outcome, ProcessRanks, RankDiedError, RankHangsError, this_rank

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
        first_address: address of the host of rank 0 in a lab; that of this machine for itself.
    """

    rank: int
    world_size: int
    port: int
    report: Callable[[object], None]
    local_world_size: int
    host: Host | None = None
    first_address: str = "127.0.0.1"

    def join(self, backend: str | None, timeout_s: float) -> None:
        """Initialize bagua's process group with the other started processes."""
        if self.host is not None and self.rank == 0:
            store, _ = serve_store(self.first_address, self.port)
        else:
            store = connect_store(self.port, timeout_s, self.first_address)
        comm.init_process_group(
            backend=backend,
            timeout=timedelta(seconds=timeout_s),
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
        )


class RanksFailedError(RuntimeError):
    """At least one started process did not return.

    Args:
        failures: outcome of each rank that failed by itself.
    """

    def __init__(self, failures: Sequence[Outcome]) -> None:
        # A failure of communication only says that another rank failed.
        self.failures = sorted(failures, key=lambda one: (isinstance(one.error, CommunicationError), one.seconds))
        self.descriptions = [_described(failure) for failure in self.failures]
        super().__init__("; ".join(self.descriptions))


def _described(failure: Outcome) -> str:
    error = failure.error
    if isinstance(error, RankDiedError):
        return str(error)
    return f"rank {failure.rank} failed: {type(error).__name__}: {error}"


class CommandRanks(ProcessRanks):
    """The processes of a command, which starts them anew: what they print, and how long they take, is as at a user's.

    Args:
        size: how many.
        on_report: called with each object that a rank reports.
    """

    method = "spawn"
    strict = False
    #: After one rank has failed the others have this long to notice and to say so themselves.
    grace_s = 10.0

    def __init__(self, size: int, on_report: Callable[[object], None]) -> None:
        super().__init__(size, backend=None, deadline_s=float("inf"))
        self.take_report = on_report

    def _start(self, *arguments: Any) -> Any:
        # Ranks inherit this and never see Ctrl-C: a terminal sends it to all, and only this process must answer.
        with held_back(signal.SIGINT):
            return super()._start(*arguments)


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
    hosts = () if network is None else tuple(network.hosts)
    with env.with_defaults(NAMELESS if hosts else {}):
        outcomes = CommandRanks(world_size, on_report).outcomes(_take_part, function, world_size, hosts, arguments)
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    if failures:
        # Those that went on until they were ended have not failed by themselves.
        raise RanksFailedError([one for one in failures if not isinstance(one.error, RankHangsError)] or failures)
    return [outcome.value for outcome in outcomes]


def _take_part(function: Callable[..., Any], world_size: int, hosts: Sequence[Host], arguments: tuple[Any, ...]) -> Any:
    """What a started process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Threads of libraries may have lifted what held_back did.
    here = this_rank.get()
    assert here.report is not None
    rank = Rank(here.rank, world_size, here.port, here.report, world_size)
    if hosts:
        on_each = world_size // len(hosts)
        host = hosts[here.rank // on_each]
        enter(host.namespace)
        env.overlay({"GLOO_SOCKET_IFNAME": INTERFACE})
        rank = Rank(here.rank, world_size, PORT_ON_HOST, here.report, on_each, host, hosts[0].address)
    return function(rank, *arguments)

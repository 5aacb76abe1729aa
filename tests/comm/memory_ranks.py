"""Ranks that are threads, without groups: a communicator each, and calls with known results."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import HashStore

from bagua.comm import Communicator, Membership, Transport
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.threads import FaultHook, ThreadsTransport, inject_fault
from tests.contract.exercises import TENSOR_KINDS, CallSetting, communicator, perform


def membership(store: Any, rank: int, size: int, timeout_s: float = 20.0, label: str = "test") -> Membership:
    return Membership(store, rank, tuple(range(size)), (0,) * size, timeout_s, label=label)


def run(
    size: int, job: Callable[[Communicator], Any], *,
    transport: Callable[[Membership], Transport] = ThreadsTransport, timeout_s: float = 10.0,
    fault: FaultHook | None = None, close: bool = True, together: bool = False, label: str = "world",
) -> list[Any]:  # fmt: skip
    """What ``job(communicator)`` returned or raised on each rank.

    Args:
        size: number of ranks.
        job: what each of them does.
        transport: makes the transport of a rank.
        timeout_s: of calls, in seconds.
        fault: is told of each step of a call on threads.
        close: whether ranks close their communicators, unless they failed.
        together: whether all of them begin, and close, when all have come so far, also those that failed.
        label: name of the communicator.
    """
    store, outcomes = HashStore(), [None] * size
    came, ended = ([threading.Event() for _ in range(size)] for _ in range(2))

    def meet(events: list[threading.Event], rank: int) -> None:
        events[rank].set()
        for event in events if together else ():
            event.wait(30)

    def rank_main(rank: int) -> None:
        communicator = None
        try:
            with inject_fault(fault):
                made = transport(membership(store, rank, size, timeout_s, label))
            communicator = Communicator(made, timeout_s)
            meet(came, rank)
            outcomes[rank] = job(communicator)
            if close and not together:
                communicator.close()
        except BaseException as error:
            outcomes[rank] = error
        came[rank].set()
        meet(ended, rank)
        if together and communicator is not None:
            communicator.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), f"ranks hang: {outcomes}"
    return outcomes


def run_on_gloo(
    size: int, job: Callable[[Communicator], Any], *,
    backend: str = "gloo", timeout_s: float = 20.0, transport: Callable[[Membership], Transport] | None = None,
) -> list[Any]:  # fmt: skip
    """The same on Gloo. Nobody closes what another rank still connects to, or uses."""
    made = transport or (lambda member: C10dTransport(backend, member))
    return run(size, job, transport=made, timeout_s=timeout_s, together=True, label="test")


def values(outcomes: list[Any]) -> list[Any]:
    """The outcomes, if no rank failed."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def on_communicators(size: int, start: Callable[..., list[Any]] = run, **options: Any) -> Callable[..., Any]:
    """The decorated test runs on ranks that ``start`` starts with these options; each passes its communicator first."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_test(**arguments: Any) -> None:
            values(start(size, functools.partial(test, **arguments), **options))

        _, *others = inspect.signature(test).parameters.values()
        run_test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run_test

    return decorate


def ramp(start: float, numel: int) -> torch.Tensor:
    """``start``, ``start + 1``, ... repeated so that sums stay exact."""
    return torch.arange(numel, dtype=torch.float32).remainder_(1000).add_(start)


KINDS = (*TENSOR_KINDS, "barrier")
#: Copied when published, and lent.
SMALL, LARGE = 7, 80_000
#: Kinds of calls with their sizes.
CALLS = [(kind, numel) for kind in KINDS for numel in (SMALL, LARGE) if (kind, numel) != ("barrier", LARGE)]


def agrees(comm: Communicator, kind: str, numel: int, times: int = 1, **options: Any) -> bool:
    """Make the call so many times, and check each result."""
    for number in range(times):
        perform(kind, comm, CallSetting(shape=(numel,), root=comm.size - 1, seed=1 + number, options=options))
    return True


def all_kinds(numels: tuple[int, ...]) -> None:
    """Make each call on the default group, in both ways."""
    comm = communicator()
    for kind in KINDS:
        for numel in numels if kind != "barrier" else (0,):
            for async_op in (False, True):
                agrees(comm, kind, numel, async_op=async_op)

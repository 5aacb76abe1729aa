"""Ranks that are threads, without groups: a communicator each, and calls with known results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import HashStore

import bagua.comm
from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.contract import Membership, Transport
from bagua.comm.transports.memory.line import Notice, rows
from bagua.comm.transports.threads import FaultHook, ThreadPeers, ThreadsTransport, inject_fault
from tests.contract.exercises import TENSOR_KINDS, CallSetting, perform


def membership(store: Any, rank: int, size: int, timeout_s: float = 20.0, label: str = "test") -> Membership:
    return Membership(store, rank, tuple(range(size)), (0,) * size, timeout_s, label=label)


def run(
    size: int,
    job: Callable[[Communicator], Any],
    *,
    transport: Callable[[Membership], Transport] = ThreadsTransport,
    timeout_s: float = 10.0,
    fault: FaultHook | None = None,
    close: bool = True,
    together: bool = False,
    label: str = "world",
) -> list[Any]:
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
    size: int,
    job: Callable[[Communicator], Any],
    *,
    backend: str = "gloo",
    timeout_s: float = 20.0,
    transport: Callable[[Membership], Transport] | None = None,
) -> list[Any]:
    """The same on Gloo. Nobody closes what another rank still connects to, or uses."""
    made = transport or (lambda member: C10dTransport(backend, member))
    return run(size, job, transport=made, timeout_s=timeout_s, together=True, label="test")


def values(outcomes: list[Any]) -> list[Any]:
    """The outcomes, if no rank failed."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


class Window:
    """A published source of which only the last two pieces can be seen, in small areas; and earlier results."""

    def __init__(self, source: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
        self.source, self.bounds = source, bounds
        self.pieces: list[tuple[int, int, list[torch.Tensor]]] = []

    def show(self, area: torch.Tensor, start: int, stop: int, kept: tuple[int, int] | None) -> None:
        """Copy columns ``start`` to ``stop`` of each row into ``area``, over all that was there but for ``kept``."""
        if kept is not None:
            self._show_around(area, start, stop, kept)
            return
        area.view(torch.uint8).fill_(0xAA)
        seen, used = [], 0
        for first, length in self.bounds:
            part = self.source[first + min(start, length) : first + min(stop, length)]
            place = area[used : used + part.numel()]
            place.copy_(part)
            seen.append(place)
            used += part.numel()
        self.pieces = [*self.pieces[-2:], (start, stop, seen)]

    def _show_around(self, area: torch.Tensor, start: int, stop: int, kept: tuple[int, int]) -> None:
        for begin, end in ((start, kept[0]), (kept[1], stop)):
            area[begin - start : end - start] = self.source[begin:end]
        self.pieces = [*self.pieces[-2:], (start, stop, [area[: stop - start]])]

    def __getitem__(self, index: slice) -> torch.Tensor:
        for (first, length), row in zip(self.bounds, range(len(self.bounds)), strict=True):
            start, stop = index.start - first, index.stop - first
            for begin, end, seen in reversed(self.pieces):
                fits = start >= begin and stop <= min(end, length)
                if fits and (start < stop or start == length == 0 or length):
                    return seen[row][start - begin : stop - begin]
        raise AssertionError(f"{index} is not in view")


class StagedPeers(ThreadPeers):
    """Shows data only through two small areas that alternate, as memory of processes does."""

    AREA_BYTES = 48
    spin_s = spin_inline_s = 20e-6

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._areas = [torch.zeros(self.AREA_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._message_areas: dict[int, torch.Tensor] = {}
        self._shown = 0
        self.line.source = self._source  # type: ignore[method-assign]

    def _source(self, slot: int, start: int, stop: int) -> torch.Tensor:
        window: Window = self.line.data[slot]  # type: ignore[assignment]
        return window.source[start:stop]

    def publish(self, slot: int, call: Call, source: torch.Tensor | None, private: bool) -> None:
        piece = 1 << 62
        if source is not None:
            bounds = rows(call, self.size)
            piece = max(self.AREA_BYTES // (len(bounds) * source.element_size()), 1)
            self.line.data[slot] = Window(source.view(-1), bounds)  # type: ignore[call-overload]
            self._show(slot, 0, piece, None)
        self.line.notices[slot] = Notice(call, call.agreement(), False, piece)

    def stage(self, slot: int, start: int, stop: int, kept: tuple[int, int] | None = None) -> None:
        self._show(slot, start, stop, kept)

    def _show(self, slot: int, start: int, stop: int, kept: tuple[int, int] | None) -> None:
        window: Window = self.line.data[slot]  # type: ignore[assignment]
        if slot < 2:
            self._shown += 1
            area = self._areas[self._shown & 1]
        else:
            area = self._message_areas.setdefault(slot, torch.zeros(self.AREA_BYTES, dtype=torch.uint8))
        window.show(area.view(window.source.dtype), start, stop, kept)


class StagedTransport(ThreadsTransport):
    """The threads transport without zero copy."""

    peers_class = StagedPeers


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
    comm = bagua.comm.get_default_group().global_communicator
    for kind in KINDS:
        for numel in numels if kind != "barrier" else (0,):
            for async_op in (False, True):
                agrees(comm, kind, numel, async_op=async_op)

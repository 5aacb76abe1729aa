"""Ranks that share memory, without groups: a communicator each, and calls with known results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import HashStore

from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.transports.base import Membership
from bagua.comm.transports.memory.line import Notice, rows
from bagua.comm.transports.threads import FaultHook, ThreadPeers, ThreadsTransport, inject_fault


def run(
    size: int,
    function: Callable[[Communicator], Any],
    *,
    fault: FaultHook | None = None,
    timeout_s: float = 10.0,
    transport: type[ThreadsTransport] = ThreadsTransport,
    close: bool = True,
) -> list[Any]:
    """What ``function`` returned or raised on each rank; None for a rank that hangs."""
    store, outcomes = HashStore(), [None] * size

    def rank_main(rank: int) -> None:
        membership = Membership(store, rank, tuple(range(size)), (0,) * size, timeout_s)
        try:
            with inject_fault(fault):
                communicator = Communicator(transport(membership), timeout_s)
            outcomes[rank] = function(communicator)
            if close:
                communicator.close()
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), f"ranks hang: {outcomes}"
    return outcomes


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


class Exercise:
    """One kind of call with its inputs and its right result, both functions of the rank."""

    def __init__(self, kind: str, numel: int) -> None:
        self.kind, self.numel = kind, numel

    def __repr__(self) -> str:
        return f"{self.kind}-{self.numel}"

    def call(self, comm: Communicator, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the call; the tensor that it wrote, and what should be in it."""
        return getattr(self, "_" + self.kind)(comm, comm.rank, comm.size, self.numel, options)

    def _allreduce(self, comm, rank, size, numel, options):
        tensor = ramp(rank, numel)
        _finish(comm.allreduce(tensor, **options))
        return tensor, sum(ramp(other, numel) for other in range(size))

    def _reduce(self, comm, rank, size, numel, options):
        tensor = ramp(rank, numel)
        _finish(comm.reduce(tensor, size - 1, **options))
        total = sum(ramp(other, numel) for other in range(size))
        return tensor, total if rank == size - 1 else ramp(rank, numel)

    def _broadcast(self, comm, rank, size, numel, options):
        tensor = ramp(10 * rank, numel)
        _finish(comm.broadcast(tensor, size - 1, **options))
        return tensor, ramp(10 * (size - 1), numel)

    def _allgather(self, comm, rank, size, numel, options):
        output = torch.full((size * numel,), -1.0)
        _finish(comm.allgather(output, ramp(10 * rank, numel), **options))
        return output, torch.cat([ramp(10 * other, numel) for other in range(size)])

    def _gather(self, comm, rank, size, numel, options):
        output = torch.full((size * numel,), -1.0) if rank == 0 else None
        _finish(comm.gather(output, ramp(10 * rank, numel), 0, **options))
        wanted = torch.cat([ramp(10 * other, numel) for other in range(size)])
        return (torch.zeros(0), torch.zeros(0)) if output is None else (output, wanted)

    def _scatter(self, comm, rank, size, numel, options):
        source = torch.cat([ramp(10 * other, numel) for other in range(size)]) if rank == 0 else None
        output = torch.full((numel,), -1.0)
        _finish(comm.scatter(output, source, 0, **options))
        return output, ramp(10 * rank, numel)

    def _reduce_scatter(self, comm, rank, size, numel, options):
        source = torch.cat([ramp(10 * other + rank, numel) for other in range(size)])
        output = torch.full((numel,), -1.0)
        _finish(comm.reduce_scatter(output, source, **options))
        return output, sum(ramp(10 * rank + other, numel) for other in range(size))

    def _alltoall(self, comm, rank, size, numel, options):
        source = torch.cat([ramp(10 * rank + other, numel) for other in range(size)])
        output = torch.full((size * numel,), -1.0)
        _finish(comm.alltoall(output, source, **options))
        return output, torch.cat([ramp(10 * other + rank, numel) for other in range(size)])

    def _alltoall_v(self, comm, rank, size, numel, options):
        def counts(sender: int) -> list[int]:
            return [(numel * (sender + receiver)) // size for receiver in range(size)]

        def part(sender: int, receiver: int) -> torch.Tensor:
            return ramp(10 * sender + receiver, counts(sender)[receiver])

        source = torch.cat([part(rank, other) for other in range(size)])
        wanted = torch.cat([part(other, rank) for other in range(size)])
        output = torch.full_like(wanted, -1.0)
        received = [counts(other)[rank] for other in range(size)]
        _finish(comm.alltoall_v(output, source, received, counts(rank), **options))
        return output, wanted

    def _sendrecv(self, comm, rank, size, numel, options):
        output = torch.full((numel,), -1.0)
        source, before, after = ramp(10 * rank, numel), (rank - 1) % size, (rank + 1) % size
        _finish(comm.sendrecv(output, source, before, after, **options))
        return output, ramp(10 * before, numel)

    def _send_and_recv(self, comm, rank, size, numel, options):
        """A chain: everyone receives from the rank before, then sends to the one after."""
        tensor = ramp(0, numel) if rank == 0 else torch.full((numel,), -1.0)
        if rank > 0:
            _finish(comm.recv(tensor, rank - 1, **options))
        if rank < size - 1:
            _finish(comm.send(tensor, rank + 1, **options))
        return tensor, ramp(0, numel)

    def _barrier(self, comm, rank, size, numel, options):
        _finish(comm.barrier(**options))
        return torch.zeros(0), torch.zeros(0)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


KINDS = (
    "allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter",
    "alltoall", "alltoall_v", "sendrecv", "send_and_recv", "barrier",
)  # fmt: skip
#: Copied when published, and lent.
SMALL, LARGE = 7, 80_000
EXERCISES = [Exercise(kind, numel) for kind in KINDS for numel in (SMALL, LARGE) if (kind, numel) != ("barrier", LARGE)]


def agrees(exercise: Exercise, comm: Communicator, times: int = 1, **options: object) -> bool:
    """Make the call so many times, and check each result."""
    for _ in range(times):
        seen, wanted = exercise.call(comm, **options)
        assert torch.equal(seen, wanted), (exercise, comm.rank)
    return True

"""The transport of ranks on several hosts with several ranks each: memory inside a host, Gloo between hosts.

An allreduce is a reduce-scatter inside each host, an allreduce of each slice between the
hosts, by all local ranks side by side, and an allgather inside each host. It goes piece by
piece, in two threads: one reduces pieces inside the host and sends them off, also those of
the next calls; the other gathers what comes back. Each has memory of its own to meet the
other ranks of the host. Hosts may be uneven: there are as many slices as the largest host
has ranks, and on a host of L ranks slice s belongs to local rank ``s mod L``. Everyone
handles pieces, and the slices of each, in ascending order.

All other calls go to all ranks through Gloo.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from bagua.comm.call import Call
from bagua.comm.reduction import divide
from bagua.comm.store.asking import refuse_together
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.contract import Data, Handle, Membership, SoloTransport, Transport
from bagua.comm.transports.memory.exchange import SMALL_BYTES
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lane, LaneHandle, Lanes, LanesTransport
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.shm.transport import ShmTransport
from bagua.errors import CommunicationError, blame
from bagua.topology import ranks_by_node

#: Of one slice of a piece. Smaller ones cost more calls; larger ones leave the link idle while a host reduces.
_PIECE_BYTES = 512 * 1024
#: Pieces that may be on their way between the hosts.
_AHEAD = 16
#: Gathers what has come back from the other hosts, while ``COLLECTIVE`` reduces what goes there.
_GATHER: Lane = ("gather", -1)


def slice_owners(hosts: list[list[int]]) -> list[tuple[int, ...]]:
    """The ranks, one of each host, that reduce each slice between the hosts.

    Example:
        >>> slice_owners([[0, 1], [2]])
        [(0, 2), (1, 2)]
    """
    largest = max(len(members) for members in hosts)
    return [tuple(members[number % len(members)] for members in hosts) for number in range(largest)]


class _Part:
    """A transport among some of the ranks."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._numbers = itertools.count(1)

    def start(
        self,
        kind: str,
        reduction: str,
        source: Data,
        target: torch.Tensor,
        numel: int,
        deadline: Deadline,
        root: int = -1,
        *,
        asynchronous: bool = False,
    ) -> Callable[[], None]:
        """Start a call; what is returned waits for it."""
        call = Call(kind, target.dtype, numel, reduction, root, sequence=next(self._numbers))
        with self._naming(deadline):
            handle = self.transport.start(call, source, target, deadline.limit_s, asynchronous)

        def wait() -> None:
            with self._naming(deadline):
                handle.wait(deadline.limit_s)

        return wait

    @contextmanager
    def _naming(self, deadline: Deadline) -> Iterator[None]:
        """Complete errors of this part with what is known here."""
        try:
            yield
        except CommunicationError as error:
            error.communicator, error.timeout_s = self.transport.membership.label, deadline.timeout_s
            raise


class _Slices:
    """One large allreduce: what two threads do for it.

    Args:
        pieces: parts of the tensor.
        reduce: reduces a piece inside the host, starts what goes between the hosts, and returns what gathers it.
        turns: numbers of memory that no piece uses; of all calls of the transport.
        give_up: breaks the communicator because of an error.
        inference: True for a tensor that was made in inference mode.
    """

    def __init__(
        self,
        pieces: Sequence[torch.Tensor],
        reduce: Callable[[torch.Tensor, int], Callable[[], None]],
        turns: queue.SimpleQueue[int],
        give_up: Callable[[BaseException], None],
        *,
        inference: bool,
    ) -> None:
        self._pieces = pieces
        self._reduce = reduce
        self._turns = turns
        self._give_up = give_up
        self._inference = inference
        #: For each piece that is on its way between the hosts what waits for it and gathers the result, and the number
        #: of its memory.
        self._sent: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        #: What went wrong, the cause first.
        self._errors: list[BaseException] = []

    def send_off(self) -> None:
        """Reduce all pieces inside the host, and send them to the other hosts. An error is for ``gather`` to raise."""
        try:
            with torch.inference_mode(self._inference):
                for piece in self._pieces:
                    turn = self._turns.get()
                    try:
                        sent = None if self._errors else (self._reduce(piece, turn), turn)
                    except BaseException:
                        self._turns.put(turn)
                        raise
                    if sent is None:
                        self._turns.put(turn)
                        return
                    self._sent.put(sent)
        except BaseException as error:  # noqa: BLE001 - raised by the other thread
            self._fail(error)
        finally:
            self.end()

    def end(self) -> None:
        """Nothing more is sent."""
        self._sent.put(None)

    def gather(self) -> None:
        """Gather all pieces inside the host; after an error, only give back their memory.

        It ends, and raises the first error of both threads, when neither of them touches the tensor any more.
        """
        while (sent := self._sent.get()) is not None:
            gather, turn = sent
            try:
                if not self._errors:
                    with torch.inference_mode(self._inference):
                        gather()
            except BaseException as error:  # noqa: BLE001 - raised below
                self._fail(error)
            self._turns.put(turn)
        if self._errors:
            del self._errors[1:]
            raise self._errors.pop()  # No name of this frame, which its traceback holds, holds it.

    def _fail(self, error: BaseException) -> None:
        """Break the communicator: on other ranks the next call of this one must not meet the rest of this call."""
        self._errors.append(error)
        self._give_up(error)


class HybridTransport(LanesTransport):
    """Shared memory inside each host, Gloo between hosts.

    Args:
        membership: the ranks, on more than one host, more than one on some of them.

    Raises:
        TransportUnavailableError: on all ranks, if the ranks of some host cannot share memory.
        CollectiveTimeoutError: some ranks did not come.
    """

    name = "hybrid"
    #: Large allreduces have threads of their own, which begin one while another is on its way.
    executor = "caller"

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        hosts = ranks_by_node(membership.nodes)
        local = next(tuple(members) for members in hosts if self.rank in members)
        owners = slice_owners(hosts)
        self._slices = len(owners)
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}
        self._lanes = Lanes(f"bagua-{membership.label}-{self.rank}")
        self._turns: queue.SimpleQueue[int] = queue.SimpleQueue()
        for turn in range(_AHEAD):
            self._turns.put(turn)
        self._parts: list[_Part] = []
        try:
            self._local, self._gathering = self._share_memory(local)
            self._flat = self._connect(tuple(range(self.size)), "flat").transport
            #: The ranks between which this one reduces, for each slice that it owns.
            self._across: dict[int, _Part] = {}
            for number, members in enumerate(owners):
                if self.rank in members:
                    known = next((self._across[s] for s in self._across if owners[s] == members), None)
                    self._across[number] = known or self._connect(members, f"slice{number}")
        except BaseException:
            self.close()
            raise

    def _share_memory(self, members: tuple[int, ...]) -> list[_Part]:
        """Connect the ranks of this host, once for each thread; if it fails on one host, it fails on all."""
        failure = None
        try:
            for name in ("host", "gather"):
                part = self.membership.part(f"{name}{members[0]}", members)
                self._parts.append(_Part(ShmTransport(part) if part.size > 1 else SoloTransport(part)))
        except CommunicationError as error:
            failure = error
        whole = self.membership
        refuse_together(whole.store, "hybrid/hosts", self.rank, whole.ranks, failure, whole.timeout_s)
        return self._parts[-2:]

    def _connect(self, members: tuple[int, ...], name: str) -> _Part:
        self._parts.append(_Part(C10dTransport("gloo", self.membership.part(name, members))))
        return self._parts[-1]

    # Calls.

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """Run a small allreduce here or behind those under way, and large ones in threads; leave the rest to Gloo."""
        if call.kind != "allreduce" or call.numel == 0:
            return self._flat.start(call, source, target, timeout_s, asynchronous)
        assert target is not None
        flat, deadline = target.view(-1), Deadline.after(timeout_s)
        if flat.nbytes <= SMALL_BYTES:
            task = partial(self._through_leaders, call, flat, deadline)
            return self._lanes.start(COLLECTIVE, task, deadline, self.abort, asynchronous=asynchronous)
        step = self._slices * max(_PIECE_BYTES // flat.element_size(), 1)
        reduce = partial(self._reduce, call.reduction, deadline)
        give_up = partial(self._give_up, call)
        pieces = torch.split(flat, step)
        slices = _Slices(pieces, reduce, self._turns, give_up, inference=flat.is_inference())
        gathering = self._lanes.submit(_GATHER, slices.gather)
        try:
            sending = self._lanes.submit(COLLECTIVE, slices.send_off)
        except BaseException:
            slices.end()
            raise
        return LaneHandle([gathering, sending], deadline, self.abort)

    def _give_up(self, call: Call, error: BaseException) -> None:
        culprit, reason = blame(error, self.membership.ranks[self.rank], str(call))
        self.abort(reason, culprit)

    def _through_leaders(self, call: Call, flat: torch.Tensor, deadline: Deadline) -> None:
        """Few bytes: to the first rank of each host, between these, and back."""
        reduction, numel, leader = _without_division(call.reduction), flat.numel(), self._local.transport.rank == 0
        with torch.inference_mode(flat.is_inference()):
            self._local.start("reduce", reduction, flat, flat, numel, deadline, root=0)()
            if leader:
                self._across[0].start("allreduce", reduction, flat, flat, numel, deadline)()
            self._local.start("broadcast", "", flat if leader else None, flat, numel, deadline, root=0)()
            if call.reduction == "avg":
                divide(flat, self.size)

    def _reduce(self, reduction: str, deadline: Deadline, piece: torch.Tensor, turn: int) -> Callable[[], None]:
        """Reduce ``piece`` inside the host, and start what goes between hosts; what is returned gathers the result."""
        local, numel, plain = self._local, piece.numel(), _without_division(reduction)
        share = -(-numel // self._slices)
        rounds = -(-self._slices // local.transport.size)
        padded = rounds * local.transport.size * share
        work = piece
        if padded != numel:
            work = self._room("padded", turn, piece, padded, local)
            work[:numel].copy_(piece)
            work[numel:].zero_()
        started = []
        for number, rows in enumerate(work.view(rounds, -1).unbind()):
            mine = self._room(f"round {number}", turn, piece, share, self._gathering)
            local.start("reduce_scatter", plain, rows, mine, share, deadline)()
            wait = None
            if across := self._across.get(number * local.transport.size + local.transport.rank):
                wait = across.start("allreduce", plain, mine, mine, share, deadline, asynchronous=True)
            started.append((rows, mine, wait))

        def gather() -> None:
            for rows, mine, wait in started:
                if wait is not None:
                    wait()
                    if reduction == "avg":
                        divide(mine, self.size)
                self._gathering.start("allgather", "", mine, rows, share, deadline)()
            if work is not piece:
                piece.copy_(work[:numel])

        return gather

    def _room(self, use: str, turn: int, like: torch.Tensor, numel: int, part: _Part) -> torch.Tensor:
        """Memory that the ranks of ``part`` can map, the same one each time: a new one costs more than a piece."""
        nbytes = numel * like.element_size()
        room = self._rooms.get((use, turn))
        if room is None or room.numel() < nbytes:
            with torch.inference_mode(False):  # The next call may be made outside of it.
                room = self._rooms[use, turn] = part.transport.empty(nbytes, torch.uint8, like.device)
        return room[:nbytes].view(like.dtype)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the ranks of this host can map."""
        return self._local.transport.empty(numel, dtype, device)

    # The end.

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Break all parts."""
        for part in self._parts:
            part.transport.abort(reason, culprit)
        self._lanes.abandon()

    def idle(self) -> bool:
        """Whether all asynchronous calls are complete."""
        return super().idle() and all(part.transport.idle() for part in self._parts)

    def close(self) -> None:
        """Let started calls finish for a second, then close all parts."""
        self._stop_lanes()
        for part in reversed(self._parts):
            part.transport.close()
        self._rooms.clear()


def _without_division(reduction: str) -> str:
    """What the parts do: the sum is divided once."""
    return "sum" if reduction == "avg" else reduction

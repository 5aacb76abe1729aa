"""The transport of ranks on several hosts with several ranks each: memory inside a host, Gloo between hosts.

An allreduce is a reduce-scatter inside each host, an allreduce of each slice between the
hosts, by all local ranks side by side, and an allgather inside each host. Hosts may be
uneven: there are as many slices as the largest host has ranks, and on a host of L ranks
slice s belongs to local rank ``s mod L``. Everyone handles its slices in ascending order.

All other calls go to all ranks through Gloo.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch.distributed import PrefixStore

from bagua.comm.call import Call
from bagua.comm.reduction import divide
from bagua.comm.store.asking import refuse_together
from bagua.comm.transports.base import Handle, Membership, Transport
from bagua.comm.transports.c10d.transport import C10dTransport
from bagua.comm.transports.memory.exchange import SMALL_BYTES
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lanes
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.shm.transport import ShmTransport
from bagua.comm.transports.solo import SoloTransport
from bagua.errors import CommunicationError
from bagua.topology import ranks_by_node

__all__ = ["HybridTransport", "slice_owners"]


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
        self.size = transport.size
        self.rank = transport.rank
        self._calls = 0

    def run(
        self,
        kind: str,
        reduction: str,
        source: torch.Tensor | None,
        target: torch.Tensor,
        numel: int,
        deadline: Deadline,
        root: int = -1,
    ) -> None:
        """Make one call and wait for it."""
        self._calls += 1
        call = Call(kind, self._calls, target.dtype, numel, reduction, root)
        remaining_s = max(deadline.at - time.perf_counter(), 0.001)
        try:
            self.transport.start(call, source, target, remaining_s, False).wait()
        except CommunicationError as error:
            error.communicator, error.timeout_s = self.transport.membership.label, deadline.timeout_s
            raise


class HybridTransport(Transport):
    """Shared memory inside each host, Gloo between hosts.

    Args:
        membership: the ranks, on more than one host, more than one on some of them.

    Raises:
        TransportUnavailableError: on all ranks, if the ranks of some host cannot share memory.
        CollectiveTimeoutError: some ranks did not come.
    """

    name = "hybrid"
    executor = "thread"

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        hosts = ranks_by_node(membership.nodes)
        local = next(tuple(members) for members in hosts if self.rank in members)
        owners = slice_owners(hosts)
        self._slices = len(owners)
        self._lanes = Lanes(f"bagua-{membership.label}-{self.rank}")
        self._parts: list[_Part] = []
        try:
            self._local = self._share_memory(local)
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

    def _share_memory(self, members: tuple[int, ...]) -> _Part:
        """Connect the ranks of this host; if it fails on one host, it fails on all."""
        part, failure = self._membership_of(members, f"host{members[0]}"), None
        try:
            transport = ShmTransport(part) if part.size > 1 else SoloTransport(part)
            self._parts.append(_Part(transport))
        except CommunicationError as error:
            failure = error
        whole = self.membership
        refuse_together(whole.store, "hybrid/hosts", self.rank, whole.ranks, failure, whole.timeout_s)
        return self._parts[-1]

    def _connect(self, members: tuple[int, ...], name: str) -> _Part:
        self._parts.append(_Part(C10dTransport("gloo", self._membership_of(members, name))))
        return self._parts[-1]

    def _membership_of(self, members: tuple[int, ...], name: str) -> Membership:
        whole = self.membership
        return Membership(
            store=PrefixStore(name, whole.store),
            rank=members.index(self.rank),
            ranks=tuple(whole.ranks[member] for member in members),
            nodes=tuple(whole.nodes[member] for member in members),
            timeout_s=whole.timeout_s,
            label=f"{whole.label}/{name}",
        )

    # Calls.

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        """Run an allreduce here or behind those under way; leave everything else to Gloo."""
        if call.kind != "allreduce" or call.numel == 0:
            return self._flat.start(call, source, target, timeout_s, asynchronous)
        assert target is not None
        deadline = Deadline(time.perf_counter() + timeout_s, timeout_s)
        task = partial(self._allreduce, call, target, deadline)
        return self._lanes.start(COLLECTIVE, task, deadline, self.abort, asynchronous=asynchronous)

    def share(self) -> None:
        """See ``MemoryTransport.share``; Gloo's calls go on by themselves."""
        self._lanes.shared = True

    def _allreduce(self, call: Call, target: torch.Tensor, deadline: Deadline) -> None:
        flat = target.view(-1)
        reduction = "sum" if call.reduction == "avg" else call.reduction
        with torch.inference_mode(target.is_inference()):
            if flat.numel() * flat.element_size() <= SMALL_BYTES:
                self._through_leaders(reduction, flat, deadline)
            else:
                self._in_slices(reduction, flat, deadline)
            if call.reduction == "avg":
                divide(flat, self.size)

    def _through_leaders(self, reduction: str, flat: torch.Tensor, deadline: Deadline) -> None:
        """Few bytes: to the first rank of each host, between these, and back."""
        numel, leader = flat.numel(), self._local.rank == 0
        self._local.run("reduce", reduction, flat, flat, numel, deadline, root=0)
        if leader:
            self._across[0].run("allreduce", reduction, flat, flat, numel, deadline)
        self._local.run("broadcast", "", flat if leader else None, flat, numel, deadline, root=0)

    def _in_slices(self, reduction: str, flat: torch.Tensor, deadline: Deadline) -> None:
        local, numel = self._local, flat.numel()
        share = -(-numel // self._slices)
        rounds = -(-self._slices // local.size)
        padded = rounds * local.size * share
        work = flat
        if padded != numel:
            work = self._empty_like(flat, padded)
            work[:numel].copy_(flat)
            work[numel:].zero_()
        mine = self._empty_like(flat, share)
        for number, rows in enumerate(work.view(rounds, -1).unbind()):
            local.run("reduce_scatter", reduction, rows, mine, share, deadline)
            across = self._across.get(number * local.size + local.rank)
            if across is not None:
                across.run("allreduce", reduction, mine, mine, share, deadline)
            local.run("allgather", "", mine, rows, share, deadline)
        if work is not flat:
            flat.copy_(work[:numel])

    def _empty_like(self, flat: torch.Tensor, numel: int) -> torch.Tensor:
        return self._local.transport.empty(numel, flat.dtype, flat.device)

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
        return not self._lanes.busy() and all(part.transport.idle() for part in self._parts)

    def close(self) -> None:
        """Let started calls finish for a second, then close all parts."""
        if not self._lanes.stop(timeout_s=1.0):
            self.abort("it closed its communicator with calls under way")
            self._lanes.stop(timeout_s=1.0)
        for part in reversed(self._parts):
            part.transport.close()

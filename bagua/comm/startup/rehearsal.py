"""A group of which one rank is there: it calls what it would call among many, and its record shows that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua.comm.call import Call
from bagua.comm.group import ProcessGroup
from bagua.comm.records.recorder import Recorder
from bagua.comm.transports.contract import DONE, Data, Handle, Transport
from bagua.comm.transports.registry import register_transport

_NAME = "rehearsal"
#: Default deadline of calls, which none of them ever needs.
_TIMEOUT_S = 1800.0


class RehearsalTransport(Transport):
    """Answers at once for peers that are not there, as if each of them held what this rank holds."""

    name = _NAME
    compares_calls = True
    #: As on Gloo, whose place it takes.
    executor = "caller"
    overlaps = True

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:  # noqa: ARG002
        """Fill the target."""
        if target is not None:
            with torch.no_grad():
                self._fill(call, source, target)
        elif call.kind == "recv" and source is not None:
            source.fill_(call.root)
        return DONE

    def _fill(self, call: Call, source: Data, target: torch.Tensor) -> None:
        flat = target.view(-1)
        if source is None or call.kind == "alltoall_v" or (call.kind == "recv" and call.root < 0):
            flat.zero_()  # What a peer would send alone is not known here.
        elif source is not target:
            takes_share = call.kind in ("alltoall", "scatter", "reduce_scatter")
            given = source.view(self.size, -1)[self.rank] if takes_share else source.view(-1)
            if call.kind in ("alltoall", "allgather", "gather"):
                flat.view(self.size, -1).copy_(given.expand(self.size, -1))
            elif given.numel() == flat.numel():
                flat.copy_(given)
        if call.reduction == "sum":
            flat.mul_(self.size)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """There is no rank to tell."""

    def close(self) -> None:
        """Nothing is held."""


class _RehearsalGroup(ProcessGroup):
    """A process group whose other members agree to everything."""

    def _agree(self, store: dist.Store, wanted: list[object], obstacle: Exception | None) -> list[str]:  # noqa: ARG002
        return [""] * self.size


def rehearsal_group(host_sizes: Sequence[int]) -> ProcessGroup:
    """Rank 0 of a group whose other ranks do not exist. Calls return at once, with what this rank put in.

    What is made of other ranks' data has no meaning. Which calls are made, in which order and with how many bytes, and
    what is computed between them, is as among real ranks.

    Args:
        host_sizes: number of ranks on each host.

    Example:
        >>> group = rehearsal_group([2, 2])
        >>> group.size, group.node_sizes, group.inter_node_communicator.ranks
        (4, (2, 2), (0, 2))
        >>> tensor = torch.ones(1)
        >>> group.global_communicator.allreduce(tensor)
        >>> tensor
        tensor([4.])
    """
    register_transport(_NAME, RehearsalTransport)
    nodes = [host for host, size in enumerate(host_sizes) for _ in range(size)]
    ranks = range(len(nodes))
    return _RehearsalGroup(dist.HashStore(), 0, ranks, nodes, _NAME, _TIMEOUT_S, _NAME, Recorder())

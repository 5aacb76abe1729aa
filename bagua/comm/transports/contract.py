"""The contract of a transport: the small thing that moves bytes for a communicator.

A transport serves one fixed set of ranks. Everything a user can get wrong has
been checked before it is called: tensors are dense, contiguous, without autograd
history, on a device that it serves, of a dtype and reduction that have a meaning,
and output and input do not overlap except where they are the same tensor.

What each kind of call gets, with n ranks and a share of ``call.numel`` elements
(shapes are free, only the number of elements counts):

================  ===========================  ============================  ==========
kind              source                       target                        root
================  ===========================  ============================  ==========
allreduce         numel                        the same tensor               -
reduce            numel                        the same tensor, changed      dst
                                               on ``dst`` only
broadcast         numel on root, else None     numel; on root the same       root
                                               tensor as source
allgather         numel                        n * numel                     -
gather            numel                        n * numel on dst, else None   dst
scatter           n * numel on root,           numel                         root
                  else None
reduce_scatter    n * numel                    numel                         -
alltoall          n * numel                    n * numel                     -
alltoall_v        sum(send_counts)             sum(recv_counts)              -
send              numel                        None                          dst
recv              None                         numel                         src
recv from any     int64, 1: takes the rank of  numel                         -1
                  the sender
sendrecv          numel                        recv_counts[0]                dst, and
                                                                             source
barrier           None                         None                          -
================  ===========================  ============================  ==========

bool arrives as uint8 for reductions (``call.dtype`` still says bool), with the
reduction that does the same to its bytes in ``call.reduction``.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed import PrefixStore, Store

from bagua.comm.call import Call
from bagua.comm.long_wait import Activity, Judge
from bagua.comm.reduction import copy_pieces

#: The tensor that a rank puts into a call, or gets out of it, where it has one.
Data = torch.Tensor | None


class Handle(ABC):
    """A started call. A transport returns one; what its user gets is made of it: ``bagua.comm.Work``."""

    __slots__ = ()

    @property
    def ended_at(self) -> float | None:
        """When it was complete, by ``time.perf_counter()``; None where the transport does not note it, or not yet."""
        return None

    @property
    def failed(self) -> bool:
        """Whether ``wait`` would raise, of a handle for which ``is_completed`` is true; False where that is unknown."""
        return False

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> object:
        """Block until the call is complete (on CUDA: until the current stream will see it).

        Args:
            timeout_s: at most so long; None means until the call's own deadline.

        Raises:
            CommunicationError: the call failed; the error is translated and chained. A
                deadline that passes is a ``CollectiveTimeoutError``; the transport is
                unusable after any of these.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once. Never raises, never blocks."""

    def notify(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002  # of those who can tell
        """Have ``callback`` run as soon as ``wait`` would return or raise at once.

        Args:
            callback: runs once, in any thread, and raises nothing.

        Returns:
            False if this kind of handle cannot tell; then somebody has to wait.
        """
        return False


def after(count: int, callback: Callable[[], None]) -> Callable[..., None]:
    """A function that runs ``callback`` when it is called for the ``count``-th time, in any threads."""
    calls = itertools.count(1)

    def one_more(*_: object) -> None:
        if next(calls) == count:  # counting is atomic
            callback()

    return one_more


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """A function that says how much of ``timeout_s`` is left for the next of several waits."""
    if timeout_s is None:
        return lambda: None
    until = time.monotonic() + timeout_s
    return lambda: max(until - time.monotonic(), 0.001)


class Joined(Handle):
    """Calls that were started together, complete when all are; at once if there are none.

    Args:
        handles: none depends on another.
    """

    __slots__ = ("_handles",)

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for one after the other."""
        left_s = countdown(timeout_s)
        for handle in self._handles:
            handle.wait(left_s())

    def is_completed(self) -> bool:
        """Whether all are complete."""
        return all(handle.is_completed() for handle in self._handles)

    @property
    def failed(self) -> bool:
        """Whether one has failed."""
        return any(handle.failed for handle in self._handles)

    def notify(self, callback: Callable[[], None]) -> bool:
        """See ``Handle.notify``; if one of the calls cannot tell, ``callback`` never runs."""
        if not self._handles:
            callback()
        one_more = after(len(self._handles), callback)
        return all(handle.notify(one_more) for handle in self._handles)


#: A call that was complete when ``start`` returned.
DONE: Handle = Joined()


@dataclass(frozen=True)
class Membership:
    """All that a transport needs to know to find its peers.

    Attributes:
        store: a store that no other communicator writes to (a prefix of its own).
        rank: this process's rank in the communicator.
        ranks: global rank of each member, by rank in the communicator.
        nodes: index of the host of each member, by rank in the communicator.
        timeout_s: default deadline of every call, in seconds.
        label: name of this communicator in messages (``world``, ``world/intra``, ...).
        activity: purpose of its calls, for messages.
        judge: asked now and then in a long wait: the error if this rank waits forever.
    """

    store: Store
    rank: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    timeout_s: float
    label: str = "world"
    activity: Activity = field(default_factory=Activity, compare=False)
    judge: Judge | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def part(self, name: str, members: Sequence[int] | None = None) -> Membership:
        """Some of the ranks, this one among them, with a part of the store for themselves.

        Args:
            name: name of the part, in the store and behind the label.
            members: their ranks here; None means all.
        """
        members = range(self.size) if members is None else members
        return Membership(
            store=PrefixStore(name, self.store),
            rank=members.index(self.rank),
            ranks=tuple(self.ranks[member] for member in members),
            nodes=tuple(self.nodes[member] for member in members),
            timeout_s=self.timeout_s,
            label=f"{self.label}/{name}",
            judge=self.judge,
        )


#: For which peers the last collectives waited: number of the call, seconds, and the members that came last; a
#: call stands in the place of its number, modulo the length. One thread at a time writes a place, any reads.
Arrivals = list[tuple[int, float, tuple[int, ...]]]
ARRIVALS_LENGTH = 64


class Transport(ABC):
    """Moves the bytes of one communicator. Three abstract members: start, abort, close.

    Args:
        membership: the ranks served. Building a transport is collective among them.

    Attributes:
        name: name in logs and ``ProcessGroup.backend``, ``gloo`` for example.
        device_types: ``torch.device.type`` of the tensors it can take.
        compares_calls: True if ``start`` itself detects ranks that disagree. If not,
            the registry puts a ``CheckedTransport`` in front when debugging is on.
        executor: place in which the engine should run an exchange on this transport, by
            measurement: started in the calling thread, because calls go on by themselves;
            in one background thread, in order; or on a communication stream.
        overlaps: True if calls go on by themselves, over a network, so that it pays to compute for one exchange while
            another one waits.
        arrivals: see ``Arrivals``; None where the transport cannot see who comes when.
    """

    name: str = "abstract"
    device_types: frozenset[str] = frozenset({"cpu"})
    compares_calls: bool = False
    executor: Literal["caller", "thread", "stream"] = "thread"
    overlaps: bool = False
    arrivals: Arrivals | None = None

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.size = membership.size

    @abstractmethod
    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """Start ``call``. Calls match across ranks in the order in which they were started.

        They may complete in another order: each handle is waited for by itself.

        With ``asynchronous=False`` the communicator waits on the handle at once, so
        the transport may do all of the work before it returns. The transport keeps
        the tensors alive until the call is complete.

        Raises:
            CommunicationError: translated and chained, as in ``Handle.wait``.
            ConcurrentUseError: nothing was started, because it would wait for a call of the
                same thread that a signal handler or finalizer has interrupted.
        """

    def share(self) -> None:  # noqa: B027 - most transports never block there
        """Several threads will take turns at ``start``, so it must not block any more.

        What takes long happens in ``Handle.wait``, also for synchronous calls.
        """

    @abstractmethod
    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Break the communicator now, from any thread, and tell the other ranks why.

        Calls under way, here and on peers, end with an error soon, which names the
        culprit and the reason. Idempotent, never raises, returns quickly.

        Args:
            reason: deed of the culprit; begins with "it".
            culprit: global rank to blame, which need not be a member; None means this one.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back: threads, sockets, memory. Idempotent, never blocks for long."""

    def idle(self) -> bool:
        """Whether no call is under way that peers may need. Never blocks, never raises."""
        return True

    def awaited_by(self) -> tuple[int, ...]:
        """Members that wait in a collective which this rank has yet to start, where that can be seen. Never blocks."""
        return ()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in memory that this transport reduces without a copy."""
        return torch.empty(numel, dtype=dtype, device=device)


class SoloTransport(Transport):
    """Serves communicators of size 1 on every device, whatever the backend."""

    name = "solo"
    device_types = frozenset({"cpu", "cuda", "xpu", "mps", "hpu"})
    compares_calls = True
    executor = "caller"

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:  # noqa: ARG002
        """Copy where output and input differ."""
        if source is not target and source is not None and target is not None:
            if target.is_inference():
                copy_pieces([target], [source])
            else:
                target.view(-1).copy_(source.view(-1))
        return DONE

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """There is no other rank to tell."""

    def close(self) -> None:
        """Nothing is held."""

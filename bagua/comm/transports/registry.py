"""From the name of a backend to its transport, in one line for each; and the comparison of calls in front of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from bagua import env
from bagua.comm.call import KIND_NUMBERS, KINDS, POINT_TO_POINT, Call
from bagua.comm.torch_private import TORCH_NAME
from bagua.comm.transports.bucket import BucketTransport
from bagua.comm.transports.c10d.groups import knows, split_name
from bagua.comm.transports.c10d.torch_transport import C10dTransport, c10d_refusal
from bagua.comm.transports.contract import Data, Handle, Membership, SoloTransport, Transport
from bagua.comm.transports.hybrid import HybridTransport
from bagua.comm.transports.memory.line import Deadline
from bagua.comm.transports.shm.transport import ShmTransport, shm_refusal
from bagua.comm.transports.threads import ThreadsTransport
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, ConfigurationError

_FACTS = 6
_FAREWELL_S = 1.0

_ADVICE = "Make all ranks issue the same calls in the same order; the calls before this one are listed below."
_POLL_S = 0.0002


def fingerprint_of(call: Call, size: int) -> torch.Tensor:
    """``call`` in ``_FACTS + 2 * size`` whole numbers; the counts only where they matter."""
    facts = [KIND_NUMBERS[call.kind], call.sequence, *call.numbers()[1:]]
    counts = [*call.send_counts, *call.recv_counts] if call.kind == "alltoall_v" else [0] * (2 * size)
    return torch.tensor(facts + counts, dtype=torch.int64, device="cpu")


def _describe(row: list[int], size: int) -> str:
    """The call behind a fingerprint, for people."""
    kind, sequence, *others = row[:_FACTS]
    counts = tuple(row[_FACTS : _FACTS + size]) if KINDS[kind] == "alltoall_v" else ()
    return str(Call.of_numbers([kind, *others], -1, counts, (), sequence))


def _mismatch(problem: str, own: str, other: str, peers: list[int]) -> CollectiveMismatchError:
    return CollectiveMismatchError(problem, expected=own, seen=other, peers=peers, advice=_ADVICE)


class CheckedTransport(Transport):
    """Calls on ``data``; collectives after their fingerprints have been compared on ``check``.

    On a backend that cannot see a disagreement, another size kills the process and another
    dtype gives rubbish. So every collective first exchanges a fingerprint of fixed size, and the
    data call starts only when the fingerprints fit. Nothing blocks in ``start``: a program that is
    correct without these checks is correct with them, only slower. Messages between two ranks start
    at once, as with torch's own checks. For debugging (``BAGUA_DEBUG=1``).

    Args:
        data: the transport that does the work.
        check: one over the same ranks that serves the CPU, with nothing else on it.
    """

    compares_calls = True

    def __init__(self, data: Transport, check: C10dTransport) -> None:
        super().__init__(data.membership)
        self.name = data.name
        self.device_types = data.device_types
        self.executor = data.executor
        self.overlaps = data.overlaps
        self.data = data
        self.check = check
        self._advancing = threading.RLock()
        _living.add(self)
        #: Collectives that have not started, in order.
        self._waiting: deque[CheckedHandle] = deque()

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:  # noqa: ARG002
        if call.kind in POINT_TO_POINT:
            message = CheckedHandle(self, call, source, target, timeout_s)
            message.try_start()
            return message
        with self._advancing:
            handle = CheckedHandle(self, call, source, target, timeout_s)
            self._waiting.append(handle)
            return handle

    def compare(self, rows: list[list[int]]) -> None:
        """Raise if any two ranks disagree: all ranks see the fingerprints of all, so all raise together."""
        ranks, mine = self.membership.ranks, rows[self.rank]
        unlike = [rank for rank, row in enumerate(rows) if row[:_FACTS] != mine[:_FACTS]]
        if unlike:
            seen = "; ".join(f"rank {ranks[rank]}: {_describe(rows[rank], self.size)}" for rank in unlike)
            self._wait_for_all()
            peers = [ranks[rank] for rank in unlike]
            raise _mismatch("ranks are about to do different things", _describe(mine, self.size), seen, peers)
        for sender, receiver in itertools.product(range(self.size), repeat=2):
            sent = rows[sender][_FACTS + receiver]
            expected = rows[receiver][_FACTS + self.size + sender]
            if sent != expected:
                sides = (
                    f"rank {ranks[sender]} sends {sent} elements to rank {ranks[receiver]}",
                    f"rank {ranks[receiver]} expects {expected} elements from rank {ranks[sender]}",
                )
                own, other = sides if self.rank != receiver else sides[::-1]
                peer = sender if self.rank == receiver else receiver
                self._wait_for_all()
                raise _mismatch("the counts of alltoall_v do not fit together", own, other, [ranks[peer]])

    def _wait_for_all(self) -> None:
        """Until every rank has seen the disagreement: the error closes the connections."""
        with contextlib.suppress(CommunicationError):
            self.check.start(Call("barrier", torch.uint8), None, None, _FAREWELL_S, True).wait()

    def advance(self) -> None:
        """Start what can be started, in order."""
        if not self._advancing.acquire(blocking=False):
            return  # Another thread is at it.
        try:
            while self._waiting and self._waiting[0].try_start():
                self._waiting.popleft()
        finally:
            self._advancing.release()

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self.data.abort(reason, culprit)
        self.check.abort(reason, culprit)

    def idle(self) -> bool:
        self.advance()
        return not self._waiting and self.data.idle() and self.check.idle()

    def close(self) -> None:
        _living.discard(self)
        self.data.close()
        self.check.close()
        for handle in self._waiting:
            handle.end(self.check.failures.ended())

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.data.empty(numel, dtype, device)


_living: weakref.WeakSet[CheckedTransport] = weakref.WeakSet()


class CheckedHandle(Handle):
    """A call that starts: a message at once, a collective when the fingerprints of all ranks were compared.

    Who waits for either lets the collectives of this rank go on: other ranks may need these first.

    Args:
        transport: transport that starts the call.
        call: call to be started.
        source: see ``Transport.start``.
        target: see ``Transport.start``.
        timeout_s: deadline of the call, from now.
    """

    __slots__ = ("_call", "_deadline", "_error", "_gathering", "_inner", "_rows", "_tensors", "_transport")

    def __init__(self, transport: CheckedTransport, call: Call, source: Data, target: Data, timeout_s: float) -> None:
        self._transport = transport
        self._call = call
        self._tensors = (source, target)
        self._deadline = Deadline.after(timeout_s)
        self._inner: Handle | None = None
        self._error: BaseException | None = None
        #: Brings the fingerprints of a collective.
        self._gathering: Handle | None = None
        if call.kind not in POINT_TO_POINT:
            own = fingerprint_of(call, transport.size)
            self._rows = own.new_empty((transport.size, own.numel()))
            gathering = Call("allgather", torch.int64, own.numel(), sequence=call.sequence)
            self._gathering = transport.check.start(gathering, own, self._rows, timeout_s, True)

    def try_start(self) -> bool:
        """Start the data call if the fingerprints are there; True if this handle is done with them."""
        if self._inner is not None or self._error is not None:
            return True
        try:
            if self._gathering is not None:
                if not self._gathering.is_completed():
                    return False
                self._gathering.wait()
                self._transport.compare(self._rows.tolist())
            self._inner = self._transport.data.start(self._call, *self._tensors, self._deadline.limit_s, True)
        except Exception as error:  # noqa: BLE001  # the one who waits raises it
            self._error = error
        return True

    def end(self, error: BaseException) -> None:
        """The transport was closed, so nothing starts any more."""
        if self._inner is None and self._error is None:
            self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        until = self._deadline if timeout_s is None else min(self._deadline, Deadline.after(timeout_s))
        while not self.is_completed() and until.left_s > 0:
            time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error
        # What was started for this call began a moment later: where the call is over, it waits for its own deadline.
        limit_s = None if self._deadline.left_s <= 0 else until.limit_s
        if self._inner is None:
            assert self._gathering is not None
            self._gathering.wait(limit_s)  # It says who is missing.
            # The peers have told what they do, and it is not this.
            waited_s = self._deadline.timeout_s if timeout_s is None else timeout_s
            raise CollectiveTimeoutError("the call did not complete in time", timeout_s=waited_s)
        self._inner.wait(limit_s)

    def is_completed(self) -> bool:
        # All of them: a peer may wait for a call that this rank made on another communicator.
        for transport in list(_living):
            transport.advance()
        return self._error is not None or (self._inner is not None and self._inner.is_completed())

    @property
    def failed(self) -> bool:
        return self._error is not None or (self._inner is not None and self._inner.failed)


_OWN = ("shm", "hybrid", "threads", "solo", TORCH_NAME)


class _Registered(NamedTuple):
    factory: Callable[[Membership], Transport]
    refusal: Callable[[], Exception | None] | None


_registered: dict[str, _Registered] = {"bucket": _Registered(BucketTransport, None)}


def register_transport(
    name: str, factory: Callable[[Membership], Transport], *, refusal: Callable[[], Exception | None] | None = None
) -> None:
    """Make ``init_process_group(backend=name)`` use a transport from outside of this package.

    Called on every rank, before ``init_process_group``. ``tests/contract`` holds a transport to what it promises.

    Args:
        name: name of the backend; neither one of ours nor one that ``torch.distributed`` knows.
        factory: makes the transport of one communicator with several ranks; collective among its members. It
            raises ``TransportUnavailableError`` on all of them if it cannot connect.
        refusal: the reason why this process cannot serve the backend, or None if it can; quick, without side
            effects. It is asked before anybody connects, and one rank's reason is everyone's error.

    Raises:
        ConfigurationError: the name is taken by another transport.

    Example:
        >>> import bagua.comm
        >>> class Mine(bagua.comm.Transport):
        ...     def start(self, call, source, target, timeout_s, asynchronous): ...
        ...     def abort(self, reason, culprit=None): ...
        ...     def close(self): ...
        >>> bagua.comm.register_transport("my_network", Mine)
    """
    entry = _Registered(factory, refusal)
    taken = name in _OWN or knows(name) or _registered.get(name, entry) != entry
    if taken or not name.isidentifier():
        raise ConfigurationError(
            "this cannot be the name of a new backend",
            argument="name",
            expected="a Python identifier that names no other backend",
            seen=repr(name),
            advice="Choose another name; registering the same factory again is allowed.",
        )
    _registered[name] = entry


def create_transport(backend: str, membership: Membership) -> Transport:
    """The transport of one communicator. Collective among its members.

    Args:
        backend: ``shm``, ``hybrid``, ``threads``, ``solo``, a registered transport, or anything that
            ``torch.distributed`` knows: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``, a third-party one.
        membership: the ranks to connect. One rank alone never needs a backend.
    """
    if membership.size == 1:
        return SoloTransport(membership)
    if backend == "threads":
        return ThreadsTransport(membership)
    hosts = len(set(membership.nodes))
    if backend == "shm" or (backend == "hybrid" and hosts == 1):
        return ShmTransport(membership)
    transport = _across_hosts(backend, membership, hosts)
    if env.debug_checks() and not transport.compares_calls:
        return CheckedTransport(transport, _beside(transport, membership))
    return transport


def _beside(transport: Transport, membership: Membership) -> C10dTransport:
    """The transport of the fingerprints; if it cannot be connected, ``transport`` is given back, too."""
    try:
        return C10dTransport("gloo", membership.part("check"))
    except BaseException:
        transport.close()
        raise


def _across_hosts(backend: str, membership: Membership, hosts: int) -> Transport:
    if backend in _registered:
        return _registered[backend].factory(membership)
    if backend == "hybrid" and hosts < membership.size:
        return HybridTransport(membership)
    return C10dTransport("gloo" if backend == "hybrid" else backend, membership)


def backend_refusal(backend: str, ranks: int = 2) -> Exception | None:
    """Why this process cannot serve ``backend``, or None if it can. Local, quick, no side effect.

    Args:
        backend: its name.
        ranks: how many are to be connected. One alone needs no backend, so any name will do that there is.
    """
    own = backend in _OWN or backend in _registered
    if ranks == 1 and (own or all(knows(name) for name in split_name(backend).values())):
        return None
    if backend in ("threads", "solo"):
        return None
    if backend in ("shm", "hybrid"):
        return shm_refusal()
    if backend in _registered:
        ask = _registered[backend].refusal
        return None if ask is None else ask()
    return c10d_refusal(backend, _registered)

"""The transport over the backends of ``torch.distributed``: Gloo, NCCL, or any that is registered.

The backend objects are built and called directly. That is faster than the functions
of ``torch.distributed``, needs no rank outside the group, and gives every call its
own deadline.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize

import torch

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.background import beside
from bagua.comm.lifetime.forks import family, forked_error, run_all
from bagua.comm.long_wait import LongWait
from bagua.comm.reduction import copy_pieces
from bagua.comm.store.keys import wait_for_keys
from bagua.comm.transports.c10d.groups import BackendGroup, create_group, group_refusal, split_name
from bagua.comm.transports.c10d.handles import C10dHandle, HostHandle, StreamHandle, Waiters
from bagua.comm.transports.c10d.lowering import Lowering
from bagua.comm.transports.contract import DONE, Data, Handle, Membership, Transport
from bagua.comm.transports.failure import FailureFinder
from bagua.errors import BaguaError, TransportUnavailableError

#: Calls under way from which on those that are complete are looked for among them.
_SWEEP_AT = 16
#: What NCCL says of ranks that use one GPU, before version 2.30 and since.
_ON_ONE_GPU = ("Duplicate GPU detected", "using the same GPU")
#: Kinds that move something even if ``call.numel`` is 0.
_NEVER_EMPTY = frozenset({"barrier", "alltoall_v", *POINT_TO_POINT})


class _Channel:
    """One backend and what is needed to start calls on it."""

    __slots__ = ("collective", "group", "message", "met", "start", "takes_messages")

    def __init__(self, group: BackendGroup, waiters: Waiters) -> None:
        self.group = group
        lowering = Lowering(group.group, group.rank, group.size, group.abilities)
        self.start = lowering.start
        self.takes_messages = lowering.takes_messages
        #: Among whom the first call was made already, where that connects them: a pair, or, with the name "", all.
        self.met: set[str] | None = set() if group.connects_late else None
        self.collective: Callable[..., C10dHandle] = StreamHandle if group.on_stream else HostHandle
        self.message = self.collective if group.on_stream else functools.partial(HostHandle, waiters=waiters)


class C10dTransport(Transport):
    """Collectives on backends of ``torch.distributed``.

    Args:
        backend: a backend (``gloo``, ``nccl``, or one registered with torch), or one for
            each device (``cpu:gloo,cuda:nccl``).
        membership: the ranks served.

    Raises:
        TransportUnavailableError: the backend does not exist here or cannot connect.
        CollectiveTimeoutError: some ranks never came; ``peers`` names them.
        PeerLostError: a rank died while the others connected.
    """

    def __init__(self, backend: str, membership: Membership) -> None:
        super().__init__(membership)
        self.name = backend
        self._waiters = Waiters()
        self._global_rank = membership.ranks[self.rank]
        #: A signal handler may close in the middle of it.
        self._lock = threading.RLock()
        self._closed = False
        self._outstanding: deque[C10dHandle] = deque()
        self._sweep_at = _SWEEP_AT
        self._channels: dict[str, _Channel] = {}
        self.failures = FailureFinder(
            membership, functools.partial(_disconnect, self._channels), functools.partial(_count_closed, self._channels)
        )
        try:
            for device_type, name in split_name(backend).items():
                self._add_channel(device_type, self._create_group(name))
        except BaseException:
            for channel in set(self._channels.values()):
                channel.group.close()
            self.failures.close()
            raise
        self._choose()
        if not _living:
            Finalize(None, _close_in_child, exitpriority=0)
        _living.add(self)
        family.add(self)

    def _create_group(self, name: str) -> BackendGroup:
        try:
            return create_group(name, self.membership)
        except TransportUnavailableError as error:
            found = self.failures.not_connected(error)
            if found is error:
                raise
            raise found from error

    def _add_channel(self, device_type: str, group: BackendGroup) -> None:
        channel = _Channel(group, self._waiters)
        for served in [device_type] if device_type else sorted(group.device_types):
            self._channels[served] = channel

    def _choose(self) -> None:
        """What follows from the backends: devices, where exchanges and barriers run, and whether they overlap."""
        self._cpu = self._channels.get("cpu")
        self._default = self._cpu or next(iter(self._channels.values()))
        served = set(self._channels)
        if self._cpu is not None and torch.cuda.is_available():
            served.add("cuda")  # By way of the CPU, if no backend takes it.
        self.device_types = frozenset(served)
        groups = [channel.group for channel in self._channels.values()]
        streams = [group for group in groups if group.executor == "stream"]
        chosen = (streams or groups)[0]
        self.executor, self.overlaps = chosen.executor, chosen.overlaps

    # Calls.

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        if self.failures.broken:
            self.failures.check_usable()
        kind = call[0]
        if call[2] == 0 and kind not in _NEVER_EMPTY:
            return DONE
        tensor = source if target is None else target
        if tensor is None:
            channel = self._default
        elif self._cpu is not None and tensor.is_cpu:
            channel = self._cpu
        else:
            found = self._channels.get(tensor.device.type)
            if found is None:
                return self._start_staged(call, source, target, timeout_s, asynchronous)
            channel = found
        if channel.met is not None:
            self._meet(call, channel.met, timeout_s)
        try:
            if target is None or not target.is_inference():
                works, finish = channel.start(call, source, target, timeout_s)
            else:
                with torch.inference_mode():  # torch guards tensors that were made in it, in any thread
                    works, finish = channel.start(call, source, target, timeout_s)
                finish = None if finish is None else torch.inference_mode()(finish)
        except RuntimeError as error:
            raise self._failed(call, error, timeout_s) from error
        new_handle = channel.message if channel.takes_messages(call) else channel.collective
        handle = new_handle(self.failures, works, finish, timeout_s, (source, target))
        handle.call = call
        if asynchronous or channel.group.on_stream:
            self._keep(handle)
        return handle

    def _meet(self, call: Call, met: set[str], timeout_s: float) -> None:
        """Wait until the others, too, are about to connect: inside torch no deadline would end that."""
        pair = sorted((self.rank, call.root)) if call.kind in ("send", "recv") else []
        name = "-".join(map(str, pair))
        if name in met or (pair and call.root < 0):
            return
        store, members, started = self.membership.store, pair or range(self.size), time.monotonic()
        store.set(f"met/{name}/{self.rank}", "")
        keys = [f"met/{name}/{member}" for member in members]
        wait = LongWait(judge=self.failures.judge)

        def meanwhile() -> bool:
            if wait.is_over():
                self.failures.warn_of(wait, call)
            if (trouble := wait.trouble()) is not None:
                raise trouble
            return self.failures.broken or self.failures.peers_left()

        there = wait_for_keys(store, keys, started + timeout_s, meanwhile)
        self.failures.check_usable()
        elapsed_s = time.monotonic() - started
        if not there:
            raise self.failures.timed_out(elapsed_s, timeout_s, peer=call.root if pair else None)
        if self.failures.peers_left():
            raise self.failures.failed(ConnectionError("a peer left"), elapsed_s, timeout_s)
        met.add(name)

    def _start_staged(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """Tensors of a device that no backend takes travel by way of the CPU."""
        # The place for the rank of a sender is on the CPU, and stays.
        near_source = source if source is None or source.is_cpu else source.to("cpu", copy=True)
        if target is None or target is source:
            near_target = None if target is None else near_source
        else:
            near_target = target.to("cpu", copy=True)
        handle = self.start(call, near_source, near_target, timeout_s, asynchronous)
        if target is not None and isinstance(handle, C10dHandle):
            assert near_target is not None
            handle.then(functools.partial(copy_pieces, [target], [near_target]))
        return handle

    def _keep(self, handle: C10dHandle) -> None:
        """Remember a call that runs on its own: its tensors must live, and close must end it."""
        outstanding = self._outstanding
        while outstanding and outstanding[0].is_completed():
            outstanding.popleft()
        outstanding.append(handle)
        if len(outstanding) > self._sweep_at:  # One that lasts, as an open receive, keeps none of those behind it.
            self._outstanding = deque(one for one in outstanding if not one.is_completed())
            self._sweep_at = max(2 * len(self._outstanding), _SWEEP_AT)
        handle.unattended()

    def _failed(self, call: Call, error: RuntimeError, timeout_s: float) -> BaguaError:
        """What to raise for what torch raised when ``call`` was to be started."""
        if isinstance(error, NotImplementedError):
            problem = f"backend {self.name} cannot do {call.kind}: {error}"
            advice = "Use another backend for this communicator."
            return TransportUnavailableError(problem, rank=self._global_rank, advice=advice)
        failed = self.failures.failed(error, 0.0, timeout_s)
        if not any(said in str(error) for said in _ON_ONE_GPU):
            return failed
        return TransportUnavailableError(
            "several ranks use one GPU, and NCCL connects one rank for each GPU",
            rank=self._global_rank,
            advice='Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, or use backend="gloo".',
        )

    # Failure, and the end.

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self.failures.abort(reason, culprit)

    def idle(self) -> bool:
        return all(handle.is_completed() for handle in list(self._outstanding))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        pending = [handle for handle in list(self._outstanding) if not handle.is_completed()]
        broken = self.failures.broken
        try:
            self.failures.end(under_way=bool(pending))
        finally:  # Ctrl-C may end what tells the others.
            self._let_go(broken)

    def _let_go(self, broken: bool) -> None:
        """Give back what a closed transport holds."""
        for handle in list(self._outstanding):
            handle.discard(self.failures.ended())
        self._outstanding.clear()
        self.failures.close()
        channels = list(set(self._channels.values()))
        self._channels.clear()
        self._cpu = self._default = None  # type: ignore[assignment]
        release = functools.partial(_release, channels, self._waiters)
        if not (broken and beside(release)):
            release()
        _living.discard(self)

    def disown(self) -> None:
        """In a forked child: say nothing to anybody, and destroy nothing of torch's."""
        self._lock = threading.RLock()
        self._closed = True
        self.failures.disown()
        for handle in self._outstanding:
            handle.disown(forked_error())
        self._outstanding.clear()
        for channel in set(self._channels.values()):
            channel.group.disown()
        _living.discard(self)


def _release(channels: list[_Channel], waiters: Waiters) -> None:
    """Drop torch's objects. One that sends to a peer that is lost may wait for it until the deadline of the call."""
    waiters.stop()
    while channels:
        channels.pop().group.close()


def _disconnect(channels: dict[str, _Channel]) -> None:
    """Not a bound method: a cycle would keep torch's objects alive until the next garbage collection."""
    for channel in set(channels.values()):
        channel.group.break_connections()


def _count_closed(channels: dict[str, _Channel]) -> int:
    return max((channel.group.count_closed() for channel in list(channels.values())), default=0)


def c10d_refusal(backend: str, others: Iterable[str] = ()) -> TransportUnavailableError | None:
    """Why this process cannot serve ``backend``, or None if it can. Messages name ``others`` that exist, too."""
    refusals = (group_refusal(name, others) for name in split_name(backend).values())
    return next((refusal for refusal in refusals if refusal is not None), None)


_living: weakref.WeakSet[C10dTransport] = weakref.WeakSet()


def _close_all() -> None:
    """Torch's objects that are alive when the interpreter ends abort the process."""
    run_all(transport.close for transport in list(_living))


def _close_in_child() -> None:
    """Children that multiprocessing forks come here, never to ``atexit``, and before they wait for their threads."""
    if all(one.daemon or one is threading.current_thread() for one in threading.enumerate()):  # Others may communicate.
        _close_all()


atexit.register(_close_all)

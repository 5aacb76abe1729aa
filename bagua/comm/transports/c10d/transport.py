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
from collections.abc import Callable

import torch

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.closing import run_all
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.transports.base import DONE, Handle, Membership, Transport
from bagua.comm.transports.c10d.groups import BackendGroup, create_group, group_refusal, split_name
from bagua.comm.transports.c10d.handles import (
    C10dHandle,
    CollectiveHandle,
    MessageHandle,
    StreamHandle,
    StreamWatch,
    Waiters,
)
from bagua.comm.transports.c10d.lowering import Finish, Lowering
from bagua.comm.transports.c10d.monitor import monitor
from bagua.comm.transports.failure.errors import ENDED, ended_error, lost_error, timeout_error
from bagua.comm.transports.failure.notices import Cause, Findings, Mailbox
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.errors import CollectiveTimeoutError, CommunicationError, TransportUnavailableError

__all__ = ["C10dTransport", "c10d_refusal"]

#: Kinds that move something even if ``call.numel`` is 0.
_NEVER_EMPTY = frozenset({"barrier", "alltoall_v", *POINT_TO_POINT})


class _Channel:
    """One backend and what is needed to start calls on it."""

    __slots__ = ("collective", "group", "message", "start", "takes_messages")

    def __init__(self, group: BackendGroup) -> None:
        self.group = group
        lowering = Lowering(group.group, group.rank, group.size, group.abilities)
        self.start = lowering.start
        self.takes_messages = lowering.takes_messages
        self.collective: type[C10dHandle] = StreamHandle if group.on_stream else CollectiveHandle
        self.message: type[C10dHandle] = StreamHandle if group.on_stream else MessageHandle


class C10dTransport(Transport):
    """Collectives on backends of ``torch.distributed``.

    Args:
        backend: a backend (``gloo``, ``nccl``, or one registered with torch), or one for
            each device (``cpu:gloo,cuda:nccl``).
        membership: the ranks served.

    Raises:
        TransportUnavailableError: the backend does not exist here or cannot connect.
        CollectiveTimeoutError: some ranks never came; ``peers`` names them.
    """

    def __init__(self, backend: str, membership: Membership) -> None:
        super().__init__(membership)
        self.name = backend
        self.waiters = Waiters()
        self._global_rank = membership.ranks[self.rank]
        # A signal handler may abort or close in the middle of either.
        self._lock = threading.RLock()
        self._verdict = threading.RLock()
        self._cause: Cause | None = None
        self._error: CommunicationError | None = None
        self._closed = False
        self._outstanding: deque[C10dHandle] = deque()
        self._channels: dict[str, _Channel] = {}
        self._mailbox = Mailbox(membership)
        try:
            self._meet()
            for device_type, name in split_name(backend).items():
                self._add_channel(device_type, create_group(name, membership))
        except BaseException:
            self._mailbox.close()
            raise
        self._choose()
        _living.add(self)
        family.add(self)

    def _meet(self) -> None:
        started = time.monotonic()
        members = self.membership
        missing = self._mailbox.meet()
        if missing:
            raise CollectiveTimeoutError(
                f"communicator {members.label} cannot be set up: {len(missing)} of {members.size} ranks did not come",
                rank=self._global_rank,
                peers=missing,
                elapsed_s=time.monotonic() - started,
                timeout_s=members.timeout_s,
                advice="Every member must make the same groups in the same order.",
            )

    def _add_channel(self, device_type: str, group: BackendGroup) -> None:
        channel = _Channel(group)
        for served in [device_type] if device_type else sorted(group.device_types):
            self._channels[served] = channel

    def _choose(self) -> None:
        """What follows from the backends: devices, executor, and where barriers run."""
        self._cpu = self._channels.get("cpu")
        self._default = self._cpu or next(iter(self._channels.values()))
        served = set(self._channels)
        if self._cpu is not None and torch.cuda.is_available():
            served.add("cuda")  # By way of the CPU, if no backend takes it.
        self.device_types = frozenset(served)
        groups = [channel.group for channel in self._channels.values()]
        streams = [group for group in groups if group.executor == "stream"]
        self.executor = (streams or groups)[0].executor

    # Calls.

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        if self._cause is not None:
            self.check_usable()
        kind = call[0]
        if call[3] == 0 and kind not in _NEVER_EMPTY:
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
        try:
            if target is None or not target.is_inference():
                works, finish = channel.start(call, source, target, timeout_s)
            else:
                with torch.inference_mode():  # torch guards tensors that were made in it
                    works, finish = channel.start(call, source, target, timeout_s)
        except NotImplementedError as error:
            raise self._unable(call, error) from error
        except RuntimeError as error:
            raise self.failed(error, 0.0, timeout_s) from error
        handle_class = channel.message if channel.takes_messages(call) else channel.collective
        handle = handle_class(self, works, _where_allowed(finish, target), timeout_s, (source, target))
        if asynchronous or channel.group.on_stream:
            self._keep(handle)
        return handle

    def _start_staged(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        """Tensors of a device that no backend takes travel by way of the CPU."""
        near_source = None if source is None else source.to("cpu", copy=True)
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
        handle.unattended()

    def watch(self, works: StreamWatch) -> None:
        """Let the monitor enforce the deadline of ``works``."""
        monitor.watch(works)

    def _unable(self, call: Call, error: Exception) -> TransportUnavailableError:
        return TransportUnavailableError(
            f"backend {self.name} cannot do {call.kind}: {error}",
            rank=self._global_rank,
            advice="Use another backend for this communicator.",
        )

    # Failure.

    @property
    def broken(self) -> bool:
        """Whether the communicator was broken or closed."""
        return self._cause is not None

    def check_usable(self) -> None:
        """Raise if this communicator was broken or closed."""
        if self._cause is None:
            return
        with self._verdict:
            error, self._error = self._error, None
        raise error or self._already()

    def timed_out(self, elapsed_s: float, timeout_s: float) -> CommunicationError:
        """End the communicator because a deadline passed; the error to raise."""
        if not self._break(self._own_cause("timed out", f"it gave up after {elapsed_s:.1f} s"), announce=True):
            return self._already()
        return self._timeout_error(self._mailbox.find_out(everyone=True), elapsed_s, timeout_s)

    def _timeout_error(self, found: Findings, elapsed_s: float, timeout_s: float) -> CommunicationError:
        return timeout_error(sorted(found.lost + found.silent), elapsed_s, timeout_s)

    def failed(self, error: BaseException, elapsed_s: float, timeout_s: float) -> CommunicationError:
        """End the communicator because a call failed; the error to raise."""
        found = self._mailbox.look()
        cause = self._named(found)
        if not self._break(cause or self._own_cause("failed", f"its call failed: {error}"), announce=cause is not None):
            return self._already()
        if cause is None:
            # Who died a moment ago may still answer; those who are well say so as soon as their calls fail.
            self._mailbox.tell(None)
            found = self._mailbox.find_out()
            cause = self._named(found)
            if cause is not None:
                self._cause = cause  # Other calls that were under way name the same rank.
                if cause.rank == self._global_rank:
                    self._mailbox.tell(cause)
        if cause is not None and cause.kind == "timed out" and elapsed_s >= timeout_s / 2:
            # This rank waited as well; the other one's clock was only a little ahead.
            self._mailbox.tell(None)
            return self._timeout_error(self._mailbox.find_out(everyone=True), elapsed_s, timeout_s)
        return lost_error(error, found, self._global_rank, elapsed_s, timeout_s)

    def _named(self, found: Findings) -> Cause | None:
        """The cause, if a notice or a refused connection names a rank."""
        if found.cause is None and found.lost:
            return Cause(self._global_rank, found.lost[0], "lost", ENDED)
        return found.cause

    def _own_cause(self, kind: str, reason: str) -> Cause:
        return Cause(self._global_rank, self._global_rank, kind, reason)

    def end_unattended(self, judge: Callable[[], CommunicationError]) -> None:
        """For the monitor: end the communicator with ``judge()``, which the next call or wait raises."""
        with self._verdict:  # Who comes meanwhile waits for the verdict.
            self._error = judge()

    def peers_left(self) -> bool:
        """Whether a peer sent a notice of why it left."""
        return self._mailbox.cause() is not None

    def _already(self) -> CommunicationError:
        assert self._cause is not None
        return ended_error(self._cause, self._global_rank)

    def _break(self, cause: Cause, *, announce: bool) -> bool:
        """Close all connections; False if that has happened before."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
        if announce:
            # Before the connections close: whoever is woken by that looks for the cause.
            self._mailbox.tell(cause)
        for channel in set(self._channels.values()):
            channel.group.break_connections()
        return True

    def abort(self, reason: str, culprit: int | None = None) -> None:
        own = self._own_cause("aborted", reason)
        self._break(own if culprit is None else own._replace(culprit=culprit), announce=True)

    def idle(self) -> bool:
        return all(handle.is_completed() for handle in list(self._outstanding))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        pending = [handle for handle in self._outstanding if not handle.is_completed()]
        cause = self._own_cause("closed", "it closed its communicator")
        if pending:
            self._break(cause, announce=True)
        elif self._cause is None:
            self._cause = cause
        for handle in self._outstanding:
            handle.discard(self._already())
        self._outstanding.clear()
        self.waiters.stop()
        self._mailbox.close()
        for channel in set(self._channels.values()):
            channel.group.close()
        self._channels = {}
        self._cpu = self._default = None  # type: ignore[assignment]
        _living.discard(self)

    def disown(self) -> None:
        """In a forked child: say nothing to anybody, and destroy nothing of torch's."""
        self._lock, self._verdict = threading.RLock(), threading.RLock()
        self._closed = True
        self._cause = self._cause or self._own_cause("forked", "the communicator is the parent's")
        for handle in self._outstanding:
            handle.disown(forked_error())
        self._outstanding.clear()
        for channel in set(self._channels.values()):
            channel.group.disown()


def _where_allowed(finish: Finish | None, target: torch.Tensor | None) -> Finish | None:
    """``finish``, in inference mode if the target was made in that, whoever calls it."""
    if finish is None or target is None or not target.is_inference():
        return finish
    return torch.inference_mode()(finish)


def c10d_refusal(backend: str) -> TransportUnavailableError | None:
    """Why this process cannot serve ``backend``, or None if it can."""
    refusals = (group_refusal(name) for name in split_name(backend).values())
    return next((refusal for refusal in refusals if refusal is not None), None)


_living: weakref.WeakSet[C10dTransport] = weakref.WeakSet()


def _close_all() -> None:
    """Torch's objects that are alive when the interpreter ends abort the process."""
    run_all(transport.close for transport in list(_living))


atexit.register(_close_all)

"""The path that every call of a communicator takes: order, errors, counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from bagua.comm.call import COLLECTIVES, KINDS, Call
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.lifetime.turns import Turns
from bagua.comm.operands import as_seconds
from bagua.comm.statistics import Statistics
from bagua.comm.transports.base import DONE, Handle, Transport
from bagua.comm.work import CompositeWork, PendingWork, Steps, Work
from bagua.errors import (
    CommunicationError,
    CommunicatorClosedError,
    ConcurrentUseError,
    ConfigurationError,
    PeerLostError,
    blame,
)

__all__ = ["CallPipeline", "Timeout"]

Timeout = float | timedelta | None


class CallPipeline:
    """Brings the calls of one communicator to its transport, and ends all of them when one fails.

    Args:
        transport: transport that moves the bytes.
        timeout_s: deadline of calls that do not bring their own, in seconds.

    Attributes:
        timeout_s: deadline of calls that do not bring their own, in seconds.
        statistics: counters, and the latest calls.
        in_use: lock that is held while a call is started, and while a synchronous one runs.
        closed: whether the communicator was closed here.
    """

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self.timeout_s = timeout_s
        self.in_use: threading.Lock | Turns = threading.Lock()
        self._shared = False
        self._broken: BaseException | None = None
        self.closed = False
        #: By kind the counter of its calls: one for all collectives, one for all calls between two ranks.
        collectives, others = [0], [0]
        self._numbers = {kind: collectives if kind in COLLECTIVES else others for kind in KINDS}
        self._composite: CompositeWork | None = None
        self.statistics = Statistics(transport.rank, transport.size)
        self._label = transport.membership.label
        self._global_rank = transport.membership.ranks[transport.rank]
        family.add(self)

    @property
    def lost(self) -> tuple[int, str] | None:
        """The global rank whose loss broke the communicator, and what it did; None if that is not what happened."""
        error = self._broken
        return (error.peers[0], error.reason) if isinstance(error, PeerLostError) and error.reason else None

    @property
    def usable(self) -> bool:
        """Whether calls are still possible: neither closed nor broken."""
        return self._broken is None and not self.closed

    def share(self) -> None:
        """Let several threads use this communicator: they start calls in turn, and wait side by side."""
        self.in_use = Turns()
        self._shared = True
        self._transport.share()

    def abort(self, reason: str = "aborted by the user", culprit: int | None = None) -> None:
        """Break the communicator at once, from any thread.

        Calls under way end with an error, here and on the other ranks, whose
        ``PeerLostError`` names the culprit and says why.

        Args:
            reason: why; of another culprit what it did, beginning with "it".
            culprit: global rank to blame, which need not be a member; None means this one.
        """
        if self._broken is None:
            why = reason if culprit is None else f"rank {culprit}: {reason}"
            self._broken = CommunicatorClosedError(f"the communicator was aborted: {why}", rank=self._global_rank)
        if culprit is None:
            reason = f"it aborted the communicator: {reason}"
        self._transport.abort(reason, culprit)

    def idle(self) -> bool:
        """Whether all calls are complete; those that consist of several are brought on. Never blocks, never raises."""
        composite = self._composite
        return (composite is None or composite.is_completed()) and self._transport.idle()

    def close(self) -> None:
        """Give back threads, sockets and memory. Later calls raise ``CommunicatorClosedError``."""
        if not self.closed:
            self.closed = True
            # A synchronous call is under way, in another thread or below a signal handler.
            if self.in_use.locked():
                self._transport.abort("it closed its communicator during a call")
            self._transport.close()

    def disown(self) -> None:
        """In a forked child: the communicator is its parent's, and calls are refused. One rank alone needs nobody."""
        self.in_use = Turns() if isinstance(self.in_use, Turns) else threading.Lock()
        self._composite = None
        if self._transport.size > 1:
            self._broken, self.closed = forked_error(), True

    # The path of every call.

    def run(  # noqa: PLR0915 - each function that it calls costs a small message more
        self,
        kind: str,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        numel: int,
        async_op: bool,
        timeout: Timeout,
        reduction: str = "",
        root: int = -1,
        *,
        peer: int = -1,
        counts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        finish: Callable[[], Any] | None = None,
        result: Any = None,
    ) -> Work | None:
        """Start the described call; wait for it unless ``async_op``.

        Its result is what ``finish`` returns; ``result`` if that is None.
        """
        timeout_s = self.timeout_s if timeout is None else as_seconds(timeout)
        composite = self._composite  # Another thread may complete it meanwhile.
        if composite is not None and not composite.driven_here():
            composite.wait()
        started = time.perf_counter()
        call: Call | None = None
        if not self.in_use.acquire(False):
            raise self._concurrent_use(kind)
        try:  # Nothing stands before it: a signal handler that raises would leave the communicator in use.
            try:
                if self._broken is not None or self.closed:
                    raise self._refusal(kind)
                number = self._numbers[kind]
                number[0] += 1
                call = Call(kind, number[0], dtype, numel, reduction, root, peer, counts[0], counts[1])
                self.statistics.recent.append(call)
                try:
                    handle = self._transport.start(call, source, target, timeout_s, async_op)
                except (ConcurrentUseError, ConfigurationError):
                    number[0] -= 1  # Nothing was started, and the other ranks count on.
                    raise
                if handle is not DONE and not (async_op or self._shared):
                    handle.wait()
            finally:
                self.in_use.release()
            if not async_op:
                if self._shared:
                    handle.wait()
                if finish is not None:
                    finish()
                self.statistics.add(call, time.perf_counter() - started)
                return None
        except BaseException as error:
            self._break(error, call, started)
            raise
        return self._pending(handle, call, started, finish, (source, target, result))

    def _pending(
        self,
        handle: Handle,
        call: Call,
        started: float,
        finish: Callable[[], Any] | None,
        kept: tuple[Any, ...],
    ) -> Work:
        spent = time.perf_counter() - started

        def complete(timeout_s: float | None) -> Any:
            waiting = time.perf_counter()
            try:
                handle.wait(timeout_s)
                found = None if finish is None else finish()
            except BaseException as error:
                self._break(error, call, started)
                raise
            self.statistics.add(call, spent + time.perf_counter() - waiting)
            return kept[-1] if found is None else found

        def give_up(error: CommunicationError) -> None:
            self._break(error, call, started)

        return PendingWork(complete, handle.is_completed, handle.notify, give_up)

    def compose(self, steps: Steps, async_op: bool) -> CompositeWork:
        """Run, or start, a collective made of several; see ``CompositeWork``."""
        composite = self._composite
        if composite is not None and not composite.driven_here():
            composite.wait()
        outer = self._composite

        def released(_: CompositeWork) -> None:
            self._composite = outer

        work = CompositeWork(steps, released)
        if work.is_completed():
            return work
        if async_op:
            self._composite = work
        else:
            work.wait()
        return work

    # Errors.

    def _concurrent_use(self, kind: str) -> ConcurrentUseError:
        return ConcurrentUseError(
            f"{kind} was called while another thread, or the code that a signal handler interrupts, "
            f"is inside a call on {self._label}",
            rank=self._global_rank,
            call=kind,
            advice="Give each thread a communicator of its own: group.duplicate().",
        )

    def _refusal(self, kind: str) -> CommunicatorClosedError:
        reason = "it was closed"
        if self._broken is not None:
            reason = str(getattr(self._broken, "problem", "") or repr(self._broken))
        refusal = CommunicatorClosedError(
            f"{kind} on {self._label}, which can no longer be used: {reason}",
            rank=self._global_rank,
            advice="Call destroy_process_group() and start anew, from a checkpoint if need be.",
        )
        refusal.__cause__ = self._broken
        return refusal

    def _break(self, error: BaseException, call: Call | None, started: float) -> None:
        """Make this communicator unusable because ``error`` ended ``call``, if there is one, half-way."""
        if call is None:
            return
        if isinstance(error, ConcurrentUseError) and error.call is None:
            error.call = str(call)  # It is that of this call, not of a handler that interrupted it.
            return
        if isinstance(error, ConfigurationError):
            return  # The transport refused before anything was sent.
        if isinstance(error, CommunicationError):
            self._complete_facts(error, call, started)
        if self._broken is None:
            self._broken = error
        culprit, reason = blame(error, self._global_rank, str(call))
        self._transport.abort(reason, culprit)

    def _complete_facts(self, error: CommunicationError, call: Call, started: float) -> None:
        if error.call is None:
            error.call = str(call)
        if error.sequence is None:
            error.sequence = call.sequence
        if error.communicator is None:
            error.communicator = self._label
        if error.rank is None:
            error.rank = self._global_rank
        if error.elapsed_s is None:
            error.elapsed_s = round(time.perf_counter() - started, 3)
        if not error.history:
            error.history = self.statistics.history()

"""The path that every call of a communicator takes: order, errors, counters."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypedDict

from bagua.comm.call import COLLECTIVES, KINDS, POINT_TO_POINT, Call, new_call
from bagua.comm.lifetime.background import Turns
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.operands import as_seconds
from bagua.comm.records.recorder import CallRecord, Place, Recorder, Statistics, observers
from bagua.comm.transports.contract import ARRIVALS_LENGTH, DONE, Data, Handle, Transport
from bagua.comm.work import Composite, Steps, Work
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    ConcurrentUseError,
    ConfigurationError,
    PeerLostError,
    blame,
)
from bagua.torch_private import profiler_range, profiling

Timeout = float | timedelta | None


class CallOptions(TypedDict, total=False):
    """What every call takes after its own arguments."""

    async_op: bool
    timeout: Timeout


class CallPipeline:
    """Brings the calls of one communicator to its transport, and ends all of them when one fails.

    Args:
        transport: transport that moves the bytes.
        timeout_s: deadline of calls that do not bring their own, in seconds.
        recorder: record of the calls of this rank; None for one of its own.

    Attributes:
        timeout_s: deadline of calls that do not bring their own, in seconds.
        statistics: counters, and the latest calls.
        in_use: lock that is held while a call is started, and while a synchronous one runs.
        closed: True once the communicator was closed here.
    """

    def __init__(self, transport: Transport, timeout_s: float, recorder: Recorder | None = None) -> None:
        membership = transport.membership
        self._transport = transport
        self._arrivals = transport.arrivals
        self.timeout_s = timeout_s
        self.in_use: threading.Lock | Turns = threading.Lock()
        self._shared = False
        #: Held while a shared communicator counts a call.
        self._counting = threading.RLock()
        #: Synchronous calls that threads wait for after their turn.
        self._awaited: set[Handle] = set()
        self._broken: BaseException | None = None
        self.closed = False
        #: The counter of all collectives, and that of all calls between two ranks.
        self._counters = collectives, others = [0], [0]
        self._numbers = {kind: collectives if kind in COLLECTIVES else others for kind in KINDS}
        self._composite: Composite | None = None
        #: Started calls that no code has seen complete. Not on CUDA streams: to ask spoils a graph that is captured.
        self._unseen: deque[tuple[CallRecord, Handle]] = deque(maxlen=64)
        self._looks = transport.executor != "stream"
        self._label = membership.label
        self._ranks = membership.ranks
        self._global_rank = membership.ranks[transport.rank]
        place = Place(membership.label, transport.name, transport.rank, membership.ranks)
        self.statistics = Statistics(place, recorder)
        self._recorder = self.statistics.recorder
        family.add(self)

    @property
    def lost(self) -> tuple[int, str] | None:
        """See ``Communicator``, also for the next ones."""
        error = self._broken
        return (error.peers[0], error.reason) if isinstance(error, PeerLostError) and error.reason else None

    @property
    def usable(self) -> bool:
        return self._broken is None and not self.closed

    def share(self) -> None:
        self.in_use = Turns()
        self._shared = True
        self._transport.share()

    def abort(self, reason: str = "aborted by the user", culprit: int | None = None) -> None:
        if self._broken is None:
            why = reason if culprit is None else f"rank {culprit}: {reason}"
            self._broken = CommunicatorClosedError(f"the communicator was aborted: {why}", rank=self._global_rank)
        if culprit is None:
            reason = f"it aborted the communicator: {reason}"
        self._transport.abort(reason, culprit)

    def idle(self) -> bool:
        composite = self._composite
        return (composite is None or composite.is_completed()) and self._transport.idle()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            # A synchronous call is under way, in another thread or below a signal handler.
            if self.in_use.locked() or self._awaited:
                self._transport.abort("it closed its communicator during a call")
            self._transport.close()
            self._unseen.clear()

    def disown(self) -> None:
        """In a forked child: the communicator is its parent's, and calls are refused. One rank alone needs no peer."""
        self.in_use = Turns() if isinstance(self.in_use, Turns) else threading.Lock()
        self._counting = threading.RLock()
        self._composite = None
        self._awaited.clear()
        self._unseen.clear()
        if self._transport.size > 1:
            self._broken, self.closed = forked_error(), True

    # The path of every call.

    def run(
        self,
        call: Call,
        source: Data,
        target: Data,
        async_op: bool,
        timeout: Timeout,
        finish: Callable[[], Any] | None = None,
        result: Any = None,
    ) -> Work | None:
        """Number ``call`` and start it; wait for it unless ``async_op``.

        Its result is what ``finish`` returns; ``result`` if that is None.
        """
        timeout_s = self.timeout_s if timeout is None else as_seconds(timeout)
        if self._composite is not None:
            self._finish_composite()
        started = self._recorder.clock()
        if self._unseen:
            self._look(started)
        # While the call is under way, autograd may make the caller's own objects part of a graph, as it does outputs.
        if async_op:
            source, target = _bare(source, target)
        record: CallRecord | None = None
        if not self.in_use.acquire(False):
            raise self._concurrent_use(call.kind)
        try:  # Nothing stands before it: a signal handler that raises would leave the communicator in use.
            try:
                if self._broken is not None or self.closed:
                    raise self._refusal(call.kind)
                number = self._numbers[call.kind]
                call = new_call(call[:-1] + (number[0] + 1,))  # noqa: RUF005 - in each call: a list would be made first
                record = self.statistics.begin(call, started)
                start = self._start_in_profile if profiling() else self._transport.start
                handle = start(call, source, target, timeout_s, async_op)
                number[0] += 1  # Not earlier: where nothing was started, the other ranks count on.
                if handle is not DONE and not async_op:
                    self._await(handle)
            finally:
                self.in_use.release()
            if not async_op:
                if self._shared or finish is not None:
                    self._conclude(handle, finish)
                self._end(record, self._recorder.clock())
                return None
        except BaseException as error:
            self._break(error, record)
            raise
        return self._pending(handle, record, finish, (source, target, result))

    def _await(self, handle: Handle) -> None:
        """Wait for a synchronous call in its turn, or note that a thread will: ``close`` looks at both."""
        if self._shared:
            self._awaited.add(handle)
        else:
            handle.wait()

    def _conclude(self, handle: Handle, finish: Callable[[], Any] | None) -> None:
        """What is left of a synchronous call."""
        if self._shared and handle is not DONE:
            try:
                handle.wait()
            finally:
                self._awaited.discard(handle)
        if finish is not None:
            finish()

    def _start_in_profile(self, call: Call, source: Data, target: Data, timeout_s: float, async_op: bool) -> Handle:
        """Start ``call`` in a range of torch's profiler, which holds the whole of a synchronous call."""
        end_range = profiler_range(f"{self._label}: {call}")
        try:
            handle = self._transport.start(call, source, target, timeout_s, async_op)
            if not (async_op or self._shared):
                handle.wait()
        finally:
            end_range()
        return handle

    def _pending(
        self, handle: Handle, record: CallRecord, finish: Callable[[], Any] | None, kept: tuple[Any, ...]
    ) -> Work:
        clock = self._recorder.clock
        record.waiter = 0
        spent = clock() - record.begun
        if handle is DONE:
            record.ended = record.begun + spent
        elif self._looks:
            self._unseen.append((record, handle))

        def complete(timeout_s: float | None) -> Any:
            waiting = clock()
            record.waiter = threading.get_ident()
            end_range = profiler_range(f"wait for {self._label}: {record.call}") if profiling() else None
            try:
                handle.wait(timeout_s)
                found = None if finish is None else finish()
            except BaseException as error:
                self._break(error, record)
                raise
            finally:
                if end_range is not None:
                    end_range()
            now = clock()
            ended = record.ended or handle.ended_at or now
            self._end(record, ended, spent + now - waiting, spent + max(ended - waiting, 0.0))
            return kept[-1] if found is None else found

        def give_up(timeout_s: float) -> CommunicationError | None:
            if handle.is_completed():
                return None
            error = CollectiveTimeoutError("the call did not complete in time", timeout_s=timeout_s)
            self._break(error, record)
            return error

        return Work(complete, handle.is_completed, handle.notify, give_up)

    def _look(self, now: float) -> None:
        """Note which of the started calls are complete by now."""
        with contextlib.suppress(IndexError, ValueError):  # Another thread looked, too.
            while True:
                record, handle = first = self._unseen[0]
                if not record.ended:
                    if not handle.is_completed():
                        return
                    if handle.failed:
                        record.state = "failed"  # The thread that waits for it gets the error.
                    record.ended = handle.ended_at or now
                self._unseen.remove(first)

    def _end(self, record: CallRecord, ended: float, spent: float | None = None, blocked_s: float = 0.0) -> None:
        """Count a call that took until ``ended``, inside of which and of its ``wait`` the caller ``spent`` seconds.

        Of a synchronous call that is the whole time, and the caller stood still in it.
        """
        if spent is None:
            spent = blocked_s = ended - record.begun
        if self._arrivals is not None:
            sequence = record.call.sequence
            number, waited_s, last = self._arrivals[sequence % ARRIVALS_LENGTH]
            if number == sequence and record.call.kind not in POINT_TO_POINT:
                ranks = self._ranks
                record.waited_s, record.waited_for = waited_s, tuple([ranks[member] for member in last])
        if not self._shared:
            self.statistics.end(record, ended, blocked_s, spent)
            return
        with self._counting:
            self.statistics.end(record, ended, blocked_s, spent)

    def _finish_composite(self) -> None:
        """Take the steps that are left of a collective made of several, which come before the next call."""
        composite = self._composite  # Another thread may complete it meanwhile.
        if composite is not None and not composite.driven_here():
            with contextlib.suppress(ConfigurationError):  # Whoever waits for it gets that. The ranks still agree.
                composite.wait()

    def compose(self, steps: Steps, async_op: bool, finish: Callable[[Any], Any] | None = None) -> Work:
        """Run, or start, a collective made of several; see ``Composite``.

        Args:
            steps: its steps. An error between them leaves peers in the middle of it, so it breaks the communicator.
            async_op: True to return before they are complete.
            finish: function of its result, called when no peer waits any more.
        """
        self._finish_composite()
        outer, begun = self._composite, self._calls()

        def released() -> None:
            self._composite = outer

        def broke(error: BaseException) -> None:
            if self._calls() > begun:
                self._break_between_calls(error)

        composite = Composite(steps, released, broke)
        if not composite.is_completed():
            if async_op:
                self._composite = composite
            else:
                composite.wait()
        return composite.as_work(finish)

    def _calls(self) -> int:
        """How many calls were started."""
        return sum(number for (number,) in self._counters)

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
        reason, advice = "it was closed", "Make this call before that, or on a new group."
        if self._broken is not None:
            reason = str(getattr(self._broken, "problem", "") or repr(self._broken))
            advice = "Call destroy_process_group() and start anew, from a checkpoint if need be."
        refusal = CommunicatorClosedError(
            f"{kind} on {self._label}, which can no longer be used: {reason}", rank=self._global_rank, advice=advice
        )
        refusal.__cause__ = self._broken
        return refusal

    def _break(self, error: BaseException, record: CallRecord | None) -> None:
        """Make this communicator unusable because ``error`` ended the call, if there is one, half-way."""
        if record is None:
            return
        call, record.state = record.call, "refused"
        if isinstance(error, ConcurrentUseError) and error.call is None:
            error.call = str(call)  # It is that of this call, not of a handler that interrupted it.
            return
        if isinstance(error, ConfigurationError):
            return  # The transport refused before anything was sent.
        record.state = "failed"
        if isinstance(error, CommunicationError):
            self._complete_facts(error, call, record.begun)
            if isinstance(error, CollectiveTimeoutError) and self._global_rank in error.peers:
                record.state = "late"
        if self._broken is None:
            self._broken = error
        culprit, reason = blame(error, self._global_rank, str(call))
        self._transport.abort(reason, culprit)
        if isinstance(error, CommunicationError):
            for observer in observers:
                observer.failed(self._recorder, error)

    def _break_between_calls(self, error: BaseException) -> None:
        """Make this communicator unusable because ``error`` ended a collective made of several between two of them."""
        if self._broken is None and not self.closed and not isinstance(error, ConfigurationError | ConcurrentUseError):
            self._broken = error
            culprit, reason = blame(error, self._global_rank, "a collective made of several calls")
            self._transport.abort(reason, culprit)

    def _complete_facts(self, error: CommunicationError, call: Call, started: float) -> None:
        facts = {
            "call": str(call),
            "activity": str(self._transport.membership.activity) or None,
            "sequence": call.sequence,
            "communicator": self._label,
            "rank": self._global_rank,
            "elapsed_s": round(self._recorder.clock() - started, 3),
        }
        for name, fact in facts.items():
            if getattr(error, name) is None:
                setattr(error, name, fact)
        if not error.history:
            error.history = self.statistics.history()


def _bare(source: Data, target: Data) -> tuple[Data, Data]:
    """The memory of both, which no graph gets hold of; of a call in place that of one."""
    memory = None if target is None else target.detach()
    return memory if source is target else None if source is None else source.detach(), memory

"""Communicators: the calls that users make, over a pipeline that brings them to a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed import Store

from bagua.comm import composed
from bagua.comm.call import Call, new_call
from bagua.comm.operands import BOOL_AS_BYTES, Intake, apart, check_counts, check_rank, readable, reduction_name
from bagua.comm.pipeline import CallPipeline, Timeout
from bagua.comm.records.recorder import KindStatistics, Recorder
from bagua.comm.reduction import ReduceOp
from bagua.comm.transports.contract import Transport
from bagua.comm.work import Work
from bagua.errors import InvalidRankError


class Communicator:
    """An ordered set of ranks that communicate; what ``comm=`` arguments take.

    Made by ``init_process_group``, ``new_group`` and ``ProcessGroup.duplicate``, never by hand. One thread at a time
    may use it. After a communication error it is broken, and every later call raises ``CommunicatorClosedError``.

    All calls take ``async_op`` (return a ``Work`` instead of waiting) and ``timeout`` (seconds or ``timedelta``;
    default: the communicator's). Ranks are ranks inside this communicator. Tensors may be 0-dimensional, empty,
    non-contiguous, or require gradients; sparse ones and devices that the transport does not serve raise
    ``InvalidTensorError`` before anything is sent.

    Args:
        transport: transport that moves the bytes.
        timeout_s: deadline of calls that do not bring their own, in seconds.
        recorder: record of the calls of this rank; None for one of its own.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        ranks: global rank of each member.
        store: store that the members of this communicator alone write to.
        backend: name of the transport, for example ``gloo``.
        label: name of this communicator in messages.
        activity: purpose of its calls, for messages.
        device_types: types of the devices whose tensors can be communicated.
        executor: place in which background exchanges run best, by measurement; see ``Transport``.
        overlaps: True if it pays to compute for one exchange while another one waits; see ``Transport``.
        statistics: counters, and the latest calls.
        pipeline: path of the calls to the transport.
        intake: checks of the arguments.

    Example:
        >>> import torch, bagua.comm
        >>> communicator = bagua.comm.solo_group().global_communicator
        >>> tensor = torch.tensor([1.0, 2.0])
        >>> communicator.allreduce(tensor)
        >>> tensor
        tensor([1., 2.])
    """

    def __init__(self, transport: Transport, timeout_s: float, recorder: Recorder | None = None) -> None:
        membership = transport.membership
        self._transport = transport
        self.rank: int = transport.rank
        self.size: int = transport.size
        self.ranks: tuple[int, ...] = membership.ranks
        self.store: Store = membership.store
        self.backend: str = transport.name
        self.label: str = membership.label
        self.activity = membership.activity
        self.device_types: frozenset[str] = transport.device_types
        self.executor: Literal["caller", "thread", "stream"] = transport.executor
        self.overlaps: bool = transport.overlaps
        self.pipeline = CallPipeline(transport, timeout_s, recorder)
        self.intake = Intake(transport.device_types, transport.rank, transport.size)
        self.statistics = self.pipeline.statistics

    @property
    def timeout_s(self) -> float:
        """Deadline of calls that do not bring their own, in seconds."""
        return self.pipeline.timeout_s

    @property
    def lost(self) -> tuple[int, str] | None:
        """The global rank whose loss broke the communicator, and what it did; None if that is not what happened."""
        return self.pipeline.lost

    @property
    def usable(self) -> bool:
        """Whether calls are still possible: neither closed nor broken."""
        return self.pipeline.usable

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """A flat uninitialized tensor of ``numel`` elements that collectives here reduce without a copy if they can."""
        return self._transport.empty(numel, dtype, torch.device(device))

    def share(self) -> None:
        """Let several threads use this communicator: they start calls in turn, and wait side by side."""
        self.pipeline.share()

    def stats(self) -> dict[str, KindStatistics]:
        """Calls, bytes and seconds of this communicator, by kind of call."""
        return self.statistics.kinds

    def history(self) -> tuple[str, ...]:
        """Descriptions of the last calls, oldest first."""
        return self.statistics.history()

    def abort(self, reason: str = "aborted by the user", culprit: int | None = None) -> None:
        """Break the communicator at once, from any thread.

        Calls under way end with an error, here and on the other ranks, whose ``PeerLostError`` names the culprit and
        says why.

        Args:
            reason: why; of another culprit what it did, beginning with "it".
            culprit: global rank to blame, which need not be a member; None means this one.
        """
        self.pipeline.abort(reason, culprit)

    def idle(self) -> bool:
        """Whether all calls are complete; those that consist of several are brought on. Never blocks, never raises."""
        return self.pipeline.idle()

    def awaited_by(self) -> tuple[int, ...]:
        """Global ranks that wait in a collective which this rank has yet to call, as far as the transport can see.

        Only between calls of this rank. Never blocks, never raises.
        """
        return tuple(self.ranks[member] for member in self._transport.awaited_by())

    def close(self) -> None:
        """Give back threads, sockets and memory. Later calls raise ``CommunicatorClosedError``."""
        self.pipeline.close()

    def __repr__(self) -> str:
        state = "" if self.usable else ", closed" if self.pipeline.closed else ", broken"
        return f"<Communicator {self.label} rank {self.rank} of {self.size} on {self.backend}{state}>"

    # In place.

    def allreduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks, in place, bitwise identically everywhere.

        Args:
            tensor: equal in dtype and number of elements on all ranks.
            op: a ``ReduceOp``; AVG only for floating and complex dtypes.
            async_op: return a ``Work`` at once.
            timeout: deadline.

        Raises:
            InvalidTensorError, InvalidReduceOpError: before anything is sent.
            CommunicationError: any of its kinds, when ranks disagree, are late, or die.
        """
        plain, finish, reduction = self.intake.reduced(tensor, op)
        call = new_call(("allreduce", tensor.dtype, plain.numel(), reduction, -1, -1, (), (), 0))
        return self.pipeline.run(call, plain, plain, async_op, timeout, finish, tensor)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks into rank ``dst``; other ranks keep theirs.

        Args:
            tensor: equal in dtype and number of elements on all ranks.
            dst: the rank that receives the result in its ``tensor``.
            op: a ``ReduceOp``.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        plain, finish, reduction = self.intake.reduced(tensor, op)
        dst = check_rank(dst, self.size, "dst")
        call = Call("reduce", tensor.dtype, plain.numel(), reduction, dst)
        return self.pipeline.run(call, plain, plain, async_op, timeout, finish if self.rank == dst else None, tensor)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Copy ``tensor`` of rank ``root`` into the ``tensor`` of all other ranks.

        Args:
            tensor: equal in dtype and number of elements on all ranks.
            root: the rank whose values are sent.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        root = check_rank(root, self.size, "root")
        if self.rank == root:
            self.intake.check(tensor, "tensor")
            plain, finish = readable(tensor), None
            source: torch.Tensor | None = plain
        else:
            plain, finish = self.intake.in_place(tensor, "tensor", keep=False)
            source = None
        call = Call("broadcast", tensor.dtype, plain.numel(), root=root)
        return self.pipeline.run(call, source, plain, async_op, timeout, finish, tensor)

    # From an input into an output.

    def allgather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Gather ``tensor`` of all ranks, in rank order, into ``output`` on every rank.

        Args:
            output: ``size`` times as many elements as ``tensor``, same dtype.
            tensor: equal in dtype and number of elements on all ranks.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        share, target, finish = self.intake.pair(tensor, output, self.size)
        call = Call("allgather", tensor.dtype, share.numel())
        return self.pipeline.run(call, share, target, async_op, timeout, finish, output)

    def gather(
        self,
        output: torch.Tensor | None,
        tensor: torch.Tensor,
        dst: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Gather ``tensor`` of all ranks, in rank order, into ``output`` on rank ``dst``.

        Args:
            output: on ``dst`` ``size`` times as many elements as ``tensor``; None elsewhere.
            tensor: equal in dtype and number of elements on all ranks.
            dst: the rank that receives.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        share = self.intake.share(tensor, "tensor")
        dst = check_rank(dst, self.size, "dst")
        target, finish = self.intake.only_on(dst, output, "output", tensor, share.numel(), written=True)
        call = Call("gather", tensor.dtype, share.numel(), root=dst)
        source = share if target is None else apart(share, target)
        return self.pipeline.run(call, source, target, async_op, timeout, finish, output)

    def scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Give each rank its share, in rank order, of ``tensor`` of rank ``root``.

        Args:
            output: receives this rank's share; equal in dtype and size on all ranks.
            tensor: on ``root`` ``size`` times as many elements as ``output``; None elsewhere.
            root: the rank that sends.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        target, finish = self.intake.in_place(output, "output", keep=False)
        root = check_rank(root, self.size, "root")
        source, _ = self.intake.only_on(root, tensor, "tensor", output, target.numel(), written=False)
        call = Call("scatter", output.dtype, target.numel(), root=root)
        source = None if source is None else apart(source, target)
        return self.pipeline.run(call, source, target, async_op, timeout, finish, output)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce ``tensor`` over all ranks and give each rank its share, in rank order.

        Args:
            output: receives this rank's share.
            tensor: ``size`` times as many elements as ``output``, same dtype.
            op: a ``ReduceOp``.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        target, finish = self.intake.in_place(output, "output", keep=False)
        source = self.intake.input(tensor, "tensor", output, self.size * target.numel())
        reduction = reduction_name(op, output.dtype)
        source = apart(source, target)
        if target.dtype is torch.bool:
            target, source = target.view(torch.uint8), source.view(torch.uint8)
            reduction = BOOL_AS_BYTES[reduction]
        call = Call("reduce_scatter", output.dtype, target.numel(), reduction)
        return self.pipeline.run(call, source, target, async_op, timeout, finish, output)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Send the j-th of ``size`` equal shares of ``tensor`` to rank j, and receive likewise.

        Args:
            output: as many elements as ``tensor``; share j comes from rank j.
            tensor: a multiple of ``size`` elements.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        source, target, finish = self.intake.pair(tensor, output, split=True)
        call = Call("alltoall", tensor.dtype, source.numel() // self.size)
        return self.pipeline.run(call, source, target, async_op, timeout, finish, output)

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Like ``alltoall`` with shares of different sizes, one after the other.

        Args:
            output: ``sum(output_counts)`` elements.
            tensor: ``sum(input_counts)`` elements.
            output_counts: elements that come from each rank.
            input_counts: elements that go to each rank. What rank i sends to rank j must
                be what rank j expects from rank i.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        source = self.intake.share(tensor, "tensor")
        send = check_counts(input_counts, self.size, source.numel(), "input_counts")
        self.intake.check(output, "output")
        receive = check_counts(output_counts, self.size, output.numel(), "output_counts")
        target, finish = self.intake.output(output, "output", tensor, output.numel())
        call = Call("alltoall_v", tensor.dtype, send_counts=send, recv_counts=receive)
        return self.pipeline.run(call, apart(source, target), target, async_op, timeout, finish, output)

    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Return after every rank has called it."""
        return self.pipeline.run(Call("barrier", torch.uint8), None, None, async_op, timeout)

    # Between two ranks.

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Send ``tensor`` to rank ``dst``, which calls ``recv``. Messages between two ranks keep their order.

        Args:
            tensor: elements to send.
            dst: another rank.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        share = self.intake.share(tensor, "tensor")
        call = Call("send", tensor.dtype, share.numel(), root=self.intake.other(dst, "dst"))
        return self.pipeline.run(call, share, None, async_op, timeout, None, tensor)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Receive into ``tensor`` what rank ``src`` sends.

        Args:
            tensor: equal in dtype and number of elements to what is sent.
            src: another rank.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        target, finish = self.intake.in_place(tensor, "tensor", keep=False)
        call = Call("recv", tensor.dtype, target.numel(), root=self.intake.other(src, "src"))
        return self.pipeline.run(call, None, target, async_op, timeout, finish, tensor)

    def recv_any(self, tensor: torch.Tensor, *, async_op: bool = False, timeout: Timeout = None) -> int | Work:
        """Receive into ``tensor`` the next message that any other rank sends.

        A message goes to the receive that was started first, of those that can take it. Ranks that have closed
        their communicator in peace are not missed as long as one is left.

        Args:
            tensor: equal in dtype and number of elements to what is sent.
            async_op: return a ``Work`` at once, whose result is the rank of the sender.
            timeout: deadline.

        Returns:
            The rank of the sender, inside this communicator.

        Raises:
            InvalidRankError: there is no other rank.
            TransportUnavailableError: the backend receives from a rank that is named only, as NCCL does.
        """
        target, finish = self.intake.in_place(tensor, "tensor", keep=False)
        if self.size == 1:
            raise InvalidRankError("there is no other rank that could send", argument="tensor", expected="two ranks")
        with torch.inference_mode(False):  # Another thread writes to it, outside of that mode.
            sender = torch.empty(1, dtype=torch.int64, device="cpu")

        def conclude() -> int:
            if finish is not None:
                finish()
            return int(sender)

        call = Call("recv", tensor.dtype, target.numel())
        work = self.pipeline.run(call, sender, target, async_op, timeout, conclude, tensor)
        return int(sender) if work is None else work

    def sendrecv(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        src: int,
        dst: int,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Send ``tensor`` to ``dst`` and receive ``output`` from ``src`` at the same time.

        Args:
            output: receives; same dtype as ``tensor``.
            tensor: is sent.
            src: rank received from. This rank itself only if ``dst`` is too: a copy.
            dst: rank sent to.
            async_op: return a ``Work`` at once.
            timeout: deadline.
        """
        share = self.intake.share(tensor, "tensor")
        src, dst = check_rank(src, self.size, "src"), check_rank(dst, self.size, "dst")
        if (src == self.rank) != (dst == self.rank):
            raise InvalidRankError(
                "a rank can exchange with itself only in both directions",
                argument="src" if src == self.rank else "dst",
                expected="another rank, or this rank as both src and dst",
                seen=self.rank,
            )
        self.intake.check(output, "output")
        expected = share.numel() if src == self.rank else output.numel()
        target, finish = self.intake.output(output, "output", tensor, expected)
        call = Call("sendrecv", tensor.dtype, share.numel(), "", dst, src, (), (target.numel(),))
        return self.pipeline.run(call, apart(share, target), target, async_op, timeout, finish, output)

    # Of several tensors, and of objects.

    allreduce_coalesced = composed.allreduce_coalesced
    broadcast_coalesced = composed.broadcast_coalesced
    broadcast_object = composed.broadcast_object
    allgather_object = composed.allgather_object
    gather_object = composed.gather_object
    scatter_object = composed.scatter_object
    send_object = composed.send_object
    recv_object = composed.recv_object

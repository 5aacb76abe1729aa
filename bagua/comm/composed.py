"""Calls made of several: on objects, and on several tensors at once. The functions are methods of ``Communicator``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from bagua.comm.objects import decode, encode, encode_failure
from bagua.comm.operands import Intake, check_rank, reduction_name
from bagua.comm.pipeline import Timeout
from bagua.comm.reduction import ReduceOp, copy_pieces
from bagua.comm.work import Steps, Work, joined
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTensorError

#: The communicator of these calls, which is above them.
Caller = Any


def broadcast_object(
    communicator: Caller,
    obj: object = None,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The object of rank ``root``, on every rank.

    Args:
        communicator: communicator whose ranks take part.
        obj: on ``root`` what to send: numbers, strings, bytes, tensors, and lists,
            tuples, sets and dictionaries of these. Ignored elsewhere.
        root: the rank that sends.
        async_op: return a ``Work`` whose ``result()`` is the object.
        timeout: deadline of each message.
        allow_pickle: accept any object, by pickle; the same on all ranks. Only for
            peers that you trust: unpickling runs what they send.

    Raises:
        ConfigurationError: on all ranks, if the object has no safe encoding.
    """
    root = check_rank(root, communicator.size, "root")
    calls = _ObjectCalls(communicator, async_op, timeout, allow_pickle)
    own, failure = calls.encoded(obj) if communicator.rank == root else (None, None)

    def steps() -> Steps:
        length = calls.lengths([0 if own is None else own.numel()])
        yield from calls.make(communicator.broadcast, length, root)
        data = own if own is not None else calls.room(int(length), root)
        yield from calls.make(communicator.broadcast, data, root)
        return data

    return calls.result(steps(), failure, lambda data: obj if own is not None else calls.decoded(data, root))


def allgather_object(
    communicator: Caller, obj: object, *, async_op: bool = False, timeout: Timeout = None, allow_pickle: bool = False
) -> Any:
    """The objects of all ranks, in rank order, on every rank.

    Args:
        communicator: communicator whose ranks take part.
        obj: contribution of this rank; see ``broadcast_object``.
        async_op: return a ``Work`` whose ``result()`` is the list.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    return _collect(_ObjectCalls(communicator, async_op, timeout, allow_pickle), obj, None)


def gather_object(
    communicator: Caller,
    obj: object,
    dst: int = 0,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The objects of all ranks, in rank order, on rank ``dst``; None elsewhere.

    Args:
        communicator: communicator whose ranks take part.
        obj: contribution of this rank; see ``broadcast_object``.
        dst: the rank that receives.
        async_op: return a ``Work`` whose ``result()`` is the list or None.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    dst = check_rank(dst, communicator.size, "dst")
    return _collect(_ObjectCalls(communicator, async_op, timeout, allow_pickle), obj, dst)


def _collect(calls: _ObjectCalls, obj: object, dst: int | None) -> Any:
    """The objects of all ranks on rank ``dst``; on every rank if that is None."""
    communicator = calls.communicator
    own, failure = calls.encoded(obj)

    def steps() -> Steps:
        lengths = calls.lengths([0] * communicator.size)
        yield from calls.make(communicator.allgather, lengths, calls.lengths([own.numel()]))
        counts = lengths.tolist()
        longest = counts.index(max(counts))
        padded = calls.padded(own, counts[longest], longest)
        rows = communicator.size if dst in (None, communicator.rank) else 0
        data = calls.room(rows * counts[longest], longest) if rows else None
        if dst is None:
            yield from calls.make(communicator.allgather, data, padded)
        else:
            yield from calls.make(communicator.gather, data, padded, dst)
        return data, counts

    def finish(received: tuple[torch.Tensor | None, list[int]]) -> list[Any] | None:
        data, counts = received
        if data is None:
            return None
        rows = data.view(len(counts), -1)
        return [calls.decoded(row[:count], rank) for rank, (row, count) in enumerate(zip(rows, counts, strict=True))]

    return calls.result(steps(), failure, finish)


def scatter_object(
    communicator: Caller,
    objs: Sequence[object] | None = None,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """This rank's object out of the list of rank ``root``.

    Args:
        communicator: communicator whose ranks take part.
        objs: on ``root`` one object per rank; None elsewhere.
        root: the rank that sends.
        async_op: return a ``Work`` whose ``result()`` is the object.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    root = check_rank(root, communicator.size, "root")
    calls = _ObjectCalls(communicator, async_op, timeout, allow_pickle)
    parts, failure = calls.encoded_parts(objs, root)

    def steps() -> Steps:
        lengths = calls.lengths([part.numel() for part in parts] or [0] * communicator.size)
        yield from calls.make(communicator.broadcast, lengths, root)
        counts = lengths.tolist()
        data = calls.room(max(counts), root)
        table = torch.cat([calls.padded(part, max(counts), root) for part in parts]) if parts else None
        yield from calls.make(communicator.scatter, data, table, root)
        return data[: counts[communicator.rank]]

    return calls.result(steps(), failure, lambda data: calls.decoded(data, root))


def send_object(
    communicator: Caller,
    obj: object,
    dst: int,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """Send an object to rank ``dst``, which calls ``recv_object``.

    Args:
        communicator: communicator whose ranks take part.
        obj: object to send; see ``broadcast_object``.
        dst: another rank.
        async_op: return a ``Work`` at once.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    calls = _ObjectCalls(communicator, async_op, timeout, allow_pickle)
    own, failure = calls.encoded(obj)

    def steps() -> Steps:
        yield from calls.make(communicator.send, calls.lengths([own.numel()]), dst)
        yield from calls.make(communicator.send, own, dst)

    return calls.result(steps(), failure, lambda _: None)


def recv_object(
    communicator: Caller, src: int, *, async_op: bool = False, timeout: Timeout = None, allow_pickle: bool = False
) -> Any:
    """The next object that rank ``src`` sends with ``send_object``.

    Args:
        communicator: communicator whose ranks take part.
        src: another rank.
        async_op: return a ``Work`` whose ``result()`` is the object.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    calls = _ObjectCalls(communicator, async_op, timeout, allow_pickle)

    def steps() -> Steps:
        length = calls.lengths([0])
        yield from calls.make(communicator.recv, length, src)
        data = calls.room(int(length), src)
        yield from calls.make(communicator.recv, data, src)
        return data

    return calls.result(steps(), None, lambda data: calls.decoded(data, src))


class _ObjectCalls:
    """What calls on objects have in common: several calls of one communicator, made in one way, with bytes."""

    def __init__(self, communicator: Caller, async_op: bool, timeout: Timeout, allow_pickle: bool) -> None:
        self.communicator = communicator
        self._home = communicator.intake.home
        self._async_op, self._timeout, self._allow_pickle = async_op, timeout, allow_pickle

    def make(self, call: Callable[..., Work | None], *arguments: Any) -> Steps:
        """Start ``call``, and yield its work unless it was complete at once."""
        work = call(*arguments, async_op=self._async_op, timeout=self._timeout)
        if work is not None:
            yield work

    def lengths(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor(lengths, device=self._home)

    def room(self, length: int, sender: int) -> torch.Tensor:
        """Memory for ``length`` bytes, which takes no page before the bytes of rank ``sender`` come."""
        try:
            return torch.empty(length, dtype=torch.uint8, device=self._home)
        except RuntimeError as error:
            culprit = self.communicator.ranks[sender]
            raise CollectiveMismatchError(
                f"rank {culprit} announces an object of {length} bytes", peers=(culprit,)
            ) from error

    def padded(self, data: torch.Tensor, length: int, sender: int) -> torch.Tensor:
        """``data`` with zeros up to the length that rank ``sender`` has."""
        padded = self.room(length, sender)
        padded[: data.numel()] = data
        padded[data.numel() :] = 0
        return padded

    def encoded(self, obj: object) -> tuple[torch.Tensor, ConfigurationError | None]:
        """``obj`` as bytes; if it has no encoding, the news of that, so that no peer waits."""
        try:
            return encode(obj, allow_pickle=self._allow_pickle).to(self._home), None
        except Exception as error:  # noqa: BLE001 - whatever it is, peers wait for this rank
            failure = error if isinstance(error, ConfigurationError) else _not_encoded(obj, error)
            return encode_failure(str(failure)).to(self._home), failure

    def encoded_parts(
        self, objs: Sequence[object] | None, root: int
    ) -> tuple[list[torch.Tensor], ConfigurationError | None]:
        """What ``root`` sends to each rank, and what is wrong with ``objs``: raised when no peer waits any more."""
        rank, size = self.communicator.rank, self.communicator.size
        if rank != root and objs is None:
            return [], None
        count = len(objs) if isinstance(objs, Sequence) and not isinstance(objs, str | bytes) else None
        if rank == root and objs is not None and count == size:
            encoded = [self.encoded(obj) for obj in objs]
            failures = [failure for _, failure in encoded if failure is not None]
            return [part for part, _ in encoded], failures[0] if failures else None
        failure = ConfigurationError(
            "one rank has the objects, one for each rank",
            argument="objs",
            expected=f"a list of {size} objects on rank {root}, None on other ranks",
            seen=f"{type(objs).__name__ if count is None else f'{count} objects'} on rank {rank}",
        )
        news = [encode_failure(str(failure)).to(self._home)] * size
        return news if rank == root else [], failure

    def decoded(self, data: torch.Tensor, sender: int) -> Any:
        return decode(data, sender=self.communicator.ranks[sender], allow_pickle=self._allow_pickle)

    def result(self, steps: Steps, failure: ConfigurationError | None, finish: Callable[[Any], Any]) -> Any:
        """What ``finish`` makes of what came, or ``failure``, which peers have got in place of an object by then."""

        def conclude(received: Any) -> Any:
            if failure is not None:
                raise failure
            return finish(received)

        work = self.communicator.pipeline.compose(steps, self._async_op, conclude)
        return work if self._async_op else work.result()


def _not_encoded(obj: object, error: Exception) -> ConfigurationError:
    failure = ConfigurationError(
        f"the object could not be encoded: {type(error).__name__}: {error}", argument="obj", seen=type(obj).__name__
    )
    failure.__cause__ = error
    return failure


# Several tensors in few messages.


def allreduce_coalesced(
    communicator: Caller,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``allreduce`` of each tensor, in place, with one message per dtype and device.

    Args:
        communicator: communicator whose ranks take part.
        tensors: equal in number, dtypes and sizes on all ranks.
        op: a ``ReduceOp`` with a meaning for every dtype in ``tensors``.
        async_op: return a ``Work`` at once; its result is the list of tensors.
        timeout: deadline of each message.
    """
    tensors = _listed(tensors)
    for tensor in tensors:
        communicator.intake.check(tensor, "tensors")
        reduction_name(op, tensor.dtype)
    return _coalesced(communicator.intake, tensors, partial(communicator.allreduce, op=op), async_op, timeout)


def broadcast_coalesced(
    communicator: Caller,
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``broadcast`` of each tensor, with one message per dtype and device.

    Args:
        communicator: communicator whose ranks take part.
        tensors: equal in number, dtypes and sizes on all ranks.
        root: the rank whose values are sent.
        async_op: return a ``Work`` at once; its result is the list of tensors.
        timeout: deadline of each message.
    """
    root = check_rank(root, communicator.size, "root")
    call = partial(communicator.broadcast, root=root)
    return _coalesced(communicator.intake, _listed(tensors), call, async_op, timeout)


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, which may be gone through once only, as a list."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        seen = type(tensors).__name__
        raise InvalidTensorError("a list of tensors is needed", argument="tensors", expected="a list", seen=seen)
    return list(tensors)


def _coalesced(
    intake: Intake, tensors: list[torch.Tensor], call: Callable[..., Work | None], async_op: bool, timeout: Timeout
) -> Work | None:
    targets = [intake.in_place(tensor, "tensors") for tensor in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for plain, _ in targets:
        alike.setdefault((plain.dtype, plain.device), []).append(plain)
    flats = [torch.cat([part.view(-1) for part in parts]) for parts in alike.values()]
    works = [call(flat, async_op=async_op, timeout=timeout) for flat in flats]

    def finish() -> list[torch.Tensor]:
        for flat, parts in zip(flats, alike.values(), strict=True):
            copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))
        for _, bring in targets:
            if bring is not None:
                bring()
        return tensors

    if async_op:
        return joined([work for work in works if work is not None], finish)
    finish()
    return None

"""Calls made of several: on objects, and on several tensors at once. The functions are methods of ``Communicator``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bagua.comm.messages import Caller, recv, send
from bagua.comm.objects import decode, encode, encode_failure
from bagua.comm.operands import check_rank
from bagua.comm.pipeline import Timeout
from bagua.comm.reduction import ReduceOp, reduction_name
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.comm.work import Steps, Work
from bagua.errors import ConfigurationError, InvalidTensorError


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
    own, failure = _encoded(communicator, obj, allow_pickle) if communicator.rank == root else (None, None)

    def steps() -> Steps:
        length = torch.tensor([0 if own is None else own.numel()], device=communicator.intake.home)
        yield from _maybe(communicator.broadcast(length, root, async_op=async_op, timeout=timeout))
        data = own if own is not None else _bytes(communicator, int(length))
        yield from _maybe(communicator.broadcast(data, root, async_op=async_op, timeout=timeout))
        return data

    def finish(data: torch.Tensor) -> Any:
        return obj if own is not None else decode(data, allow_pickle=allow_pickle)

    return _object_result(communicator, steps(), async_op, failure, finish)


def allgather_object(
    communicator: Caller,
    obj: object,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The objects of all ranks, in rank order, on every rank.

    Args:
        communicator: communicator whose ranks take part.
        obj: contribution of this rank; see ``broadcast_object``.
        async_op: return a ``Work`` whose ``result()`` is the list.
        timeout: deadline of each message.
        allow_pickle: see ``broadcast_object``.
    """
    own, failure = _encoded(communicator, obj, allow_pickle)

    def steps() -> Steps:
        lengths = torch.zeros(communicator.size, dtype=torch.int64, device=communicator.intake.home)
        mine = torch.tensor([own.numel()], device=communicator.intake.home)
        yield from _maybe(communicator.allgather(lengths, mine, async_op=async_op, timeout=timeout))
        counts = lengths.tolist()
        padded = _padded(communicator, own, max(counts))
        data = _bytes(communicator, communicator.size * max(counts))
        yield from _maybe(communicator.allgather(data, padded, async_op=async_op, timeout=timeout))
        return data, counts

    def finish(received: tuple[torch.Tensor, list[int]]) -> list[Any]:
        return _decode_rows(*received, allow_pickle)

    return _object_result(communicator, steps(), async_op, failure, finish)


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
    own, failure = _encoded(communicator, obj, allow_pickle)

    def steps() -> Steps:
        lengths = torch.zeros(communicator.size, dtype=torch.int64, device=communicator.intake.home)
        mine = torch.tensor([own.numel()], device=communicator.intake.home)
        yield from _maybe(communicator.allgather(lengths, mine, async_op=async_op, timeout=timeout))
        counts = lengths.tolist()
        padded = _padded(communicator, own, max(counts))
        data = _bytes(communicator, communicator.size * max(counts)) if communicator.rank == dst else None
        yield from _maybe(communicator.gather(data, padded, dst, async_op=async_op, timeout=timeout))
        return data, counts

    def finish(received: tuple[torch.Tensor | None, list[int]]) -> list[Any] | None:
        data, counts = received
        return None if data is None else _decode_rows(data, counts, allow_pickle)

    return _object_result(communicator, steps(), async_op, failure, finish)


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
    parts, failure = _encoded_parts(communicator, objs, root, allow_pickle)

    def steps() -> Steps:
        lengths = torch.zeros(communicator.size, dtype=torch.int64, device=communicator.intake.home)
        for rank, part in enumerate(parts):
            lengths[rank] = part.numel()
        yield from _maybe(communicator.broadcast(lengths, root, async_op=async_op, timeout=timeout))
        counts = lengths.tolist()
        data = _bytes(communicator, max(counts))
        table = torch.cat([_padded(communicator, part, max(counts)) for part in parts]) if parts else None
        yield from _maybe(communicator.scatter(data, table, root, async_op=async_op, timeout=timeout))
        return data[: counts[communicator.rank]]

    def finish(data: torch.Tensor) -> Any:
        return decode(data, allow_pickle=allow_pickle)

    return _object_result(communicator, steps(), async_op, failure, finish)


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
    own, failure = _encoded(communicator, obj, allow_pickle)

    def steps() -> Steps:
        length = torch.tensor([own.numel()], device=communicator.intake.home)
        yield from _maybe(send(communicator, length, dst, async_op=async_op, timeout=timeout))
        yield from _maybe(send(communicator, own, dst, async_op=async_op, timeout=timeout))

    return _object_result(communicator, steps(), async_op, failure, lambda _: None)


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

    def steps() -> Steps:
        length = torch.zeros(1, dtype=torch.int64, device=communicator.intake.home)
        yield from _maybe(recv(communicator, length, src, async_op=async_op, timeout=timeout))
        data = _bytes(communicator, int(length))
        yield from _maybe(recv(communicator, data, src, async_op=async_op, timeout=timeout))
        return data

    def finish(data: torch.Tensor) -> Any:
        return decode(data, allow_pickle=allow_pickle)

    return _object_result(communicator, steps(), async_op, None, finish)


# What those on objects have in common.


def _bytes(communicator: Caller, length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.uint8, device=communicator.intake.home)


def _padded(communicator: Caller, data: torch.Tensor, length: int) -> torch.Tensor:
    padded = _bytes(communicator, length)
    padded[: data.numel()] = data
    return padded


def _encoded(communicator: Caller, obj: object, allow_pickle: bool) -> tuple[torch.Tensor, ConfigurationError | None]:
    """``obj`` as bytes; if it has no encoding, the news of that, so that no peer waits."""
    try:
        return encode(obj, allow_pickle=allow_pickle).to(communicator.intake.home), None
    except Exception as error:  # noqa: BLE001 - whatever it is, peers wait for this rank
        failure = error if isinstance(error, ConfigurationError) else _not_encoded(obj, error)
        return encode_failure(str(failure)).to(communicator.intake.home), failure


def _encoded_parts(
    communicator: Caller, objs: Sequence[object] | None, root: int, allow_pickle: bool
) -> tuple[list[torch.Tensor], ConfigurationError | None]:
    """What ``root`` sends to each rank, and what is wrong with ``objs``: raised when no peer waits any more."""
    if communicator.rank != root and objs is None:
        return [], None
    count = len(objs) if isinstance(objs, Sequence) and not isinstance(objs, str | bytes) else None
    if communicator.rank == root and objs is not None and count == communicator.size:
        encoded = [_encoded(communicator, obj, allow_pickle) for obj in objs]
        failures = [failure for _, failure in encoded if failure is not None]
        return [part for part, _ in encoded], failures[0] if failures else None
    failure = ConfigurationError(
        "one rank has the objects, one for each rank",
        argument="objs",
        expected=f"a list of {communicator.size} objects on rank {root}, None on other ranks",
        seen=f"{type(objs).__name__ if count is None else f'{count} objects'} on rank {communicator.rank}",
    )
    news = [encode_failure(str(failure)).to(communicator.intake.home)] * communicator.size
    return news if communicator.rank == root else [], failure


def _object_result(
    communicator: Caller,
    steps: Steps,
    async_op: bool,
    failure: ConfigurationError | None,
    finish: Callable[[Any], Any],
) -> Any:
    """What ``finish`` makes of what came, or ``failure``, which peers have got in place of an object by then."""

    def conclude(received: Any) -> Any:
        if failure is not None:
            raise failure
        return finish(received)

    work = communicator.pipeline.compose(steps, async_op, conclude)
    return work if async_op else work.result()


def _not_encoded(obj: object, error: Exception) -> ConfigurationError:
    failure = ConfigurationError(
        f"the object could not be encoded: {type(error).__name__}: {error}", argument="obj", seen=type(obj).__name__
    )
    failure.__cause__ = error
    return failure


def _maybe(work: Work | None) -> Steps:
    if work is not None:
        yield work


def _decode_rows(data: torch.Tensor, counts: list[int], allow_pickle: bool) -> list[Any]:
    rows = data.view(len(counts), -1)
    return [decode(row[:count], allow_pickle=allow_pickle) for row, count in zip(rows, counts, strict=True)]


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
    return _coalesced(
        communicator,
        tensors,
        lambda flat: communicator.allreduce(flat, op, async_op=async_op, timeout=timeout),
        async_op,
    )


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
    return _coalesced(
        communicator,
        _listed(tensors),
        lambda flat: communicator.broadcast(flat, root, async_op=async_op, timeout=timeout),
        async_op,
    )


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, which may be gone through once only, as a list."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        seen = type(tensors).__name__
        raise InvalidTensorError("a list of tensors is needed", argument="tensors", expected="a list", seen=seen)
    return list(tensors)


def _coalesced(
    communicator: Caller,
    tensors: list[torch.Tensor],
    start: Callable[[torch.Tensor], Work | None],
    async_op: bool,
) -> Work | None:
    targets = [communicator.intake.in_place(tensor, "tensors") for tensor in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for plain, _ in targets:
        alike.setdefault((plain.dtype, plain.device), []).append(plain)

    def steps() -> Steps:
        flats = [torch.cat([part.view(-1) for part in parts]) for parts in alike.values()]
        works = [start(flat) for flat in flats]
        for work, flat, parts in zip(works, flats, alike.values(), strict=True):
            if work is not None:
                yield work
            copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))
        for _, finish in targets:
            if finish is not None:
                finish()
        return tensors

    work = communicator.pipeline.compose(steps(), async_op)
    return work if async_op else None

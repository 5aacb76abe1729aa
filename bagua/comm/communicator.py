"""The communicator that users see: tensor collectives, coalesced ones, and objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from bagua.comm.collectives import TensorCollectives
from bagua.comm.core import Timeout
from bagua.comm.objects import decode, encode, encode_failure
from bagua.comm.operands import check_rank
from bagua.comm.reduction import ReduceOp, reduction_name
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.comm.work import Steps, Work
from bagua.errors import ConfigurationError, InvalidTensorError

__all__ = ["Communicator"]


class Communicator(TensorCollectives):
    """An ordered set of ranks that communicate; what ``comm=`` arguments take.

    Made by ``init_process_group``, ``new_group`` and ``ProcessGroup.duplicate``, never
    by hand. One thread at a time may use it. After a communication error it is
    broken, and every later call raises ``CommunicatorClosedError``.

    Example:
        >>> import torch, bagua.comm
        >>> communicator = bagua.comm.solo_group().global_communicator
        >>> tensor = torch.tensor([1.0, 2.0])
        >>> communicator.allreduce(tensor)
        >>> tensor
        tensor([1., 2.])
    """

    # Several tensors in few messages.

    def allreduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``allreduce`` of each tensor, in place, with one message per dtype and device.

        Args:
            tensors: equal in number, dtypes and sizes on all ranks.
            op: a ``ReduceOp`` with a meaning for every dtype in ``tensors``.
            async_op: return a ``Work`` at once; its result is the list of tensors.
            timeout: deadline of each message.
        """
        for tensor in tensors:
            self._check(tensor, "tensors")
            reduction_name(op, tensor.dtype)
        return self._coalesced(
            tensors,
            lambda flat: self.allreduce(flat, op, async_op=async_op, timeout=timeout),
            async_op,
        )

    def broadcast_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``broadcast`` of each tensor, with one message per dtype and device.

        Args:
            tensors: equal in number, dtypes and sizes on all ranks.
            root: the rank whose values are sent.
            async_op: return a ``Work`` at once; its result is the list of tensors.
            timeout: deadline of each message.
        """
        root = check_rank(root, self.size, "root")
        return self._coalesced(
            tensors,
            lambda flat: self.broadcast(flat, root, async_op=async_op, timeout=timeout),
            async_op,
        )

    def _coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor], Work | None],
        async_op: bool,
    ) -> Work | None:
        if isinstance(tensors, torch.Tensor):
            raise InvalidTensorError(
                "a list of tensors is needed", argument="tensors", expected="a list", seen="a tensor"
            )
        targets = [self._in_place(tensor, "tensors") for tensor in tensors]
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
            return list(tensors)

        work = self._compose(steps(), async_op)
        return work if async_op else None

    # Objects.

    def broadcast_object(
        self,
        obj: object = None,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        allow_pickle: bool = False,
    ) -> Any:
        """The object of rank ``root``, on every rank.

        Args:
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
        root = check_rank(root, self.size, "root")
        own, failure = self._encoded(obj, allow_pickle) if self.rank == root else (None, None)

        def steps() -> Steps:
            length = torch.tensor([0 if own is None else own.numel()], device=self._home)
            yield from _maybe(self.broadcast(length, root, async_op=async_op, timeout=timeout))
            data = own if own is not None else self._bytes(int(length))
            yield from _maybe(self.broadcast(data, root, async_op=async_op, timeout=timeout))
            if failure is not None:
                raise failure
            return obj if own is not None else decode(data, allow_pickle=allow_pickle)

        return self._object_result(steps(), async_op)

    def allgather_object(
        self,
        obj: object,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        allow_pickle: bool = False,
    ) -> Any:
        """The objects of all ranks, in rank order, on every rank.

        Args:
            obj: what this rank contributes; see ``broadcast_object``.
            async_op: return a ``Work`` whose ``result()`` is the list.
            timeout: deadline of each message.
            allow_pickle: see ``broadcast_object``.
        """
        own, failure = self._encoded(obj, allow_pickle)

        def steps() -> Steps:
            lengths = torch.zeros(self.size, dtype=torch.int64, device=self._home)
            mine = torch.tensor([own.numel()], device=self._home)
            yield from _maybe(self.allgather(lengths, mine, async_op=async_op, timeout=timeout))
            counts = lengths.tolist()
            padded = self._padded(own, max(counts))
            data = self._bytes(self.size * max(counts))
            yield from _maybe(self.allgather(data, padded, async_op=async_op, timeout=timeout))
            if failure is not None:
                raise failure
            return _decode_rows(data, counts, allow_pickle)

        return self._object_result(steps(), async_op)

    def gather_object(
        self,
        obj: object,
        dst: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        allow_pickle: bool = False,
    ) -> Any:
        """The objects of all ranks, in rank order, on rank ``dst``; None elsewhere.

        Args:
            obj: what this rank contributes; see ``broadcast_object``.
            dst: the rank that receives.
            async_op: return a ``Work`` whose ``result()`` is the list or None.
            timeout: deadline of each message.
            allow_pickle: see ``broadcast_object``.
        """
        dst = check_rank(dst, self.size, "dst")
        own, failure = self._encoded(obj, allow_pickle)

        def steps() -> Steps:
            lengths = torch.zeros(self.size, dtype=torch.int64, device=self._home)
            mine = torch.tensor([own.numel()], device=self._home)
            yield from _maybe(self.allgather(lengths, mine, async_op=async_op, timeout=timeout))
            counts = lengths.tolist()
            padded = self._padded(own, max(counts))
            data = self._bytes(self.size * max(counts)) if self.rank == dst else None
            yield from _maybe(self.gather(data, padded, dst, async_op=async_op, timeout=timeout))
            if failure is not None:
                raise failure
            return None if data is None else _decode_rows(data, counts, allow_pickle)

        return self._object_result(steps(), async_op)

    def scatter_object(
        self,
        objs: Sequence[object] | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
        allow_pickle: bool = False,
    ) -> Any:
        """This rank's object out of the list of rank ``root``.

        Args:
            objs: on ``root`` one object per rank; None elsewhere.
            root: the rank that sends.
            async_op: return a ``Work`` whose ``result()`` is the object.
            timeout: deadline of each message.
            allow_pickle: see ``broadcast_object``.
        """
        root = check_rank(root, self.size, "root")
        parts, failure = self._encoded_parts(objs, root, allow_pickle)

        def steps() -> Steps:
            lengths = torch.zeros(self.size, dtype=torch.int64, device=self._home)
            for rank, part in enumerate(parts):
                lengths[rank] = part.numel()
            yield from _maybe(self.broadcast(lengths, root, async_op=async_op, timeout=timeout))
            counts = lengths.tolist()
            data = self._bytes(max(counts))
            table = torch.cat([self._padded(part, max(counts)) for part in parts]) if parts else None
            yield from _maybe(self.scatter(data, table, root, async_op=async_op, timeout=timeout))
            if failure is not None:
                raise failure
            return decode(data[: counts[self.rank]], allow_pickle=allow_pickle)

        return self._object_result(steps(), async_op)

    def send_object(
        self, obj: object, dst: int, *, async_op: bool = False, timeout: Timeout = None, allow_pickle: bool = False
    ) -> Any:
        """Send an object to rank ``dst``, which calls ``recv_object``.

        Args:
            obj: what to send; see ``broadcast_object``.
            dst: another rank.
            async_op: return a ``Work`` at once.
            timeout: deadline of each message.
            allow_pickle: see ``broadcast_object``.
        """
        own, failure = self._encoded(obj, allow_pickle)

        def steps() -> Steps:
            length = torch.tensor([own.numel()], device=self._home)
            yield from _maybe(self.send(length, dst, async_op=async_op, timeout=timeout))
            yield from _maybe(self.send(own, dst, async_op=async_op, timeout=timeout))
            if failure is not None:
                raise failure

        return self._object_result(steps(), async_op)

    def recv_object(
        self, src: int, *, async_op: bool = False, timeout: Timeout = None, allow_pickle: bool = False
    ) -> Any:
        """The next object that rank ``src`` sends with ``send_object``.

        Args:
            src: another rank.
            async_op: return a ``Work`` whose ``result()`` is the object.
            timeout: deadline of each message.
            allow_pickle: see ``broadcast_object``.
        """

        def steps() -> Steps:
            length = torch.zeros(1, dtype=torch.int64, device=self._home)
            yield from _maybe(self.recv(length, src, async_op=async_op, timeout=timeout))
            data = self._bytes(int(length))
            yield from _maybe(self.recv(data, src, async_op=async_op, timeout=timeout))
            return decode(data, allow_pickle=allow_pickle)

        return self._object_result(steps(), async_op)

    # What the object collectives have in common.

    @property
    def _home(self) -> torch.device:
        """Where the bytes of objects travel from: the CPU if the transport serves it."""
        return torch.device("cpu" if self._cpu else next(iter(self._device_types)))

    def _bytes(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self._home)

    def _padded(self, data: torch.Tensor, length: int) -> torch.Tensor:
        padded = self._bytes(length)
        padded[: data.numel()] = data
        return padded

    def _encoded(self, obj: object, allow_pickle: bool) -> tuple[torch.Tensor, ConfigurationError | None]:
        """``obj`` as bytes; if it has no encoding, the news of that, so that no peer waits."""
        try:
            return encode(obj, allow_pickle=allow_pickle).to(self._home), None
        except Exception as error:  # noqa: BLE001 - whatever it is, peers wait for this rank
            failure = error if isinstance(error, ConfigurationError) else _not_encoded(obj, error)
            return encode_failure(str(failure)).to(self._home), failure

    def _encoded_parts(
        self, objs: Sequence[object] | None, root: int, allow_pickle: bool
    ) -> tuple[list[torch.Tensor], ConfigurationError | None]:
        """What ``root`` sends to each rank, and what is wrong with ``objs``: raised when no peer waits any more."""
        if self.rank != root and objs is None:
            return [], None
        count = len(objs) if isinstance(objs, Collection) else None
        if self.rank == root and objs is not None and count == self.size:
            encoded = [self._encoded(obj, allow_pickle) for obj in objs]
            failures = [failure for _, failure in encoded if failure is not None]
            return [part for part, _ in encoded], failures[0] if failures else None
        failure = ConfigurationError(
            "one rank has the objects, one for each rank",
            argument="objs",
            expected=f"a list of {self.size} objects on rank {root}, None on other ranks",
            seen=f"{type(objs).__name__ if count is None else f'{count} objects'} on rank {self.rank}",
        )
        news = [encode_failure(str(failure)).to(self._home)] * self.size
        return news if self.rank == root else [], failure

    def _object_result(self, steps: Steps, async_op: bool) -> Any:
        work = self._compose(steps, async_op)
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

"""What ``torch.distributed`` has beyond our collectives: lists of tensors, rows, scaled sums, messages with tags."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from bagua.checks import check_kind
from bagua.comm.communicator import Communicator
from bagua.comm.objects import as_bytes, decode, encode
from bagua.comm.pipeline import CallOptions
from bagua.comm.reduction import ReduceOp, copy_pieces
from bagua.comm.store.asking import meeting
from bagua.comm.store.keys import NoAnswerError, connection_to, with_limit
from bagua.comm.torch_private import premul_factor
from bagua.comm.work import Composite, Steps, Work, followed
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConcurrentUseError,
    InvalidReduceOpError,
    InvalidTensorError,
    PeerLostError,
)


def flat(parts: Sequence[Tensor]) -> Tensor:
    """All elements of ``parts``, one after the other, in new memory."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def rows_for(outputs: Sequence[Tensor]) -> Tensor:
    """Memory for what all ranks send, a row for each output.

    Raises:
        InvalidTensorError: the outputs differ in size or dtype.
    """
    kinds = {(output.numel(), output.dtype) for output in outputs}
    if len(kinds) != 1:
        raise InvalidTensorError(
            "the outputs of one gather must be alike",
            argument="output tensors",
            expected="a list of tensors of one size and dtype",
            seen=[(tuple(output.shape), output.dtype) for output in outputs],
        )
    return outputs[0].new_empty(len(outputs), outputs[0].numel())


def _counts_of_rows(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """How many elements are in the given rows for each rank; none given means equal shares."""
    width = math.prod(tensor.shape[1:])
    return [count * width for count in rows or [len(tensor) // size] * size]


def allgather_tensors(
    communicator: Communicator, outputs: Sequence[Tensor], tensor: Tensor, **how: Unpack[CallOptions]
) -> Work | None:
    """Gather ``tensor`` of all ranks into a list of one output for each rank."""
    _check_list("tensor_list", outputs, communicator.size, tensor.dtype)
    rows = rows_for(outputs)
    work = communicator.allgather(rows, tensor, **how)
    return followed(work, lambda: copy_pieces(outputs, rows.unbind()))


def gather_tensors(
    communicator: Communicator, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, **how: Unpack[CallOptions]
) -> Work | None:
    """Gather ``tensor`` of all ranks into a list on rank ``dst``; None or an empty list elsewhere."""
    if not _only_on(dst, communicator, "gather_list", outputs):
        return communicator.gather(None, tensor, dst, **how)
    assert outputs is not None
    _check_list("gather_list", outputs, communicator.size, tensor.dtype)
    rows = rows_for(outputs)
    work = communicator.gather(rows, tensor, dst, **how)
    return followed(work, lambda: copy_pieces(outputs, rows.unbind()))


def scatter_tensors(
    communicator: Communicator, output: Tensor, tensors: Sequence[Tensor] | None, root: int, **how: Unpack[CallOptions]
) -> Work | None:
    """Give each rank its tensor of the list of rank ``root``; None or an empty list elsewhere."""
    if not _only_on(root, communicator, "scatter_list", tensors):
        return communicator.scatter(output, None, root, **how)
    assert tensors is not None
    _check_list("scatter_list", tensors, communicator.size, output.dtype)
    rows_for(tensors)
    return communicator.scatter(output, flat(tensors), root, **how)


def reduce_scatter_tensors(
    communicator: Communicator,
    output: Tensor,
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    **how: Unpack[CallOptions],
) -> Work | None:
    """Reduce lists of tensors over all ranks, and give each rank its part."""
    _check_list("input_list", tensors, communicator.size, output.dtype)
    rows_for(tensors)
    return communicator.reduce_scatter(output, flat(tensors), op, **how)


def alltoall_tensors(
    communicator: Communicator, outputs: Sequence[Tensor], tensors: Sequence[Tensor], **how: Unpack[CallOptions]
) -> Work | None:
    """Send one tensor to each rank and receive one from each; sizes may differ."""
    _check_list("input_tensor_list", tensors, communicator.size)
    _check_list("output_tensor_list", outputs, communicator.size, tensors[0].dtype)
    received, sent = [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
    target = outputs[0].new_empty(sum(received))
    work = communicator.alltoall_v(target, flat(tensors), received, sent, **how)
    return followed(work, lambda: copy_pieces(outputs, torch.split(target, received)))


def alltoall_rows(
    communicator: Communicator,
    output: Tensor,
    tensor: Tensor,
    output_rows: Sequence[int] | None,
    input_rows: Sequence[int] | None,
    **how: Unpack[CallOptions],
) -> Work | None:
    """Send some of the first dimension to each rank; the same to each if no sizes are given."""
    if not output_rows and not input_rows:
        return communicator.alltoall(output, tensor, **how)
    received = _counts_of_rows(output, output_rows or (), communicator.size)
    sent = _counts_of_rows(tensor, input_rows or (), communicator.size)
    return communicator.alltoall_v(output, tensor, received, sent, **how)


def _only_on(rank: int, communicator: Communicator, argument: str, tensors: Sequence[Tensor] | None) -> bool:
    """Whether this is ``rank``, which gives a list where others give none."""
    here = communicator.rank == rank
    if here is not bool(tensors):
        raise InvalidTensorError(
            "one rank gives the list",
            argument=argument,
            expected=f"a list of {communicator.size} tensors on rank {rank} of the group, None on others",
            seen=f"{'a list' if tensors else 'no list'} on rank {communicator.rank}",
        )
    return here


def _check_list(argument: str, tensors: Any, size: int, dtype: torch.dtype | None = None) -> None:
    """Raise ``InvalidTensorError`` unless there is one tensor for each rank, of ``dtype`` or the first one's."""
    of_tensors = isinstance(tensors, Sequence) and all(isinstance(tensor, Tensor) for tensor in tensors)
    if not of_tensors or len(tensors) != size:
        raise InvalidTensorError(
            "a list of one tensor for each rank is needed",
            argument=argument,
            expected=f"a list of {size} tensors",
            seen=f"{len(tensors)} of them" if of_tensors else type(tensors).__name__,
        )
    dtype = dtype or tensors[0].dtype
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes != {dtype}:
        raise InvalidTensorError(
            "all tensors of one call have one dtype", argument=argument, expected=dtype, seen=sorted(map(str, dtypes))
        )


# ``ReduceOp.PREMUL_SUM``: each rank multiplies its input by a factor of its own before all are added.


def is_scaled(op: Any) -> bool:
    """Whether ``op`` has a factor: the name ``ReduceOp.PREMUL_SUM`` alone has none."""
    return type(op) is ReduceOp and bool(op == ReduceOp.PREMUL_SUM)  # type: ignore[comparison-overlap]  # torch's stub


def scaled(op: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor times the factor of ``op``, in new memory.

    Args:
        op: result of ``make_premul_sum``.
        tensors: tensors of floating dtypes, as on NCCL.

    Raises:
        InvalidTypeError: something else than a tensor.
        InvalidReduceOpError: another dtype.

    Example:
        >>> from bagua.comm.torch_private import make_premul_sum
        >>> scaled(make_premul_sum(0.5), [torch.ones(2)])
        [tensor([0.5000, 0.5000])]
    """
    for tensor in tensors:
        check_kind(Tensor, "a tensor", tensor=tensor)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise InvalidReduceOpError(
                f"PREMUL_SUM has no meaning for {tensor.dtype}",
                argument="op",
                expected="PREMUL_SUM of a floating dtype of 16 bits and more",
                seen=tensor.dtype,
                advice="Multiply the tensor before the call, and use SUM.",
            )
    factor = premul_factor(op)
    return [(tensor.detach() * factor).to(tensor.dtype).contiguous() for tensor in tensors]


def scale(op: Any, tensors: Sequence[Tensor]) -> None:
    """Multiply each tensor, in place; see ``scaled``."""
    copy_pieces(tensors, scaled(op, tensors))


T = TypeVar("T")

#: The store takes no values that are much larger.
_PIECE_BYTES = 4 * 2**20
#: Digits of the number of pieces: 400 GB, and no list of names that fills the memory.
_LONGEST_COUNT = 5
#: How long to sleep between two looks, at first and at most.
_SHORTEST_S, _LONGEST_S = 0.0002, 0.005


class Mail:
    """Tagged messages of one rank in one communicator: they lie in the store until they are fetched.

    The transports match messages by their sender, in order. A tag is another order, so these messages take
    another way, which is slow: each is a few requests to the process that hosts the store. A sender never
    waits. That it died is noticed at the receiver's deadline.

    Args:
        communicator: communicator of the ranks between which they travel.
        store: key-value store of these ranks only.
    """

    def __init__(self, communicator: Communicator, store: dist.Store) -> None:
        self._communicator = weakref.ref(communicator)
        self._store = store
        # No lock: a signal handler that sends would wait for what it interrupted. Each step is one operation.
        self._sent: dict[tuple[int, int], Iterator[int]] = {}
        self._expected: dict[tuple[int, int], Iterator[int]] = {}
        self._next: dict[tuple[int, int], int] = {}
        self.ranks, self.rank = communicator.ranks, communicator.rank
        self.label, self.timeout_s = communicator.label, communicator.timeout_s

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Leave ``tensor`` for rank ``dst``.

        Raises:
            CommunicatorClosedError: the communicator is closed or broken.
            PeerLostError: the store is gone.
        """
        self.require_open("send")
        data = as_bytes(encode(tensor))
        key = f"{self.rank}/{dst}/{tag}/{next(self._sent.setdefault((dst, tag), itertools.count()))}"
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]

        def put() -> None:
            for index, piece in enumerate(pieces):
                self._store.set(f"{key}/{index}", piece)  # type: ignore[arg-type]  # takes bytes, too
            self._store.set(key, json.dumps(len(pieces)))  # Last: who sees it can fetch all.

        self._talk(put)

    def expect(self, src: int, tag: int) -> str:
        """The key of the next message from ``src`` that no receive waits for yet."""
        number = next(self._expected.setdefault((src, tag), itertools.count()))
        self._next[src, tag] = number + 1
        return f"{src}/{self.rank}/{tag}/{number}"

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        """Start to receive into ``tensor``; the thread that waits, or asks, writes it.

        Args:
            tensor: receives the message.
            src: the sender; None means any other rank.
            tag: number that tells the messages of a sender apart.

        Returns:
            A work whose result is the rank of the sender.

        Raises:
            CommunicatorClosedError: the communicator is closed or broken.
        """
        message = _Message(self, tensor, src, tag)

        def steps() -> Steps:
            yield Work(message.wait, message.is_there)
            message.take()
            return message.source

        return Composite(steps()).as_work()

    def find(self, sources: Sequence[int], tag: int) -> int | None:
        """One of ``sources`` from which such a message is there; None if there is none."""
        for src in sources:
            key = f"{src}/{self.rank}/{tag}/{self._next.get((src, tag), 0)}"
            if self._talk(lambda key=key: self._store.check([key])):  # type: ignore[misc]  # cannot infer
                return src
        return None

    def is_there(self, key: str) -> bool:
        """Whether a message can be fetched."""
        return self._talk(lambda: self._store.check([key]))

    def fetch(self, key: str, src: int) -> torch.Tensor:
        """Take a message of rank ``src`` that is there out of the store."""
        count = self._talk(lambda: self._store.get(key))
        if not count.isdigit() or len(count) > _LONGEST_COUNT:
            raise self.mismatch(src, "the number of pieces of a message", repr(count[:40]))
        places = [f"{key}/{index}" for index in range(int(count))]

        def take() -> bytes:
            data = b"".join(self._store.get(place) for place in places)
            for place in (key, *places):
                self._store.delete_key(place)
            return data

        data = bytearray(self._talk(take))
        message = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        received = decode(message, sender=self.ranks[src])
        if not isinstance(received, torch.Tensor):
            raise self.mismatch(src, "a tensor", type(received).__name__)
        return received

    def mismatch(self, src: int, expected: object, seen: object) -> CollectiveMismatchError:
        """The error of a message of rank ``src`` that is not what this rank receives."""
        return CollectiveMismatchError(
            "sender and receiver disagree",
            rank=self.ranks[self.rank],
            call="recv",
            communicator=self.label,
            peers=(self.ranks[src],),
            expected=expected,
            seen=seen,
        )

    def require_open(self, kind: str) -> None:
        """Raise ``CommunicatorClosedError`` if the communicator is closed or broken."""
        communicator = self._communicator()
        if communicator is None or not communicator.usable:
            raise CommunicatorClosedError(
                f"{kind} on {self.label}, which can no longer be used", rank=self.ranks[self.rank]
            )

    def give_up(self, error: BaseException) -> None:
        """Break the communicator, because ``error`` ended a call."""
        communicator = self._communicator()
        if communicator is not None and communicator.usable:
            communicator.abort(f"a receive with a tag ended with {type(error).__name__}: {error}")

    def _talk(self, conversation: Callable[[], T]) -> T:
        try:
            return conversation()
        except NoAnswerError as error:
            raise CollectiveTimeoutError(
                "the store through which messages with a tag travel does not answer",
                rank=self.ranks[self.rank],
                communicator=self.label,
                timeout_s=self.timeout_s,
                advice="It is hosted by rank 0 or by the launcher: was that process stopped, or its machine?",
            ) from error
        except (RuntimeError, OSError) as error:
            raise PeerLostError(
                f"rank {self.ranks[self.rank]} lost the store through which messages with a tag travel",
                rank=self.ranks[self.rank],
                advice="Its host (rank 0, or the launcher) has ended: look at its output first.",
            ) from error


class _Message:
    """A message that is awaited.

    Args:
        mail: tagged messages of this rank.
        tensor: receives it.
        src: the sender; None means any other rank.
        tag: number that tells the messages of a sender apart.

    Attributes:
        source: the sender, once it is known.
    """

    def __init__(self, mail: Mail, tensor: torch.Tensor, src: int | None, tag: int) -> None:
        mail.require_open("recv")
        self._mail, self._tensor, self._tag = mail, tensor, tag
        self._looker: int | None = None
        self._taken = False
        self.source = src
        self._key = None if src is None else mail.expect(src, tag)

    def _look(self) -> bool:
        """Whether the message is there; False also in a signal handler that interrupts this question."""
        if self._taken or self._looker is not None:
            return self._taken
        self._looker = threading.get_ident()
        try:
            if self._key is None:
                others = [rank for rank in range(len(self._mail.ranks)) if rank != self._mail.rank]
                self.source = self._mail.find(others, self._tag)
                if self.source is not None:
                    self._key = self._mail.expect(self.source, self._tag)
            return self._key is not None and self._mail.is_there(self._key)
        finally:
            self._looker = None

    def is_there(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        try:
            return self._look()
        except PeerLostError:
            return True

    def wait(self, timeout_s: float | None) -> None:
        """Block until the message is there.

        Raises:
            ConcurrentUseError: a signal handler that interrupted a look at the store waits for the message.
        """
        if self._looker == threading.get_ident():
            raise ConcurrentUseError(
                "a signal handler waits for the message that it interrupted",
                advice="Ask is_completed() there, and wait after the handler has returned.",
            )
        mail, pause_s = self._mail, _SHORTEST_S
        limit_s = mail.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        with self._breaking():
            while not self._look():
                mail.require_open("recv")
                if time.monotonic() - started > limit_s:
                    raise self._late(limit_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)

    def take(self) -> None:
        """Move the message, which is there, from the store into its tensor."""
        assert self._key is not None
        assert self.source is not None
        with self._breaking():
            received, own = self._mail.fetch(self._key, self.source), self._tensor
            self._taken = True
            if received.dtype is not own.dtype or received.numel() != own.numel():
                expected, seen = (f"{tensor.numel()} x {tensor.dtype}" for tensor in (own, received))
                raise self._mail.mismatch(self.source, expected, seen)
            copy_pieces([self._tensor], [received.view(-1)])

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Break the communicator if an error ends this: later messages with this tag would be taken for this one."""
        try:
            yield
        except BaseException as error:
            self._mail.give_up(error)
            raise

    def _late(self, limit_s: float) -> CollectiveTimeoutError:
        sender = None if self.source is None else self._mail.ranks[self.source]
        return CollectiveTimeoutError(
            f"no message with tag {self._tag} came from {'any rank' if sender is None else f'rank {sender}'}",
            rank=self._mail.ranks[self._mail.rank],
            call="recv",
            communicator=self._mail.label,
            peers=() if sender is None else (sender,),
            timeout_s=limit_s,
        )


_mails: weakref.WeakKeyDictionary[Communicator, Mail] = weakref.WeakKeyDictionary()


def mail_of(communicator: Communicator) -> Mail:
    """The tagged messages of ``communicator``, over a connection of their own to the store."""
    found = _mails.get(communicator)
    if found is None:
        rank, limit_s = communicator.rank, communicator.timeout_s
        with meeting("a message with a tag", rank, communicator.ranks):
            store = dist.PrefixStore("tagged", connection_to(communicator.store, limit_s))
        found = _mails.setdefault(communicator, Mail(communicator, with_limit(store, limit_s)))
    return found

"""Calls between two ranks: what they take, promise and refuse. They are methods of ``Communicator``."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bagua.comm.operands import Intake, apart, check_rank
from bagua.comm.pipeline import CallPipeline, Timeout
from bagua.comm.work import Work
from bagua.errors import InvalidRankError


class Caller(Protocol):
    """What these calls, and those made of several, need of their communicator, which is above them."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    intake: Intake
    pipeline: CallPipeline

    def allreduce(self, *_: Any, **__: Any) -> Work | None:
        """See ``Communicator.allreduce``."""

    def broadcast(self, *_: Any, **__: Any) -> Work | None:
        """See ``Communicator.broadcast``."""

    def allgather(self, *_: Any, **__: Any) -> Work | None:
        """See ``Communicator.allgather``."""

    def gather(self, *_: Any, **__: Any) -> Work | None:
        """See ``Communicator.gather``."""

    def scatter(self, *_: Any, **__: Any) -> Work | None:
        """See ``Communicator.scatter``."""


def send(
    communicator: Caller, tensor: torch.Tensor, dst: int, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None:
    """Send ``tensor`` to rank ``dst``, which calls ``recv``. Messages between two ranks keep their order.

    Args:
        communicator: communicator whose ranks take part.
        tensor: elements to send.
        dst: another rank.
        async_op: return a ``Work`` at once.
        timeout: deadline.
    """
    share = communicator.intake.share(tensor, "tensor")
    return communicator.pipeline.run(
        "send", share, None, tensor.dtype, share.numel(), async_op, timeout,
        "", communicator.intake.other(dst, "dst"), result=tensor,
    )  # fmt: skip


def recv(
    communicator: Caller, tensor: torch.Tensor, src: int, *, async_op: bool = False, timeout: Timeout = None
) -> Work | None:
    """Receive into ``tensor`` what rank ``src`` sends.

    Args:
        communicator: communicator whose ranks take part.
        tensor: equal in dtype and number of elements to what is sent.
        src: another rank.
        async_op: return a ``Work`` at once.
        timeout: deadline.
    """
    target, finish = communicator.intake.in_place(tensor, "tensor", keep=False)
    return communicator.pipeline.run(
        "recv", None, target, tensor.dtype, target.numel(), async_op, timeout,
        "", communicator.intake.other(src, "src"), finish=finish, result=tensor,
    )  # fmt: skip


def recv_any(
    communicator: Caller, tensor: torch.Tensor, *, async_op: bool = False, timeout: Timeout = None
) -> int | Work:
    """Receive into ``tensor`` the next message that any other rank sends.

    A message goes to the receive that was started first, of those that can take it. Ranks that have closed
    their communicator in peace are not missed as long as one is left.

    Args:
        communicator: communicator whose ranks take part.
        tensor: equal in dtype and number of elements to what is sent.
        async_op: return a ``Work`` at once, whose result is the rank of the sender.
        timeout: deadline.

    Returns:
        The rank of the sender, inside this communicator.

    Raises:
        InvalidRankError: there is no other rank.
        TransportUnavailableError: the backend receives from a rank that is named only, as NCCL does.
    """
    target, finish = communicator.intake.in_place(tensor, "tensor", keep=False)
    if communicator.intake.size == 1:
        raise InvalidRankError("there is no other rank that could send", argument="tensor", expected="two ranks")
    with torch.inference_mode(False):  # Another thread writes to it, outside of that mode.
        sender = torch.empty(1, dtype=torch.int64)

    def conclude() -> int:
        if finish is not None:
            finish()
        return int(sender)

    work = communicator.pipeline.run(
        "recv", sender, target, tensor.dtype, target.numel(), async_op, timeout, finish=conclude, result=tensor,
    )  # fmt: skip
    return int(sender) if work is None else work


def sendrecv(
    communicator: Caller,
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
        communicator: communicator whose ranks take part.
        output: receives; same dtype as ``tensor``.
        tensor: is sent.
        src: rank received from. This rank itself only if ``dst`` is too: a copy.
        dst: rank sent to.
        async_op: return a ``Work`` at once.
        timeout: deadline.
    """
    share = communicator.intake.share(tensor, "tensor")
    src, dst = check_rank(src, communicator.intake.size, "src"), check_rank(dst, communicator.intake.size, "dst")
    if (src == communicator.intake.rank) != (dst == communicator.intake.rank):
        raise InvalidRankError(
            "a rank can exchange with itself only in both directions",
            argument="src" if src == communicator.intake.rank else "dst",
            expected="another rank, or this rank as both src and dst",
            seen=communicator.intake.rank,
        )
    communicator.intake.check(output, "output")
    expected = share.numel() if src == communicator.intake.rank else output.numel()
    target, finish = communicator.intake.output(output, "output", tensor, expected)
    return communicator.pipeline.run(
        "sendrecv", apart(share, target), target, tensor.dtype, share.numel(), async_op,
        timeout, "", dst, peer=src, counts=((), (target.numel(),)), finish=finish, result=output,
    )  # fmt: skip

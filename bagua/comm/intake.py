"""What a communicator does with its arguments before a call: check them, and copy those that need it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.comm.operands import check_rank, check_tensor, is_plain, readable, writable
from bagua.comm.reduction import check_communicable
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.errors import InvalidRankError, InvalidTensorError

__all__ = ["Finish", "Intake"]

#: Brings a result from where the transport wrote it to where the user wants it; None if that is the same place.
Finish = Callable[[], None] | None


class Intake:
    """Turns the user's tensors into those that a transport works on.

    Args:
        device_types: ``torch.device.type`` of the tensors that the transport takes.
        rank: rank of this process in the communicator.
        size: number of ranks.
    """

    def __init__(self, device_types: frozenset[str], rank: int, size: int) -> None:
        self.device_types = device_types
        self.rank = rank
        self.size = size
        #: Facts read on every call.
        self._cpu = "cpu" in device_types
        self._cuda = "cuda" in device_types

    @property
    def home(self) -> torch.device:
        """Where the bytes of objects travel from: the CPU if the transport serves it."""
        return torch.device("cpu" if self._cpu else next(iter(self.device_types)))

    def check(self, tensor: torch.Tensor, argument: str) -> None:
        """The checks of ``check_tensor``; the common case without their cost."""
        try:
            served = (self._cpu and tensor.is_cpu) or (self._cuda and tensor.is_cuda)
            plain = served and tensor.layout is torch.strided
        except AttributeError:
            plain = False
        if plain:
            check_communicable(tensor.dtype, argument)
            return
        check_tensor(tensor, argument, self.device_types)

    def in_place(self, tensor: torch.Tensor, argument: str, *, keep: bool = True) -> tuple[torch.Tensor, Finish]:
        """What the transport works on instead of ``tensor``, and how the result gets back."""
        self.check(tensor, argument)
        if is_plain(tensor):
            return tensor, None
        stage, destination = writable(tensor, argument, keep=keep)
        if destination is None:
            return stage, None
        return stage, lambda: _copy(destination, stage)

    def share(self, tensor: torch.Tensor, argument: str) -> torch.Tensor:
        """``tensor`` in the form that transports read."""
        self.check(tensor, argument)
        return readable(tensor)

    def input(self, tensor: torch.Tensor, argument: str, like: torch.Tensor, numel: int) -> torch.Tensor:
        """What the transport reads instead of ``tensor``, which must fit ``like``."""
        self.check(tensor, argument)
        _check_fits(tensor, argument, like, numel)
        return readable(tensor)

    def output(
        self, tensor: torch.Tensor, argument: str, like: torch.Tensor, numel: int
    ) -> tuple[torch.Tensor, Finish]:
        """What the transport writes instead of ``tensor``, which must fit ``like``, and how the result gets there."""
        self.check(tensor, argument)
        _check_fits(tensor, argument, like, numel)
        return self.in_place(tensor, argument, keep=False)

    def only_on(
        self,
        root: int,
        tensor: torch.Tensor | None,
        argument: str,
        like: torch.Tensor,
        share: int,
        *,
        written: bool,
    ) -> tuple[torch.Tensor | None, Finish]:
        """The tensor of all shares, which exists on ``root`` only."""
        if self.rank != root:
            if tensor is not None:
                raise InvalidTensorError(
                    "only one rank has this tensor",
                    argument=argument,
                    expected=f"None on every rank but {root}",
                    seen=f"a tensor on rank {self.rank}",
                )
            return None, None
        if tensor is None:
            raise InvalidTensorError(
                "this rank must pass the tensor of all shares",
                argument=argument,
                expected=f"{self.size * share} elements on rank {root}",
                seen="None",
            )
        if written:
            return self.output(tensor, argument, like, self.size * share)
        return self.input(tensor, argument, like, self.size * share), None

    def other(self, rank: int, argument: str) -> int:
        """``rank`` if it is another rank of this communicator."""
        rank = check_rank(rank, self.size, argument)
        if rank == self.rank:
            raise InvalidRankError(
                "a rank cannot send to or receive from itself",
                argument=argument,
                expected="another rank",
                seen=rank,
            )
        return rank


def _copy(destination: torch.Tensor, stage: torch.Tensor) -> None:
    copy_pieces([destination], [stage.view(destination.dtype)])


def _check_fits(tensor: torch.Tensor, argument: str, like: torch.Tensor, numel: int) -> None:
    if tensor.dtype is not like.dtype or tensor.device != like.device or tensor.numel() != numel:
        raise InvalidTensorError(
            "tensors do not fit together",
            argument=argument,
            expected=f"{numel} elements of {like.dtype} on {like.device}",
            seen=f"{tensor.numel()} elements of {tensor.dtype} on {tensor.device}",
        )

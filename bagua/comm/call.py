"""The description of one collective: a value that is compared, counted, logged and shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

#: Kinds in which every rank of the communicator takes part. The position of a
#: kind is its number in a fingerprint: append, never reorder.
COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "alltoall_v",
    "barrier",
)
#: Kinds between two ranks; they do not count in the sequence of collectives. A set: each call asks.
POINT_TO_POINT = frozenset({"send", "recv", "sendrecv"})

# What ranks tell each other of a call: the position of a name is its number. Append, never reorder.
KINDS = (*COLLECTIVES, "send", "recv", "sendrecv")
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
REDUCTION_NUMBERS = {name: number for number, name in enumerate(REDUCTIONS)}
#: Equal on all ranks, as long as they run the same torch.
DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Call(NamedTuple):
    """What one rank asks for, without the data.

    Attributes:
        kind: one of ``COLLECTIVES`` or ``POINT_TO_POINT``.
        dtype: dtype of the elements, as the user gave it.
        numel: elements of one rank's share (see ``comm/transports/contract.py``); 0 for ``barrier``.
        reduction: ``sum``, ``avg``, ...; empty where nothing is reduced.
        root: root, destination or peer; -1 where there is none, and for ``recv`` from any rank.
        source: for ``sendrecv`` the rank received from; otherwise -1.
        send_counts: for ``alltoall_v`` the elements sent to each rank; otherwise empty.
        recv_counts: for ``alltoall_v`` the elements received from each rank; for
            ``sendrecv`` the one count received; otherwise empty.
        sequence: number of this call on its communicator, from 1; collectives and
            point-to-point calls are counted apart. 0 before the call is made.
    """

    kind: str
    dtype: torch.dtype
    numel: int = 0
    reduction: str = ""
    root: int = -1
    source: int = -1
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    sequence: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input."""
        count = sum(self.send_counts) if self.kind == "alltoall_v" else self.numel
        return count * self.dtype.itemsize

    def agreement(self) -> tuple[str, torch.dtype, int, str, int]:
        """The part on which all ranks of a collective must agree."""
        numel = 0 if self.kind == "alltoall_v" else self.numel
        return self.kind, self.dtype, numel, self.reduction, self.root

    def numbers(self) -> tuple[int, int, int, int, int]:
        """``agreement`` as ranks in other processes are told."""
        kind, dtype, numel, reduction, root = self.agreement()
        return KIND_NUMBERS[kind], DTYPE_NUMBERS[dtype], numel, REDUCTION_NUMBERS[reduction], root

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], *rest: Any) -> Call:
        """The call of which a rank tells in ``numbers``; ``rest`` are the other fields, from ``source`` on."""
        kind, dtype, numel, reduction, root = numbers
        return cls(KINDS[kind], DTYPES[dtype], numel, REDUCTIONS[reduction], root, *rest)

    def __str__(self) -> str:
        count = list(self.send_counts) if self.kind == "alltoall_v" else self.numel
        parts = [] if self.kind == "barrier" else [f"{count} x {str(self.dtype).removeprefix('torch.')}"]
        if self.reduction:
            parts.append(self.reduction)
        if self.root >= 0:
            parts.append(f"root {self.root}" if self.kind not in POINT_TO_POINT else f"peer {self.root}")
        if self.source >= 0:
            parts.append(f"from {self.source}")
        return f"#{self.sequence} {self.kind}({', '.join(parts)})"


#: ``Call`` of all its fields in their order, in two thirds of the time.
new_call = partial(tuple.__new__, Call)

"""Checks and conversions of what users pass, before anything is sent.

A transport takes dense, contiguous tensors without autograd history. Others are
copied in and, where they are written, copied back when the call completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from bagua.comm.reduction import OPERATIONS, ReduceOp, copy_pieces
from bagua.errors import ConfigurationError, InvalidRankError, InvalidReduceOpError, InvalidTensorError

_STRIDED = torch.strided
#: What clocks, locks, and torch can all wait for.
_LONGEST_S = 365 * 24 * 3600.0
#: Brings a result from where the transport wrote it to where the user wants it; None if that is the same place.
Finish = Callable[[], None] | None


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL = frozenset({torch.bool})
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
_REDUCIBLE = _FLOATS | _COMPLEX | _INTEGERS | _BOOL
_COPIED = _FLOAT8 | {torch.uint16, torch.uint32, torch.uint64}
#: The dtypes that collectives carry; those that are only copied among them.
COMMUNICABLE = _REDUCIBLE | _COPIED

_ALLOWED: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("sum", "product"), _REDUCIBLE),
    **dict.fromkeys(("min", "max"), _FLOATS | _INTEGERS | _BOOL),
    "avg": _FLOATS | _COMPLEX,
    **dict.fromkeys(("band", "bor", "bxor"), _INTEGERS | _BOOL),
}

#: One look-up answers both "is this legal" and "what is it called". By identity: torch takes long to hash its enum.
_LEGAL = {(id(op), dtype): name for name, op in OPERATIONS.items() for dtype in _ALLOWED[name]}

#: Reductions of bool, expressed on its bytes (0 or 1).
BOOL_AS_BYTES = {
    **dict.fromkeys(("sum", "max", "bor"), "max"),
    **dict.fromkeys(("product", "min", "band"), "min"),
    "bxor": "bxor",
}


def reduction_name(op: object, dtype: torch.dtype) -> str:
    """Name of the reduction ``op`` for tensors of ``dtype``.

    Args:
        op: a ``torch.distributed.ReduceOp`` value.
        dtype: dtype of the tensors to reduce.

    Returns:
        One of ``sum, product, min, max, avg, band, bor, bxor``.

    Raises:
        InvalidReduceOpError: ``op`` is unknown or has no meaning for ``dtype``.

    Example:
        >>> reduction_name(ReduceOp.AVG, torch.float16)
        'avg'
    """
    try:
        return _LEGAL[id(op), dtype]
    except KeyError:
        return _explain(op, dtype)


def _explain(op: object, dtype: torch.dtype) -> str:
    for name, known in OPERATIONS.items() if isinstance(op, ReduceOp) else ():
        if op == known:  # a ReduceOp object rather than the enum's value
            if dtype in _ALLOWED[name]:
                return name
            dtypes = sorted(str(allowed) for allowed in _ALLOWED[name])
            raise InvalidReduceOpError(
                f"{name.upper()} has no meaning for {dtype}",
                argument="op",
                expected=f"{name.upper()} of one of {', '.join(dtypes)}",
                seen=dtype,
                advice="Convert the tensor or choose another reduction.",
            )
    raise InvalidReduceOpError(
        "unknown reduction",
        argument="op",
        expected="one of ReduceOp." + ", ReduceOp.".join(map(str.upper, OPERATIONS)),
        seen=repr(op),
        advice="For PREMUL_SUM, multiply the tensor and use SUM; bagua.distributed does it for you."
        if isinstance(op, ReduceOp)
        else "",
    )


def check_communicable(dtype: torch.dtype, argument: str) -> None:
    """Raise ``InvalidTensorError`` for a dtype that no collective carries (quantized ones, say)."""
    if dtype not in COMMUNICABLE:
        raise InvalidTensorError(
            "this dtype cannot be communicated",
            argument=argument,
            expected="a floating, complex, integer or bool dtype",
            seen=dtype,
        )


def as_seconds(timeout: object, argument: str = "timeout") -> float:
    """``timeout`` in seconds; whatever is longer than a year, infinity too, means a year.

    Args:
        timeout: number of seconds, or a timedelta.
        argument: name of the argument that it comes from, for the error.

    Raises:
        ConfigurationError: not a positive number.

    Example:
        >>> as_seconds(timedelta(minutes=1))
        60.0
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigurationError(
            "a timeout must be positive", argument=argument, expected="seconds > 0 or a timedelta", seen=repr(timeout)
        )
    return _LONGEST_S if seconds > _LONGEST_S else float(seconds)


def check_rank(rank: object, size: int, argument: str) -> int:
    """``rank`` if it is a rank of a communicator of ``size``, else ``InvalidRankError``."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise InvalidRankError(
            "not a rank of this communicator",
            argument=argument,
            expected=f"a whole number from 0 to {size - 1}",
            seen=repr(rank),
            advice="Ranks are counted inside the communicator, not over the world.",
        )
    return rank


def check_tensor(tensor: object, argument: str, device_types: frozenset[str]) -> None:
    """Raise ``InvalidTensorError`` unless ``tensor`` is dense and on a served device."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidTensorError(
            "not a tensor", argument=argument, expected="a torch.Tensor", seen=type(tensor).__name__
        )
    if tensor.layout is not torch.strided:
        raise InvalidTensorError(
            "only dense tensors can be communicated",
            argument=argument,
            expected="layout torch.strided",
            seen=tensor.layout,
            advice="Call .to_dense() first.",
        )
    if tensor.device.type not in device_types:
        raise InvalidTensorError(
            "the transport of this communicator does not serve this device",
            argument=argument,
            expected=f"a tensor on {' or '.join(sorted(device_types))}",
            seen=tensor.device,
            advice="Move the tensor, or initialize with a backend that serves its device.",
        )
    check_communicable(tensor.dtype, argument)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a transport can take ``tensor`` as it is."""
    return tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg() and not tensor.is_conj()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` or a copy of it, in the form that transports read."""
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor, argument: str, *, keep: bool) -> tuple[torch.Tensor, Finish]:
    """A plain tensor to write to, and how the result gets to ``tensor``.

    Args:
        tensor: the user's tensor.
        argument: its name, for the error.
        keep: True if the call also reads it.

    Raises:
        InvalidTensorError: several elements of ``tensor`` share memory.
    """
    if is_plain(tensor):
        return tensor, None
    bare = tensor.detach()
    if is_plain(bare):
        return bare, None
    if overlaps_itself(bare):
        raise InvalidTensorError(
            "elements of this tensor share memory, so it cannot take a result",
            argument=argument,
            expected="a tensor whose elements have memory of their own",
            seen=f"shape {tuple(bare.shape)} with strides {bare.stride()}",
            advice="Pass tensor.clone().",
        )
    stage = readable(bare) if keep else torch.empty(bare.shape, dtype=bare.dtype, device=bare.device)
    return stage, lambda: copy_pieces([bare], [stage.view(bare.dtype)])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of ``tensor`` lie at the same address.

    Example:
        >>> overlaps_itself(torch.zeros(1).expand(3)), overlaps_itself(torch.zeros(2, 3).t())
        (True, False)
    """
    if tensor.numel() < 2:
        return False
    dimensions = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if dimensions[0][0] == 0:
        return True
    reach = 0
    for stride, size in dimensions:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    # Interleaved strides need not collide: count the addresses.
    extent = 1 + sum(stride * (size - 1) for stride, size in dimensions)
    addresses = torch.arange(extent, device="cpu").as_strided(tensor.shape, tensor.stride())
    distinct: int = torch.unique(addresses).numel()
    return distinct < tensor.numel()


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors overlap in memory."""
    first, second = one.data_ptr(), other.data_ptr()
    # In each call: what follows is asked of tensors that begin between the ends of each other.
    if not (second < first + one.nbytes if first <= second else first < second + other.nbytes):
        return False
    return one.device == other.device and one.numel() > 0 and other.numel() > 0


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``source``, or a copy of it where the call would overwrite it while it is read."""
    return source.clone() if shares_memory(source, target) else source


def check_counts(counts: Sequence[object], size: int, numel: int, argument: str) -> tuple[int, ...]:
    """Per-rank element counts of ``alltoall_v``, checked against the tensor they describe."""
    checked = tuple(count for count in counts if isinstance(count, int) and not isinstance(count, bool))
    whole = len(checked) == len(counts) == size
    if not whole or min(checked) < 0 or sum(checked) != numel:
        raise ConfigurationError(
            "counts do not describe the tensor",
            argument=argument,
            expected=f"{size} whole numbers >= 0 with sum {numel}",
            seen=list(counts),
        )
    return checked


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
            if served and tensor.layout is _STRIDED and tensor.dtype in COMMUNICABLE:
                return
        except AttributeError:
            pass
        check_tensor(tensor, argument, self.device_types)

    def reduced(self, tensor: torch.Tensor, op: object) -> tuple[torch.Tensor, Finish, str]:
        """Like ``in_place``, and the name of the reduction; of a bool tensor its bytes, and what reduces them."""
        self.check(tensor, "tensor")
        # In each call: the common case is seen here, without the calls that see it, too.
        plain, finish = (tensor, None) if is_plain(tensor) else writable(tensor, "tensor", keep=True)
        dtype = tensor.dtype
        reduction = _LEGAL.get((id(op), dtype)) or reduction_name(op, dtype)
        if dtype is torch.bool:
            return plain.view(torch.uint8), finish, BOOL_AS_BYTES[reduction]
        return plain, finish, reduction

    def pair(
        self, tensor: torch.Tensor, output: torch.Tensor, times: int = 1, *, split: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Finish]:
        """What the transport reads and writes instead of ``tensor`` and an ``output`` of ``times`` its elements.

        Also how the result gets to ``output``. Where both lie in one place, what is read is a copy. If ``tensor`` is
        ``split``, each rank gets as much of it.
        """
        self.check(tensor, "tensor")
        if split and tensor.numel() % self.size:
            raise InvalidTensorError(
                "the tensor does not split evenly over the ranks",
                argument="tensor",
                expected=f"a multiple of {self.size} elements",
                seen=tensor.numel(),
                advice="Pad it, or use alltoall_v.",
            )
        target, finish = self.output(output, "output", tensor, times * tensor.numel())
        return apart(readable(tensor), target), target, finish

    def in_place(self, tensor: torch.Tensor, argument: str, *, keep: bool = True) -> tuple[torch.Tensor, Finish]:
        """What the transport works on instead of ``tensor``, and how the result gets back."""
        self.check(tensor, argument)
        return writable(tensor, argument, keep=keep)

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
        return writable(tensor, argument, keep=False)

    def only_on(
        self, root: int, tensor: torch.Tensor | None, argument: str, like: torch.Tensor, share: int, *, written: bool
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
                "a rank cannot send to or receive from itself", argument=argument, expected="another rank", seen=rank
            )
        return rank


def _check_fits(tensor: torch.Tensor, argument: str, like: torch.Tensor, numel: int) -> None:
    there = (tensor.is_cpu and like.is_cpu) or tensor.device == like.device  # The first costs half as much.
    if tensor.dtype is not like.dtype or not there or tensor.numel() != numel:
        raise InvalidTensorError(
            "tensors do not fit together",
            argument=argument,
            expected=f"{numel} elements of {like.dtype} on {like.device}",
            seen=f"{tensor.numel()} elements of {tensor.dtype} on {tensor.device}",
        )

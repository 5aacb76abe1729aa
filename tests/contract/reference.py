"""What collectives must compute, on plain tensors and without communication.

Written independently of ``bagua.comm.reduction``, so that both have to be wrong in
the same way for a mistake to pass.
"""

from __future__ import annotations

import functools

import torch

from bagua.comm import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

#: Every dtype that is reduced, and every one that is at least carried.
REDUCED = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
COPIED = (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)

_ORDERED = (*FLOATS, *INTEGERS, torch.bool)
_BITS = (*INTEGERS, torch.bool)

#: The dtypes for which each reduction has a meaning.
LEGAL: tuple[tuple[ReduceOp.RedOpType, tuple[torch.dtype, ...]], ...] = (
    (ReduceOp.SUM, REDUCED),
    (ReduceOp.PRODUCT, REDUCED),
    (ReduceOp.MIN, _ORDERED),
    (ReduceOp.MAX, _ORDERED),
    (ReduceOp.AVG, (*FLOATS, *COMPLEX)),
    (ReduceOp.BAND, _BITS),
    (ReduceOp.BOR, _BITS),
    (ReduceOp.BXOR, _BITS),
)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers that suit ``dtype``, the same for the same ``seed`` everywhere.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        seed: a whole number >= 0.
    """
    return _drawn(shape, dtype, seed).clone()


@functools.lru_cache(maxsize=64)  # Every rank needs the numbers of all ranks, for each kind of call.
@torch.inference_mode(mode=False)
def _drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 256), torch.int8: (-128, 128)}.get(dtype, (-9, 10))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What an output holds before a result is there: nothing that could pass for one."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan")).to(dtype)
    return torch.full(shape, 77, dtype=torch.int64).to(dtype)


def reduced(inputs: list[torch.Tensor], op: ReduceOp.RedOpType) -> torch.Tensor:
    """The reduction of the inputs of all ranks, computed in the widest dtype there is.

    Args:
        inputs: one per rank, equal in shape and dtype.
        op: a ``ReduceOp``.

    Example:
        >>> reduced([torch.tensor([1, 2]), torch.tensor([3, 4])], ReduceOp.SUM)
        tensor([4, 6])
    """
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack(inputs).to(wide)
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        op = ReduceOp.MAX if op == ReduceOp.SUM else ReduceOp.MIN
    return _reduce(stack, op).to(dtype)


def _reduce(stack: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
    if op == ReduceOp.SUM:
        return stack.sum(0)
    if op == ReduceOp.AVG:
        return stack.sum(0) / len(stack)
    if op == ReduceOp.PRODUCT:
        return stack.prod(0)
    if op == ReduceOp.MIN:
        return stack.amin(0)
    if op == ReduceOp.MAX:
        return stack.amax(0)
    total = stack[0]
    for part in stack[1:]:
        total = total & part if op == ReduceOp.BAND else total | part if op == ReduceOp.BOR else total ^ part
    return total


def assert_same(actual: torch.Tensor, expected: torch.Tensor, message: str, *, rounding_steps: int = 0) -> None:
    """Fail unless two tensors hold the same values.

    Args:
        actual: result that was computed.
        expected: result that should have been; same shape and dtype.
        message: says what this was about.
        rounding_steps: 0 compares bits; otherwise so many roundings are forgiven where
            numbers are rounded at all.
    """
    assert actual.dtype is expected.dtype, f"{message}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape} instead of {expected.shape}"
    actual, expected = _plain(actual), _plain(expected)
    inexact = expected.dtype.is_floating_point or expected.dtype.is_complex
    if rounding_steps and inexact:
        tolerance = 2 * rounding_steps * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=4 * tolerance, msg=lambda text: f"{message}: {text}"
        )
        return
    same = torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert same, f"{message}: {actual} instead of {expected}"


def assert_rounded_once(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    """Fail unless ``actual`` is ``expected`` or a neighbour of it among the numbers of its dtype.

    A neighbour, because the result in float32 may lie almost in the middle of two of them.
    """
    assert actual.dtype is expected.dtype, f"{message}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape} instead of {expected.shape}"
    step = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(
        _plain(actual).float(), _plain(expected).float(), rtol=step, atol=step / 1024,
        msg=lambda text: f"{message}: {text}",
    )  # fmt: skip


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy. ``contiguous()`` is not enough: it leaves a single element its odd stride."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)

"""``MinMaxUInt8`` on CUDA in one kernel for each direction, bit for bit the format of ``minmax_uint8.py``.

Needs Triton, which PyTorch's CUDA builds bring along. Without it, or in float64, the operations
in ``minmax_uint8.py`` do the same. A value half-way between two codes may become either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: A block is one program, whose elements are in registers.
_LONGEST_BLOCK = 16384
_SHORTEST_BLOCK = 64

_SLACK = tl.constexpr(1 + 2.0**-15)
_LOWER_BY = tl.constexpr(2.0**-8)
_DROPPED_BITS = tl.constexpr(2**37 - 1)
_SINGLE_MAGIC = tl.constexpr(1.5 * 2.0**23)
_DOUBLE_MAGIC = tl.constexpr(1.5 * 2.0**52)
_SINGLE_TINY = tl.constexpr(2.0**-126)
_SINGLE_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def suits(block_numel: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can do this."""
    return _SHORTEST_BLOCK <= block_numel <= _LONGEST_BLOCK and dtype != torch.float64


def encode(flat: torch.Tensor, first: torch.Tensor, step: torch.Tensor, codes: torch.Tensor, block_numel: int) -> None:
    """Write first values, steps and codes of all blocks of ``flat``."""
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        _encode_kernel[(first.numel(),)](
            flat, first, step, codes, flat.numel(), block_numel, WIDTH=triton.next_power_of_2(block_numel)
        )


def decode(
    codes: torch.Tensor,
    first: torch.Tensor,
    step: torch.Tensor,
    out: torch.Tensor,
    block_numel: int,
    *,
    add: bool,
    limit: float,
) -> None:
    """Write the values to ``out``, or add them; none is beyond plus and minus ``limit``."""
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _decode_kernel[(first.numel(),)](
            codes,
            first,
            step,
            out,
            out.numel(),
            block_numel,
            limit,
            WIDTH=triton.next_power_of_2(block_numel),
            ADD=add,
            SUM=tl.float64 if out.dtype == torch.float64 else tl.float32,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(flat, first, step, codes, numel, block_numel, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    places = block * block_numel + offsets
    inside = (offsets < block_numel) & (places < numel)
    values = tl.load(flat + places, mask=inside, other=0.0).to(tl.float32)
    # Minima and maxima of the hardware pass NaN over.
    odd = (values != values) | (tl.abs(values) == float("inf"))  # noqa: PLR0124
    low = tl.min(tl.where(inside, values, float("inf")), axis=0)
    high = tl.max(tl.where(inside, values, float("-inf")), axis=0)
    exact_low, exact_high = low.to(tl.float64), high.to(tl.float64)

    wanted = tl.maximum((exact_high / 255 - exact_low / 255) * _SLACK, _SINGLE_TINY)
    bits = (wanted.to(tl.int64, bitcast=True) + _DROPPED_BITS) & ~_DROPPED_BITS
    wanted = bits.to(tl.float64, bitcast=True)
    finite = (tl.max(odd.to(tl.int32), axis=0) == 0) & (wanted * 256 <= _SINGLE_LARGEST)
    contains_zero = (low <= 0) & (high >= 0)
    rounded = (exact_low / wanted - _LOWER_BY + _DOUBLE_MAGIC) - _DOUBLE_MAGIC
    below_zero = tl.where(contains_zero, rounded, 0.0)
    origin = tl.where(contains_zero, 0.0, low)

    scaled = (values - origin) * (1.0 / wanted).to(tl.float32) + (-below_zero + _SINGLE_MAGIC).to(tl.float32)
    code = tl.where(finite, scaled.to(tl.int32, bitcast=True) & 255, 0)
    tl.store(codes + places, code.to(tl.uint8), mask=inside)
    begin = (below_zero * wanted + origin).to(tl.float32)
    tl.store(first + block, tl.where(finite, begin, float("nan")))
    tl.store(step + block, tl.where(finite, wanted.to(tl.float32), float("nan")))


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes,
    first,
    step,
    out,
    numel,
    block_numel,
    limit,
    WIDTH: tl.constexpr,  # noqa: N803
    ADD: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    places = block * block_numel + offsets
    inside = (offsets < block_numel) & (places < numel)
    code = tl.load(codes + places, mask=inside, other=0).to(tl.float32)
    values = code * tl.load(step + block) + tl.load(first + block)
    values = tl.where(values > limit, limit, tl.where(values < -limit, -limit, values))  # NaN stays.
    values = values.to(SUM)
    if ADD:
        values += tl.load(out + places, mask=inside, other=0.0).to(SUM)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)

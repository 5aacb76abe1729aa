"""The reference that everything is compared with: checked by hand, and able to tell a difference."""

import math

import pytest
import torch

from bagua.comm import ReduceOp
from tests.contract.reference import COPIED, LEGAL, REDUCED, assert_same, garbage, reduced, values


@pytest.mark.parametrize(
    ("op", "dtype", "inputs", "expected"),
    [
        (ReduceOp.SUM, torch.float16, [1.5, 2.0, 3.0], 6.5),
        (ReduceOp.AVG, torch.float32, [1.0, 2.0, 6.0], 3.0),
        (ReduceOp.PRODUCT, torch.int32, [2, -3, 4], -24),
        (ReduceOp.SUM, torch.uint8, [200, 100, 0], 44),
        (ReduceOp.SUM, torch.int8, [100, 100, 0], -56),
        (ReduceOp.MIN, torch.int64, [3, -5, 4], -5),
        (ReduceOp.MAX, torch.bfloat16, [3, -5, 4], 4),
        (ReduceOp.BAND, torch.uint8, [0b1110, 0b0111, 0b1111], 0b0110),
        (ReduceOp.BOR, torch.int16, [1, 2, 8], 11),
        (ReduceOp.BXOR, torch.int32, [1, 3, 8], 10),
        (ReduceOp.SUM, torch.bool, [False, True, True], True),
        (ReduceOp.PRODUCT, torch.bool, [False, True, True], False),
        (ReduceOp.BXOR, torch.bool, [False, True, True], False),
        (ReduceOp.PRODUCT, torch.complex64, [1j, 1j, 2], -2),
        (ReduceOp.AVG, torch.complex128, [1j, 1, 2], 1 + 1j / 3),
    ],
)
def test_reductions_by_hand(op, dtype, inputs, expected):
    result = reduced([torch.tensor([number], dtype=dtype) for number in inputs], op)
    assert_same(result, torch.tensor([expected], dtype=dtype), str(op))


def test_numbers_depend_on_the_seed_alone_and_suit_their_dtype():
    for dtype in COPIED:
        one = values((50,), dtype, 3)
        assert_same(one, values((50,), dtype, 3), "the same seed")
        assert not torch.equal(one.view(torch.uint8), values((50,), dtype, 4).view(torch.uint8))
    assert values((99,), torch.int16, 1).min() < 0
    assert not math.isfinite(garbage((1,), torch.float32).item())


@pytest.mark.parametrize("dtype", REDUCED)
def test_a_difference_is_seen(dtype):
    one = values((20,), dtype, 5)
    other = one.clone()
    other[7] = ~other[7] if dtype is torch.bool else other[7] + 1
    for rounding_steps in (0, 3):
        assert_same(one, one.clone(), "equal", rounding_steps=rounding_steps)
        with pytest.raises(AssertionError, match="the subject"):
            assert_same(one, other, "the subject", rounding_steps=rounding_steps)


def test_a_bit_a_dtype_and_a_shape_are_differences():
    one = torch.ones(3)
    with pytest.raises(AssertionError):
        assert_same(one, torch.nextafter(one, torch.tensor(2.0)), "a bit")
    assert_same(one, torch.nextafter(one, torch.tensor(2.0)), "a rounding", rounding_steps=1)
    with pytest.raises(AssertionError):
        assert_same(torch.zeros(1), -torch.zeros(1), "the sign of zero")
    with pytest.raises(AssertionError, match="float64"):
        assert_same(one, one.double(), "a dtype", rounding_steps=9)
    with pytest.raises(AssertionError, match="Size"):
        assert_same(one, one.view(3, 1), "a shape")


def test_every_dtype_has_a_reduction():
    assert {dtype for _, dtypes in LEGAL for dtype in dtypes} == set(REDUCED)

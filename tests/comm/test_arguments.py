"""What needs no rank: checks, memory that tensors share, timeouts, and the bits of a division."""

import copy
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.checks import check_choice, check_flags, check_numbers, check_whole
from bagua.comm.operands import as_seconds, overlaps_itself, reduction_name, shares_memory
from bagua.comm.reduction import ReduceOp, divide
from bagua.errors import ConfigurationError, InvalidReduceOpError, InvalidTypeError


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4))
def test_overlap_is_what_counting_addresses_says(layout):
    shape, strides = [size for size, _ in layout], [stride for _, stride in layout]
    view = torch.arange(1 + sum(4 * stride for stride in strides)).as_strided(shape, strides)
    addresses = view.flatten().tolist()
    assert overlaps_itself(view) == (len(set(addresses)) < len(addresses))


@given(st.integers(0, 9), st.integers(0, 5), st.integers(0, 9), st.integers(0, 5))
def test_shared_memory_is_what_addresses_say(start, length, other_start, other_length):
    memory = torch.zeros(16, dtype=torch.int32)
    one, other = memory[start : start + length], memory[other_start : other_start + other_length]
    common = set(range(start, start + length)) & set(range(other_start, other_start + other_length))
    assert shares_memory(one, other) == bool(common)


@pytest.mark.parametrize(
    ("given_timeout", "seconds"),
    [
        *((3, 3.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)),
        *((longer, 365 * 24 * 3600.0) for longer in (float("inf"), 1e300, 10**400, timedelta.max)),
    ],
)
def test_seconds(given_timeout, seconds):
    assert as_seconds(given_timeout) == seconds


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]), st.integers(1, 9)
)
def test_dividing_gives_the_bits_of_a_division(dtype, by):
    real = torch.tensor(0, dtype=dtype).abs().dtype
    limits = torch.finfo(real)
    special = torch.tensor([0.0, -0.0, limits.tiny, limits.smallest_normal * 1.5, limits.max, limits.eps, torch.inf])
    tiny, usual = limits.tiny * torch.randn(20, dtype=real), torch.randn(20)
    total = torch.cat([part.to(dtype) for part in (special, tiny, usual)])
    expected = total.clone().div_(by)
    assert divide(total, by) is total
    assert torch.equal(total.view(torch.uint8), expected.view(torch.uint8))


def test_a_copy_of_an_operation_is_the_operation():
    assert reduction_name(copy.copy(ReduceOp.MAX), torch.int64) == "max"
    with pytest.raises(InvalidReduceOpError, match=r"AVG has no meaning for torch\.int64"):
        reduction_name(copy.copy(ReduceOp.AVG), torch.int64)


def _positive(number: float) -> bool:
    return number > 0


def test_what_is_right_passes():
    check_whole(-3, steps=-3)
    check_numbers(_positive, "> 0", whole=1, real=0.5, single=np.float32(2), endless=math.inf)


#: By what is expected, how that is checked, and what is of another type.
TYPES = {
    "True or False": (lambda wrong: check_flags(right=True, wrong=wrong), ["no", "", 1, 0, None, np.True_, [True]]),
    "a whole number >= 1": (lambda wrong: check_whole(1, wrong=wrong), ["3", 3.0, True, None, np.int64(3)]),
    "> 0": (lambda wrong: check_numbers(_positive, "> 0", wrong=wrong), ["3", True, None, 1j, [1]]),
}


@pytest.mark.parametrize(("expected", "wrong"), [(name, one) for name, (_, all_) in TYPES.items() for one in all_])
def test_what_is_of_another_type_is_shown_beside_what_is_expected(expected, wrong):
    with pytest.raises(InvalidTypeError) as caught:
        TYPES[expected][0](wrong)
    assert (caught.value.argument, caught.value.expected) == ("wrong", expected)
    assert repr(wrong) in str(caught.value)


def test_a_value_out_of_its_range_has_the_right_type_and_choices_are_named():
    for check in (
        lambda: check_whole(1, size=0),
        lambda: check_numbers(_positive, "> 0", size=0),
        lambda: check_numbers(lambda _: True, "a number", size=math.nan),
        lambda: check_choice((1, 2), size=3),
        lambda: check_choice((1, 2), size=True),
    ):
        with pytest.raises(ConfigurationError, match=r"^size must be .*, not \w+$") as caught:
            check()
        assert not isinstance(caught.value, TypeError)
    with pytest.raises(ConfigurationError, match=r"^side must be 'left' or 'right', not 'up'$"):
        check_choice(("left", "right"), side="up")


def test_a_large_value_is_shown_in_short():
    with pytest.raises(InvalidTypeError, check=lambda error: len(str(error)) < 200):
        check_flags(average=list(range(10_000)))

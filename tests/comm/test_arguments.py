"""What needs no rank: memory that tensors share, timeouts, and the bits of a division."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.comm.operands import as_seconds, overlaps_itself, shares_memory
from bagua.comm.reduction import divide

LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), min_size=0, max_size=4)


@given(LAYOUTS)
def test_overlap_is_what_counting_addresses_says(layout):
    shape, strides = [size for size, _ in layout], [stride for _, stride in layout]
    memory = torch.arange(1 + sum(4 * stride for stride in strides))
    view = memory.as_strided(shape, strides)
    addresses = view.flatten().tolist()
    assert overlaps_itself(view) == (len(set(addresses)) < len(addresses))


@given(st.integers(0, 9), st.integers(0, 5), st.integers(0, 9), st.integers(0, 5))
def test_shared_memory_is_what_addresses_say(start, length, other_start, other_length):
    memory = torch.zeros(16, dtype=torch.int32)
    one, other = memory[start : start + length], memory[other_start : other_start + other_length]
    common = set(range(start, start + length)) & set(range(other_start, other_start + other_length))
    assert shares_memory(one, other) == bool(common)


YEAR_S = 365 * 24 * 3600.0


@pytest.mark.parametrize(
    ("given_timeout", "seconds"),
    [
        *((3, 3.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)),
        *((longer, YEAR_S) for longer in (float("inf"), 1e300, 10**400, timedelta.max)),
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
    total = torch.cat(
        [special.to(dtype), limits.tiny * torch.randn(20, dtype=real).to(dtype), torch.randn(20).to(dtype)]
    )
    expected = total.clone().div_(by)
    assert divide(total, by) is total
    assert torch.equal(total.view(torch.uint8), expected.view(torch.uint8))

"""Checks that need no rank: overlap, counts, timeouts, staging."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.comm.operands import (
    as_seconds,
    check_counts,
    check_rank,
    is_plain,
    overlaps_itself,
    readable,
    shares_memory,
    writable,
)
from bagua.errors import ConfigurationError, InvalidRankError, InvalidTensorError

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


def test_tensors_of_different_memory_do_not_share():
    assert not shares_memory(torch.ones(4), torch.ones(4))


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


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "3", None, True, timedelta(seconds=-1)])
def test_what_is_no_timeout(wrong):
    with pytest.raises(ConfigurationError, match="timeout"):
        as_seconds(wrong)


@pytest.mark.parametrize("wrong", [-1, 3, 1.0, True, None, "1", torch.tensor(1)])
def test_what_is_no_rank(wrong):
    with pytest.raises(InvalidRankError, match="0 to 2"):
        check_rank(wrong, 3, "root")
    assert check_rank(2, 3, "root") == 2


@pytest.mark.parametrize("wrong", [[1, 2], [1, 2, 3, 0], [-1, 4, 3], [1, 2, 4], [1.0, 2, 3], [True, 2, 3]])
def test_counts_that_do_not_describe_the_tensor(wrong):
    with pytest.raises(ConfigurationError, match="sum 6"):
        check_counts(wrong, 3, 6, "input_counts")
    assert check_counts([0, 2, 4], 3, 6, "input_counts") == (0, 2, 4)


def test_a_plain_tensor_is_taken_as_it_is():
    tensor = torch.ones(2, 3)
    assert readable(tensor) is tensor
    assert writable(tensor, "tensor", keep=True) == (tensor, None)


@pytest.mark.parametrize(
    "odd",
    [torch.ones(2, 3).t(), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.complex64).conj()],
    ids=["transposed", "leaf", "conjugated"],
)
def test_other_tensors_are_made_plain(odd):
    plain = readable(odd)
    assert is_plain(plain)
    assert torch.equal(plain, odd.detach())


def test_a_leaf_is_written_in_place():
    leaf = torch.ones(2, requires_grad=True)
    plain, finish = writable(leaf, "tensor", keep=True)
    assert finish is None
    assert plain.data_ptr() == leaf.data_ptr()


def test_an_output_whose_elements_share_memory_is_refused():
    with pytest.raises(InvalidTensorError, match="share memory"):
        writable(torch.zeros(1).expand(3), "output", keep=False)

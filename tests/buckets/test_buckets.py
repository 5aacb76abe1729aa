"""Buckets: how members are dealt into them, and what lies where in their flat memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagua.buckets import Bucket, form_buckets, padded_numel
from bagua.comm import solo_group

members = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=40)


@given(members, st.integers(1, 120))
def test_every_member_is_in_exactly_one_bucket_of_its_kind(sized, bucket_bytes):
    positions = range(len(sized))
    buckets = _form(sized, bucket_bytes)
    assert sorted(itertools.chain(*buckets)) == list(positions)
    assert all(len({sized[position][0] for position in bucket}) == 1 for bucket in buckets)
    assert all(bucket == sorted(bucket) for bucket in buckets)


@given(members, st.integers(1, 120))
def test_only_the_last_bucket_of_a_kind_is_small_and_none_is_needlessly_large(sized, bucket_bytes):
    last_of_kind = {sized[bucket[0]][0]: bucket for bucket in _form(sized, bucket_bytes)}
    for bucket in _form(sized, bucket_bytes):
        held = [sized[position][1] for position in bucket]
        assert sum(held[:-1]) < bucket_bytes, "it was full before its last member"
        assert sum(held) >= bucket_bytes or bucket == last_of_kind[sized[bucket[0]][0]]


@given(members, st.integers(1, 120))
def test_buckets_come_in_the_order_in_which_they_are_complete(sized, bucket_bytes):
    lasts = [bucket[-1] for bucket in _form(sized, bucket_bytes)]
    assert lasts == sorted(lasts)


def test_the_first_bucket_may_be_smaller_than_the_others():
    def form(bucket_bytes: int, first_bytes: int | None) -> list[list[int]]:
        sizes = [1, 1, 2, 3, 3, 4]
        return form_buckets(
            sizes, key=lambda _: 0, nbytes=lambda size: size, bucket_bytes=bucket_bytes, first_bytes=first_bytes
        )

    assert form(6, 2) == [[1, 1], [2, 3, 3], [4]]
    assert form(2, 6) == form(2, None) == [[1, 1], [2], [3], [3], [4]]


def _form(sized, bucket_bytes):
    return form_buckets(
        range(len(sized)),
        key=lambda position: sized[position][0],
        nbytes=lambda position: sized[position][1],
        bucket_bytes=bucket_bytes,
    )


@given(
    st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([8, 16, 128, 1024]), st.integers(1, 7)
)
def test_padding_is_the_smallest_that_splits_into_aligned_shares(numel, itemsize, align_bytes, shares):
    padded = padded_numel(numel, itemsize, align_bytes, shares)
    assert padded >= max(numel, 1)
    assert padded % shares == 0
    assert padded // shares * itemsize % align_bytes == 0
    smaller = range(max(numel, 1), padded)
    assert not any(size % shares == 0 and size // shares * itemsize % align_bytes == 0 for size in smaller)


def _bucket(*parameters: nn.Parameter, **options) -> Bucket:
    names = [f"p{index}" for index in range(len(parameters))]
    return Bucket(0, names, parameters, solo_group().global_communicator, **options)


def _mixed() -> list[nn.Parameter]:
    """A matrix, a scalar, nothing, ``channels_last``, a transposed one, and one with gaps."""
    return [
        nn.Parameter(torch.randn(3, 5)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 4)),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 2).t()),
        nn.Parameter(torch.randn(8, 8)[:, ::2]),
    ]


def test_fused_weights_keep_values_identity_layout_and_alignment():
    parameters = _mixed()
    before = [(parameter.detach().clone(), parameter.stride()) for parameter in parameters]
    bucket = _bucket(*parameters)
    bucket.fuse_weights()
    assert bucket.weights is not None
    base = bucket.weights.data_ptr()
    for parameter, (value, _) in zip(bucket.parameters, before, strict=True):
        assert torch.equal(parameter, value)
        if parameter.numel():
            assert (parameter.data_ptr() - base) % 64 == 0
            assert 0 <= parameter.data_ptr() - base < bucket.weights.nbytes
    dense = list(zip(parameters, before, strict=True))[:5]
    assert all(parameter.stride() == stride for parameter, (_, stride) in dense)
    assert all(held is given for held, given in zip(bucket.parameters, parameters, strict=True))
    bucket.weights.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in parameters)


def test_views_do_not_overlap_and_leave_padding_alone():
    bucket = _bucket(*_mixed(), align_bytes=256, shares=3)
    flat = bucket.allocate_gradients()
    assert flat.numel() == bucket.numel
    assert flat.numel() % 3 == 0
    for number, view in enumerate(bucket.gradient_views, start=1):
        view.fill_(float(number))
    sizes = [parameter.numel() for parameter in bucket.parameters]
    for number, size in enumerate(sizes, start=1):
        assert int((flat == number).sum()) == size
    assert int((flat == 0).sum()) == flat.numel() - sum(sizes)


def test_changing_one_parameter_does_not_invalidate_what_autograd_saved_of_another():
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    _bucket(first, second).fuse_weights()
    product = (first * first).sum()
    with torch.no_grad():
        second.add_(1.0)
    product.backward()
    assert torch.equal(first.grad, 2 * first.detach())


@pytest.mark.parametrize("fusion", [True, False])
def test_weights_are_read_and_written_with_and_without_fusion(fusion):
    parameters = _mixed()
    before = [parameter.detach().clone() for parameter in parameters]
    bucket = _bucket(*parameters, fusion=fusion)
    bucket.fuse_weights()
    assert (bucket.weights is not None) == fusion
    flat = bucket.read_weights(bucket.empty())
    for view, value in zip(bucket.views(flat), before, strict=True):
        assert torch.equal(view, value)
    bucket.write_weights(flat.mul_(2.0))
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, 2 * value)
        assert parameter.requires_grad


def test_padding_is_what_belongs_to_no_parameter():
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(20)), nn.Parameter(torch.randn(1))]
    bucket = _bucket(*parameters)
    owned = torch.cat([view.flatten() for view in bucket.views(torch.arange(float(bucket.numel)))]).tolist()
    assert sorted([*owned, *bucket.padding().tolist()]) == list(range(bucket.numel))
    assert not bucket.empty().any()

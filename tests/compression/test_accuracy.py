"""How much each codec may change, and what it may not change at all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.compression import BFloat16, BySize, Codec, Float16, Identity, Metadata, MinMaxUInt8, Sign, TopK

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def decoded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decompress(codec.compress(tensor), Metadata.of(tensor))


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype, largest: float = 1e30) -> torch.Tensor:
    """Of any length, with a spread and an offset of any size, some elements zero."""
    numel = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 5000])))
    reach = min(largest, torch.finfo(dtype).max / 8)
    spread = 10.0 ** draw(st.floats(-35 if reach > 1e5 else -6, math.log10(reach)))
    offset = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 100.0, -1e6])) * spread
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(numel, generator=generator, dtype=torch.float64).sub_(0.5).mul_(spread).add_(offset)
    if draw(st.booleans()):
        values[torch.rand(numel, generator=generator) < 0.3] = 0.0
    return values.clamp_(-reach, reach).to(dtype)


@dtypes
@given(data=st.data())
def test_identity_changes_no_bit(dtype, data):
    tensor = data.draw(tensors(dtype))
    assert torch.equal(decoded(Identity(), tensor).view(torch.uint8), tensor.view(torch.uint8))


@dtypes
@pytest.mark.parametrize(("codec", "bits", "smallest"), [(Float16(), 11, 2.0**-14), (BFloat16(), 8, 2.0**-126)])
@given(data=st.data())
def test_casts_are_off_by_half_a_unit(codec, bits, smallest, dtype, data):
    tensor = data.draw(tensors(dtype, largest=6e4))
    error = (decoded(codec, tensor).double() - tensor.double()).abs()
    # Twice, where the result does not fit into the tensor's own dtype: bfloat16 in float16.
    bound = (tensor.double().abs() * 2.0**-bits + smallest * 2.0**-bits) * (1 if dtype.itemsize > 2 else 2)
    assert (error <= bound).all()
    assert (decoded(codec, tensor)[tensor == 0] == 0).all()


def test_a_cast_beyond_the_range_is_seen():
    assert decoded(Float16(), torch.tensor([1e6, -1e6])).tolist() == [math.inf, -math.inf]


@dtypes
@pytest.mark.parametrize("block_numel", [16, 2048])
@given(data=st.data())
def test_minmax_is_off_by_half_a_step_and_keeps_zero(dtype, block_numel, data):
    tensor = data.draw(tensors(dtype))
    values = decoded(MinMaxUInt8(block_numel), tensor)
    tiny = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny
    eps, smallest_normal = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for block, result in zip(tensor.double().split(block_numel), values.double().split(block_numel), strict=True):
        low, high = block.min(), block.max()
        bound = (high - low) / 510 * (1 + 1e-4) + eps * result.abs().clamp(min=smallest_normal) + tiny
        assert ((result - block).abs() <= bound).all()
        assert len(result.unique()) <= 256
        if low <= 0 <= high:
            assert (result[block == 0] == 0).all()
        if low == high:
            assert torch.equal(result, block)


@dtypes
@pytest.mark.parametrize("extremes", [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0), (-1.0, 0.001), (-0.5, 1.0), (0.25, 1.0)])
def test_minmax_keeps_finite_what_is_close_to_the_largest_number(dtype, extremes):
    """Half a step above the largest float16 or bfloat16 would be Inf."""
    reach = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 2.1)
    tensor = torch.linspace(*extremes, 1000, dtype=torch.float64).mul_(reach).to(dtype)
    values = decoded(MinMaxUInt8(), tensor)
    assert values.isfinite().all()
    span = (extremes[1] - extremes[0]) * reach
    assert ((values.double() - tensor.double()).abs() <= span / 509 + torch.finfo(dtype).eps * reach).all()


def test_minmax_loses_exactly_the_blocks_that_are_not_finite():
    tensor = torch.arange(100.0)
    tensor[15], tensor[42], tensor[99] = math.nan, math.inf, -math.inf
    lost = decoded(MinMaxUInt8(block_numel=10), tensor).isnan().view(10, 10)
    assert lost.all(dim=1).nonzero().flatten().tolist() == [1, 4, 9]
    assert lost.sum() == 30


def test_minmax_has_no_range_for_what_overflows():
    huge = torch.tensor([-3e38, 3e38])
    assert decoded(MinMaxUInt8(), huge).isnan().all()
    assert decoded(MinMaxUInt8(), huge.double()).isfinite().all()


def test_minmax_uses_all_codes_of_a_narrow_range_far_from_zero():
    """The original's grid through zero has no resolution left there."""
    tensor = 1 + torch.linspace(0, 2.0**-13, 256)
    assert len(decoded(MinMaxUInt8(), tensor).unique()) == 256


@dtypes
@given(data=st.data())
def test_signs_with_the_mean_magnitude_of_their_block(dtype, data):
    tensor = data.draw(tensors(dtype))
    values = decoded(Sign(block_numel=64), tensor)
    for block, result in zip(tensor.double().split(64), values.double().split(64), strict=True):
        mean = block.abs().mean()
        expected = torch.where(block < 0, -mean, mean)
        nonzero = block != 0
        info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
        allowed = 4 * info.eps * mean.clamp(min=info.tiny)
        assert ((result - expected).abs()[nonzero] <= allowed).all()
        assert ((result.abs() - mean).abs() <= allowed).all()


def test_signs_need_one_bit():
    assert Sign(block_numel=8).compressed_bytes(Metadata(16, torch.float32)) == 2 * 4 + 2 + 6
    million = Sign().compressed_bytes(Metadata(10**6, torch.float32))
    assert million < 10**6 / 8 * 1.02


@dtypes
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@given(data=st.data())
def test_topk_keeps_the_largest_and_nothing_else(dtype, ratio, data):
    tensor = data.draw(tensors(dtype))
    values = decoded(TopK(ratio), tensor)
    kept = math.ceil(ratio * tensor.numel())
    dropped = values != tensor
    assert (values[dropped] == 0).all()
    assert dropped.sum() <= tensor.numel() - kept
    smallest_kept = tensor.abs().double().sort(descending=True).values[kept - 1]
    assert (tensor[dropped].abs() <= smallest_kept).all()


@pytest.mark.parametrize("pattern", ["normal", "sparse", "ties", "spike at the sampled places", "nan"])
def test_topk_finds_the_largest_of_many_through_a_sample(pattern):
    """More elements than the sample has; whatever the sample says, the result is that of a full search."""
    numel, codec = 3 * 2**16 + 5, TopK(ratio=0.01)
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    if pattern == "sparse":
        tensor[torch.rand(numel, generator=torch.Generator().manual_seed(2)) < 0.999] = 0
    if pattern == "ties":
        tensor = tensor.sign()
    if pattern == "spike at the sampled places":
        tensor[::3] += 100
    if pattern == "nan":
        tensor[1::2] = math.nan
    values = decoded(codec, tensor)
    kept = codec.kept(Metadata.of(tensor))
    expected = tensor.abs().topk(kept).values
    chosen = values[values != 0].abs()  # NaN is not 0.
    if pattern == "nan":
        assert chosen.isnan().sum() == kept
    else:
        assert torch.equal(chosen.sort().values, expected[expected != 0].sort().values)


def test_by_size_is_what_was_chosen():
    codec = BySize(threshold_bytes=400, small=Identity(), large=Sign())
    small, large = torch.randn(99), torch.randn(100)
    assert torch.equal(decoded(codec, small), small)
    assert torch.equal(decoded(codec, large), decoded(Sign(), large))

"""How much each codec may change, and what it may not change at all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua import compression
from bagua.compression import BFloat16, BlockTopK, Float16, Int2, Int4, Metadata, MinMaxUInt8, Sign, TopK
from tests.harness import coded

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype, largest: float = 1e30) -> torch.Tensor:
    """Of any length, with a spread and an offset of any size, some elements zero."""
    numel = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 5000])))
    reach = min(largest, torch.finfo(dtype).max / 8)
    spread = 10.0 ** draw(st.floats(-35 if reach > 1e5 else -6, math.log10(reach)))
    offset = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 100.0, -1e6])) * spread
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.rand(numel, generator=generator, dtype=torch.float64).sub_(0.5).mul_(spread).add_(offset)
    if draw(st.booleans()):
        values[torch.rand(numel, generator=generator) < 0.3] = 0.0
    return values.clamp_(-reach, reach).to(dtype)


@dtypes
@given(data=st.data())
def test_identity_changes_no_bit(dtype, data):
    tensor = data.draw(tensors(dtype))
    assert torch.equal(coded(compression.Identity(), tensor).view(torch.uint8), tensor.view(torch.uint8))


@dtypes
@pytest.mark.parametrize(("codec", "bits", "smallest"), [(Float16(), 11, 2.0**-14), (BFloat16(), 8, 2.0**-126)])
@given(data=st.data())
def test_casts_are_off_by_half_a_unit(codec, bits, smallest, dtype, data):
    tensor = data.draw(tensors(dtype, largest=6e4))
    error = (coded(codec, tensor).double() - tensor.double()).abs()
    # Twice, where the result does not fit into the tensor's own dtype: bfloat16 in float16.
    bound = (tensor.double().abs() * 2.0**-bits + smallest * 2.0**-bits) * (1 if dtype.itemsize > 2 else 2)
    assert (error <= bound).all()
    assert (coded(codec, tensor)[tensor == 0] == 0).all()


def test_a_cast_beyond_the_range_is_seen():
    assert coded(Float16(), torch.tensor([1e6, -1e6])).tolist() == [math.inf, -math.inf]


@dtypes
@pytest.mark.parametrize("block_numel", [16, 2048])
@given(data=st.data())
def test_minmax_is_off_by_half_a_step_and_keeps_zero(dtype, block_numel, data):
    tensor = data.draw(tensors(dtype))
    values = coded(MinMaxUInt8(block_numel), tensor)
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
    values = coded(MinMaxUInt8(), tensor)
    assert values.isfinite().all()
    span = (extremes[1] - extremes[0]) * reach
    assert ((values.double() - tensor.double()).abs() <= span / 509 + torch.finfo(dtype).eps * reach).all()


def test_minmax_loses_exactly_the_blocks_that_are_not_finite_or_whose_range_overflows():
    tensor = torch.arange(100.0)
    tensor[[15, 42, 99]] = torch.tensor([math.nan, math.inf, -math.inf])
    lost = coded(MinMaxUInt8(block_numel=10), tensor).isnan().view(10, 10)
    assert lost.all(dim=1).nonzero().flatten().tolist() == [1, 4, 9]
    assert lost.sum() == 30
    huge = torch.tensor([-3e38, 3e38])
    assert coded(MinMaxUInt8(), huge).isnan().all()
    assert coded(MinMaxUInt8(), huge.double()).isfinite().all()


@dtypes
@given(data=st.data())
def test_signs_with_the_mean_magnitude_of_their_block(dtype, data):
    tensor = data.draw(tensors(dtype))
    values = coded(Sign(block_numel=64), tensor)
    for block, result in zip(tensor.double().split(64), values.double().split(64), strict=True):
        mean = block.abs().mean()
        info = torch.finfo(torch.float32 if dtype == torch.float64 else torch.bfloat16)
        allowed = info.eps * mean.clamp(min=torch.finfo(dtype).tiny)
        assert ((result - block.sign() * mean).abs()[block != 0] <= allowed).all()
        assert ((result.abs() - mean).abs() <= allowed).all()


def test_signs_need_one_bit():
    assert Sign(block_numel=8).compressed_bytes(Metadata(16, torch.float32)) == 2 * 2 + 2 + 2
    assert Sign(block_numel=64).compressed_bytes(Metadata(64_000, torch.float32)) == 64_000 * 1.25 / 8
    assert Sign().compressed_bytes(Metadata(10**6, torch.float32)) < 10**6 / 8 * 1.02


@dtypes
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@given(data=st.data())
def test_topk_keeps_the_largest_and_nothing_else(dtype, ratio, data):
    tensor = data.draw(tensors(dtype))
    values = coded(TopK(ratio), tensor)
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
    values, kept = coded(codec, tensor), codec.kept(Metadata.of(tensor))
    chosen = values[values != 0].abs()  # NaN is not 0.
    if pattern == "nan":
        assert chosen.isnan().sum() == kept
    else:
        largest = tensor.abs().topk(kept).values
        assert torch.equal(chosen.sort().values, largest[largest != 0].sort().values)


def hard_blocks(numel: int) -> dict[str, torch.Tensor]:
    """Blocks in which much can be lost: alike, one that towers above, heavy tails, at the edges of bins."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    tower = normal * 0.01
    tower[numel // 2] = -30.0
    return {
        "normal": normal, "alike": torch.ones(numel), "signs": normal.sign(), "far from zero": normal + 20,
        "tower": tower, "tower on a floor": tower.abs() + 0.5,
        "tails": normal.sign() * torch.rand(numel, generator=generator).pow(-0.5),
        "middles": torch.tensor([1.0, 0.75, -0.375, 2.0**-7, -(2.0**-6) * 0.74, 1e-3]).repeat(numel)[:numel],
        "two heights": torch.where(torch.rand(numel, generator=generator) < 0.1, 2.25, 0.7499) * normal.sign(),
    }  # fmt: skip


CONTRACTIVE = [
    *(compression.Codec.init(name) for name in compression.registry if name != "identity"),
    Int2(64), Int4(64), Int4(64, seed=0), MinMaxUInt8(64, seed=0), BlockTopK(64, 4, 2), BlockTopK(64, 4, None),
]  # fmt: skip


@pytest.mark.parametrize("codec", CONTRACTIVE, ids=repr)
def test_what_a_block_loses_is_bounded_as_the_codec_says(codec):
    assert codec.contraction > 0
    for name, block in hard_blocks(getattr(codec, "block_numel", 4096)).items():
        lost = float((coded(codec, block).double() - block).square().sum() / block.double().square().sum())
        assert lost <= 1 - codec.contraction + 1e-6, name


def test_a_codec_that_may_add_to_a_block_says_so():
    """Rounding at random to few values: right on average, but no contraction."""
    codec, values = Int2(seed=0), hard_blocks(4096)["normal"] * 0.01
    values[:2] = torch.tensor([-1.0, 1.0])
    assert codec.contraction == 0
    assert (coded(codec, values) - values).norm() > values.norm()


@pytest.mark.parametrize("codec", [Int4(64), Int2(64), Sign(64), BlockTopK(64, 64, 8)], ids=repr)
def test_normal_numbers_lose_far_less_than_the_worst_case(codec):
    values = torch.randn(64_000, generator=torch.Generator().manual_seed(3))
    bound = {Int4: 0.015, Int2: 0.19, Sign: 0.38, BlockTopK: 1e-4}[type(codec)]
    lost = float((coded(codec, values) - values).square().mean())
    assert bound / 4 < lost < bound


def statistical(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The published form, written plainly: bins of a width of six deviations over their number, and their means."""
    levels, centred = 2**bits, values - values.mean()
    scale = 6 * centred.std() / levels
    bins = (centred / scale + levels / 2).round().clamp(0, levels - 1)
    result = torch.empty_like(values)
    for number in range(levels):
        chosen = bins == number
        if chosen.any():
            result[chosen] = centred[chosen].mean() + values.mean()
    return result


@pytest.mark.parametrize(("codec", "bits"), [(Int4(256), 4), (Int2(256), 2)], ids=repr)
def test_few_bits_are_the_means_of_bins(codec, bits):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(bits)).add_(0.3).double()
    expected = torch.cat([statistical(part, bits) for part in values.split(256)])
    torch.testing.assert_close(coded(codec, values), expected)


@pytest.mark.parametrize("numel", [8192, 16384, 2**20])
def test_sums_of_long_blocks_keep_their_precision(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    difference = (coded(Int4(numel), values) - statistical(values.double(), 4).float()).abs()
    # But for elements at an edge, which the norm in float32 puts in the next bin.
    assert (difference > 1e-4).sum() <= 4 + numel // 10_000


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-60, 2.0**60, 2.0**100])
@pytest.mark.parametrize("codec", [Int4(64), Int2(64)], ids=repr)
def test_a_scale_changes_no_code_and_no_other_block(codec, scale):
    """Also where squares of elements overflow, or vanish: blocks beside such a block are as they are alone."""
    values = torch.randn(256, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([1.0, scale, 1.0, 1.0]).repeat_interleave(64)
    torch.testing.assert_close(coded(codec, values * scales) / scales, coded(codec, values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [MinMaxUInt8, Int4, Int2])
def test_rounding_at_random_is_right_on_average_and_another_on_each_rank(kind):
    codec, draws = kind(block_numel=64, seed=5), 400
    values = torch.linspace(-1, 2, 128).square()
    values[::9] = 0
    results = torch.stack([coded(codec.for_draw(rank), values) for rank in range(draws)])
    ranges = torch.stack([part.max() - part.min() for part in values.split(64)]).repeat_interleave(64)
    step = ranges / {MinMaxUInt8: 254, Int4: 15, Int2: 3}[kind]
    assert ((results - values).abs() <= 1.01 * step).all()
    # A draw is off by at most half a step in the root mean square: five standard errors.
    assert ((results.mean(dim=0) - values).abs() <= 5 * 0.5 * step / draws**0.5).all()
    errors = (results - values) / step
    alike = (errors[:-1] * errors[1:]).mean() / errors.square().mean()
    assert alike.abs() < 0.05, "ranks err alike"
    assert codec.unbiased
    assert torch.equal(codec.compress(values), kind(64, seed=5).compress(values)), "it can be repeated"


@pytest.mark.parametrize("kind", [MinMaxUInt8, Int4])
def test_rounding_to_the_nearest_is_wrong_on_average(kind):
    """The mutant of the test above: without noise the mean over ranks stays where one rank is."""
    codec, values = kind(block_numel=64), torch.linspace(0, 1, 64).square()
    assert torch.equal(coded(codec.for_draw(1), values), coded(codec.for_draw(2), values))
    assert not codec.unbiased
    assert (coded(codec, values) - values).abs().max() > 1e-4


def test_blockwise_top_k_keeps_the_largest_of_each_block():
    values = torch.randn(4096 + 100, generator=torch.Generator().manual_seed(0))
    for bits, rounding in ((None, 0.0), (8, values.abs().max() / 254 * 1.001)):
        result = coded(BlockTopK(value_bits=bits), values)
        for block, kept, count in zip(values.split(4096), result.split(4096), (32, 1), strict=True):
            largest = block.abs().topk(count).indices
            expected = torch.zeros_like(block).index_copy(0, largest, block[largest])
            assert (kept - expected).abs().max() <= rounding
    assert BlockTopK().compressed_bytes(Metadata(4096 * 100, torch.float32)) == 84 * 100


def test_two_bits_of_what_is_kept_are_signs_and_two_heights():
    values = torch.tensor([0.0, 8.0, -6.0, 1.0, -3.0, 0.1, 0.2, 0.3])
    result = coded(BlockTopK(block_numel=8, kept=4, value_bits=2), values)
    assert result.tolist() == [0.0, 7.0, -7.0, 2.0, -2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("codec", [MinMaxUInt8(64), Int4(64), Int2(64), BlockTopK(64, 4)], ids=repr)
def test_a_few_blocks_at_a_time_are_coded_as_all_at_once(codec, monkeypatch):
    values = torch.randn(5 * 64 + 3, generator=torch.Generator().manual_seed(0))
    at_once, back = codec.compress(values), coded(codec, values)
    monkeypatch.setattr(compression.packing, "_CACHED_NUMEL", 2 * 64)
    assert torch.equal(codec.compress(values), at_once)
    assert torch.equal(coded(codec, values), back)


@pytest.mark.parametrize("codec", [Int4(block_numel=64, seed=0), Int2(block_numel=64, seed=0)])
def test_rounding_at_random_stays_beside_the_element_where_the_range_overflows(codec):
    tensor = torch.zeros(64)
    tensor[:2] = torch.tensor([-3.3e38, 3.3e38])
    values = coded(codec, tensor)
    assert values.isfinite().all()
    assert (values / 3.3 - tensor / 3.3).abs().max() <= 2e38 / (2**codec.bits - 1) * 1.01

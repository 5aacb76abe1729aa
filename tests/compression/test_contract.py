"""What every codec promises, tried on everything in the registry."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bagua.compression
from bagua import compression
from bagua.errors import ConfigurationError, InvalidTensorError
from tests.harness import coded

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

#: Every codec with its defaults, and some with options under which other code runs.
CODECS = [
    *map(compression.Codec.init, compression.registry),
    compression.MinMaxUInt8(7), compression.MinMaxUInt8(512, seed=0), compression.Sign(16), compression.TopK(0.4),
    compression.Int4(16), compression.Int2(72, seed=3), compression.BlockTopK(48, kept=5, value_bits=2),
]  # fmt: skip

codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)
dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=str)

#: Empty, odd, below, at and above a block, and so many that a second piece of work begins.
LENGTHS = st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 140_000]))


def normal(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@codecs
@dtypes
@given(numel=LENGTHS)
def test_the_size_is_as_estimated_and_what_comes_back_has_the_shape(codec, dtype, numel):
    tensor = normal(numel, dtype)
    metadata, data = compression.Metadata.of(tensor), codec.compress(tensor)
    assert (data.dtype, data.shape) == (torch.uint8, (codec.compressed_bytes(metadata),))
    assert data.numel() % 8 == 0
    values = codec.decompress(data, metadata)
    assert (values.dtype, values.shape) == (dtype, (numel,))
    assert values.isfinite().all()


@codecs
@dtypes
@given(numel=LENGTHS)
def test_every_byte_depends_on_the_tensor_alone(codec, dtype, numel):
    """Whatever was in the memory before, also in what pads a size, and whatever lies beside it."""
    tensor = normal(numel, dtype)
    nbytes = codec.compressed_bytes(compression.Metadata.of(tensor))
    around = torch.full((3 * nbytes,), 255, dtype=torch.uint8)
    out = around[nbytes : 2 * nbytes]
    assert codec.compress(tensor, out=out) is out
    assert torch.equal(out, codec.compress(tensor.clone(), out=torch.zeros(nbytes, dtype=torch.uint8)))
    assert (around[:nbytes] == 255).all()
    assert (around[2 * nbytes :] == 255).all()


@codecs
@dtypes
@pytest.mark.parametrize("target", FLOATING, ids=str)
def test_values_are_written_or_added_in_the_dtype_of_the_target(codec, dtype, target):
    tensor = normal(101, dtype)
    data, metadata = codec.compress(tensor), compression.Metadata.of(tensor)
    values = codec.decompress(data, metadata).to(target)
    rounding = {"rtol": 0, "atol": 8 * max(torch.finfo(dtype).eps, torch.finfo(target).eps)}
    out = torch.full((101,), torch.nan, dtype=target)
    assert codec.decompress(data, metadata, out=out) is out
    assert torch.allclose(out, values, **rounding)
    sums = torch.full((101,), 2.0, dtype=target)
    assert codec.decompress(data, metadata, out=sums, add=True) is sums
    assert torch.allclose(sums, values + 2, **rounding)


@codecs
@dtypes
def test_zeros_stay_zeros(codec, dtype):
    assert (coded(codec, torch.zeros(2050, dtype=dtype)) == 0).all()


@codecs
@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 2049])
def test_what_is_not_finite_is_still_seen_after_decoding(codec, dtype, bad, position):
    tensor = normal(2050, dtype)
    tensor[position] = bad
    assert not coded(codec, tensor).isfinite().all()
    assert torch.equal(codec.compress(tensor), codec.compress(tensor.clone()))


@codecs
def test_shape_strides_and_gradients_of_the_input_do_not_matter(codec):
    tensor = normal(60, torch.float32).view(6, 10).t()
    plain = tensor.contiguous().view(-1)
    assert torch.equal(codec.compress(tensor.requires_grad_()), codec.compress(plain))
    assert not codec.compress(tensor).requires_grad


@codecs
def test_a_codec_prints_as_its_constructor_call_and_survives_pickle(codec):
    assert eval(repr(codec), vars(bagua.compression)) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))


@codecs
def test_tensors_that_do_not_fit_are_refused(codec):
    tensor = normal(9, torch.float32)
    metadata, data = compression.Metadata.of(tensor), codec.compress(tensor)
    nbytes, room = len(data), torch.empty(2 * len(data) + 8, dtype=torch.uint8)
    unfit = [room[: nbytes + 8], data.view(torch.int8), data[None], room[: 2 * nbytes : 2], room[4 : nbytes + 4]]
    for memory in unfit:
        with pytest.raises(InvalidTensorError):
            codec.compress(tensor, out=memory)
        with pytest.raises(InvalidTensorError):
            codec.decompress(memory, metadata)
    for out in (torch.empty(8), torch.empty(9, dtype=torch.int32), torch.empty(3, 3), torch.empty(18)[::2]):
        with pytest.raises(InvalidTensorError):
            codec.decompress(data, metadata, out=out)
    with pytest.raises(ConfigurationError):
        codec.decompress(data, metadata, add=True)


@codecs
def test_dtypes_that_cannot_be_compressed_are_refused_before_anything_is_done(codec):
    metadata = compression.Metadata(4, torch.int64)
    if isinstance(codec, compression.Identity):
        assert codec.compressed_bytes(metadata) == 32
        return
    with pytest.raises(InvalidTensorError, match="float16 or"):
        codec.compressed_bytes(metadata)
    with pytest.raises(InvalidTensorError):
        codec.compress(torch.zeros(4, dtype=torch.int64))


def test_codecs_are_found_by_name():
    assert compression.Codec.init("sign", block_numel=64) == compression.Sign(block_numel=64)
    assert compression.as_codec("int4") == compression.Int4()
    assert compression.as_codec(compression.Int4()) == compression.Int4()
    assert compression.as_codec(None) is None
    with pytest.raises(ConfigurationError, match="the name of one"):
        compression.as_codec(4)
    with pytest.raises(ConfigurationError, match="minmax_uint8"):
        compression.Codec.init("nothing")
    with pytest.raises(TypeError, match="block_numel"):
        compression.Codec.init("sign", block=64)
    with pytest.raises(ConfigurationError, match="another codec"):
        compression.register("sign", compression.TopK)
    compression.register("sign", compression.Sign)


#: Values that an option cannot have.
REFUSED = {
    "block_topk": {"block_numel": [100], "kept": [0, 5000], "value_bits": [4]},
    "int4": {"block_numel": [12], "seed": [0.5]},
    "minmax_uint8": {"block_numel": [0, 2.0], "seed": ["yes"]},
    "sign": {"block_numel": [12, -8]},
    "topk": {"ratio": [0, 1.5, float("nan"), "1"]},
}
ROWS = [(name, option, wrong) for name, its in REFUSED.items() for option, values in its.items() for wrong in values]


@pytest.mark.parametrize(("name", "option", "wrong"), ROWS)
def test_options_that_cannot_be_used_are_refused_at_construction(name, option, wrong):
    with pytest.raises(ConfigurationError) as caught:
        compression.Codec.init(name, **{option: wrong})
    assert caught.value.argument == option

"""Codecs: a tensor in, bytes out, and back. No communication."""

from bagua.compression.codec import BFloat16, Codec, Float16, Identity, Metadata, as_codec, register, registry
from bagua.compression.codec import check_codec as check_codec
from bagua.compression.levels import Int2, Int4, Sign
from bagua.compression.minmax_uint8 import MinMaxUInt8
from bagua.compression.top_k import BlockTopK, TopK

__all__ = [
    "BFloat16",
    "BlockTopK",
    "Codec",
    "Float16",
    "Identity",
    "Int2",
    "Int4",
    "Metadata",
    "MinMaxUInt8",
    "Sign",
    "TopK",
    "as_codec",
    "register",
    "registry",
]

register("identity", Identity)
register("float16", Float16)
register("bfloat16", BFloat16)
register("minmax_uint8", MinMaxUInt8)
register("int4", Int4)
register("int2", Int2)
register("sign", Sign)
register("topk", TopK)
register("block_topk", BlockTopK)

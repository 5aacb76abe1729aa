"""Codecs: a tensor in, bytes out, and back. No communication."""

from bagua.compression.base import Codec, Metadata, register, registry
from bagua.compression.base import check_codec as check_codec
from bagua.compression.by_size import BySize
from bagua.compression.casting import BFloat16, Float16
from bagua.compression.identity import Identity
from bagua.compression.minmax_uint8 import MinMaxUInt8
from bagua.compression.sign import Sign
from bagua.compression.top_k import TopK

__all__ = [
    "BFloat16",
    "BySize",
    "Codec",
    "Float16",
    "Identity",
    "Metadata",
    "MinMaxUInt8",
    "Sign",
    "TopK",
    "register",
    "registry",
]

register("identity", Identity)
register("float16", Float16)
register("bfloat16", BFloat16)
register("minmax_uint8", MinMaxUInt8)
register("sign", Sign)
register("topk", TopK)
register("by_size", BySize)

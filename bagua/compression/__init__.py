"""Codecs: a tensor in, bytes out, and back. No communication."""

from bagua.compression import codec, levels, minmax_uint8, top_k
from bagua.compression.codec import *
from bagua.compression.codec import check_codec as check_codec
from bagua.compression.levels import *
from bagua.compression.minmax_uint8 import *
from bagua.compression.top_k import *

__all__: list[str] = []
__all__ += codec.__all__ + levels.__all__ + minmax_uint8.__all__ + top_k.__all__

codec.register("identity", codec.Identity)
codec.register("float16", codec.Float16)
codec.register("bfloat16", codec.BFloat16)
codec.register("minmax_uint8", minmax_uint8.MinMaxUInt8)
codec.register("int4", levels.Int4)
codec.register("int2", levels.Int2)
codec.register("sign", levels.Sign)
codec.register("topk", top_k.TopK)
codec.register("block_topk", top_k.BlockTopK)

"""Codecs: a tensor in, bytes out, and back. No communication."""

from bagua.compression.base import Codec, Metadata, register, registry
from bagua.compression.identity import Identity
from bagua.compression.minmax_uint8 import MinMaxUInt8

__all__ = ["Codec", "Identity", "Metadata", "MinMaxUInt8", "register", "registry"]

register("identity", Identity)
register("minmax_uint8", MinMaxUInt8)

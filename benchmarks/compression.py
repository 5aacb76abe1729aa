"""How long codecs take: each against ``Tensor.copy_`` of the same tensor, on one core.

A ratio of 3 means a third of the speed of a copy. Promised are 5 for compressing and 2.5 for decompressing with
``minmax_uint8``, and that ``int4`` and ``int2`` compress 1 GB/s of float32, which is printed beside the ratios; nothing
for the others. ``+=`` is decompression with ``add=True``, what sums over ranks are made of.

``python -m benchmarks.compression``
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch

from bagua.compression import Codec, Metadata
from benchmarks.paired import Comparison, add_arguments, compare, conclude, measure

LIMITS = {("minmax_uint8", "compress"): 5.0, ("minmax_uint8", "decompress"): 2.5}
CODECS = ("float16", "bfloat16", "minmax_uint8", "int4", "int2", "sign", "topk", "block_topk")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def directions(codec: Codec, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    metadata, data, out = Metadata.of(tensor), codec.compress(tensor), torch.zeros_like(tensor)
    return {
        "compress": functools.partial(codec.compress, tensor, out=data),
        "decompress": functools.partial(codec.decompress, data, metadata, out=out),
        "decompress +=": functools.partial(codec.decompress, data, metadata, out=out, add=True),
    }


def time_codec(name: str, tensor: torch.Tensor, rounds: int) -> list[Comparison]:
    """Lines of the table for one codec."""
    copy = functools.partial(torch.empty_like(tensor).copy_, tensor)
    promised = LIMITS if tensor.dtype == torch.float32 else {}
    return [
        compare(f"{name} {direction} : copy_", measure(copy, function, rounds=rounds), promised.get((name, direction)))
        for direction, function in directions(Codec.init(name), tensor).items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    add_arguments(parser, rounds=20)
    parser.add_argument("--bytes", type=int, default=25_000_000, metavar="N", help="size of the tensor")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensor")
    parser.add_argument("--codec", action="append", choices=CODECS, help="leave the others out; repeatable")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dtype = DTYPES[options.dtype]
    tensor = torch.randn(options.bytes // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    lines = [line for name in options.codec or CODECS for line in time_codec(name, tensor, options.rounds)]
    sizes = {
        f"{name}: part of the bytes": round(Codec.init(name).compressed_bytes(Metadata.of(tensor)) / tensor.nbytes, 4)
        for name in options.codec or CODECS
    }
    speeds = {
        f"{line.name.partition(' :')[0]}: GB/s of the tensor": round(tensor.nbytes / line.candidate_s / 1e9, 2)
        for line in lines
    }
    return conclude(lines, options, sizes | speeds)


if __name__ == "__main__":
    sys.exit(main())

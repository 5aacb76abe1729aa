"""Objects as bytes, without pickle unless the caller asks for it.

The format is one flag byte, the length of a JSON document, the document, and the
raw bytes of the tensors and byte strings that it refers to. Decoding it can build
numbers, strings, bytes, lists, tuples, sets, dictionaries and tensors, and nothing
else, so nothing that comes from the network is executed.
"""

from __future__ import annotations

import json
import mmap
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from bagua.comm.reduction import check_communicable, dtype_by_name
from bagua.errors import ConfigurationError, InvalidTensorError

_HEADER = struct.Struct("<BQ")
_PLAIN, _PICKLE, _FAILURE = 0, 1, 2
#: Bytes from which on memory is asked for by itself.
_LARGE = 1 << 20
Memory = bytearray | mmap.mmap
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object, *, allow_pickle: bool = False) -> torch.Tensor:
    """``value`` as a one-dimensional uint8 tensor.

    Args:
        value: numbers, strings, bytes, None, tensors, and lists, tuples, sets and
            dictionaries of these; anything else only with ``allow_pickle``.
        allow_pickle: use pickle for the whole object.

    Raises:
        ConfigurationError: a part of ``value`` has no safe encoding.

    Example:
        >>> decode(encode({"step": 3, "tags": ("a", b"b")}))
        {'step': 3, 'tags': ('a', b'b')}
    """
    if allow_pickle:
        return _as_tensor(_HEADER.pack(_PICKLE, 0) + _pickled(value))
    memory, copy = encoded_later(value)
    copy()
    return _as_tensor(memory)


def encoded_later(value: object) -> tuple[Memory, Callable[[], None]]:
    """Memory for ``value`` as ``encode`` writes it without pickle, and what copies its tensors there, in any thread.

    Raises:
        ConfigurationError: a part of ``value`` has no safe encoding.
    """
    blobs: list[bytes | torch.Tensor] = []
    document = json.dumps(_node(value, blobs)).encode()
    head = _HEADER.pack(_PLAIN, len(document)) + document
    found = _memory(len(head) + sum(map(len, blobs)))
    found[: len(head)] = head

    def copy() -> None:
        flat, position = torch.frombuffer(found, dtype=torch.uint8), len(head)
        for blob in blobs:
            end = position + len(blob)
            if isinstance(blob, torch.Tensor):
                flat[position:end].copy_(blob)
            else:
                found[position:end] = blob
            position = end

    return found, copy


def _memory(length: int) -> Memory:
    """Memory that is not filled with zeros where it is large: all other threads would wait for that."""
    if length < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return bytearray(length)
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def encode_failure(reason: str) -> torch.Tensor:
    """What a rank sends in place of an object that it could not encode."""
    return _as_tensor(_HEADER.pack(_FAILURE, 0) + reason.encode(errors="backslashreplace"))


def decode(data: torch.Tensor, *, allow_pickle: bool = False) -> Any:
    """The object that ``encode`` turned into ``data``; its tensors are on the CPU.

    Raises:
        ConfigurationError: the sender failed to encode it, or used pickle and this side
            did not ask for that.
    """
    flag, length = _HEADER.unpack(as_bytes(data[: _HEADER.size]))
    body = data[_HEADER.size :]
    if flag == _FAILURE:
        problem = as_bytes(body).decode()
        raise ConfigurationError(f"the sending rank could not encode its object: {problem}", argument="obj")
    if flag == _PICKLE:
        if not allow_pickle:
            raise ConfigurationError(
                "the sending rank used pickle, which this rank does not accept",
                argument="allow_pickle",
                expected="the same value on all ranks",
                seen="True on the sender, False here",
            )
        return pickle.loads(as_bytes(body))  # noqa: S301 - both sides asked for it
    return _Reader(body[length:]).value(json.loads(as_bytes(body[:length])))


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # pickle lets through whatever the object raises
        raise ConfigurationError("the object cannot be pickled", argument="obj", seen=type(value).__name__) from error


def _as_tensor(raw: bytes | Memory) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw) if isinstance(raw, bytes) else raw, dtype=torch.uint8)


def as_bytes(data: torch.Tensor) -> bytes:
    """The bytes of a uint8 tensor. By way of a bytearray, because NumPy may not be there."""
    if not data.numel():
        return b""
    raw = bytearray(data.numel())
    torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
    return bytes(raw)


def _node(value: object, blobs: list[bytes | torch.Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]  # type: ignore[attr-defined]
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))  # type: ignore[call-overload]
        return [kind.__name__, len(blobs[-1])]
    if isinstance(value, torch.Tensor):
        return _tensor_node(value, blobs)
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *(_node(item, blobs) for item in value)]  # type: ignore[attr-defined]
    if kind is dict:
        pairs = value.items()  # type: ignore[attr-defined]
        return ["dict", *([_node(key, blobs), _node(item, blobs)] for key, item in pairs)]
    raise ConfigurationError(
        "an object of this type cannot be sent without pickle",
        argument="obj",
        expected="numbers, strings, bytes, tensors, and containers of these",
        seen=f"{kind.__module__}.{kind.__qualname__}",
        advice="Convert it, or pass allow_pickle=True on every rank if you trust all of them.",
    )


def _tensor_node(value: torch.Tensor, blobs: list[bytes | torch.Tensor]) -> list[Any]:
    if value.layout is not torch.strided:
        raise InvalidTensorError(
            "only dense tensors can be sent inside an object",
            argument="obj",
            expected="layout torch.strided",
            seen=value.layout,
        )
    check_communicable(value.dtype, "obj")
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    if plain.numel() == 1 or not plain.is_contiguous():
        # Not contiguous(): that leaves a single element its odd stride, which no view as bytes accepts.
        plain = plain.clone(memory_format=torch.contiguous_format)
    blobs.append(plain.view(-1).view(torch.uint8))
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]


class _Reader:
    """Rebuilds a value; blobs are consumed in the order in which they were written."""

    def __init__(self, blobs: torch.Tensor) -> None:
        self._blobs = blobs
        self._position = 0

    def _take(self, length: int) -> torch.Tensor:
        start, self._position = self._position, self._position + length
        return self._blobs[start : self._position]

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        tag, *rest = node
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.value(item) for item in rest)
        if tag == "dict":
            return {self.value(key): self.value(item) for key, item in rest}
        if tag == "tensor":
            return self._tensor(*rest)
        if tag == "complex":
            return complex(*rest)
        raw = as_bytes(self._take(rest[0]))
        return raw if tag == "bytes" else bytearray(raw)

    def _tensor(self, dtype_name: str, shape: list[int]) -> torch.Tensor:
        dtype = dtype_by_name(dtype_name)
        result = torch.empty(shape, dtype=dtype)
        raw = self._take(result.numel() * dtype.itemsize)
        if raw.numel():
            result.view(-1).view(torch.uint8).copy_(raw)
        return result

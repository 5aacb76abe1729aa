"""Objects as bytes, without pickle unless the caller asks for it.

The format is one flag byte, the length of a JSON document, the document, and the
raw bytes of the tensors and byte strings that it refers to. Decoding it can build
numbers, strings, bytes, lists, tuples, sets, dictionaries and tensors, and nothing
else, so nothing that comes from the network is executed. Every length is held against
the bytes that are there before memory is made, and all bytes must belong to a value.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from bagua.comm.operands import COMMUNICABLE, check_communicable
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTensorError

_HEADER = struct.Struct("<BQ")
_PLAIN, _PICKLE, _FAILURE = 0, 1, 2
#: Bytes from which on memory is asked for by itself.
_LARGE = 1 << 20
Memory = bytearray | mmap.mmap
#: Levels of containers in an object: each costs two frames of Python here and there.
_DEEPEST = 100
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
        try:
            return _as_tensor(_HEADER.pack(_PICKLE, 0) + pickle.dumps(value))
        except Exception as error:  # pickle lets through whatever the object raises
            seen = type(value).__name__
            raise ConfigurationError("the object cannot be pickled", argument="obj", seen=seen) from error
    memory, copy = encoded_later(value)
    copy()
    return _as_tensor(memory)


def encoded_later(value: object) -> tuple[Memory, Callable[[], None]]:
    """Memory for ``value`` as ``encode`` writes it without pickle, and what copies its tensors there, in any thread.

    Raises:
        ConfigurationError: a part of ``value`` has no safe encoding.
    """
    blobs: list[bytes | torch.Tensor] = []
    document = json.dumps(_node(value, blobs, _DEEPEST)).encode()
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


def decode(data: torch.Tensor, *, sender: int | None = None, allow_pickle: bool = False) -> Any:
    """The object that ``encode`` turned into ``data``; its tensors are on the CPU.

    Args:
        data: one-dimensional uint8 tensor, as it came.
        sender: rank from which ``data`` came, for errors.
        allow_pickle: accept pickle, too.

    Raises:
        ConfigurationError: the sender failed to encode it, or used pickle and this side
            did not ask for that.
        CollectiveMismatchError: ``data`` is not what ``encode`` makes. Its ``peers`` is the sender.
    """
    if data.numel() < _HEADER.size:
        raise _no_object("the header is cut off", sender)
    flag, length = _HEADER.unpack(as_bytes(data[: _HEADER.size]))
    body = data[_HEADER.size :]
    if flag == _FAILURE:
        problem = as_bytes(body).decode(errors="backslashreplace")
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
    if flag != _PLAIN or length > body.numel():
        raise _no_object(f"flag {flag}, a document of {length} bytes in {body.numel()}", sender)
    try:
        document = json.loads(as_bytes(body[:length]))
        return _Reader(body[length:]).whole(document)
    except (ValueError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise _no_object(f"{type(error).__name__}: {error}", sender) from error


def _no_object(problem: str, sender: int | None) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"{'the bytes' if sender is None else f'the bytes of rank {sender}'} are no object: {problem[:200]}",
        peers=() if sender is None else (sender,),
        advice="Look whether that rank runs the same version of bagua, and whether its calls are in the same order.",
    )


def _as_tensor(raw: bytes | Memory) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw) if isinstance(raw, bytes) else raw, dtype=torch.uint8)


def as_bytes(data: torch.Tensor) -> bytes:
    """The bytes of a uint8 tensor. By way of a bytearray, because NumPy may not be there."""
    if not data.numel():
        return b""
    raw = bytearray(data.numel())
    torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
    return bytes(raw)


def _node(value: object, blobs: list[bytes | torch.Tensor], levels: int) -> Any:
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
    if kind in (list, tuple, set, frozenset, dict) and not levels:
        raise ConfigurationError(
            "an object is nested too deeply", argument="obj", expected=f"{_DEEPEST} levels at most"
        )
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *(_node(item, blobs, levels - 1) for item in value)]  # type: ignore[attr-defined]
    if kind is dict:
        pairs = value.items()  # type: ignore[attr-defined]
        return ["dict", *([_node(key, blobs, levels - 1), _node(item, blobs, levels - 1)] for key, item in pairs)]
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
    """Rebuilds a value; blobs are consumed in the order in which they were written.

    What does not fit is a ``ValueError``, or what Python and torch raise of it.
    """

    def __init__(self, blobs: torch.Tensor) -> None:
        self._blobs = blobs

    def whole(self, document: Any) -> Any:
        """The value that ``document`` describes, which has all blobs."""
        value = self._value(document, _DEEPEST)
        if self._blobs.numel():
            raise ValueError(f"{self._blobs.numel()} bytes belong to no value")
        return value

    def _take(self, length: Any) -> torch.Tensor:
        if type(length) is not int or not 0 <= length <= self._blobs.numel():
            raise ValueError(f"{length} bytes are announced, and {self._blobs.numel()} are there")
        found, self._blobs = self._blobs[:length], self._blobs[length:]
        return found

    def _value(self, node: Any, levels: int) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if not isinstance(node, list) or not node:
            raise ValueError(f"{type(node).__name__} without a tag")
        tag, *rest = node
        if tag in ("bytes", "bytearray", "complex", "tensor"):
            return self._leaf(tag, *rest)
        if not levels:
            raise ValueError(f"more than {_DEEPEST} levels")
        if tag == "dict":
            return {self._value(key, levels - 1): self._value(item, levels - 1) for key, item in rest}
        if tag not in _SEQUENCES:
            raise ValueError(f"unknown tag {tag!r}")
        return _SEQUENCES[tag](self._value(item, levels - 1) for item in rest)

    def _leaf(self, tag: str, first: Any, second: Any = None) -> Any:
        if tag == "tensor":
            return self._tensor(first, second)
        if tag == "complex":
            if not type(first) is type(second) is float:
                raise ValueError("a complex number is not made of two floats")
            return complex(first, second)
        raw = as_bytes(self._take(first))
        return raw if tag == "bytes" else bytearray(raw)

    def _tensor(self, dtype_name: Any, shape: Any) -> torch.Tensor:
        dtype = next((one for one in COMMUNICABLE if str(one) == f"torch.{dtype_name}"), None)
        if (
            dtype is None
            or not isinstance(shape, list)
            or any(type(length) is not int or length < 0 for length in shape)
        ):
            raise ValueError(f"no tensor of dtype {dtype_name!r} and shape {shape!r}")
        raw = self._take(math.prod(shape) * dtype.itemsize)
        result = torch.empty(shape, dtype=dtype, device="cpu")
        if raw.numel():
            result.view(-1).view(torch.uint8).copy_(raw)
        return result

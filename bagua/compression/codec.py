"""What a codec is: a tensor in, bytes out, and back, of a size that is known before."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua.checks import check_kind
from bagua.errors import ConfigurationError, InvalidTensorError

__all__ = ["BFloat16", "Codec", "Float16", "Identity", "Metadata", "as_codec", "register", "registry"]

#: What every codec takes.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Sizes are multiples of this, so that what lies behind a compressed tensor is aligned for any dtype.
ALIGNMENT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What must be known of a tensor to decode it; everything else travels in its bytes.

    Attributes:
        numel: number of elements.
        dtype: dtype of the elements.

    Example:
        >>> Metadata.of(torch.ones(2, 3))
        Metadata(numel=6, dtype=torch.float32)
    """

    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """The metadata of ``tensor``, of any shape."""
        return cls(tensor.numel(), tensor.dtype)


class Codec(ABC):
    """Turns a tensor into bytes and back. Subclasses are frozen dataclasses that hold their options.

    A codec can be printed (as its constructor call), compared and pickled. It has no state: equal tensors give equal
    bytes on ranks that run the same software on the same kind of device, and equal bytes always decode to equal values
    there. One that rounds at random does so by its seed, which belongs to its options.

    Someone who adds one writes ``_payload_bytes``, ``_encode`` and ``_decode``.

    Example:
        >>> codec = Codec.init("identity")
        >>> data = codec.compress(torch.tensor([1.0, 2.0]))
        >>> codec.decompress(data, Metadata(2, torch.float32))
        tensor([1., 2.])
    """

    #: Dtypes that can be compressed.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATING

    @property
    def contraction(self) -> float | None:
        """``d`` in ``||x - x'||^2 <= (1 - d) ||x||^2`` for each block ``x`` of finite values in range; None if unknown.

        1 means that nothing is lost, and near 0 that some blocks lose nearly everything: what is lost must then be fed
        back.
        """
        return None

    @property
    def unbiased(self) -> bool:
        """Whether the expected value of what is decoded is what was compressed, over all seeds."""
        return False

    def for_draw(self, *numbers: int) -> Codec:  # noqa: ARG002 - for codecs that draw
        """The codec to use for one of many tensors: with random numbers of its own, if it draws any.

        Args:
            numbers: numbers that tell this use from others, as the rank and the step. Ranks that drew alike would err
                alike.
        """
        return self

    @classmethod
    def init(cls, name: str, **options: Any) -> Codec:
        """The codec registered as ``name``.

        Args:
            name: ``minmax_uint8``, for example.
            options: its constructor's arguments.

        Raises:
            ConfigurationError: there is none of that name, or an option cannot be used.
            TypeError: it does not have one of the options.

        Example:
            >>> Codec.init("minmax_uint8", block_numel=512)
            MinMaxUInt8(block_numel=512, seed=None)
        """
        check_kind(str, "the name of a codec", name=name)
        if name not in registry:
            raise ConfigurationError(
                "there is no codec of this name", argument="name", expected=" or ".join(registry), seen=repr(name)
            )
        kind = registry[name]
        known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        unknown = [option for option in options if option not in known]
        if unknown:
            raise TypeError(f"{kind.__name__} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
        return kind(**options)

    @torch.no_grad()
    def compress(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``tensor`` as bytes.

        Args:
            tensor: tensor of any shape; read in the order of its elements.
            out: one-dimensional ``uint8``, contiguous, of ``compressed_bytes`` elements, on
                the device of ``tensor``, at a multiple of 8 bytes in its storage.

        Returns:
            ``out``, or a new tensor like it.

        Raises:
            InvalidTensorError: a dtype that this codec cannot compress, or an unfit ``out``.
        """
        flat = tensor.detach().reshape(-1)
        payload = self._checked_payload(Metadata(flat.numel(), flat.dtype))
        nbytes = align(payload)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=flat.device)
        else:
            _check_bytes(out, nbytes, "out")
        if payload:
            self._encode(flat, out)
        if payload != nbytes:
            out[payload:].zero_()
        return out

    @torch.no_grad()
    def decompress(
        self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor | None = None, add: bool = False
    ) -> torch.Tensor:
        """The tensor that ``data`` was made of, or what is left of it.

        Args:
            data: from ``compress``.
            metadata: metadata of the tensor that was compressed.
            out: one-dimensional, contiguous, of ``metadata.numel`` elements, on the device of
                ``data``; its dtype may be another floating-point one.
            add: add the values to ``out`` instead of overwriting it.

        Returns:
            ``out``, or a new one-dimensional tensor of ``metadata.dtype``.

        Raises:
            InvalidTensorError: ``data`` or ``out`` does not fit ``metadata``.
            ConfigurationError: ``add`` without ``out``.
        """
        _check_bytes(data, align(self._checked_payload(metadata)), "data")
        if out is None:
            if add:
                raise ConfigurationError("there is nothing to add to", argument="out", expected="a tensor", seen=None)
            out = torch.empty(metadata.numel, dtype=metadata.dtype, device=data.device)
        else:
            _check_out(out, metadata)
        if metadata.numel:
            self._decode(data, metadata, out, add)
        return out

    def compressed_bytes(self, metadata: Metadata) -> int:
        """The size of a compressed tensor, exactly. Depends on nothing but ``metadata`` and the options.

        Raises:
            InvalidTensorError: this codec cannot compress such a tensor.
        """
        return align(self._checked_payload(metadata))

    def _checked_payload(self, metadata: Metadata) -> int:
        """``_payload_bytes`` of a tensor that this codec can compress."""
        if metadata.dtype not in self.dtypes:
            raise InvalidTensorError(
                f"{self!r} cannot compress this dtype",
                argument="tensor",
                expected=" or ".join(str(dtype) for dtype in self.dtypes),
                seen=metadata.dtype,
            )
        return self._payload_bytes(metadata)

    @abstractmethod
    def _payload_bytes(self, metadata: Metadata) -> int:
        """Bytes that ``_encode`` writes; 0 for a tensor without elements."""

    @abstractmethod
    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write each of the first ``_payload_bytes`` of ``out``. ``flat`` has at least one element."""

    @abstractmethod
    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        """Write the values to ``out``, or add them. There is at least one."""


def as_codec(codec: Codec | str | None) -> Codec | None:
    """A codec from itself, from its name, with its defaults, or from nothing.

    Raises:
        ConfigurationError: there is none of that name.
        InvalidTypeError: it is nothing of the sort.

    Example:
        >>> as_codec("float16")
        Float16()
    """
    check_kind((Codec, str, type(None)), "a codec of bagua.compression, the name of one, or None", codec=codec)
    return Codec.init(codec) if isinstance(codec, str) else codec


def check_codec(codec: object) -> None:
    """Raise ``InvalidTypeError`` unless this is a codec."""
    check_kind(Codec, "a Codec", codec=codec)


#: All codecs by name. ``bagua/compression/__init__.py`` has one line for each.
registry: dict[str, type[Codec]] = {}


def register(name: str, codec: type[Codec]) -> None:
    """Make ``codec`` known under ``name``.

    Raises:
        ConfigurationError: the name is taken by another codec.
    """
    if registry.setdefault(name, codec) is not codec:
        raise ConfigurationError("another codec has this name", argument="name", expected="a new name", seen=repr(name))


def align(nbytes: int) -> int:
    """``nbytes``, rounded up to a size of which several can lie side by side."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def store(values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write ``values`` to ``out``, or add them, in the dtype of ``out``."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def _check_bytes(data: torch.Tensor, nbytes: int, argument: str) -> None:
    fits = data.dtype == torch.uint8 and data.dim() == 1 and data.numel() == nbytes and data.is_contiguous()
    if not fits or data.storage_offset() % ALIGNMENT_BYTES:
        raise InvalidTensorError(
            "this tensor cannot hold the compressed one",
            argument=argument,
            expected=f"{nbytes} contiguous uint8, at a multiple of {ALIGNMENT_BYTES} bytes",
            seen=f"{data.dtype} of shape {list(data.shape)} at {data.storage_offset() * data.itemsize} bytes",
        )


def _check_out(out: torch.Tensor, metadata: Metadata) -> None:
    same_kind = out.dtype == metadata.dtype or (out.dtype in FLOATING and metadata.dtype in FLOATING)
    if not same_kind or out.dim() != 1 or out.numel() != metadata.numel or not out.is_contiguous():
        raise InvalidTensorError(
            "this tensor cannot take the decompressed values",
            argument="out",
            expected=f"{metadata.numel} contiguous elements of {metadata.dtype}, or of another floating-point dtype",
            seen=f"{out.dtype} of shape {list(out.shape)}",
        )


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Cast(Codec):
    target: ClassVar[torch.dtype]

    @property
    def contraction(self) -> float:
        """Nearly all: what is left of rounding each element."""
        return 1.0 - float(torch.finfo(self.target).eps) ** 2

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002 - for what is stored as it is
        return self.target

    def _payload_bytes(self, metadata: Metadata) -> int:
        return metadata.numel * self._stored_as(metadata.dtype).itemsize

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out[: self._payload_bytes(Metadata.of(flat))].view(self._stored_as(flat.dtype)).copy_(flat)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        store(data[: self._payload_bytes(metadata)].view(self._stored_as(metadata.dtype)), out, add)


@dataclass(frozen=True)
class Identity(_Cast):
    """The bytes of the tensor as they are: ``x' = x``, bit by bit. Takes complex numbers and integers, too.

    Example:
        >>> Identity().compressed_bytes(Metadata(10, torch.float32))
        40
    """

    dtypes = (*FLOATING, torch.complex64, torch.complex128, *_INTEGERS, torch.bool)
    unbiased = True
    contraction = 1.0  # Nothing is lost.

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision: ``|x' - x| <= 2**-11 |x|`` where ``2**-14 <= |x| <= 65504``.

    Below, it loses ``2**-25`` at most; above, values become infinite, so that a
    ``GradScaler`` sees it and scales less. Zero, NaN and Inf are reproduced exactly.

    Example:
        >>> codec, tensor = Float16(), torch.tensor([1.0, 1e6])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([1., inf])
    """

    target = torch.float16


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Brain floating point: ``|x' - x| <= 2**-8 |x|`` over the range of float32.

    Zero, NaN and Inf are reproduced exactly. Values beyond that range become infinite, and
    below ``1e-38`` the error is absolute.

    Example:
        >>> codec, tensor = BFloat16(), torch.tensor([1.0, 1e6])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([1.0000e+00, 9.9942e+05])
    """

    target = torch.bfloat16

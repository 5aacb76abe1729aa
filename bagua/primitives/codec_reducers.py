"""Reducers made of a codec and collectives that copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua.comm import Communicator
from bagua.compression import Codec, Metadata, check_codec
from bagua.primitives.memory import ReducerMemory, summing_dtype
from bagua.primitives.reducers import SumReducer

__all__ = ["AllGatherReducer", "ContributorsReducer", "ScatterGatherReducer", "mean_of_senders"]


@dataclass(frozen=True)
class AllGatherReducer(SumReducer):
    """Everyone sends its compressed tensor to everyone, and adds up what arrives: ``sum_i D(Q(x_i))``.

    Receives ``n`` times the compressed size: for strong compression, or few ranks. Sums are
    in rank order, in single precision at least.

    Args:
        codec: ``Q`` and ``D``.

    Raises:
        ConfigurationError: ``codec`` is none.

    Example:
        >>> from bagua.compression import MinMaxUInt8
        >>> AllGatherReducer(MinMaxUInt8())
        AllGatherReducer(codec=MinMaxUInt8(block_numel=2048, seed=None))
    """

    codec: Codec

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def contraction(self) -> float | None:
        """That of the codec."""
        return self.codec.contraction

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        super().check_dtype(dtype)
        _check_codec(self.codec, dtype)

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``."""
        codec, metadata = self.codec.for_draw(communicator.rank, memory.step), Metadata.of(flat)
        received = _gather(codec, flat, communicator, memory)
        if remainder is not None:
            torch.sub(flat, codec.decompress(received[communicator.rank], metadata, out=remainder), out=remainder)
        exact = summing_dtype(flat.dtype)
        total = flat if exact == flat.dtype else memory.buffer("total", flat.numel(), exact)
        for source, data in enumerate(received):
            codec.decompress(data, metadata, out=total, add=source > 0)
        if total is not flat:
            flat.copy_(total)


@dataclass(frozen=True)
class ContributorsReducer(SumReducer):
    """As ``AllGatherReducer``, but of each element the mean over those ranks that sent it, times the number of ranks.

    ``n sum_i D(Q(x_i)) / max(number of ranks whose D(Q(x_i)) is not zero, 1)``: what one rank of ``n`` sends counts
    ``n`` times as much as in a sum. For codecs that send few elements, of which ranks choose different ones.

    Args:
        codec: ``Q`` and ``D``, as ``BlockTopK()``.

    Raises:
        ConfigurationError: ``codec`` is none.

    Example:
        >>> from bagua.compression import TopK
        >>> ContributorsReducer(TopK(0.1))
        ContributorsReducer(codec=TopK(ratio=0.1))

    Source: the repositories of CCLoco and DeMo.
    """

    codec: Codec

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def contraction(self) -> float | None:
        """That of the codec."""
        return self.codec.contraction

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        super().check_dtype(dtype)
        _check_codec(self.codec, dtype)

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``; the remainder is what this rank did not send."""
        codec, metadata, exact = self.codec, Metadata.of(flat), summing_dtype(flat.dtype)
        received = _gather(codec.for_draw(communicator.rank, memory.step), flat, communicator, memory)
        total = memory.buffer("total", flat.numel(), exact)
        if remainder is not None:
            torch.sub(flat, codec.decompress(received[communicator.rank], metadata, out=remainder), out=remainder)
        mean_of_senders(codec, received, metadata, total, memory)
        flat.copy_(total.mul_(communicator.size))


@dataclass(frozen=True)
class ScatterGatherReducer(SumReducer):
    """Each rank sums one slice of all compressed tensors, and sends the compressed sum to everyone.

    With ``x_i[r]`` the r-th of ``n`` slices of rank ``i``: ``y[r] = D(Q(sum_i D(Q(x_i[r]))))``. Two
    messages of the compressed size, whatever the number of ranks. Sums are in rank order, in
    single precision at least.

    Args:
        codec: ``Q`` and ``D``.

    Raises:
        ConfigurationError: ``codec`` is none.

    Example:
        >>> from bagua.compression import MinMaxUInt8
        >>> ScatterGatherReducer(MinMaxUInt8())
        ScatterGatherReducer(codec=MinMaxUInt8(block_numel=2048, seed=None))

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022 (primitive C_LP_S).
    """

    codec: Codec

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def contraction(self) -> float | None:
        """That of the codec."""
        return self.codec.contraction

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        super().check_dtype(dtype)
        _check_codec(self.codec, dtype)
        _check_codec(self.codec, summing_dtype(dtype))

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``. What the sum of a slice loses remains on the rank that added it up."""
        size, rank = communicator.size, communicator.rank
        codec = self.codec.for_draw(rank, memory.step)
        exact = summing_dtype(flat.dtype)
        shares = Shares(codec, flat.numel(), size)
        row_bytes = max(shares.row_bytes(flat.dtype), shares.row_bytes(exact))
        sent = memory.buffer("sent", size * row_bytes, torch.uint8)
        received = memory.buffer("received", size * row_bytes, torch.uint8)

        shares.compress(flat, sent.view(size, row_bytes))
        communicator.alltoall(received, sent)
        own = flat[shares.slices[rank]]
        total = memory.buffer("total", own.numel(), exact)
        rows = received.view(size, row_bytes)[:, : codec.compressed_bytes(Metadata.of(own))]
        self._add_up(rows, Metadata.of(own), total, memory)
        if remainder is not None:
            shares.decompress(sent.view(size, row_bytes), flat.dtype, remainder)
            torch.sub(flat, remainder, out=remainder)

        answer = sent[:row_bytes]
        again = codec.for_draw(0)  # Not with the numbers that some of the summands were rounded with.
        again.compress(total, out=answer[: codec.compressed_bytes(Metadata.of(total))])
        communicator.allgather(received, answer)
        shares.decompress(received.view(size, row_bytes), exact, flat)
        if remainder is not None:
            remainder[shares.slices[rank]].add_(total.sub_(own), alpha=self._weight_of_one(size))

    def _add_up(
        self,
        rows: torch.Tensor,
        metadata: Metadata,
        total: torch.Tensor,
        memory: ReducerMemory,  # noqa: ARG002 - for means
    ) -> None:
        """Make ``total`` of the compressed tensors of all ranks."""
        for source, row in enumerate(rows):
            self.codec.decompress(row, metadata, out=total, add=source > 0)

    def _weight_of_one(self, size: int) -> float:  # noqa: ARG002 - for means
        """What a rank has to send again for each 1 that the answer lacks."""
        return 1.0


class Shares:
    """The slices of a flat tensor, one for each rank, and their place in rows of bytes.

    Args:
        codec: codec of the slices.
        numel: elements of the tensor; the last slices may have fewer, or none.
        size: number of slices.

    Attributes:
        slices: slices of the elements.
    """

    def __init__(self, codec: Codec, numel: int, size: int) -> None:
        length = -(-numel // size)
        self._codec = codec
        self.slices = [slice(min(r * length, numel), min((r + 1) * length, numel)) for r in range(size)]

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that any of the slices takes at most."""
        return max(self._nbytes(part, dtype) for part in self.slices)

    def _nbytes(self, part: slice, dtype: torch.dtype) -> int:
        return self._codec.compressed_bytes(Metadata(part.stop - part.start, dtype))

    def compress(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Each slice of ``flat`` into its row."""
        for part, row in zip(self.slices, rows, strict=True):
            self._codec.compress(flat[part], out=row[: self._nbytes(part, flat.dtype)])

    def decompress(self, rows: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Each row, compressed from ``dtype``, into its slice of ``out``."""
        for part, row in zip(self.slices, rows, strict=True):
            metadata = Metadata(part.stop - part.start, dtype)
            self._codec.decompress(row[: self._nbytes(part, dtype)], metadata, out=out[part])


def mean_of_senders(
    codec: Codec, rows: torch.Tensor, metadata: Metadata, total: torch.Tensor, memory: ReducerMemory
) -> None:
    """Make ``total`` of compressed tensors: of each element the mean of those that are not zero."""
    counts, decoded = (memory.buffer(name, total.numel(), total.dtype) for name in ("counts", "decoded"))
    total.zero_()
    counts.zero_()
    for row in rows:
        codec.decompress(row, metadata, out=decoded)
        total.add_(decoded)
        counts.add_(decoded != 0)
    total.div_(counts.clamp_(min=1))


def _gather(codec: Codec, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory) -> torch.Tensor:
    """A row for each rank: its tensor, compressed."""
    nbytes = codec.compressed_bytes(Metadata.of(flat))
    sent = codec.compress(flat, out=memory.buffer("sent", nbytes, torch.uint8))
    received = memory.buffer("received", communicator.size * nbytes, torch.uint8)
    communicator.allgather(received, sent)
    return received.view(communicator.size, nbytes)


def _check_codec(codec: Codec, dtype: torch.dtype) -> None:
    """Raise what ``codec`` raises for tensors of ``dtype``, small or large."""
    for numel in (0, 2**40):
        codec.compressed_bytes(Metadata(numel, dtype))

"""Reducers made of a codec and collectives that copy, and the choice between them for few elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from bagua.checks import check_flags, check_whole
from bagua.comm import Communicator
from bagua.compression import Codec, Metadata, check_codec
from bagua.primitives.reducers import ReducerMemory, Remainder, SumReducer, summing_dtype


@dataclass(frozen=True)
class CodecReducer(SumReducer):
    """What all reducers of one codec have in common: subclasses say who receives what, and how it is added up.

    Args:
        codec: ``Q`` and ``D``.

    Attributes:
        sends_sums: compresses sums as well.
        of_senders: takes of each element the mean over those ranks that sent it, times the number of ranks.

    Raises:
        ConfigurationError: ``codec`` is none.
    """

    codec: Codec

    sends_sums: ClassVar[bool] = False
    of_senders: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def contraction(self) -> float | None:
        """That of the codec."""
        return self.codec.contraction

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses, small or large."""
        super().check_dtype(dtype)
        for sent in (dtype, summing_dtype(dtype)) if self.sends_sums else (dtype,):
            for numel in (0, 2**40):
                self.codec.compressed_bytes(Metadata(numel, sent))

    def _add_up(self, rows: torch.Tensor, metadata: Metadata, total: torch.Tensor, memory: ReducerMemory) -> None:
        """Make ``total`` of the compressed tensors in ``rows``, in their order."""
        if not self.of_senders:
            for source, row in enumerate(rows):
                self.codec.decompress(row, metadata, out=total, add=source > 0)
            return
        counts, decoded = (memory.buffer(name, total.numel(), total.dtype) for name in ("counts", "decoded"))
        total.zero_()
        counts.zero_()
        for row in rows:
            self.codec.decompress(row, metadata, out=decoded)
            total.add_(decoded)
            counts.add_(decoded != 0)
        total.div_(counts.clamp_(min=1)).mul_(len(rows))


@dataclass(frozen=True)
class AllGatherReducer(CodecReducer):
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

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """See ``SumReducer.reduce``; the remainder is what this rank did not send."""
        metadata, exact = Metadata.of(flat), summing_dtype(flat.dtype)
        nbytes = self.codec.compressed_bytes(metadata)
        drawn = self.codec.for_draw(communicator.rank, memory.step)
        sent = drawn.compress(flat, out=memory.buffer("sent", nbytes, torch.uint8))
        received = memory.buffer("received", communicator.size * nbytes, torch.uint8)
        communicator.allgather(received, sent)
        rows = received.view(communicator.size, nbytes)
        if remainder is not None:
            torch.sub(flat, self.codec.decompress(rows[communicator.rank], metadata, out=remainder), out=remainder)
        total = flat if exact == flat.dtype else memory.buffer("total", flat.numel(), exact)
        self._add_up(rows, metadata, total, memory)
        if total is not flat:
            flat.copy_(total)


@dataclass(frozen=True)
class ContributorsReducer(AllGatherReducer):
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

    Source: the repository of CCLoco.
    """

    of_senders: ClassVar[bool] = True


@dataclass(frozen=True)
class ScatterGatherReducer(CodecReducer):
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

    sends_sums: ClassVar[bool] = True

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """See ``SumReducer.reduce``. What the sum of a slice loses remains on the rank that added it up."""
        size, rank = communicator.size, communicator.rank
        # Who sends an element alone is all who have it, so its value counts for every rank.
        weight_of_one = 1.0 / size if self.of_senders else 1.0
        drawn, shares = self.codec.for_draw(rank, memory.step), _shares(self.codec, flat.numel(), size, flat.dtype)
        sent = memory.buffer("sent", size * shares.row_bytes, torch.uint8).view(size, shares.row_bytes)
        received = memory.buffer("received", size * shares.row_bytes, torch.uint8)
        rows = received.view(size, shares.row_bytes)

        for sending, row in zip(shares.raw, sent, strict=True):
            drawn.compress(flat[sending.place], out=row[: sending.nbytes])
        communicator.alltoall(received, sent.view(-1))
        own, mine = flat[shares.raw[rank].place], shares.raw[rank]
        if remainder is not None:
            for sending, row in zip(shares.raw, sent, strict=True):
                drawn.decompress(row[: sending.nbytes], sending.metadata, out=remainder[sending.place])
            torch.sub(flat, remainder, out=remainder)
        # What is lost is known: the total may lie where this rank's own slice was.
        total = own if shares.exact == flat.dtype else memory.buffer("total", own.numel(), shares.exact)
        self._add_up(rows[:, : mine.nbytes], mine.metadata, total, memory)

        answer = sent[0]
        again = drawn.for_draw(0)  # Not with the numbers that some of the summands were rounded with.
        again.compress(total, out=answer[: shares.summed[rank].nbytes])
        communicator.allgather(received, answer)
        # This rank has to send ``weight_of_one`` again for each 1 that its answer lacks.
        left = None if remainder is None else remainder[mine.place].add_(total, alpha=weight_of_one)
        for coming, row in zip(shares.summed, rows, strict=True):
            drawn.decompress(row[: coming.nbytes], coming.metadata, out=flat[coming.place])
        if left is not None:
            left.sub_(own, alpha=weight_of_one)


@dataclass(frozen=True)
class ContributorsByRange(ScatterGatherReducer):
    """``ContributorsReducer``, with each rank taking the means of one range of positions."""

    of_senders: ClassVar[bool] = True


class Share(NamedTuple):
    """One slice of a flat tensor: its elements, what must be known to decode it, and its compressed size in bytes."""

    place: slice
    metadata: Metadata
    nbytes: int


class Shares(NamedTuple):
    """The slices of a flat tensor, one for each rank.

    Attributes:
        exact: dtype of sums.
        raw: slices of the tensor; the last ones may have fewer elements, or none.
        summed: the same slices of sums.
        row_bytes: bytes that any of them takes at most.
    """

    exact: torch.dtype
    raw: list[Share]
    summed: list[Share]
    row_bytes: int


@functools.lru_cache(maxsize=4096)
def _shares(codec: Codec, numel: int, size: int, dtype: torch.dtype) -> Shares:
    """Those of a tensor of ``numel`` elements for ``size`` ranks: each step asks for them again."""
    length, exact = -(-numel // size), summing_dtype(dtype)
    places = [slice(min(r * length, numel), min((r + 1) * length, numel)) for r in range(size)]

    def shares_of(kind: torch.dtype) -> list[Share]:
        told = [Metadata(one.stop - one.start, kind) for one in places]
        return [Share(one, known, codec.compressed_bytes(known)) for one, known in zip(places, told, strict=True)]

    raw, summed = shares_of(dtype), shares_of(exact)
    return Shares(exact, raw, summed, max(share.nbytes for share in (*raw, *summed)))


@dataclass(frozen=True)
class SparseReducer(SumReducer):
    """Few elements of everyone: sent to everyone between few ranks, and by ranges of positions between many.

    Between up to ``gather_ranks`` ranks this is ``AllGatherReducer``, or ``ContributorsReducer``, and each rank
    receives what all others send. Between more it is ``ScatterGatherReducer``: each rank chooses elements in each of
    ``n`` ranges, one rank adds up for each range, and sends as many of the sums as a rank chose there. That takes two
    messages of the compressed size, whatever the number of ranks, and loses more: use it with error feedback.

    Args:
        codec: codec that keeps few elements, as ``TopK(0.01)``.
        contributors: True gives the mean of each element over those ranks that sent it, times the number of ranks.
        gather_ranks: at least 1.

    Raises:
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> from bagua.compression import TopK
        >>> SparseReducer(TopK(0.01)).chosen(8), SparseReducer(TopK(0.01)).chosen(9)
        (AllGatherReducer(codec=TopK(ratio=0.01)), ScatterGatherReducer(codec=TopK(ratio=0.01)))
    """

    codec: Codec
    contributors: bool = False
    gather_ranks: int = 8

    def __post_init__(self) -> None:
        check_codec(self.codec)
        check_flags(contributors=self.contributors)
        check_whole(1, gather_ranks=self.gather_ranks)

    def chosen(self, size: int) -> SumReducer:
        """The reducer between ``size`` ranks."""
        if size <= self.gather_ranks:
            return ContributorsReducer(self.codec) if self.contributors else AllGatherReducer(self.codec)
        return ContributorsByRange(self.codec) if self.contributors else ScatterGatherReducer(self.codec)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        for size in (self.gather_ranks, self.gather_ranks + 1):
            self.chosen(size).check_dtype(dtype)

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """See ``SumReducer.reduce``."""
        self.chosen(communicator.size).reduce(flat, communicator, memory, remainder)

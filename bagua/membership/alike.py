"""What all islands hold alike, as the anchor of an outer step: whether they still do, once in each exchange."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence

import torch

from bagua.comm import ProcessGroup
from bagua.errors import CollectiveMismatchError
from bagua.primitives import differ_by_rounding, quick_digest

_log = logging.getLogger("bagua")
#: What an island tells that compares nothing.
_NOTHING = (0, 0)


class Alike:
    """Compares tensors with those of other islands. Islands that only round differently are told so once, and go on.

    Attributes:
        told: two numbers for the other islands, equal on all: a digest of the tensors, and one of their shapes.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._rounds = False
        self.told = _NOTHING

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """An exchange begins, before which all islands hold ``tensors``."""
        self._tensors, self.told = tensors, _NOTHING
        if tensors and not self._rounds:
            kinds = repr([(tuple(one.shape), one.dtype) for one in tensors])
            self.told = (int.from_bytes(quick_digest(tensors), "little", signed=True), 1 + zlib.crc32(kinds.encode()))

    def compare(self, everyone: Sequence[tuple[int, int]], group: ProcessGroup) -> None:
        """Compare what all members of ``group`` told. Collective if they told different things.

        Raises:
            CollectiveMismatchError: on all of them, if there is a difference beyond rounding.
        """
        if _NOTHING in everyone or len(set(everyone)) == 1:
            return
        same_shapes = len({kind for _, kind in everyone}) == 1
        communicator = group.global_communicator
        self._rounds = same_shapes and differ_by_rounding(self._tensors, communicator)
        communicator.barrier()  # A member that raises ends the connections: others may still be receiving.
        if not self._rounds:
            raise _different(everyone, group)
        if communicator.rank == 0:
            _log.warning("islands: what all hold alike differs by rounding. Training goes on, and compares no more")


def _different(everyone: Sequence[tuple[int, int]], group: ProcessGroup) -> CollectiveMismatchError:
    """The error that names the islands that differ from most; all, if there are not more of one kind."""
    (most, count), *others = Counter(everyone).most_common()
    tied = bool(others) and others[0][1] == count
    strange = [seat for seat, one in zip(group.ranks, everyone, strict=True) if tied or one != most]
    rest = [seat for seat in group.ranks if seat not in strange]
    said = f"that of seats {strange} is not that of seats {rest}" if rest else f"seats {strange} have no majority"
    return CollectiveMismatchError(
        f"islands hold different shared state or weights: {said}",
        rank=group.ranks[group.rank],
        peers=strange,
        expected="what all islands have exchanged",
        seen=f"something else on seats {strange}",
        advice="Load weights before the first exchange, on all islands alike, and change weights and shared state on "
        "none alone. join_islands(resume=...) begins another run from one state.",
    )

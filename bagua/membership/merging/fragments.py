"""Parts of a model that are merged by themselves, and what is on its way to their merges, and from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bagua.compression import Codec, Metadata
from bagua.membership.merging.quorum import Choice


class Fragment(NamedTuple):
    """A part of the model that is merged by itself.

    Attributes:
        name: equal on all members.
        numel: elements of a difference.
        dtype: their dtype.
        merge: makes one difference of several, with a weight for each.
        codec: codec for differences and results; None for all bits.
        feedback: part of what the codec loses of a result that its owner adds to its next one.
        parameters: names and shapes of the parameters that lie in a difference, in that order.
    """

    name: str
    numel: int
    dtype: torch.dtype
    merge: Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]
    codec: Codec | None = None
    feedback: float = 0.0
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def layout(self) -> tuple[object, ...]:
        """What a difference of it says of each element: equal where differences can be merged."""
        return self.name, self.numel, self.dtype, self.parameters

    def room(self) -> torch.Tensor:
        """Where a difference, or a result, is received as it is sent."""
        if self.codec is None:
            return torch.empty(self.numel, dtype=self.dtype)
        return torch.empty(self.codec.compressed_bytes(Metadata(self.numel, self.dtype)), dtype=torch.uint8)

    def encode(self, values: torch.Tensor, *draw: int) -> torch.Tensor:
        """``values`` as they are sent; ``draw`` tells this use of a codec that rounds at random from others."""
        return values if self.codec is None else self.codec.for_draw(*draw).compress(values)

    def decode(self, sent: torch.Tensor) -> torch.Tensor:
        """What was sent, or what is left of it."""
        return sent if self.codec is None else self.codec.decompress(sent, Metadata(self.numel, self.dtype))


class Merge(NamedTuple):
    """One merge that counts.

    Attributes:
        number: from 1, in the order in which all members take merges in.
        fragment: number of the fragment.
        seats: those whose differences were merged.
        weights: weights of these.
    """

    number: int
    fragment: int
    seats: tuple[int, ...]
    weights: tuple[float, ...]


class MergeResult(NamedTuple):
    """What an exchange brings if it counts.

    Attributes:
        choice: fragment that was merged, and the seats of those whose differences were.
        difference: merged difference; None if nothing was learned.
        residual: loss of the codec, on the owner, if that is fed back.
    """

    choice: Choice
    difference: torch.Tensor | None = None
    residual: torch.Tensor | None = None


class Arrived(NamedTuple):
    """A merge that has yet to be taken in here.

    Attributes:
        difference: merged difference; None if nothing was learned.
        own: this member has contributed to it.
        number: number of the merge; 0 for one that came with the state of another member.
    """

    difference: torch.Tensor | None
    own: bool
    number: int = 0


class Sent(NamedTuple):
    """A difference of this member that has not been merged.

    Attributes:
        difference: flat tensor, as it is sent, that stays as it is.
        weight: how much it counts.
        since: when it was contributed, in seconds.
        samples: samples that this member had trained on then, where samples are dealt out.
    """

    difference: torch.Tensor
    weight: float
    since: float
    samples: int = 0

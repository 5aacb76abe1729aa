"""How differences reach the owner of a fragment, and its result all members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua.comm import Communicator
from bagua.membership.merging.fragments import Fragment, MergeResult
from bagua.membership.merging.quorum import Choice


class Merger:
    """The owner of a fragment receives differences, merges them, and sends the result to all.

    Args:
        seat: seat of this member.

    Attributes:
        fragments: parts of the model that are merged.
    """

    def __init__(self, seat: int) -> None:
        self._seat = seat
        self.fragments: list[Fragment] = []
        #: What the codec has lost of the last results of this member, by number of the fragment.
        self._residuals: dict[int, torch.Tensor] = {}

    def open(self, fragments: Sequence[Fragment]) -> None:
        """Merge these from now on."""
        if not self.has(fragments):
            self._residuals.clear()
        self.fragments = list(fragments)

    def has(self, fragments: Sequence[Fragment]) -> bool:
        """Whether these are merged already, with the same parameters in each."""
        return [one.layout for one in fragments] == [one.layout for one in self.fragments]

    def number_of(self, name: str) -> int:
        """The number of the fragment of this name."""
        return next(number for number, one in enumerate(self.fragments) if one.name == name)

    def merge(self, choice: Choice, communicator: Communicator, own: torch.Tensor | None, draw: int) -> MergeResult:
        """The merged difference, on all members. The next members own what one had that is gone.

        A difference without weight stays where it is.

        Args:
            choice: fragment, and whose differences.
            communicator: members.
            own: difference of this member, as it is sent; None if it is not one of those.
            draw: number of the merge, for codecs that round at random.
        """
        weights = {seat: weight for seat, weight in zip(choice.seats, choice.weights, strict=True) if weight}
        if not weights:
            return MergeResult(choice)
        fragment, owner = self.fragments[choice.fragment], choice.fragment % communicator.size
        sent, exact = fragment.room(), None
        if communicator.rank == owner:
            exact = self._merged(choice.fragment, weights, communicator, own)
            sent = fragment.encode(exact, self._seat, draw, 0)
        elif own is not None and self._seat in weights:
            communicator.send(own, owner)
        communicator.broadcast(sent, owner)
        result = fragment.decode(sent)
        if not result.isfinite().all():  # It overflowed.
            return MergeResult(choice, torch.zeros_like(result))
        return MergeResult(choice, result, exact - result if exact is not None and fragment.feedback else None)

    def _merged(
        self, number: int, weights: Mapping[int, float], communicator: Communicator, own: torch.Tensor | None
    ) -> torch.Tensor:
        """The differences of all in one, with what was lost of the last one that was merged here."""
        fragment, differences = self.fragments[number], []
        for seat in weights:
            if seat == self._seat and own is not None:
                differences.append(fragment.decode(own))
                continue
            received = fragment.room()
            communicator.recv(received, communicator.ranks.index(seat))
            differences.append(fragment.decode(received))
        merged = fragment.merge(differences, list(weights.values()))
        residual = self._residuals.get(number)
        return merged if residual is None else merged.add_(residual, alpha=fragment.feedback)

    def count(self, result: MergeResult) -> None:
        """The exchange counts: its owner remembers what was lost."""
        if result.residual is not None:
            self._residuals[result.choice.fragment] = result.residual

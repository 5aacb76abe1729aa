"""In which order gradients appear: noted in a backward pass, agreed on by all ranks, and cut into buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import form_buckets
from bagua.comm import Communicator
from bagua.engine.buckets.layout import foreign, name_of, twice, unused
from bagua.engine.buckets.registration import Registration
from bagua.engine.state.agreement import gather_objects
from bagua.errors import CollectiveMismatchError

#: The first bucket is small: until it is full, no exchange is under way while gradients are computed. As torch's DDP.
_FIRST_BUCKET_BYTES = 1024 * 1024


class GradientOrder:
    """The order in which the gradients of a module appear.

    Args:
        registration: parameters of the module, equal on all ranks.

    Attributes:
        arrived: parameters whose gradients have appeared in the backward pass under way, in that order.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._positions: list[int] = []
        self.forget()

    def add(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` has appeared.

        Raises:
            ConfigurationError: it had before in the same backward pass, or it is no parameter of the module.
        """
        if parameter not in self._registration:
            raise foreign(parameter)
        if id(parameter) in self._seen:
            raise twice(name_of(self._registration, parameter))
        self._seen.add(id(parameter))
        self.arrived.append(parameter)

    def forget(self) -> None:
        """The backward pass is over."""
        self.arrived: list[torch.nn.Parameter] = []
        self._seen: set[int] = set()

    def agree(self, communicator: Communicator, *, find_unused: bool, same_order: bool, told: str) -> list[str]:
        """The backward pass is over: take the order in which gradients appeared on rank 0. Collective.

        Args:
            communicator: communicator of all ranks.
            find_unused: parameters without a gradient come last; otherwise they are an error.
            same_order: another order than rank 0's is an error.
            told: words for all other ranks, sent on the way.

        Returns:
            What each rank told.

        Raises:
            ConfigurationError: on all ranks, naming what is missing on each.
            CollectiveMismatchError: on all ranks, naming the first parameter that came elsewhere.
        """
        gathered = gather_objects(communicator, "the forming of buckets", [self._places(), told])
        everyone: list[list[int]] = [places for places, _ in gathered]
        names = self._registration.names
        lacking = {
            rank: [name for name, arrived in zip(names, places, strict=True) if arrived < 0]
            for rank, places in enumerate(everyone)
        }
        if not find_unused and any(lacking.values()):
            raise unused({rank: missing for rank, missing in lacking.items() if missing})
        if same_order:
            _refuse_other_orders(names, everyone, communicator)
        first = everyone[0]
        self._positions = sorted(range(len(first)), key=lambda position: (first[position] < 0, first[position]))
        return [words for _, words in gathered]

    def _places(self) -> list[int]:
        """When the gradient of each parameter has appeared, counted from 0; -1 if it has not. Forgets it."""
        positions = {id(parameter): position for position, parameter in enumerate(self._registration.parameters)}
        places = [-1] * len(positions)
        for arrived, parameter in enumerate(self.arrived):
            places[positions[id(parameter)]] = arrived
        self.forget()
        return places

    def suppose_reversed(self) -> None:
        """Take the reverse of the order of registration, which is about that of gradients."""
        self._positions = list(reversed(range(len(self._registration.names))))

    def suppose(self, members: Sequence[Sequence[int]]) -> None:
        """Take the order in which the buckets ``members`` have their parameters, if there is none yet."""
        self._positions = self._positions or [position for positions in members for position in positions]

    def cut(self, bucket_bytes: int) -> list[list[int]]:
        """Positions of the parameters of each bucket, if buckets are closed at so many bytes."""
        parameters = self._registration.parameters
        return form_buckets(
            self._positions,
            key=lambda position: (parameters[position].dtype, parameters[position].device),
            nbytes=lambda position: parameters[position].nbytes,
            bucket_bytes=bucket_bytes,
            first_bytes=_FIRST_BUCKET_BYTES,
        )


def _refuse_other_orders(names: Sequence[str], everyone: Sequence[Sequence[int]], communicator: Communicator) -> None:
    """Compare the order of all ranks with that of rank 0, for parameters that both have a gradient of."""
    ranks = communicator.ranks
    for other, places in enumerate(everyone):
        common = [position for position, place in enumerate(places) if place >= 0 <= everyone[0][position]]
        here = sorted(common, key=lambda position: everyone[0][position])
        there = sorted(common, key=places.__getitem__)
        for number, (expected, seen) in enumerate(zip(here, there, strict=True)):
            if expected != seen:
                raise CollectiveMismatchError(
                    "gradients appear in another order on another rank",
                    rank=ranks[communicator.rank],
                    peers=(ranks[0], ranks[other]),
                    expected=f"{names[expected]}, gradient {number} on rank {ranks[0]}",
                    seen=f"{names[seen]} on rank {ranks[other]}",
                    advice="Let all ranks run the same modules in the same order.",
                )

"""Buckets as a user or a checkpoint gives them, and what can be wrong about their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import Bucket, form_buckets
from bagua.checks import check_kind, check_whole
from bagua.comm import Communicator
from bagua.engine.buckets.registration import Registration
from bagua.engine.state.agreement import gather_objects
from bagua.errors import CollectiveMismatchError, ConfigurationError


def bucket_lists(buckets: object) -> list[list[torch.Tensor | str]]:
    """Buckets as a user gives them, in lists of our own.

    Raises:
        InvalidTypeError: something else than lists of parameters or names.
    """
    expected = "lists of parameters or of their names"
    check_kind((list, tuple), expected, buckets=buckets)
    assert isinstance(buckets, list | tuple)
    for bucket in buckets:
        check_kind((list, tuple), expected, buckets=bucket)
        for member in bucket:
            check_kind((torch.Tensor, str), expected, buckets=member)
    return [list(bucket) for bucket in buckets]


def name_of(registration: Registration, member: torch.Tensor | str) -> str:
    """The name of a parameter that is given by itself or by its name."""
    if isinstance(member, str):
        return member
    named = zip(registration.names, registration.parameters, strict=True)
    return next((name for name, parameter in named if parameter is member), "a tensor that is no trainable parameter")


def positions_of(registration: Registration, buckets: Sequence[Sequence[torch.Tensor | str]]) -> list[list[int]]:
    """Positions of the parameters of buckets that are given as parameters or names.

    Raises:
        ConfigurationError: a bucket mixes dtypes or devices, or something else than each
            trainable parameter exactly once is in the buckets.
    """
    position = {name: number for number, name in enumerate(registration.names)}
    named = [[name_of(registration, member) for member in bucket] for bucket in buckets]
    flat = [name for bucket in named for name in bucket]
    wrong = sorted({name for name in flat if name not in position or flat.count(name) > 1})
    wrong += [name for name in registration.names if name not in flat]
    if wrong:
        raise ConfigurationError(
            "buckets do not hold each trainable parameter exactly once",
            argument="buckets",
            expected="lists of parameters or of their names",
            seen=f"missing, repeated or unknown: {', '.join(wrong)}",
        )
    members = [[position[name] for name in bucket] for bucket in named if bucket]
    for bucket in members:
        kinds = {(registration.parameters[p].dtype, registration.parameters[p].device) for p in bucket}
        if len(kinds) > 1:
            raise ConfigurationError(
                "a bucket holds different kinds of parameters",
                argument="buckets",
                expected="one dtype and one device in a bucket",
                seen=", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds, key=str)),
            )
    return members


def check_place(buckets: Sequence[Bucket], parameters: Sequence[torch.Tensor], bucket_idx: int) -> None:
    """Check that ``parameters`` are those of the bucket in this place."""
    check_whole(0, bucket_idx=bucket_idx)
    there = buckets[bucket_idx].parameters if bucket_idx < len(buckets) else ()
    if [id(parameter) for parameter in parameters] != [id(parameter) for parameter in there]:
        raise ConfigurationError(
            "this bucket is not in this place",
            argument="bucket_idx",
            expected=f"the index of the bucket among {len(buckets)}",
            seen=bucket_idx,
        )


def foreign(tensor: object) -> ConfigurationError:
    """The error for a tensor that no algorithm exchanges."""
    shape = (
        f"{type(tensor).__name__} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
    )
    return ConfigurationError(
        "this tensor is no trainable parameter of the module",
        argument="param",
        expected="a parameter that the module had when it was wrapped, and that is not ignored",
        seen=shape,
    )


def unused(lacking: dict[int, list[str]]) -> ConfigurationError:
    """The error for parameters without a gradient, by rank."""
    seen = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in lacking.items())
    return ConfigurationError(
        f"parameters without a gradient in this backward pass: {seen}",
        argument="find_unused_parameters",
        expected="a gradient for every trainable parameter, or True",
        seen=False,
        advice="Pass find_unused_parameters=True, or freeze them with requires_grad_(False) on every rank.",
    )


def shared(name: str) -> ConfigurationError:
    """The error for a parameter of two wrapped models that are not one and the same."""
    return ConfigurationError(
        f"{name} is exchanged by the engine of another model, which has other parameters besides",
        argument="module",
        expected="parameters of one model",
        seen="parameters that two wrapped models share",
        advice="Wrap one module that contains both.",
    )


def twice(name: str) -> ConfigurationError:
    """The error for a parameter whose gradient was accumulated twice in one backward pass."""
    return ConfigurationError(
        f"the gradient of {name} was accumulated twice in one backward pass",
        argument="module",
        expected="one gradient for each parameter",
        seen="a second one after the first was taken for the exchange",
        advice="A parameter used in several reentrant checkpoints does that: use checkpoint(use_reentrant=False).",
    )


def not_formed() -> ConfigurationError:
    """The error for a step before there are buckets."""
    return ConfigurationError(
        "buckets have not been formed yet",
        argument="buckets",
        expected="initialize_buckets() after the first backward pass",
        seen="none",
    )


def changed_by_others() -> ConfigurationError:
    """The error for weights that no optimizer changed, while an exchange waited for the optimizers."""
    return ConfigurationError(
        "weights were changed between a backward pass and the step of the optimizer, and would be sent like that",
        argument="optimizers",
        expected="a step of one of the optimizers that the model was wrapped with",
        seen="weights that something else has changed",
        advice="Put all backward passes but the one that the optimizer steps with into no_sync(), as the first one of "
        "sharpness-aware minimization; and wrap the model with the optimizer whose step() is called.",
    )


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

"""What a communication hook remembers of each bucket, by parameter, because DDP forms its buckets anew."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.comm import Communicator
from bagua.errors import ConfigurationError
from bagua.primitives import MatrixBlock, ReducerMemory, SumReducer

__all__ = ["HookMemory"]

Tensors = dict[str, torch.Tensor]
Names = Mapping[int, str]


class _Place:
    """The memory of one bucket, and where its parameters lie in it.

    Args:
        memory: of a reducer.
        parameters: one after the other, without gaps.
    """

    def __init__(self, memory: ReducerMemory, parameters: Sequence[torch.Tensor]) -> None:
        self.memory = memory
        self.parameters = tuple(parameters)
        self.slices: dict[int, slice] = {}
        end = 0
        for parameter in parameters:
            self.slices[id(parameter)] = slice(end, end + parameter.numel())
            end += parameter.numel()

    @property
    def key(self) -> tuple[int, ...]:
        """Tells apart buckets."""
        return tuple(self.slices)

    def elementwise(self) -> Tensors:
        """State with one element for each element of the bucket."""
        state = self.memory.state
        return {key: value for key, value in state.items() if value.shape == (self.memory.numel,)}

    def part(self, parameter: int) -> Tensors:
        """The state of one parameter."""
        return {key: value[self.slices[parameter]] for key, value in self.elementwise().items()}

    def whole(self) -> Tensors:
        """State of the bucket as a whole."""
        elementwise = self.elementwise()
        return {key: value for key, value in self.memory.state.items() if key not in elementwise}


class HookMemory:
    """The memories of all buckets of a model.

    Args:
        reducer: whose they are.
    """

    def __init__(self, reducer: SumReducer) -> None:
        self._reducer = reducer
        self._places: dict[tuple[tuple[int, ...], torch.dtype], _Place] = {}
        self._parts: dict[int, Tensors] = {}
        self._wholes: dict[tuple[int, ...], Tensors] = {}

    def of(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], communicator: Communicator) -> ReducerMemory:
        """The memory for a bucket; a new one takes over what was remembered of its parameters.

        Args:
            flat: gradients of the bucket.
            parameters: whose gradients lie in ``flat``, one after the other.
            communicator: provides memory that it can exchange without a copy.
        """
        key = (tuple(map(id, parameters)), flat.dtype)
        if key not in self._places:
            place = _Place(self._reducer.memory(communicator, flat, _blocks(parameters)), parameters)
            assert sum(parameter.numel() for parameter in parameters) == flat.numel(), "DDP leaves no gaps"
            self._take_over(place)
            self._places[key] = place
        return self._places[key].memory

    def _take_over(self, place: _Place) -> None:
        for kind, former in list(self._places.items()):
            if not former.slices.keys().isdisjoint(place.slices):
                self._parts.update({parameter: former.part(parameter) for parameter in former.slices})
                self._wholes[former.key] = former.whole()
                del self._places[kind]
        for parameter in place.slices:
            own = place.part(parameter)
            for key, value in self._parts.pop(parameter, {}).items():
                own[key].copy_(value)
        for key, value in self._wholes.pop(place.key, {}).items():
            if place.memory.state[key].shape == value.shape:
                place.memory.state[key].copy_(value)

    def collect(self, names: Names) -> dict[str, Any]:
        """Copies of everything that is remembered.

        Args:
            names: of the parameters, by their ``id``.
        """
        parts, wholes = dict(self._parts), dict(self._wholes)
        for place in self._places.values():
            parts.update({parameter: place.part(parameter) for parameter in place.slices})
            wholes[place.key] = place.whole()
        _check_known(parts, names)
        return {
            "parameters": {names[one]: _copies(state) for one, state in parts.items() if state},
            "buckets": [
                {"names": [names[one] for one in key], **_copies(state)} for key, state in wholes.items() if state
            ],
        }

    def restore(self, remembered: Mapping[str, Any], names: Names) -> None:
        """Go on with what ``collect`` returned; buckets take it up when they are exchanged first.

        Args:
            remembered: from ``collect``.
            names: of the parameters, by their ``id``.
        """
        numbers = {name: number for number, name in names.items()}
        unknown = [name for name in remembered["parameters"] if name not in numbers]
        if unknown:
            raise ConfigurationError(
                "the saved state belongs to another model",
                argument="state_dict",
                expected=" or ".join(numbers),
                seen=", ".join(unknown),
            )
        self._places = {}
        self._parts = {numbers[name]: dict(state) for name, state in remembered["parameters"].items()}
        self._wholes = {
            tuple(numbers[name] for name in state["names"]): {
                key: value for key, value in state.items() if key != "names"
            }
            for state in remembered["buckets"]
        }


def _copies(state: Tensors) -> Tensors:
    return {key: value.clone() for key, value in state.items()}


def _check_known(parts: Mapping[int, Tensors], names: Names) -> None:
    if not names.keys() >= parts.keys():
        raise ConfigurationError(
            "this state belongs to another model",
            argument="module",
            expected="the model whose gradients were exchanged",
            seen=f"a model without {len(parts.keys() - names.keys())} of its parameters",
        )


def _blocks(parameters: Sequence[torch.Tensor]) -> list[MatrixBlock]:
    """The matrices among the gradients of a bucket; DDP lays each out like its parameter."""
    offsets = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    found = map(MatrixBlock.of, parameters, offsets)
    return [block for block in found if block is not None]

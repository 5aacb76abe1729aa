"""What a communication hook remembers of the buckets of DDP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from bagua.comm import Communicator
from bagua.engine import Remembered, collect, merged, renamed, restore
from bagua.primitives import MatrixBlock, ReducerMemory, SumReducer

__all__ = ["HookBuckets"]


class _HookBucket:
    """What is remembered of a bucket of DDP, which has its parameters one after the other, without gaps.

    Args:
        names: names of the parameters.
        parameters: parameters of the bucket.
        reducer: reducer of their gradients.
        memory: memory of the reducer.
    """

    label = ""

    def __init__(
        self, names: list[str], parameters: list[torch.Tensor], reducer: SumReducer, memory: ReducerMemory
    ) -> None:
        self.names = names
        self.reducer = reducer
        self.memory = memory
        self._shapes = [parameter.shape for parameter in parameters]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        parts = flat.split_with_sizes([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class HookBuckets:
    """What is remembered of all buckets of a model. DDP forms them anew; parameters are known by their ``id``."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[str, ...], torch.dtype], _HookBucket] = {}
        self._kept = collect(())
        #: Buckets of a saved state, as names, until gradients have been exchanged in them.
        self._saved: list[list[str]] = []

    @property
    def layout(self) -> list[list[str]]:
        """The parameters of each bucket, by their ``id``, in the order of their exchanges."""
        return [list(names) for names, _ in self._places]

    @property
    def awaits_layout(self) -> bool:
        """Whether the next step is to be exchanged in the buckets of a saved state."""
        return bool(self._saved)

    def take_layout(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Buckets of a saved state, made of ``parameters``; none if they are others. Once.

        A run that goes on has the buckets that DDP formed in its first step; one that resumes has yet to make it.
        """
        saved, self._saved = self._saved, []
        known = {str(id(one)): one for one in parameters}
        if sorted(name for names in saved for name in names) != sorted(known):
            return []
        return [[known[name] for name in names] for names in saved]

    def memory_of(
        self, flat: torch.Tensor, parameters: list[torch.Tensor], communicator: Communicator, reducer: SumReducer
    ) -> ReducerMemory:
        """The memory of a reducer for a bucket; a new one takes over what was remembered of its parameters."""
        names = [str(id(parameter)) for parameter in parameters]
        key = (tuple(names), flat.dtype)
        if key not in self._places or self._places[key].reducer != reducer:
            offsets = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
            blocks = [block for block in map(MatrixBlock.of, parameters, offsets) if block is not None]
            place = _HookBucket(names, parameters, reducer, reducer.memory(communicator, flat, blocks))
            former = [other for other in self._places if not set(names).isdisjoint(other[0])]
            self._kept = merged(self._kept, collect([self._places.pop(other) for other in former]))
            restore([place], self._kept)
            self._places[key] = place
        return self._places[key].memory

    def collect(self, names: Mapping[int, str]) -> Remembered:
        """Copies of everything that is remembered, by ``names``."""
        return renamed(
            merged(self._kept, collect(self._places.values())), {str(key): name for key, name in names.items()}
        )

    def restore(self, remembered: Remembered, names: Mapping[int, str], layout: Sequence[Sequence[str]]) -> None:
        """Go on with what ``collect`` returned; buckets take it up when they are exchanged first.

        Args:
            remembered: all that is remembered.
            names: names of the parameters, by their ``id``.
            layout: names of the parameters of each bucket.
        """
        keys = {name: str(key) for key, name in names.items()}
        self._kept = renamed(remembered, keys)
        self._places = {}
        self._saved = [[keys[name] for name in bucket if name in keys] for bucket in layout]

"""What a communication hook remembers of the buckets of DDP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from bagua.comm import Communicator
from bagua.engine import Remembered, collect, merged, renamed, restore
from bagua.primitives import MatrixBlock, ReducerMemory, SumReducer


class _HookBucket:
    """What is remembered of a bucket of DDP, which has its parameters one after the other, without gaps."""

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
        #: Buckets of a saved state, as names.
        self._restored: list[list[str]] = []
        #: Buckets other than those of DDP in which the next backward pass is exchanged, as names; none for DDP's own.
        self._awaited: list[list[str]] = []
        #: Complete backward passes since then, the buckets of the last one, and those of one that is under way.
        self._passes = 0
        self._last: list[list[str]] = []
        self._coming: list[list[str]] = []

    @property
    def layout(self) -> list[list[str]]:
        """The parameters of each bucket, by their ``id``, in which the next backward pass is to be exchanged."""
        return self._restored if self._restored and self._passes < 2 else self._last

    @property
    def awaits_layout(self) -> bool:
        """Whether this backward pass is to be exchanged in other buckets than those that DDP has."""
        return bool(self._awaited)

    def note(self, index: int, parameters: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Note a bucket that DDP hands over.

        Args:
            index: number of the bucket in its backward pass, from 0.
            parameters: parameters of the bucket.
            is_last: True for the last bucket of the pass.
        """
        if index == 0:
            self._coming = []
            if self._passes == 1 and not self._restored:
                self._awaited = self._last
        self._coming.append([str(id(parameter)) for parameter in parameters])
        if is_last:
            self._last, self._passes = self._coming, self._passes + 1

    def take_layout(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The buckets to exchange this backward pass in, made of ``parameters``; none if they are others. Once.

        DDP forms its buckets anew after the first pass of a process. A run that goes on has them; one that resumes
        has yet to make that pass. So the first pass after a load is exchanged in the buckets of the saved state.
        After the very first pass DDP's next buckets are not known, so the second pass takes those of the first.
        """
        saved, self._awaited = self._awaited, []
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
        self._restored = [[keys[name] for name in bucket if name in keys] for bucket in layout]
        self._awaited, self._passes, self._last = self._restored, 0, []

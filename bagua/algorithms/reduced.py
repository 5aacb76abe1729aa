"""What algorithms have in common that sum gradients with a reducer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl
from bagua.buckets import Bucket
from bagua.checks import check_flags, check_whole
from bagua.comm import Group, ProcessGroup, Work
from bagua.primitives import MatrixBlock, ReducerMemory, SumReducer, allreduce_sum, reducer_sum

__all__ = ["ReducedGradients", "ReducedGradientsImpl", "matrix_blocks", "padding"]


@dataclass(frozen=True)
class ReducedGradients(Algorithm):
    """Replace each gradient by what a reducer makes of its sum over all ranks; subclasses name the reducer.

    Args:
        hierarchical: sum inside each host in full precision, and use the reducer between hosts.
            With a single host, or a single rank on each, it is used between all ranks.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.
    """

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical, average=self.average)
        check_whole(0, warmup_steps=self.warmup_steps)
        _ = self.reducer  # Refuses options that it cannot use.

    @property
    def reducer(self) -> SumReducer:
        """What sums the gradients."""
        raise NotImplementedError


class ReducedGradientsImpl(AlgorithmImpl):
    """A subclass of ``ReducedGradients`` on a group."""

    options: ReducedGradients

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._reducer = self.options.reducer
        self._memories: weakref.WeakKeyDictionary[Bucket, ReducerMemory] = weakref.WeakKeyDictionary()

    def check_model(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Refuse parameters of a dtype that the reducer cannot sum."""
        for parameter in parameters.values():
            self._reducer.check_dtype(parameter.dtype)

    @property
    def gradient_scale(self) -> float:
        """Dividing before the sum keeps 16-bit gradients in range."""
        return 1.0 / self.process_group.size if self.options.average else 1.0

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """What the reducer remembers, for example the residual of error feedback."""
        gradients = bucket.allocate_gradients()
        memory = self._reducer.memory(bucket.communicator, gradients, matrix_blocks(bucket), padding(bucket))
        self._memories[bucket] = memory
        return memory.state

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Sum the gradients where they lie."""
        gradients, hierarchical = bucket.allocate_gradients(), self.options.hierarchical
        if step < self.options.warmup_steps:
            return allreduce_sum(gradients, group, hierarchical=hierarchical, async_op=True)
        memory = self._memories[bucket]
        memory.step, memory.loss_scale = step, self.loss_scale
        reducer_sum(gradients, group, self._reducer, memory, hierarchical=hierarchical)
        memory.clear_padding(gradients)
        return None

    def apply(self, bucket: Bucket, step: int) -> None:
        """Keep what the reducer remembers, unless the sum is not finite."""
        self._memories[bucket].settle(bucket.allocate_gradients())


def matrix_blocks(bucket: Bucket) -> list[MatrixBlock]:
    """The parameters of ``bucket`` that are matrices, as they lie in its flat memory."""
    found = map(MatrixBlock.of, bucket.gradient_views, bucket.offsets)
    return [block for block in found if block is not None]


def padding(bucket: Bucket) -> torch.Tensor | None:
    """Positions in the flat memory of ``bucket`` that belong to no parameter; None if there are none."""
    free = torch.ones(bucket.numel, dtype=torch.bool)
    for offset, parameter in zip(bucket.offsets, bucket.parameters, strict=True):
        free[offset : offset + parameter.numel()] = False
    return free.nonzero().view(-1).to(bucket.device) if free.any() else None

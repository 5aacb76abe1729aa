"""A reducer that sums a few elements, which all ranks draw alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bagua.checks import check_kind, check_numbers
from bagua.comm import Communicator
from bagua.primitives.memory import ReducerMemory
from bagua.primitives.reducers import SumReducer


@dataclass(frozen=True)
class RandomKReducer(SumReducer):
    """Sum a random choice of the elements exactly; the rest of the result is zero.

    All ranks draw the same positions from ``seed`` and the step, one from each of ``k`` parts of
    equal size, so no positions are sent, and an ordinary allreduce does the sum. Without
    error feedback the sums are multiplied by the size of their part, which makes the
    expected result exact; with it they are not.

    Args:
        ratio: ``k`` is this part of all elements, rounded up.
        seed: equal on all ranks.

    Raises:
        ConfigurationError: ``ratio`` is not in (0, 1].

    Example:
        >>> from bagua.comm import solo_group
        >>> communicator, tensor = solo_group().global_communicator, torch.ones(6)
        >>> reducer = RandomKReducer(ratio=0.5)
        >>> reducer.reduce(tensor, communicator, reducer.memory(communicator, tensor))
        >>> tensor.view(3, 2).sum(dim=1)
        tensor([2., 2., 2.])

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(lambda ratio: 0 < ratio <= 1, "a number above 0 and at most 1", ratio=self.ratio)
        check_kind(int, "a whole number", seed=self.seed)

    @property
    def contraction(self) -> float | None:
        """All that is large may be left out."""
        return 0.0

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``."""
        if not flat.numel():
            return
        positions, sizes = self._draw(flat.numel(), memory.step)
        positions = positions.to(flat.device)
        # The last element tells everyone of values that are not finite and were not chosen.
        chosen = memory.buffer("chosen", len(positions) + 1, flat.dtype)
        torch.index_select(flat, 0, positions, out=chosen[:-1])
        chosen[-1] = flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)) * 0
        if remainder is not None:
            remainder.copy_(flat).index_fill_(0, positions, 0)
        communicator.allreduce(chosen)
        flat.fill_(chosen[-1])
        values = chosen[:-1] if remainder is not None else chosen[:-1] * sizes.to(flat.device, flat.dtype)
        flat.index_copy_(0, positions, values)

    def _draw(self, numel: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions, in rising order, and the size of the part that each was drawn from."""
        parts = math.ceil(self.ratio * numel)
        bounds = torch.arange(parts + 1) * numel // parts
        sizes = bounds.diff()
        # The generator looks at 32 bits only.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**32)
        offsets = (torch.rand(parts, dtype=torch.float64, generator=generator) * sizes).long()
        return bounds[:-1] + offsets, sizes

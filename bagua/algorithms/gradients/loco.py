"""Synchronous training that sends four bits for each element of a gradient, and remembers a byte of what they lose."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.compression import Int4
from bagua.primitives import AveragedFeedback, ScatterGatherReducer, SumReducer


@dataclass(frozen=True)
class LoCoAlgorithm(ReducedGradients):
    """Replace each gradient by its mean in four bits; a running average of what they lose is added to the next ones.

    ``h_i = g_i + e_i``; ``g_i <- Q((1 / n) sum_j Q(h_j))``; ``e_i <- (1 - averaging) e_i + averaging (h_i - Q(h_i))``,
    where ``Q`` is ``Int4`` and ``e_i`` is remembered in eight bits. What the second ``Q`` loses goes to the ``e_i`` of
    the rank that added up. See ``AveragedFeedback``. A sixth of the bytes of a float32 allreduce; with large blocks an
    eighth, which loses more.

    With ``averaging`` below 1, as in the paper, ``e_i`` forgets slowly. On the tasks of the documentation 1 lost less.

    Args:
        hierarchical: sum inside each host in full precision, and round between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        averaging: weight of what was lost last, above 0 and at most 1.
        reset_every: steps after which ``e_i`` begins at zero again.
        block_numel: elements that share 16 values, a multiple of 8.

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> LoCoAlgorithm(reset_every=1000).reset_every
        1000

    Paper: Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", TPAMI 2025.
    """

    warmup_steps: int = field(default=100, kw_only=True)
    averaging: float = 1.0
    reset_every: int = 512
    block_numel: int = 512

    @property
    def reducer(self) -> SumReducer:
        """Scatter and gather of four bits, with averaged error feedback."""
        return AveragedFeedback(ScatterGatherReducer(Int4(self.block_numel)), self.averaging, self.reset_every)


LoCoAlgorithmImpl = bound_form(LoCoAlgorithm)

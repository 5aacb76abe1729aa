"""Synchronous training that sends a byte, four bits or one bit for each element of a gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.compression import Int4, MinMaxUInt8, Sign
from bagua.primitives import AllGatherReducer, AveragedFeedback, ErrorFeedback, ScatterGatherReducer, SumReducer


@dataclass(frozen=True)
class ByteGradAlgorithm(ReducedGradients):
    """Replace each gradient by its mean over all ranks, rounded twice to 8 bits: ``g_i <- Q((1 / n) sum_j Q(g_j))``.

    ``Q`` is ``MinMaxUInt8``: one byte for each element and one range for each 2048 of them. A
    quarter of the bytes of a float32 allreduce, for an error of about 1 % of a gradient.

    Args:
        hierarchical: sum inside each host in full precision, and round between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.

    Example:
        >>> ByteGradAlgorithm(hierarchical=False)
        ByteGradAlgorithm(hierarchical=False, average=True, warmup_steps=0)

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022.
    """

    @property
    def reducer(self) -> SumReducer:
        """Scatter-gather of bytes."""
        return ScatterGatherReducer(MinMaxUInt8())


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


@dataclass(frozen=True)
class SignSGDAlgorithm(ReducedGradients):
    """Replace each gradient by the mean of scaled signs; what is lost is added to the next gradient.

    ``x_i = g_i + e_i``; ``g_i <- (1 / n) sum_j Sign(x_j)``; ``e_i <- x_i - Sign(x_i)``, where ``Sign`` is the sign
    times the mean magnitude of each ``block_numel`` elements. Every rank sends one bit for each element, and a number
    for each block, to each of the others.

    With the defaults it keeps the loss of full gradients at their learning rate. Larger blocks send up to a fifth less,
    and lose more; so does a shorter warm-up.

    Args:
        hierarchical: sum inside each host in full precision, and take signs between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        block_numel: elements that share a magnitude, a multiple of 8.

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> SignSGDAlgorithm(block_numel=256)
        SignSGDAlgorithm(hierarchical=True, average=True, warmup_steps=150, block_numel=256)

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    warmup_steps: int = field(default=150, kw_only=True)
    block_numel: int = 64

    @property
    def reducer(self) -> SumReducer:
        """Allgather of signs with error feedback."""
        return ErrorFeedback(AllGatherReducer(Sign(self.block_numel)))


ByteGradAlgorithmImpl = bound_form(ByteGradAlgorithm)
LoCoAlgorithmImpl = bound_form(LoCoAlgorithm)
SignSGDAlgorithmImpl = bound_form(SignSGDAlgorithm)

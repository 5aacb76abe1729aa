"""Adam and LAMB that, after a warm-up, exchange their momentum in one bit for each element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.q_adam import FrozenAdam
from bagua.compression import Sign
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.primitives import ErrorFeedback, ScatterGatherReducer, SumReducer


@dataclass(frozen=True)
class OneBitAdamAlgorithm(FrozenAdam):
    """Adam with exact mean gradients during a warm-up, and with one bit for each element of the momenta after it.

    In a step after the warm-up, rank ``i`` adds its gradient to the momentum, which all have in common:
    ``m_i = beta1 * m + (1 - beta1) * g_i + e_i``. One rank for each slice sums: ``y = (1 / n) sum_i S(m_i)``, and the
    new momentum is ``m' = S(y)``, with ``S`` = ``Sign``: a sign for each element, the mean magnitude for each block.
    What the first ``S`` loses stays in ``e_i``; what the second one does, in that of the rank that summed. The gradient
    of each parameter then becomes the one that leads to ``m'``, as in ``QAdamAlgorithm``.

    A 26th of the bytes of a float32 allreduce; with large blocks a 32nd, which loses more. The second moment is
    frozen after the warm-up of the optimizer, which should last until it has settled: for 15 to 25 % of all steps, say
    the authors.

    Args:
        q_adam_optimizer: the optimizer of the model; None finds it. See ``QAdamAlgorithm``.
        hierarchical: sum inside each host in full precision, and compress between hosts only.
        block_numel: elements that share a magnitude, a multiple of 8.

    Raises:
        InvalidTypeError: an option of a wrong type.
        ConfigurationError: ``block_numel`` is no positive multiple of 8; when a model is wrapped: a parameter that no
            ``QAdamOptimizer`` owns, or several with different warm-ups.

    Example:
        >>> OneBitAdamAlgorithm(hierarchical=False)
        OneBitAdamAlgorithm(hierarchical=False, block_numel=64)

    Paper: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
    2021.
    """

    block_numel: int = 64

    @property
    def reducer(self) -> SumReducer:
        """Scatter and gather of signs with error feedback."""
        return ErrorFeedback(ScatterGatherReducer(Sign(self.block_numel)))


@dataclass(frozen=True)
class OneBitLambAlgorithm(OneBitAdamAlgorithm):
    """LAMB with exact mean gradients during a warm-up, and with one bit for each element of the momenta after it.

    As ``OneBitAdamAlgorithm``, with the momentum of each tensor multiplied by a number first that makes the root mean
    squares of all of them equal, so that none is drowned where tensors share a magnitude. The numbers are those of the
    end of the warm-up. ``OneBitLambOptimizer`` says what becomes of the trust ratios.

    Args:
        q_adam_optimizer: the optimizer of the model, a ``OneBitLambOptimizer``; None finds it. See ``QAdamAlgorithm``.
        hierarchical: sum inside each host in full precision, and compress between hosts only.
        block_numel: elements that share a magnitude, a multiple of 8.

    Raises:
        InvalidTypeError: an option of a wrong type.
        ConfigurationError: ``block_numel`` is no positive multiple of 8; when a model is wrapped: a parameter that no
            ``OneBitLambOptimizer`` owns, or several with different warm-ups.

    Example:
        >>> OneBitLambAlgorithm(hierarchical=False)
        OneBitLambAlgorithm(hierarchical=False, block_numel=64)

    Paper: Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
    Speed", 2021.
    """

    optimizer_class: ClassVar[type[QAdamOptimizer]] = OneBitLambOptimizer


OneBitAdamAlgorithmImpl = bound_form(OneBitAdamAlgorithm)
OneBitLambAlgorithmImpl = bound_form(OneBitLambAlgorithm)

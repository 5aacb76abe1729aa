"""LAMB that, after a warm-up, exchanges its momentum in one bit for each element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.one_bit import OneBitAdamAlgorithm
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer


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


OneBitLambAlgorithmImpl = bound_form(OneBitLambAlgorithm)

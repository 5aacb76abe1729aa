"""Synchronous training that sends the largest elements of a gradient only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.fields import Model
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.checks import check_numbers, check_whole
from bagua.compression import TopK
from bagua.errors import ConfigurationError
from bagua.primitives import ErrorFeedback, MomentumCorrection, SparseReducer, SumReducer

#: Before ``ratio`` is reached, so many times is the part that is sent lowered, from this one.
_STAGES = 4
_FIRST_RATIO = 0.25


@dataclass(frozen=True)
class TopKAlgorithm(ReducedGradients):
    """Replace each gradient by the mean of everyone's largest elements; the others are added to the next gradient.

    ``x_i = g_i + e_i``; ``g_i <- (1 / n) sum_j TopK(x_j)``; ``e_i <- x_i - TopK(x_i)``, where ``TopK`` keeps the part
    ``ratio`` of a bucket's elements that is largest in magnitude, and makes the others zero.

    With the defaults it keeps the loss of full gradients at their learning rate, after some hundred steps in which it
    sends more. A lower ``ratio`` sends less, and loses more; so does a shorter beginning.

    With ``momentum`` (deep gradient compression) momenta are accumulated in place of gradients, and that of an element
    is zero again when it was sent; see ``bagua.primitives.MomentumCorrection``. Use an optimizer without momentum then.

    Args:
        hierarchical: sum inside each host in full, and choose elements between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        ratio: part of the elements that each rank sends, above 0 and at most 1.
        momentum: from 0 and less than 1; None for that of the optimizer.
        clip_norm: with ``momentum``, the largest norm of a rank's share of the mean gradient of a bucket; None for any.
        density_steps: so many steps after the warm-up send more: in four equal stages from a quarter of all elements,
            each by the same factor fewer, to ``ratio``.

    Raises:
        ConfigurationError: an option out of its range, or ``clip_norm`` without ``momentum``.

    Example:
        >>> TopKAlgorithm(ratio=0.25 / 4**4, momentum=0.9, density_steps=400).phases
        ('warm-up', 0.25, 0.0625, 0.015625, 0.00390625, 'reduced')

    Papers: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Lin et al., "Deep Gradient
    Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
    """

    warmup_steps: int = field(default=100, kw_only=True)
    ratio: float = 0.02
    momentum: float | None = None
    clip_norm: float | None = None
    density_steps: int = 300

    def __post_init__(self) -> None:
        check_whole(0, density_steps=self.density_steps)
        if self.momentum is None and self.clip_norm is not None:
            raise ConfigurationError(
                "only gradients that are accumulated here are clipped here",
                argument="clip_norm",
                expected="None, or a momentum",
                seen=self.clip_norm,
                advice="Use torch.nn.utils.clip_grad_norm_, or momentum=0.0.",
            )
        check_numbers(lambda ratio: 0 < ratio <= 1, "a number above 0 and at most 1", ratio=self.ratio)
        super().__post_init__()

    @property
    def reducer(self) -> SumReducer:
        """The largest elements with error feedback."""
        return self._reducer(self.ratio)

    def _reducer(self, ratio: float) -> SumReducer:
        reducer = SparseReducer(TopK(ratio))
        if self.momentum is None:
            return ErrorFeedback(reducer)
        return MomentumCorrection(reducer, self.momentum, self.clip_norm)

    def reducer_in(self, phase: Hashable) -> SumReducer | None:
        """Denser in the first phases after the warm-up."""
        return self._reducer(phase) if isinstance(phase, float) else super().reducer_in(phase)

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, the parts that are sent in the stages after it, and what comes then."""
        *warm, last = super().phases
        return (*warm, *self._stages, last)

    @property
    def _stages(self) -> tuple[float, ...]:
        if not self.density_steps or self.ratio >= _FIRST_RATIO:
            return ()
        return tuple(_FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** (stage / _STAGES) for stage in range(_STAGES))

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        done, stages = step - self.warmup_steps, self._stages
        if done < 0 or done >= self.density_steps or not stages:
            return super().phase(step, model)
        return stages[done * _STAGES // self.density_steps]


TopKAlgorithmImpl = bound_form(TopKAlgorithm)

"""Training alone, with an outer step along the largest elements of what was learned."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import WHOLE, Every, Exchange
from bagua.algorithms.exchanges.outer import Outer, OuterStep, Retain
from bagua.algorithms.exchanges.values import Difference
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.checks import check_choice, check_numbers
from bagua.compression import BlockTopK
from bagua.errors import ConfigurationError
from bagua.primitives import ErrorFeedback, SparseReducer, SumReducer

Average = Literal["all", "contributors"]
Residual = Literal["weights"]


@dataclass(frozen=True)
class SparseLoCoAlgorithm(LocalUpdates):
    """Step an anchor, equal on all ranks, with the largest elements of what each learned.

    After every ``sync_every``-th step, with ``b`` = ``error_feedback``: ``e_i <- b e_i + Theta - x_i``;
    ``q_i = Q(e_i)``; ``e_i <- e_i - q_i``; ``Theta <- Theta - outer_lr A``; the weights then become the anchor
    ``Theta``. ``Q`` keeps ``kept`` of each ``block_numel`` elements, in few bits; ``A`` is a mean of ``q_i``.
    Between these steps nothing is sent. Error feedback takes the place of an outer momentum.

    The paper has ``sync_every=30``, ``kept=32`` and ``average="all"``, for runs of many thousand steps. The defaults
    suit some hundred.

    Blocks are elements that follow each other in flat memory; in the paper they are tiles of 64 x 64 of each matrix.

    Args:
        sync_every: steps from one exchange to the next.
        outer_lr: the learning rate of the anchor, above 0.
        error_feedback: part of a residual that is kept until the next exchange, above 0 and at most 1. ``weights``:
            what a rank does not send stays in its weights instead, so that nothing it has learned is undone, and all of
            it is in the mean that ``bagua_finish()`` makes. Needs ``hierarchical=False``, and takes no ``inner``.
        block_numel: elements among which the largest are chosen, a multiple of 8.
        kept: how many of them.
        value_bits: bits of each kept value: 8, 2, or None for the values as they are.
        average: ``contributors``: each element is the mean over those ranks that sent it. ``all``: elements that a rank
            does not send count as zero, as in the paper; steps are up to ``n`` times shorter then.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        average_buffers: take the mean of floating-point buffers, too, after each ``sync_every``-th step.
        hierarchical: sum inside each host first, with all bits.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``; see ``LocalUpdates``.
        pace: ``equal``, or between islands ``own``: each makes the steps that it can; see ``LocalUpdates``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.

    Example:
        >>> SparseLoCoAlgorithm(30, kept=64).outer_exchange.when
        Every(steps=30, offset=0)

    Paper: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
    """

    sync_every: int = 10
    _: KW_ONLY
    start_after: int = 100
    outer_lr: float = 1.0
    error_feedback: float | Residual = 0.95
    block_numel: int = 4096
    kept: int = 256
    value_bits: int | None = 2
    average: Average = "contributors"

    def __post_init__(self) -> None:
        check_numbers(lambda rate: rate > 0, "a number above 0", outer_lr=self.outer_lr)
        if self.error_feedback != "weights":
            expected = "a number above 0 and at most 1, or 'weights'"
            check_numbers(lambda part: 0 < part <= 1, expected, error_feedback=self.error_feedback)
        elif self.hierarchical or self.inner is not None:
            name, expected = ("inner", "None") if self.inner is not None else ("hierarchical", "False")
            raise ConfigurationError(
                "with error_feedback='weights' each rank exchanges for itself",
                argument=name,
                expected=expected,
                seen=getattr(self, name),
            )
        check_choice(get_args(Average), average=self.average)
        super().__post_init__()

    @property
    def outer_exchange(self) -> Exchange:
        """The largest elements of the difference, and a step of the anchor."""
        optimizer = Outer(torch.optim.SGD, lr=self.outer_lr)
        if self.error_feedback == "weights":
            how, step = self.mean(self._reducer), OuterStep(optimizer, Retain())
        else:
            how, step = self.mean(ErrorFeedback(self._reducer, self.error_feedback)), OuterStep(optimizer)
        return Exchange(Difference(), Every(self.sync_every), how, step, parts=WHOLE)

    @property
    def is_hierarchical(self) -> bool | None:
        """Not where each rank keeps what it has not sent."""
        return None if self.error_feedback == "weights" else super().is_hierarchical

    @property
    def _reducer(self) -> SumReducer:
        codec = BlockTopK(self.block_numel, self.kept, self.value_bits)
        return SparseReducer(codec, contributors=self.average == "contributors")


SparseLoCoAlgorithmImpl = bound_form(SparseLoCoAlgorithm)

"""Training alone, with the mean of all weights every so often."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import WHOLE, Every, Exchange
from bagua.algorithms.exchanges.values import Replace, Weights
from bagua.algorithms.local.diloco import DiLoCoAlgorithm
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.compression import Codec, as_codec


@dataclass(frozen=True)
class LocalSGDAlgorithm(LocalUpdates):
    """Take the mean of the weights after every ``sync_every``-th step: ``x_i <- (1 / n) sum_j x_j``.

    Between these steps nothing is sent. What optimizers remember stays on its rank. With ``start_after`` it is
    post-local SGD; after that, steps are counted anew. With ``codec`` or ``overlap``, ranks send what they learned
    since the last mean, and remember that mean: a copy of the weights.

    Args:
        sync_every: steps from one mean to the next.
        codec: codec that what was learned is sent in, as ``Float16()``, or its name, as ``"int4"``; None for all bits.
        overlap: steps from the start of an exchange to its end; less than ``sync_every``. Training goes on meanwhile,
            and nothing that is learned meanwhile is lost.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        average_buffers: take the mean of floating-point buffers, too, after each ``sync_every``-th step.
        hierarchical: sum inside each host first.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``; see ``LocalUpdates``.
        pace: ``equal``, or between islands ``own``: each makes the steps that it can; see ``LocalUpdates``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.

    Example:
        >>> LocalSGDAlgorithm(sync_every=16).outer_exchange.when
        Every(steps=16, offset=0)

    Papers: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR 2020.
    """

    _: KW_ONLY
    codec: Codec | str | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", as_codec(self.codec))
        super().__post_init__()

    @property
    def outer_exchange(self) -> Exchange:
        """The mean of the weights takes their place; or that of differences is a whole step of the last mean."""
        if self.codec is None and self.overlap == 0:
            return Exchange(Weights(), Every(self.sync_every), self.mean(), Replace(), parts=WHOLE)
        return DiLoCoAlgorithm(
            self.sync_every,
            outer="sgd",
            outer_lr=1.0,
            outer_momentum=0.0,
            overlap=self.overlap,
            mix="add" if self.overlap else "blend",
            codec=self.codec,
            hierarchical=self.hierarchical,
            inner=self.inner,
        ).outer_exchange


LocalSGDAlgorithmImpl = bound_form(LocalSGDAlgorithm)

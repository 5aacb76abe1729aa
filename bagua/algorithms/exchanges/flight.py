"""One start of an exchange, on its way from what is sent to what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bagua.algorithms.exchanges.model import Model
from bagua.buckets import Bucket
from bagua.primitives import ReducerMemory


class Flight:
    """One start of one exchange, for one bucket of parameters. Made, kept and saved by the engine.

    Attributes:
        step: number of the training step in which it started, from 0.
        t: number of that step in its phase, from 1.
        round: how many times this exchange has started in its phase, this time included.
        ranks: how many contributions like this one make one mean; see ``How.ranks``.
        loss_scale: factor by which the loss was multiplied in that step; 1.0 without a ``GradScaler``, and where no
            gradients are sent.
        scale: factor on what is sent; see ``How.scale``.
        rescale: at the fold, what brings gradients of that step to the loss scale of this one.
        early: at the fold, whether training was interrupted before its time.
        finite: at the fold, whether the results of the whole part are finite; looked at for ``Then.whole``, and where
            all ranks get the same weights.
        diverged: True if something of the same model that other ranks hold was not finite when it was sent.
        bucket: bucket of the parameters.
        memory: state that is remembered of them, and buffers.
        reads: names of what the exchange sends; see ``What.reads``.
        model: names, parameters and optimizers.
        flat: values to send, laid out like the bucket; after ``How.run`` the result.
        unfilled: writes ``flat``, which nobody has done yet; None otherwise. See ``Then.steps_toward_weights``.
        sent: a copy of what was sent, before the factor, if ``Then.keeps_sent``.
        lost: after ``How.run`` what was lost of what this rank sent, with the factor, if ``Then.keeps_lost``.
        prepared: return value of ``How.prepare``.
        wait: ends ``How.run``.
    """

    __slots__ = (
        *(
            "bucket",
            "diverged",
            "early",
            "finite",
            "flat",
            "loss_scale",
            "lost",
            "memory",
            "model",
            "prepared",
            "ranks",
            "reads",
        ),
        *("rescale", "round", "scale", "sent", "step", "t", "unfilled", "wait"),
    )

    def __init__(
        self,
        *,
        step: int,
        t: int,
        round: int,  # noqa: A002 - the word of topologies
        ranks: float,
        loss_scale: float,
        scale: float,
        bucket: Bucket,
        memory: ReducerMemory,
        model: Model,
        flat: torch.Tensor,
        reads: frozenset[str] = frozenset(),
        prepared: Any = None,
        wait: Callable[[], object],
    ) -> None:
        self.step, self.t, self.round = step, t, round
        self.ranks = ranks
        self.loss_scale = loss_scale
        self.scale = scale
        self.rescale = 1.0
        self.early = False
        self.finite = True
        self.diverged = False
        self.bucket = bucket
        self.memory = memory
        self.model = model
        self.flat = flat
        self.unfilled: Callable[[Flight], None] | None = None
        self.reads = reads
        self.sent: torch.Tensor | None = None
        self.lost: torch.Tensor | None = None
        self.prepared = prepared
        self.wait = wait

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """What is remembered, by name."""
        return self.memory.state

    def is_finite(self) -> bool:
        """Whether ``flat`` has no Inf or NaN; waits for the device."""
        if self.unfilled is not None:
            # If even the squares of the weights are finite, so are differences between them and an anchor.
            if all(math.isfinite(torch.dot(weights, weights)) for weights in self.bucket.memory()):
                return True
            self.unfilled(self)
            self.unfilled = None
        total = self.flat.sum(dtype=torch.promote_types(self.flat.dtype, torch.float32))
        return bool(total.isfinite()) or bool(self.flat.isfinite().all())  # A sum may overflow.

    def scratch(self, name: str) -> torch.Tensor:
        """Memory like ``flat``, whose contents do not matter."""
        return self.memory.buffer(name, self.flat.numel(), self.flat.dtype)

    def weights(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the weights into ``flat``."""
        return self.bucket.read_weights(flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``."""
        return self.bucket.views(flat)

    def learning_rates(self) -> list[float]:
        """For each parameter the learning rate of its optimizer in the step that the exchange follows.

        Only for ``Then.reads_rates``. 0.0 where there is no optimizer.
        """
        return [self.model.rate_of(parameter) for parameter in self.bucket.parameters]

"""Asynchronous model averaging: every rank trains at its own pace; weights are averaged in the background."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua.algorithms.averager import Averager
from bagua.algorithms.base import Algorithm, AlgorithmImpl
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, How
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.values import Add, Gradients, Mean, Replace, Weights
from bagua.buckets import Bucket
from bagua.checks import check_choice, check_numbers, check_whole
from bagua.comm import Group, ProcessGroup
from bagua.errors import ConfigurationError


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Let every rank train at its own pace, and average the weights in the background.

    From time to time each rank ``i`` puts down a copy ``s_i`` of its weights and trains on. The mean of all copies is
    formed in the background, and at one of its next steps each rank takes it in: ``x_i <- x_i + (mean_j s_j - s_i)``.
    What it has learned meanwhile is kept.

    ``model.bagua_algorithm.abort(model)`` ends averaging, with the same weights on all ranks.

    Args:
        peer_selection_mode: ``all``: all ranks take part in each average.
        sync_interval_ms: time between two averages.
        warmup_steps: steps of gradient allreduce before that.

    Raises:
        ConfigurationError: a value that makes no sense.

    Example:
        >>> AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=10).peer_selection_mode
        'all'

    Paper: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018;
    Stich, Local SGD converges fast and communicates little, 2019.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_choice(("all",), peer_selection_mode=self.peer_selection_mode)
        check_numbers(lambda time: time >= 0, "milliseconds >= 0", sync_interval_ms=self.sync_interval_ms)
        check_whole(0, warmup_steps=self.warmup_steps)

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, if there is one, and averaging."""
        return ("warm-up", "averaging") if self.warmup_steps else ("averaging",)

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        return "warm-up" if step < self.warmup_steps else "averaging"

    def exchanges(self, phase: Hashable = "averaging") -> tuple[Exchange, ...]:
        """Gradients in the warm-up, weights between steps after it."""
        if phase == "warm-up":
            return (Exchange(Gradients(), Every(), Mean(), Replace()),)
        return (Exchange(Weights(), Every(), BackgroundMean(), Add(), at="safe"),)


@dataclass(frozen=True)
class BackgroundMean(How):
    """A mean of copies that is formed beside the steps; see ``bagua.algorithms.averager``."""

    lockstep: ClassVar[bool] = False

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Never called: the bound form does it."""
        raise AssertionError("exchanges in the background have no flights")


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl, declaration=AsyncModelAverageAlgorithm):
    """``AsyncModelAverageAlgorithm`` on a group."""

    options: AsyncModelAverageAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._averager: Averager | None = None
        self._buckets: list[Bucket] = []
        self._paused = False
        #: The step that was begun last.
        self._step = -1

    def abort(self, bagua_module: torch.nn.Module) -> None:
        """End averaging, with the same weights on all ranks. Every rank calls it when it has come to its end.

        It waits until all ranks have called it. Meanwhile this rank's weights take part in averages as they are, so no
        rank that still trains is held up. When all have come, the mean of all takes the place of the weights of each.
        Calling it again does nothing; nor does calling it in the warm-up, in which all weights are equal.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            PeerLostError: a rank died, or has left without calling this.
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        in_warm_up = self._step + 1 < self.options.warmup_steps
        if self._averager is not None and not self._paused and not in_warm_up:
            self._averager.stop(self._buckets, average=True)
        self._paused = True

    def resume(self, bagua_module: torch.nn.Module) -> None:
        """Average again, after ``abort``. Every rank calls it; averages are formed again when all have trained on.

        Args:
            bagua_module: the model that this algorithm trains.

        Raises:
            PeerLostError: a rank died, or has left.
            ConfigurationError: another algorithm trains this model.
        """
        self._check(bagua_module)
        if self._averager is not None:
            self._averager.check(training=False)
        self._paused = False

    def _check(self, bagua_module: torch.nn.Module) -> None:
        if getattr(bagua_module, "bagua_algorithm", None) is not self:
            raise ConfigurationError(
                "this is not the model that is trained here",
                argument="bagua_module",
                expected="the model that was wrapped: model.bagua_algorithm.abort(model)",
                seen=type(bagua_module).__name__,
            )

    # What the engine tells.

    def attach(self, buckets: Sequence[Bucket], group: ProcessGroup, step: int) -> None:
        """See ``AlgorithmImpl``."""
        if group.size == 1:
            return
        if self._averager is None:
            self._averager = Averager(group, self.options.sync_interval_ms / 1e3)
        self._averager.lay_out_anew()
        self._buckets, self._step = list(buckets), step - 1

    def safe_point(self, step: int) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is None:
            return
        self._averager.check(training=True)
        if step != self._step and not self._paused and step >= self.options.warmup_steps:
            self._averager.safe_point(self._buckets)
        self._step = step

    def settle(self) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is not None:
            self._averager.stop(self._buckets, average=False)

    def close(self) -> None:
        """See ``AlgorithmImpl``."""
        if self._averager is not None:
            self._averager.leave()

"""The mean of all ranks' weights, for an evaluation or for good."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from typing_extensions import Self

from bagua.algorithms import Exchange
from bagua.engine.reducer import Reducer
from bagua.errors import ConfigurationError


class GlobalAverage:
    """The model holds the mean of all ranks; at the end of a ``with`` block, its own weights again.

    Made by ``bagua_global_average()`` and ``DecentralizedDataParallel.global_avg()``. If it is neither used in a
    ``with`` block nor told to ``restore``, the mean stays, and what ranks had sent each other before
    is not mixed in any more.

    Args:
        reducer: reducer of the model.
        exchanges: exchanges that make the means; see ``Algorithm.closing``.

    Attributes:
        distance: the Euclidean distance of this rank's trainable parameters from the mean;
            also ``float(average)``.
    """

    def __init__(self, reducer: Reducer, exchanges: Sequence[Exchange]) -> None:
        self._reducer = reducer
        self._step = reducer.phases.ending.merged_at = reducer.step
        reducer.formation.failure.check()
        self._suspended = reducer.scheduler.suspend()
        self._layout = reducer.buckets
        trained = list(reducer.formation.registration.parameters)
        held = reducer.formation.model.buffers() if any("buffers" in one.needs for one in exchanges) else {}
        self._tensors: list[torch.Tensor] = [*trained, *held.values()]
        self._others = self._means(exchanges)
        self.distance = _distance(self._tensors[: len(trained)], self._others[: len(trained)])
        self._swap()

    @torch.no_grad()
    def _means(self, exchanges: Sequence[Exchange]) -> list[torch.Tensor]:
        """What ``exchanges`` leave in the model, which then has its own again, also after an error."""
        formation, own = self._reducer.formation, [tensor.detach().clone() for tensor in self._tensors]
        try:
            formation.scheduler.once(exchanges, formation.model, formation.options, formation.phases.clock)
            return [tensor.detach().clone() for tensor in self._tensors]
        finally:
            for tensor, kept in zip(self._tensors, own, strict=True):
                tensor.copy_(kept)

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, other in zip(self._tensors, self._others, strict=True):
            before = tensor.detach().clone()
            tensor.copy_(other)
            other.copy_(before)

    def restore(self) -> None:
        """Give the model its own weights back, and the exchanges that were under way. Once; later calls do nothing.

        Raises:
            ConfigurationError: the mean was trained on since.
        """
        if not self._others:
            return
        if self._reducer.step != self._step:
            self._others = []
            raise ConfigurationError(
                "the mean was trained on, so the weights from before cannot be restored",
                argument="average",
                expected="no training step before restore()",
                seen=f"{self._reducer.step - self._step} steps",
                advice="To go on from the mean, call bagua_finish(), or global_avg() without `with`.",
            )
        self._swap()
        self._others = []
        if self._reducer.buckets is self._layout:
            self._reducer.scheduler.resume(self._suspended)

    def __float__(self) -> float:
        return self.distance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"GlobalAverage(distance={self.distance:.6g})"


def _distance(parameters: list[torch.Tensor], means: list[torch.Tensor]) -> float:
    squares = [
        torch.linalg.vector_norm(parameter.detach() - mean).double().square().cpu()
        for parameter, mean in zip(parameters, means, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

"""Pauses of a training, in which weights are looked at: ranks owe each other nothing then, and averages rest."""

from __future__ import annotations

from typing import Any

from bagua.algorithms import AsyncModelAverageAlgorithmImpl


def pause(model: Any) -> None:
    """End what ranks owe each other; averages in the background end with equal weights. Collective, and idempotent.

    Args:
        model: model that has an engine.
    """
    model._bagua_engine.reducer.after_optimizers()  # noqa: SLF001 - ours
    if averaging := _averaging_of(model):
        averaging.abort(model)


def go_on(model: Any) -> None:
    """Let averages in the background go on, after ``pause``. Collective."""
    if averaging := _averaging_of(model):
        averaging.resume(model)


def _averaging_of(model: Any) -> AsyncModelAverageAlgorithmImpl | None:
    bound = model.bagua_algorithm
    return bound if isinstance(bound, AsyncModelAverageAlgorithmImpl) else None

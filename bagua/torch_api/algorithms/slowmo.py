"""``bagua.torch_api.algorithms.slowmo``: training alone for many steps."""

from __future__ import annotations

from bagua.algorithms import SlowMoAlgorithm, SlowMoAlgorithmImpl, SlowStep

__all__ = ["SlowMoAlgorithm", "SlowMoAlgorithmImpl", "SlowStep"]

"""What algorithms have in common whose exchange makes the direction of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.exchanges.values import Mean

__all__ = ["MeanOfAll"]


@dataclass(frozen=True)
class MeanOfAll(Mean):
    """``Mean`` by a reducer that does more than to add up, so one rank alone runs it as well."""

    alone: ClassVar[bool] = True

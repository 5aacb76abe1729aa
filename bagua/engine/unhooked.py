"""Engines that are not found by looking at the hooks of a parameter."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

Engine = TypeVar("Engine")


class WithoutHooks(Generic[Engine]):
    """Engines that have parameters, but no hooks on each of them. It does not keep them alive.

    Args:
        parameters_of: an engine.
    """

    def __init__(self, parameters_of: Callable[[Engine], Iterable[torch.Tensor]]) -> None:
        self._parameters_of = parameters_of
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._guard = threading.Lock()

    def add(self, engine: Engine) -> None:
        """This one has none from now on."""
        with self._guard:
            self._engines.add(engine)

    def discard(self, engine: Engine) -> None:
        """This one has hooks, or is detached. Idempotent."""
        with self._guard:
            self._engines.discard(engine)

    def by_parameter(self) -> dict[int, list[Engine]]:
        """The engines of each parameter, by its ``id``."""
        with self._guard:
            engines = list(self._engines)
        found: dict[int, list[Engine]] = {}
        for engine in engines:
            for parameter in self._parameters_of(engine):
                found.setdefault(id(parameter), []).append(engine)
        return found

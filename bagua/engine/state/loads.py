"""Weights that a rank loads between two steps: whether others came of it, and whether other ranks loaded some, too."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

import torch

from bagua.comm import ProcessGroup
from bagua.primitives import quick_digest

_log = logging.getLogger("bagua")


class Loads:
    """Counts the steps before which this rank loaded weights.

    An evaluation may swap weights in and out again with two calls of ``load_state_dict``, on one rank alone. Other
    ranks need not know: if the weights are, bit by bit, what they were before the first of several calls, none counts.

    Attributes:
        count: steps before which weights were loaded, since the ranks met last.
        step: the last of these steps; -1 before the first.
        begun: whether there was a call since training went on last.
    """

    def __init__(self) -> None:
        self.count, self.step = 0, -1
        self._meetings = self._calls = 0
        self._before = b""
        self.begun = False

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """A call of ``load_state_dict`` begins; the model has ``weights`` before it."""
        if not self._before:
            self._before, self.begun = quick_digest(weights), True

    def end(self) -> None:
        """It has ended."""
        self._calls += 1

    def differ(self, weights: Callable[[], Iterable[torch.Tensor]]) -> bool:
        """Whether ``weights()`` were loaded since training went on last, and not put back."""
        return bool(self._before) and (
            self._calls == 1 or (self._calls > 1 and quick_digest(weights()) != self._before)
        )

    def settle(self, step: int, weights: Callable[[], Iterable[torch.Tensor]]) -> bool:
        """Training goes on with ``step``: whether weights were loaded before it, and not put back.

        Args:
            step: number of the step that comes next.
            weights: gives those of the model as they are now.
        """
        loaded = self.differ(weights)
        self._calls, self._before, self.begun = 0, b"", False
        if not loaded:
            return False
        self.count += 1
        self.step = step
        return True

    def unmet(self) -> int:
        """A number for ranks to meet by, if weights were loaded since the question was asked last; else 0.

        It counts the meetings: a rank may have loaded more often than others before one.
        """
        if not self.count:
            return 0
        self.count = 0
        self._meetings += 1
        return self._meetings

    def tell(self, group: ProcessGroup) -> None:
        """Have other ranks know of the load before ``step``. Each rank has one key, however often it loads."""
        with contextlib.suppress(RuntimeError):  # The store may be gone; then so is the training.
            group.store.set(_key(group.rank), str(self.step))

    def warn_if_alone(self, step: int, group: ProcessGroup) -> None:
        """Warn if others made ``step``, which has ended, with the weights that they had."""
        others: list[int] = []
        with contextlib.suppress(RuntimeError):
            others = [rank for place, rank in enumerate(group.ranks) if _loaded_at(group, place) < step]
        if others:
            _log.warning(
                "rank %d loaded weights before step %d, and rank %s did not: load them on every rank, or give all "
                "ranks rank 0's with bagua.torch_api.distributed.broadcast_parameters(model)",
                group.ranks[group.rank],
                step,
                ", ".join(map(str, others)),
            )


def _key(place: int) -> str:
    return f"loaded/{place}"


def _loaded_at(group: ProcessGroup, place: int) -> int:
    """The last step before which a rank told of a load; -1 if it never did."""
    return int(group.store.get(_key(place))) if group.store.check([_key(place)]) else -1

"""What is said where training ends, and the weights of the ranks have not been brought together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from bagua.algorithms import Algorithm, Exchange, WithInner, differ_between_ranks, registry
from bagua.comm import Communicator, uncaught_error

_log = logging.getLogger("bagua")


class Ending:
    """Says once, on rank 0, that ranks end with weights of their own. It outlives the model, and keeps none alive.

    Attributes:
        step: steps so far.
        merged_at: step after which the mean of all ranks was taken, or lent, last; or with which training went on.
    """

    def __init__(self) -> None:
        self.step, self.merged_at = 0, -1
        self._told = self._differ = False

    def enter(self, algorithm: Algorithm, exchanges: Sequence[Exchange], began: int) -> None:
        """Take the exchanges of a phase of ``algorithm``, which began with step ``began``."""
        self._differ = differ_between_ranks(exchanges) and not algorithm.in_background
        rare = [one for one in exchanges if one.how is not None and one.when.steps > 1]
        self._first = began + min((_first_step(one) for one in rare), default=0)
        self._period = max((one.when.steps for one in rare), default=1)
        self._began = began
        makes_equal = (one for one in exchanges if "weights" in one.writes and _is_whole(one))
        self._together = next((one.when.steps for one in makes_equal), 0)
        while isinstance(algorithm, WithInner):
            algorithm = algorithm.inner
        self._name = registry.name_of(type(algorithm)) or repr(algorithm)
        option = next((one for one in ("sync_every", "communication_interval") if hasattr(algorithm, one)), "")
        self._shown = f"{self._period} steps ({option})" if option else f"{self._period} steps"
        self._cure = f"Set {option}, or call model.bagua_finish()" if option else "Call model.bagua_finish()"

    def tell(self, communicator: Communicator, *, saving: bool = False) -> None:
        """Say it, unless training has failed, or goes on after ``saving`` as it does between two exchanges.

        Args:
            communicator: communicator of the ranks; it may be broken.
            saving: True if a checkpoint is taken.
        """
        failed = not communicator.usable or sys.exc_info()[0] is not None or uncaught_error() is not None
        silent = self._told or communicator.rank > 0 or communicator.size == 1 or failed
        if silent or not self._differ or self.step in (0, self.merged_at):
            return
        if self.step < self._first:
            self._told = True
            _log.warning(
                "trained %d steps and exchanged nothing: %s exchanges every %s. %s.",
                *(self.step, self._name, self._shown, self._cure),
            )
        elif not saving and not (self._together and (self.step - self._began) % self._together == 0):
            self._told = True
            _log.warning(
                "trained %d steps, and ranks end with different weights: %s makes no one model of them. "
                "Call model.bagua_finish() before you save or publish the model.",
                *(self.step, self._name),
            )


def _first_step(exchange: Exchange) -> int:
    """The step of a phase, from 1, in which the first part is due."""
    steps, parts = exchange.when.steps, exchange.parts
    return min((exchange.when.offset + parts.shift(part, steps) - 1) % steps + 1 for part in range(parts.n))


def _is_whole(exchange: Exchange) -> bool:
    """Whether all weights are equal after it, and stay so until the next step."""
    how, one_part = exchange.how, exchange.parts.n == 1 and not exchange.lag
    return how is not None and how.uniform and one_part and exchange.then.replaces and exchange.until == "stepped"

"""Which step training is in, and in which phase of its algorithm: what is exchanged in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Sequence

import torch

from bagua.algorithms import Algorithm, Every, Exchange, Model, WithInner, differ_between_ranks, registry
from bagua.comm import Communicator, uncaught_error
from bagua.engine.schedule.courses import Clock, follows_gradients, is_between_steps

_log = logging.getLogger("bagua")


class Phases:
    """The steps of a training run, and the phases of its algorithm.

    Args:
        size: number of ranks.
        grad_scaler: knows the scale of the loss; None if there is none.

    Attributes:
        several: True if the algorithm has several phases.
        step: synchronized backward passes so far; of the fastest member, where each trains at its own pace.
        began: step with which the phase began.
        restored_at: step with which training went on from a checkpoint; -1 if it did not.
        exchanges: exchanges that are made in the phase; none before the first is entered.
        between_steps: True if ranks exchange between steps in it.
        follows_gradients: True if something happens in it as gradients arrive.
        ending: tells the user when ranks end with weights of their own.
    """

    def __init__(self, size: int, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        self.step = self.began = 0
        self.restored_at = -1
        self.ending = Ending()
        self.exchanges: tuple[Exchange, ...] = ()
        self.between_steps, self.follows_gradients = False, True
        self._size, self._scaler = size, grad_scaler
        self._phase: Hashable = None
        self._paced = Every()

    def bind(self, algorithm: Algorithm, model: Model) -> None:
        """Take the phases of ``algorithm`` for ``model``; they count when one is entered."""
        self._algorithm, self._model = algorithm, model
        self.several = len(algorithm.phases) > 1

    def made(self, exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
        """Those of ``exchanges`` that are made on a group of this size."""
        return tuple(one for one in exchanges if self._size > 1 or one.alone)

    @property
    def coming(self) -> tuple[Exchange, ...]:
        """What is exchanged in the step that comes next, in this phase or another."""
        return self.made(self._algorithm.exchanges(self._algorithm.phase(self.step, self._model)))

    @property
    def is_over(self) -> bool:
        """Whether the step that comes next is in another phase."""
        return self.several and self._algorithm.phase(self.step, self._model) != self._phase

    def enter(self) -> None:
        """Enter the phase of the step that comes next."""
        phase = self._algorithm.phase(self.step, self._model)
        if phase != self._phase:
            self.began = 0 if self._phase is None else self.step
        self._phase, self.exchanges = phase, self.made(self._algorithm.exchanges(phase))
        self.between_steps = is_between_steps(self.exchanges)
        self.follows_gradients = follows_gradients(self.exchanges)
        self._paced = next((one.when for one in self.exchanges if one.when.pace is not None), Every())
        self.ending.enter(self._algorithm, self.exchanges, self.began)

    def go_to(self, step: int, began: int) -> None:
        """Go on with step ``step``, of a phase that began with step ``began``: both come from a checkpoint."""
        self.step = self.restored_at = self.ending.step = self.ending.merged_at = step
        self.enter()
        self.began = began
        self.ending.enter(self._algorithm, self.exchanges, began)

    @property
    def clock(self) -> Clock:
        """The training step that comes next, or is under way."""
        loss_scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        done, pace = self.step - self.began, self._paced.pace
        stride = 1 if pace is None else pace.stride(done, self._paced.steps)
        return Clock(self.step, done + stride, loss_scale, stride)

    def advance(self, stride: int = 1) -> None:
        """A step is over, which stands for so many."""
        self.step += stride
        self.ending.step = self.step
        if self._paced.pace is not None:
            self._paced.pace.step()


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

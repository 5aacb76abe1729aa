"""Which step training is in, and in which phase of its algorithm: what is exchanged in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from bagua.algorithms import Algorithm, Every, Exchange, Model
from bagua.engine.schedule import courses
from bagua.engine.schedule.ending import Ending
from bagua.engine.schedule.tracks import Clock


class Phases:
    """The steps of a training run, and the phases of its algorithm.

    Args:
        size: number of ranks.

    Attributes:
        step: synchronized backward passes so far; of the fastest member, where each trains at its own pace.
        began: step with which the phase began.
        restored_at: step with which training went on from a checkpoint; -1 if it did not.
        exchanges: exchanges that are made in the phase; none before the first is entered.
        between_steps: True if ranks exchange between steps in it.
        follows_gradients: True if something happens in it as gradients arrive.
        ending: what is said when training ends.
    """

    def __init__(self, size: int) -> None:
        self.step = self.began = 0
        self.restored_at = -1
        self.ending = Ending()
        self.exchanges: tuple[Exchange, ...] = ()
        self.between_steps, self.follows_gradients = False, True
        self._size = size
        self._phase: Hashable = None
        self._paced = Every()

    def bind(self, algorithm: Algorithm, model: Model) -> None:
        """Take the phases of ``algorithm`` for ``model``; they count when one is entered."""
        self._algorithm, self._model = algorithm, model
        self._several = len(algorithm.phases) > 1

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
        return self._several and self._algorithm.phase(self.step, self._model) != self._phase

    def enter(self) -> None:
        """Enter the phase of the step that comes next."""
        phase = self._algorithm.phase(self.step, self._model)
        if phase != self._phase:
            self.began = 0 if self._phase is None else self.step
        self._phase, self.exchanges = phase, self.made(self._algorithm.exchanges(phase))
        self.between_steps = courses.is_between_steps(self.exchanges)
        self.follows_gradients = courses.follows_gradients(self.exchanges)
        self._paced = next((one.when for one in self.exchanges if one.when.pace is not None), Every())
        self.ending.enter(self._algorithm, self.exchanges, self.began)

    def go_to(self, step: int, began: int) -> None:
        """Go on with step ``step``, of a phase that began with step ``began``: both come from a checkpoint."""
        self.step = self.restored_at = self.ending.step = self.ending.merged_at = step
        self.enter()
        self.began = began
        self.ending.enter(self._algorithm, self.exchanges, began)

    def clock(self, loss_scale: float) -> Clock:
        """The training step that comes next, or is under way."""
        done, pace = self.step - self.began, self._paced.pace
        stride = 1 if pace is None else pace.stride(done, self._paced.steps)
        return Clock(self.step, done + stride, loss_scale, stride)

    def advance(self, stride: int = 1) -> None:
        """A step is over, which stands for so many."""
        self.step += stride
        self.ending.step = self.step
        if self._paced.pace is not None:
            self._paced.pace.step()

"""A search that lets the library optuna propose settings; it comes with the extra ``autotune``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from bagua.engine.autotune.search import Search, Setting

__all__ = ["OptunaSearch"]


@dataclass
class OptunaSearch(Search):
    """Explores with optuna's tree-structured Parzen estimator, then confirms like every search."""

    _study: Any = field(init=False, repr=False)
    _trial: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        optuna = importlib.import_module("optuna")
        said = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # It would announce the study on stderr.
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        optuna.logging.set_verbosity(said)
        self._study.enqueue_trial(self._parameters(self.start))

    def explore(self) -> Setting | None:
        """What optuna proposes, for half of the samples; a setting that it proposes again is measured again."""
        if self.taken >= max(self.max_samples // 2, 1):
            return None
        self._trial = self._study.ask()
        form: int = self._trial.suggest_categorical("form", list(range(len(self.ladders))))
        place: int = self._trial.suggest_int("place", 0, max(map(len, self.ladders)) - 1)
        ladder = self.ladders[form]
        return ladder[min(place, len(ladder) - 1)]

    def tell(self, setting: Setting, score: float) -> None:
        """Note a sample, and tell optuna if it asked for it."""
        super().tell(setting, score)
        trial, self._trial = self._trial, None
        if trial is not None:
            self._study.tell(trial, score)

    def _parameters(self, setting: Setting) -> dict[str, int]:
        form = next(number for number, ladder in enumerate(self.ladders) if setting in ladder)
        return {"form": form, "place": self.ladders[form].index(setting)}

"""How tuning is to go: the arguments, and what the environment says where there are none."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from bagua import env
from bagua.checks import check_choice, check_flags, check_kind, check_numbers, check_whole, install_command
from bagua.errors import ConfigurationError


class TuningMode(Enum):
    """Who measures."""

    Off = "off"
    Manual = "manual"
    Automatic = "automatic"


@dataclass(frozen=True)
class AutotuneSettings:
    """How the size of buckets, and whether to exchange hierarchically, are found out during training.

    Args:
        warmup_time_s: seconds before the first sample is taken.
        sampling_confidence_time_s: seconds that a setting is measured at least, for one sample.
        max_samples: the final choice is made after so many samples at the latest.
        tune_hierarchical: try the hierarchical and the flat form of the algorithm, too.
        search: ``sweep`` measures every layout of buckets that differs from the others;
            ``optuna`` lets that library propose, which pays where there are many more of
            them than samples (``pip install 'bagua-torch[autotune]'``).
        log_file: samples and the final choice as CSV, written by rank 0; None writes none.

    Raises:
        ConfigurationError: a value that makes no sense.

    Example:
        >>> AutotuneSettings(max_samples=20).warmup_time_s
        30.0
    """

    warmup_time_s: float = 30.0
    sampling_confidence_time_s: float = 5.0
    max_samples: int = 60
    tune_hierarchical: bool = True
    search: Literal["sweep", "optuna"] = "sweep"
    log_file: str | None = None

    def __post_init__(self) -> None:
        check_numbers(
            lambda seconds: 0 <= seconds < math.inf,
            "seconds >= 0",
            warmup_time_s=self.warmup_time_s,
            sampling_confidence_time_s=self.sampling_confidence_time_s,
        )
        check_whole(1, max_samples=self.max_samples)
        check_flags(tune_hierarchical=self.tune_hierarchical)
        check_choice(("sweep", "optuna"), search=self.search)
        check_kind((str, os.PathLike, NoneType), "a path, or None", log_file=self.log_file)
        if self.search == "optuna" and importlib.util.find_spec("optuna") is None:
            raise ConfigurationError(
                "this search needs optuna, which is not installed",
                argument="search",
                expected="'sweep', or optuna",
                seen="'optuna'",
                advice=f"{install_command('autotune')} installs it.",
            )

    @classmethod
    def from_environment(cls) -> AutotuneSettings:
        """What ``BAGUA_AUTOTUNE_*`` say, and the defaults elsewhere."""
        log_file = Path(tempfile.gettempdir()) / f"bagua_autotune_{os.getpid()}.log"
        found: dict[str, Any] = {
            "warmup_time_s": env.autotune_warmup_time_s(),
            "sampling_confidence_time_s": env.autotune_sampling_confidence_time_s(),
            "max_samples": env.autotune_max_samples(),
            "log_file": str(log_file) if env.autotune_log() else None,
        }
        return cls(**{name: value for name, value in found.items() if value is not None})

    @property
    def agreed(self) -> str:
        """What must be equal on all ranks, as text."""
        return repr(dataclasses.replace(self, log_file=None))


def tuning_from(autotune: bool | AutotuneSettings | None) -> tuple[TuningMode, AutotuneSettings]:
    """Who measures, and how, from the argument ``autotune`` of a wrapper.

    Args:
        autotune: True or settings let the engine measure; False switches tuning off; None
            leaves it to ``BAGUA_AUTOTUNE``, and without that to calls of
            ``ModelSwitchWrapper.report_metrics``.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(autotune, AutotuneSettings):
        return TuningMode.Automatic, autotune
    check_kind((bool, NoneType), "True, False, None or AutotuneSettings", autotune=autotune)
    if autotune is None:
        level = env.autotune_level()
        autotune = None if level is None else level > 0
    mode = {None: TuningMode.Manual, False: TuningMode.Off, True: TuningMode.Automatic}[autotune]
    return mode, AutotuneSettings.from_environment()

"""One rank's process of ``bagua advise``: trains the script alone for a while, then rehearses all algorithms.

``main`` gets SETTINGS SCRIPT ARGUMENTS, and writes what it found to a file.
"""

from __future__ import annotations

import json
import pickle
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.advise import LEAST_STEPS, ModelFacts, Rehearsal, StepMeter, rehearse_all
from bagua.algorithms import registry
from bagua.engine import Reducer, start_listeners
from bagua.errors import BaguaError, UnsupportedAlgorithmException


@dataclass
class Found:
    """What a worker says.

    Attributes:
        problem: why there is nothing else; empty if there is.
        facts: the model.
        rehearsals: runs of one rank with each algorithm.
        refusals: why others could not be rehearsed, by name.
    """

    problem: str = ""
    facts: ModelFacts | None = None
    rehearsals: list[Rehearsal] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


class _EndOfScript(SystemExit):
    """Ends the script in order."""


class _Watch:
    """Waits for the script to wrap a model, and measures its steps.

    Args:
        seconds: how long.
        names: names of algorithms that the script must have registered when it wraps the model.

    Attributes:
        meter: measures the steps; None before the script wraps a model.
        problem: why the script was ended without a measurement; empty if it was not.
    """

    def __init__(self, seconds: float, names: Sequence[str]) -> None:
        self._seconds = seconds
        self._names = names
        self._until = 0.0
        self.meter: StepMeter | None = None
        self.problem = ""

    def __call__(self, reducer: Reducer) -> None:
        """Training starts. The first model is the one that is measured."""
        if self.meter is not None or not reducer.optimizers:
            return
        try:
            for name in self._names:
                registry.get(name)
        except UnsupportedAlgorithmException as error:
            self.problem = f"{error} An algorithm of your own must be registered before the model is wrapped."
            raise _EndOfScript(0) from None
        self.meter = StepMeter(reducer.module, reducer.optimizers)
        self._until = time.monotonic() + self._seconds
        reducer.optimizers[0].register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if self.meter is not None and self.meter.steps >= LEAST_STEPS and time.monotonic() >= self._until:
            raise _EndOfScript(0)


def main(arguments: Sequence[str]) -> None:
    """Measure, rehearse, and write the file."""
    settings, script, *others = arguments
    wanted = json.loads(settings)
    found = _measure(wanted, script, others)
    if found.facts is not None:
        print(f"measured {len(found.facts.steps_s)} steps of {found.facts.step_s * 1e3:.1f} ms", file=sys.stderr)
        try:
            found.rehearsals, found.refusals = rehearse_all(
                found.facts, wanted["hosts"], wanted["ranks_per_host"], wanted["algorithms"]
            )
        except BaguaError as error:
            found.problem = str(error)
    file = Path(wanted["file"])
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.replace(file)


def _measure(wanted: dict[str, Any], script: str, others: Sequence[str]) -> Found:
    watch = _Watch(wanted["seconds"], wanted["algorithms"] or ())
    start_listeners.append(watch)
    sys.argv = [script, *others]
    try:
        if wanted["module"]:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except _EndOfScript:
        pass
    except SystemExit as end:
        if end.code not in (None, 0) and (watch.meter is None or watch.meter.steps < LEAST_STEPS):
            return Found(f"the script ended with exit status {end.code} before {LEAST_STEPS} steps were measured")
    except Exception as error:  # noqa: BLE001 - whatever a script raises
        traceback.print_exc()
        return Found(_why(error))
    finally:
        start_listeners.remove(watch)
    return _found(watch, wanted["copies"])


def _why(error: Exception) -> str:
    text = f"the script failed: {type(error).__name__}: {error}"
    if "CUDA" in str(error) or "NVIDIA" in str(error):
        text += ". It needs a GPU, and advise measures on the CPU of this machine: give it an option for the CPU"
    return text


def _found(watch: _Watch, copies: int) -> Found:
    if watch.problem:
        return Found(watch.problem)
    if watch.meter is None:
        return Found(
            "the script never gave a model to bagua, so there is nothing to measure: call model.with_bagua(...) in it, "
            "or call bagua.torch_api.advise(model, optimizer, step) from Python"
        )
    watch.meter.end()
    if watch.meter.steps < LEAST_STEPS:
        return Found(
            f"the script made {watch.meter.steps} steps after the first ones; at least {LEAST_STEPS} are needed"
        )
    try:
        return Found(facts=watch.meter.facts(copies))
    except BaguaError as error:
        return Found(str(error))

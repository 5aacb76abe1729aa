"""Where a training step is, for messages."""

from __future__ import annotations

import weakref
from typing import Protocol

from bagua.engine.schedule.execution import Execution
from bagua.engine.schedule.phases import Phases


class Steps(Protocol):
    """What makes steps."""

    phases: Phases
    execution: Execution


def whereabouts(reference: weakref.ref[Steps]) -> str:
    """The step that is under way, and the bucket that is waited for: for messages."""
    steps = reference()
    if steps is None:
        return ""
    scheduler = steps.execution.scheduler
    bucket = None if scheduler is None else scheduler.waits_for
    names = "" if bucket is None else f", bucket {bucket.index} ({bucket.names[0]} to {bucket.names[-1]})"
    return f"step {steps.phases.step}{names}"

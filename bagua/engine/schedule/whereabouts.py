"""Where a training step is, for messages."""

from __future__ import annotations

import weakref
from typing import Protocol

from bagua.engine.schedule.scheduler import Scheduler


class Steps(Protocol):
    """What makes steps."""

    step: int
    scheduler: Scheduler | None


def whereabouts(reference: weakref.ref[Steps]) -> str:
    """The step that is under way, and the bucket that is waited for: for messages."""
    formation = reference()
    if formation is None:
        return ""
    scheduler = formation.scheduler
    bucket = None if scheduler is None else scheduler.waits_for
    names = "" if bucket is None else f", bucket {bucket.index} ({bucket.names[0]} to {bucket.names[-1]})"
    return f"step {formation.step}{names}"

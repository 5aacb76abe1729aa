"""What a model has of its own, and gives back when it is closed or dropped."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable

from bagua.comm import ProcessGroup
from bagua.engine.schedule.executor import Executor
from bagua.errors import CommunicationError

_POLL_S = 0.001


class Belongings:
    """What a model has of its own and must give back: threads, then the groups that these use.

    Args:
        group: private to the model.

    Attributes:
        executors: executors of the exchanges, while there are buckets.
        groups: private to the model; none once they are being closed. An error that broke one of them may know the
            frames of the training loop, and so the model.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.executors: list[Executor] = []
        self.groups = [group]

    def idle(self) -> bool:
        """Whether no exchange is under way."""
        return all(executor.idle() for executor in self.executors) and all(group.idle() for group in self.groups)

    def wait_until_idle(self) -> None:
        """Wait for the end of all exchanges. Each ends by its own deadline at the latest."""
        while not self.idle():
            time.sleep(_POLL_S)

    def end(self, end_exchanges: weakref.WeakMethod[Callable[[], None]]) -> None:
        """The group is closing: a slower rank may still need what this one sends in its last step.

        Args:
            end_exchanges: waits for what is under way, while the model is there.
        """
        wait = end_exchanges()
        if wait is not None:
            with contextlib.suppress(CommunicationError):  # What this rank would have received is not used.
                wait()
        else:
            self.wait_until_idle()
        self.groups.clear()

    def give_back(self, group: ProcessGroup) -> None:
        """Close one of the groups. Idempotent."""
        group.close()
        if group in self.groups:
            self.groups.remove(group)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for executor in self.executors:
            executor.close()
        for group in list(self.groups):
            group.close()

"""The data plane: connections between the members of a round, and one exchange of weights over them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua.averaging.handoff import Parcel
from bagua.comm import Communicator, ProcessGroup, ReduceOp, Work

__all__ = ["Channel", "Courier", "GroupCourier", "Transfer", "host_backend"]


@dataclass(frozen=True)
class Channel:
    """A connection of some members.

    Attributes:
        name: the same on all of them.
        members: their ranks.
    """

    name: str
    members: tuple[int, ...]


class Transfer(ABC):
    """An exchange under way, in which every parcel's ``average`` becomes the mean of all snapshots."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether it is complete. Never blocks.

        Raises:
            CommunicationError: what went wrong; ``peers`` are global ranks.
        """


class Courier(ABC):
    """Opens channels and moves parcels over them."""

    @abstractmethod
    def open(self, channel: Channel) -> None:
        """Connect the members. All of them do it, soon.

        Raises:
            CommunicationError: it cannot be done.
        """

    @abstractmethod
    def start(self, channel: Channel, parcels: Sequence[Parcel]) -> Transfer:
        """Begin an exchange on an open channel.

        Raises:
            CommunicationError: it cannot be done.
        """

    @abstractmethod
    def close(self, channel: Channel) -> None:
        """Give the channel up; an exchange on it ends with an error for all. Idempotent."""

    @abstractmethod
    def interrupt(self, reason: str) -> None:
        """End whatever exchange is under way, from any thread."""


class GroupCourier(Courier):
    """A courier over communicators of a process group, in host memory.

    Each channel has a communicator of its own: calls of the user, of the engine and of
    other models never meet those made here.

    Args:
        group: the ranks.
        label: makes the names of channels unique in the group.
        connect_timeout_s: how long the members of a new channel wait for each other.
        transfer_timeout_s: how long the exchange of so many bytes may take, once all have agreed on it.
    """

    def __init__(
        self, group: ProcessGroup, label: str, *, connect_timeout_s: float, transfer_timeout_s: Callable[[int], float]
    ) -> None:
        self._group = group
        self._label = label
        self._backend = host_backend(group)
        self._connect_timeout_s = connect_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._open: dict[Channel, Communicator] = {}
        self._guard = threading.Lock()
        self._interrupted = ""

    def open(self, channel: Channel) -> None:
        """See ``Courier.open``."""
        communicator = self._group.connect(
            channel.members,
            f"{self._label}/{channel.name}",
            timeout_s=self._connect_timeout_s,
            backend=self._backend,
        )
        with self._guard:
            self._open[channel] = communicator
            reason = self._interrupted
        if reason:
            communicator.abort(reason)

    def start(self, channel: Channel, parcels: Sequence[Parcel]) -> Transfer:
        """See ``Courier.start``."""
        communicator = self._open[channel]
        timeout_s = self._transfer_timeout_s(sum(parcel.nbytes for parcel in parcels))
        works = []
        for parcel in parcels:
            if not parcel.filled:  # An exchange that broke off has spoiled it.
                parcel.fill()
            parcel.filled = False
            works.append(communicator.allreduce(parcel.average, ReduceOp.AVG, async_op=True, timeout=timeout_s))
        return _Works([work for work in works if work is not None])

    def close(self, channel: Channel) -> None:
        """See ``Courier.close``."""
        with self._guard:
            communicator = self._open.pop(channel, None)
        if communicator is not None:
            self._group.disconnect(communicator)

    def interrupt(self, reason: str) -> None:
        """See ``Courier.interrupt``."""
        with self._guard:
            self._interrupted = reason
            communicators = list(self._open.values())
        for communicator in communicators:
            communicator.abort(reason)


class _Works(Transfer):
    """Several calls on one communicator."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        """See ``Transfer.poll``."""
        while self._works and self._works[0].is_completed():
            self._works.pop(0).wait()
        return not self._works


def host_backend(group: ProcessGroup) -> str | None:
    """The backend for tensors in host memory; None for the group's own.

    Weights of a GPU travel through host memory. So what happens in the background uses no
    stream and no NCCL communicator, whose kernels could wait for those of the training.
    """
    serves = group.global_communicator.device_types
    plain = ":" not in group.backend and "nccl" not in group.backend
    return None if plain and "cpu" in serves else "gloo"

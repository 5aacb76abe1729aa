"""The data plane: connections between the members of a round, and one exchange of weights over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua.averaging.handoff import Contribution
from bagua.comm import Communicator, ProcessGroup, ReduceOp, Work

#: Connections that are kept open; each costs a few threads and sockets.
MOST_OPEN = 8

Members = tuple[int, ...]
#: Whether an exchange that is under way is complete.
IsComplete = Callable[[], bool]


@dataclass(frozen=True)
class Connection:
    """A connection of some members.

    Attributes:
        name: the same on all of them.
        members: their ranks.
    """

    name: str
    members: tuple[int, ...]


class DataLink:
    """Opens connections over communicators of a process group, and moves contributions over them, in host memory.

    Each connection has a communicator of its own: calls of the user, of the engine and of
    other models never meet those made here.

    Args:
        group: the ranks.
        label: makes the names of connections unique in the group.
        connect_timeout_s: how long the members of a new connection wait for each other.
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
        self._open: dict[Connection, Communicator] = {}
        self._guard = threading.Lock()
        self._interrupted = ""

    def open(self, connection: Connection) -> None:
        """Connect the members. All of them do it, soon.

        Raises:
            CommunicationError: it cannot be done.
        """
        communicator = self._group.connect(
            connection.members,
            f"{self._label}/{connection.name}",
            timeout_s=self._connect_timeout_s,
            backend=self._backend,
        )
        with self._guard:
            self._open[connection] = communicator
            reason = self._interrupted
        if reason:
            communicator.abort(reason)

    def start(self, connection: Connection, contributions: Sequence[Contribution]) -> IsComplete:
        """Begin an exchange on an open connection: every contribution's ``average`` becomes the mean of all snapshots.

        Returns:
            What says whether it is complete. It never blocks; a ``CommunicationError`` of it says that the exchange
            failed, with global ranks as ``peers``.

        Raises:
            CommunicationError: it cannot be done.
        """
        communicator = self._open[connection]
        timeout_s = self._transfer_timeout_s(sum(contribution.nbytes for contribution in contributions))
        works: list[Work] = []
        for contribution in contributions:
            if not contribution.filled:  # An exchange that broke off has spoiled it.
                contribution.fill()
            contribution.filled = False
            work = communicator.allreduce(contribution.average, ReduceOp.AVG, async_op=True, timeout=timeout_s)
            assert work is not None
            works.append(work)

        def is_complete() -> bool:
            while works and works[0].is_completed():
                works.pop(0).wait()
            return not works

        return is_complete

    def close(self, connection: Connection) -> None:
        """Give the connection up; an exchange on it ends with an error for all. Idempotent."""
        with self._guard:
            communicator = self._open.pop(connection, None)
        if communicator is not None:
            self._group.disconnect(communicator)

    def interrupt(self, reason: str) -> None:
        """End whatever exchange is under way, from any thread."""
        with self._guard:
            self._interrupted = reason
            communicators = list(self._open.values())
        for communicator in communicators:
            communicator.abort(reason)


class Connections:
    """At most one connection for each set of ranks that meet; the least used ones are closed.

    Args:
        link: opens and closes them.
    """

    def __init__(self, link: DataLink) -> None:
        self._link = link
        self._held: dict[Members, Connection] = {}

    def name(self, meeting: Members) -> str:
        """The connection that is open here for those who meet; empty for none."""
        held = self._held.get(meeting)
        return "" if held is None else held.name

    def common(self, meeting: Members, present: Members, names: Sequence[str], fresh: str) -> str:
        """The connection that all those present can use: the one that each holds, else a new one.

        Args:
            meeting: all who would meet.
            present: those who do.
            names: connections that each of them holds.
            fresh: a name that was never used.
        """
        held = self._held.get(meeting)
        usable = held is not None and held.members == present and set(names) == {held.name}
        return held.name if held is not None and usable else fresh

    def require(self, meeting: Members, present: Members, name: str) -> Connection:
        """The connection of that name, opened if it is new.

        Raises:
            CommunicationError: it cannot be opened.
        """
        held = self._held.pop(meeting, None)
        if held is not None and held.name != name:
            self._link.close(held)
            held = None
        if held is None:
            held = Connection(name, present)
            self._link.open(held)
        self._held[meeting] = held  # At the end: the order is that of use.
        while len(self._held) > MOST_OPEN:
            self.drop(next(iter(self._held)))
        return held

    def drop(self, meeting: Members) -> None:
        """Close the connection of those who meet, if there is one."""
        held = self._held.pop(meeting, None)
        if held is not None:
            self._link.close(held)

    def close(self) -> None:
        """Close all connections."""
        for meeting in list(self._held):
            self.drop(meeting)


def host_backend(group: ProcessGroup) -> str | None:
    """The backend for tensors in host memory; None for the group's own.

    Weights of a GPU travel through host memory. So what happens in the background uses no
    stream and no NCCL communicator, whose kernels could wait for those of the training.
    """
    serves = group.global_communicator.device_types
    plain = ":" not in group.backend and "nccl" not in group.backend
    return None if plain and "cpu" in serves else "gloo"

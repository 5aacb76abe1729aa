"""Groups of processes that no launcher numbered: each has a seat, and a group is some of the seats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from bagua.comm.group import ProcessGroup
from bagua.comm.pieces.fetching import PhaseDeadline
from bagua.comm.records.recorder import Recorder
from bagua.comm.startup.formation import new_job
from bagua.comm.store.asking import gather_values
from bagua.errors import CommunicationError, PeerLostError, TransportUnavailableError


def group_of_seats(
    store: Store,
    seats: Sequence[int],
    own: int,
    name: str,
    *,
    backend: str,
    timeout_s: float,
    meet_s: float,
    look: Callable[[], None] | None = None,
    connecting: PhaseDeadline | None = None,
) -> ProcessGroup:
    """A group of the processes on ``seats``, each on a host of its own. Collective among them alone.

    Messages and errors number the members by their seats.

    Args:
        store: key-value store of all; somebody keeps a reference to it as long as the group lives.
        seats: members, in ascending order.
        own: seat of this process.
        name: used once for each store.
        backend: as for ``init_process_group``.
        timeout_s: default deadline of every call, in seconds.
        meet_s: how long to wait for all members to come, in seconds.
        look: called until all have come. It raises a ``CommunicationError`` if there is no use in waiting.
        connecting: how long they may take to connect when all have come, which nothing can interrupt; None for
            ``meet_s``.

    Raises:
        CollectiveTimeoutError: some did not come.
        PeerLostError: one that had come has gone before all were there.
        TransportUnavailableError: they cannot be connected.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> group = group_of_seats(thread_store(), [7], 7, "epoch1", backend="gloo", timeout_s=60.0, meet_s=5.0)
        >>> group.ranks
        (7,)
    """
    members, place, recorder = PrefixStore(name, store), list(seats).index(own), Recorder()
    try:
        recorder.job = members.compare_set("job", "", new_job()).decode()
        _meet(members, place, seats, meet_s, look)
        deadline, started = connecting or PhaseDeadline(meet_s), time.monotonic()
        try:
            group = ProcessGroup(members, place, seats, range(len(seats)), backend, deadline.seconds, name, recorder)
        except BaseException:
            deadline.forget()
            raise
        deadline.note(time.monotonic() - started)
    except (DistNetworkError, DistStoreError) as error:
        raise TransportUnavailableError(f"{name}: the store does not answer: {error}", rank=own) from error
    group.set_timeout(timeout_s)
    return group


def _meet(members: Store, place: int, seats: Sequence[int], meet_s: float, look: Callable[[], None] | None) -> None:
    """Wait until all have come. Then all connect, or none does: to connect cannot be interrupted."""
    if look is not None:
        look()
    try:
        gather_values(members, "here", place, seats, seats[place], meet_s, look)
    except CommunicationError:
        if members.compare_set("meeting", "", "off") == b"on":
            return  # The others have seen this process: they are connecting with it.
        raise
    if members.compare_set("meeting", "", "on") != b"on":
        raise PeerLostError("a process that had come has gone before all were there", rank=seats[place])

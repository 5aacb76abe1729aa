"""Process groups: a set of ranks, where they live, and its three communicators."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist

from bagua.comm.communicator import Communicator
from bagua.comm.lifetime.forks import family, forked_error, leak, run_all
from bagua.comm.long_wait import Activity
from bagua.comm.operands import check_rank
from bagua.comm.records.deadlock import Deadlocks
from bagua.comm.records.recorder import Recorder
from bagua.comm.store.asking import gather_values, meeting, raise_refusals
from bagua.comm.store.keys import connection_to
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.registry import backend_refusal, create_transport
from bagua.errors import CollectiveMismatchError, InvalidRankError
from bagua.topology import ranks_by_node


class NonMember:
    """Stands for a group, or a communicator, of other ranks. There is one: ``NON_MEMBER``.

    Every call on it returns None at once and leaves its tensors as they are. It is false in a condition,
    its rank and size are -1, its communicators are itself. It is not None, which means all ranks.

    Example:
        >>> import torch
        >>> tensor = torch.ones(2)
        >>> NON_MEMBER.allreduce(tensor)
        >>> tensor, bool(NON_MEMBER), NON_MEMBER.rank
        (tensor([1., 1.]), False, -1)
    """

    rank = -1
    size = -1
    ranks: tuple[int, ...] = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NON_MEMBER"

    def __reduce__(self) -> str:
        return "NON_MEMBER"

    @property
    def global_communicator(self) -> NonMember:
        """Itself."""
        return self

    intra_node_communicator = inter_node_communicator = global_communicator

    def subgroup(self, *_: Any, **__: Any) -> NonMember:
        """Itself: a group of other ranks has no part for this one."""
        return self

    duplicate = subgroup
    get_global_communicator = get_intra_node_communicator = get_inter_node_communicator = subgroup

    def ignore(self, *_: Any, **__: Any) -> None:
        """Return None at once: the call is that of other ranks."""

    allreduce = reduce = broadcast = allreduce_coalesced = broadcast_coalesced = ignore
    allgather = gather = scatter = reduce_scatter = alltoall = alltoall_v = ignore
    send = recv = recv_any = sendrecv = barrier = ignore
    broadcast_object = allgather_object = gather_object = scatter_object = ignore
    send_object = recv_object = ignore
    abort = close = ignore


NON_MEMBER = NonMember()


def is_non_member(group: object) -> bool:
    """Whether ``group`` says that this rank does not belong to it: ours, or torch's sentinel."""
    theirs: object = dist.GroupMember.NON_GROUP_MEMBER
    return group is NON_MEMBER or (type(group) is type(theirs) and group == theirs)


class ProcessGroup:
    """Ranks that train together, and their communicators. Building one is collective.

    Users get groups from ``init_process_group``, ``new_group`` and
    ``from_torch_group``. All three communicators exist as soon as the group does, so
    no later call waits for ranks that never come. With one host, or one rank per
    host, those with the same members are one and the same communicator.

    Args:
        store: written to by the members of this group only.
        rank: this process's rank in the group.
        ranks: global rank of each member.
        nodes: index of the host of each member.
        backend: name of the transport.
        timeout_s: default deadline of every call, in seconds.
        label: name of the group in messages.
        recorder: record of the calls of this rank on all of its communicators.
        leader: the local rank that speaks for its host, on every host.

    Attributes:
        global_communicator: all members.
        intra_node_communicator: the members on this host.
        inter_node_communicator: the leader of each host; ``NON_MEMBER`` on other ranks.

    Raises:
        InvalidRankError: some host has no rank ``leader``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        nodes: Sequence[int],
        backend: str,
        timeout_s: float,
        label: str,
        recorder: Recorder,
        leader: int = 0,
    ) -> None:
        self._store = store
        self._inherited = False
        self.rank = rank
        self.ranks = tuple(ranks)
        self.nodes = tuple(nodes)
        self.backend = backend
        self.timeout_s = timeout_s
        self.label = label
        #: What this rank did, on all of its communicators.
        self.recorder = recorder
        self._descendants: list[ProcessGroup] = []
        self._made: list[Communicator] = []
        self._when_closing: list[Callable[[], None]] = []
        self._parent: weakref.ref[ProcessGroup] | None = None
        #: A group that was dropped is closed in the background, and may be closed from here at the same time.
        self._closing = threading.RLock()
        self._own_store: dist.Store | None = None
        self._numbered = 0
        self._on_hosts = ranks_by_node(self.nodes)
        self.leader = check_rank(leader, min(self.node_sizes), "leader")
        self.closed = False
        family.add(self)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        local = self._on_hosts[self.node_rank]
        leaders = [members[self.leader] for members in self._on_hosts]
        everyone = list(range(self.size))
        self.global_communicator = self._communicator(everyone, "")
        self.intra_node_communicator = (
            self.global_communicator if local == everyone else self._communicator(local, "/intra")
        )
        self.inter_node_communicator: Communicator | NonMember = NON_MEMBER
        if self.rank in leaders:
            self.inter_node_communicator = (
                self.global_communicator if leaders == everyone else self._communicator(leaders, "/inter")
            )

    def _communicator(
        self, members: list[int], suffix: str, *, store: dist.Store | None = None, timeout_s: float | None = None
    ) -> Communicator:
        activity = Activity()
        membership = Membership(
            store=dist.PrefixStore(f"communicator{suffix}{members[0]}", store or self.store),
            rank=members.index(self.rank),
            ranks=tuple(self.ranks[member] for member in members),
            nodes=tuple(self.nodes[member] for member in members),
            timeout_s=timeout_s or self.timeout_s,
            label=self.label + suffix,
            activity=activity,
            judge=Deadlocks(self.recorder, self.store, activity, self.label + suffix).look,
        )
        with meeting(f"the set-up of {membership.label}", membership.rank, membership.ranks):
            transport = create_transport(self.backend, membership)
        communicator = Communicator(transport, self.timeout_s, self.recorder)
        self._made.append(communicator)
        return communicator

    def set_timeout(self, timeout_s: float) -> None:
        """Set the default deadline of all later calls, in seconds; until now it was that of connecting."""
        self.timeout_s = timeout_s
        for communicator in self._made:
            communicator.pipeline.timeout_s = timeout_s

    # Facts.

    @property
    def store(self) -> dist.Store:
        """Where the members of this group meet.

        Raises:
            CommunicatorClosedError: this process was forked, and shares its connection with its parent.
        """
        if self._inherited:
            raise forked_error()
        return self._store

    @property
    def gauges(self) -> dict[str, float]:
        """Metrics of what this group is used for, by name; they are forgotten when it is closed."""
        return self.global_communicator.statistics.gauges

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def node_rank(self) -> int:
        """Position of this process's host among the hosts of the group."""
        return next(i for i, members in enumerate(self._on_hosts) if self.rank in members)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Members on each host; hosts in the order of their lowest rank."""
        return tuple(len(members) for members in self._on_hosts)

    @property
    def has_two_levels(self) -> bool:
        """Whether hosts matter: not when there is one, or one rank on each."""
        return len(self.node_sizes) > 1 and max(self.node_sizes) > 1

    @property
    def local_rank(self) -> int:
        """Rank among the members on this host."""
        return self._on_hosts[self.node_rank].index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of members on this host."""
        return self.node_sizes[self.node_rank]

    def get_global_communicator(self) -> Communicator:
        """The communicator of all members."""
        return self.global_communicator

    def get_intra_node_communicator(self) -> Communicator:
        """The communicator of the members on this host."""
        return self.intra_node_communicator

    def get_inter_node_communicator(self) -> Communicator | NonMember:
        """The communicator of the leader of each host; ``NON_MEMBER`` on other ranks."""
        return self.inter_node_communicator

    def __repr__(self) -> str:
        return (
            f"<ProcessGroup {self.label} rank {self.rank} of {self.size} on {self.backend}, "
            f"hosts of {list(self.node_sizes)}>"
        )

    # Groups from this one.

    def duplicate(self, label: str = "duplicate", *, leader: int | None = None) -> ProcessGroup:
        """A group of the same ranks with communicators of its own. Collective.

        Args:
            label: name of the new group in messages.
            leader: the local rank that speaks for its host; None means as in this group.

        Raises:
            InvalidRankError: some host has no rank ``leader``.
        """
        leader = self.leader if leader is None else check_rank(leader, min(self.node_sizes), "leader")
        group = self._derive(range(self.size), None, None, label, leader)
        assert isinstance(group, ProcessGroup)  # This rank is one of all ranks.
        return group

    def subgroup(
        self, ranks: Sequence[int], *, backend: str | None = None, timeout_s: float | None = None, label: str = "group"
    ) -> ProcessGroup | NonMember:
        """A group of some members. Called by all members with the same arguments.

        Args:
            ranks: ranks in this group; their order does not matter.
            backend: name of the new group's backend; None means this group's.
            timeout_s: default deadline of the new group; None means this group's.
            label: name of the new group in messages.

        Returns:
            The group on its members, ``NON_MEMBER`` elsewhere.

        Raises:
            InvalidRankError: ``ranks`` is empty, repeats a rank, or has an unknown one.
            CollectiveMismatchError: members passed different arguments.
        """
        members = sorted(ranks)
        known = all(type(member) is int and 0 <= member < self.size for member in members)
        if not members or len(set(members)) < len(members) or not known:
            raise InvalidRankError(
                "not a set of ranks of this group",
                argument="ranks",
                expected=f"different whole numbers from 0 to {self.size - 1}, at least one",
                seen=list(ranks),
            )
        return self._derive(members, backend, timeout_s, label)

    def _derive(
        self, members: Sequence[int], backend: str | None, timeout_s: float | None, label: str, leader: int = 0
    ) -> ProcessGroup | NonMember:
        self._numbered += 1
        name = f"{label}{self._numbered}"
        store = dist.PrefixStore(name, self.store)
        backend = backend or self.backend
        obstacle = backend_refusal(backend, len(members)) if self.rank in members else None
        wanted = [list(members), backend, timeout_s or self.timeout_s, leader]
        reasons = self._agree(store, wanted, obstacle)
        if self.rank not in members:
            return NON_MEMBER
        raise_refusals(reasons, self.rank, self.ranks, obstacle)
        group = type(self)(  # as it is in a rehearsal
            dist.PrefixStore("members", store),
            list(members).index(self.rank),
            [self.ranks[member] for member in members],
            [self.nodes[member] for member in members],
            backend,
            timeout_s or self.timeout_s,
            f"{self.label}/{name}",
            self.recorder,
            leader,
        )
        group._parent = weakref.ref(self)  # noqa: SLF001 - another one of these
        self._descendants.append(group)
        return group

    # For those who need no call of the other members.

    def connect(self, members: Sequence[int], name: str, *, timeout_s: float) -> Communicator:
        """A communicator of some members, built by these alone: no call of any other member is needed.

        Args:
            members: ranks in this group, in ascending order, this one among them.
            name: used once per group; the same on all of ``members``.
            timeout_s: how long to wait for them.

        Returns:
            The communicator. Give it back with ``disconnect``; the group closes it at the latest.

        Raises:
            CollectiveTimeoutError: some of them did not come.
            TransportUnavailableError: they cannot be connected.
        """
        if self._own_store is None:  # One for all: its host has few to give. No call of this group keeps it busy.
            with meeting(f"a connection of {self.label}", self.rank, self.ranks):
                self._own_store = connection_to(self.store, self.timeout_s)
        return self._communicator(list(members), f"/{name}", store=self._own_store, timeout_s=timeout_s)

    def disconnect(self, communicator: Communicator) -> None:
        """Close a communicator that ``connect`` made. Idempotent."""
        communicator.close()
        if communicator in self._made:
            self._made.remove(communicator)
        self.recorder.retire(communicator.statistics)

    def when_closing(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when this group is closed, before its communicators are."""
        self._when_closing.append(callback)

    def _agree(self, store: dist.Store, wanted: list[object], obstacle: Exception | None) -> list[str]:
        """Compare what every member asks for, before anyone waits for a connection; their reasons to refuse it."""
        own = [wanted, str(obstacle or "")]
        answers = gather_values(store, "new_group", self.rank, self.ranks, own, self.timeout_s)
        for member, (answer, _) in enumerate(answers):
            if answer != wanted:
                raise CollectiveMismatchError(
                    "ranks ask for different groups",
                    rank=self.ranks[self.rank],
                    call=f"new group from {self.label}",
                    peers=(self.ranks[member],),
                    expected=_described(wanted),
                    seen=_described(answer),
                )
        return [reason for _, reason in answers]

    # The end.

    def abort(self, reason: str = "aborted by the user", culprit: int | None = None) -> None:
        """Break all communicators of this group and of groups derived from it, from any thread.

        Args:
            reason: why; of another culprit what it did, beginning with "it".
            culprit: global rank to blame, which need not be a member; None means this one.
        """
        for group in list(self._descendants):
            group.abort(reason, culprit)
        for communicator in list(self._made):
            communicator.abort(reason, culprit)

    def idle(self) -> bool:
        """Whether no call is under way in this group and in those derived from it. Never blocks, never raises."""
        return all(group.idle() for group in list(self._descendants)) and all(
            communicator.idle() for communicator in list(self._made)
        )

    def close(self) -> None:
        """Close this group and every group derived from it. Idempotent, from any thread."""
        with self._closing:
            self.closed = True
            callbacks, self._when_closing = self._when_closing, []
            try:
                run_all(
                    [
                        *reversed(callbacks),
                        *(group.close for group in reversed(list(self._descendants))),
                        *(functools.partial(self._end, communicator) for communicator in reversed(self._made)),
                    ]
                )
            finally:
                parent = None if self._parent is None else self._parent()
                if parent is not None:
                    with contextlib.suppress(ValueError):  # It was closed before.
                        parent._descendants.remove(self)  # noqa: SLF001 - another one of these

    def _end(self, communicator: Communicator) -> None:
        """Close ``communicator``. If this rank ends because it lost a member, the others name that one."""
        recorder = self.recorder
        recorder.lost = recorder.lost or next(filter(None, (one.lost for one in self._made)), None)
        try:
            if recorder.lost is not None and recorder.lost[0] in self.ranks:
                culprit, reason = recorder.lost
                communicator.abort(reason, culprit)
            communicator.close()
        finally:
            recorder.retire(communicator.statistics)

    def disown(self) -> None:
        """In a forked child: the store is the parent's, too."""
        self._inherited = self.size > 1
        self._closing = threading.RLock()  # Another thread of the parent may have held it.
        self.recorder.disown()
        leak([self._store, self._own_store])


def _described(wanted: Sequence[object]) -> str:
    members, backend, timeout_s, leader = wanted
    return f"ranks {members}, backend {backend}, timeout {timeout_s} s, leader {leader}"


def solo_group() -> ProcessGroup:
    """A group of this process alone, without any initialization.

    Example:
        >>> solo_group().size
        1
    """
    return ProcessGroup(dist.HashStore(), 0, [0], [0], "solo", 1800.0, "solo", Recorder())

"""How ranks of one host find each other's control memory, and make sure that it is theirs.

Every rank listens on an abstract Unix socket with a random name, which goes through the
store. Each connects to the ranks below it and waits for those above. Both ends look at
the credentials that the kernel vouches for, then pass the descriptors of their control
memory and of their bell. The memory must contain the nonce that its rank announced in
the store. Then all ranks tell each other whether it worked; one refusal is everyone's.

Later segments come to a peer over another socket, before a notice names them.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import resource
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bagua import env
from bagua.comm.store.asking import gather_values, raise_refusals
from bagua.comm.store.keys import bounded
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.shm.line import NONCE_BYTES, MappedSegment
from bagua.comm.transports.shm.memory import Segment, SharedMemory, create_memory, map_memory
from bagua.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, TransportUnavailableError

_MESSAGE = struct.Struct("q")


class DescriptorChannel:
    """The connection of this process to one peer, for the segments of one communicator.

    The owner sends before it publishes, without waiting, so a peer that reads the notice
    finds the descriptor there. No rank ever waits for an answer, and no thread serves.

    Args:
        connection: socket to the peer; not blocking.
        peer: its rank, for messages.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection = connection
        #: Descriptor of the connection, which hangs up when the peer ends.
        self.connection = connection.fileno()
        self._peer = peer
        self._lock = threading.Lock()
        self._sent: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._mapped: dict[int, MappedSegment] = {}

    def offer(self, segment: Segment) -> bool:
        """Make ``segment`` known to the peer. Returns whether it will find it.

        It will not if it has not taken what was sent for a long time; the data can go
        through memory that it knows.
        """
        if segment in self._sent:
            return True
        message = _MESSAGE.pack(segment.number)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.descriptor]))]
        with self._lock:
            try:
                self._connection.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except ConnectionError:
                return True  # The peer has ended; the ranks that wait for it will find out.
            except OSError:
                return False
            self._sent.add(segment)
        return True

    def segment(self, number: int, named: Callable[[], Collection[int]]) -> MappedSegment:
        """The peer's segment ``number``, which it has announced.

        Args:
            number: number of the segment.
            named: see ``drop_gone``.

        Raises:
            PeerLostError: it is not there: the peer has ended, or given the memory up.
            TransportUnavailableError: this process cannot map it: too many open files, or too little memory.
        """
        found = self._mapped.get(number)
        if found is not None:
            return found
        with self._lock:
            while number not in self._mapped:
                self._take_one(number)
            found = self._mapped[number]
        self.drop_gone(named)
        return found

    def _take_one(self, wanted: int) -> None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, descriptors, seen, _ = socket.recv_fds(self._connection, _MESSAGE.size, 1, flags)
            if seen & socket.MSG_CTRUNC:  # The kernel had nowhere to put it.
                raise TransportUnavailableError(
                    f"memory of rank {self._peer} cannot be mapped: {os.strerror(errno.EMFILE)}",
                    advice="Raise `ulimit -n`.",
                )
            if len(data) < _MESSAGE.size or not descriptors:
                raise ConnectionResetError("the connection was closed")
        except OSError as error:
            raise PeerLostError(
                f"memory {wanted} of rank {self._peer} cannot be reached: {error}",
                peers=(self._peer,),
                reason=f"its memory cannot be reached: {error}",
            ) from error
        try:
            self._mapped[_MESSAGE.unpack(data)[0]] = MappedSegment(descriptors[0])
        except OSError as error:
            raise TransportUnavailableError(f"memory of rank {self._peer} cannot be mapped: {error}") from error
        finally:
            os.close(descriptors[0])

    def drop_gone(self, named: Callable[[], Collection[int]]) -> None:
        """Unmap what the peer does not use any more.

        Args:
            named: gives the numbers of segments that are still to be read, which are kept. Asked after a look at
                what is gone, because a segment goes only after it was named.
        """
        if not self._mapped or self._lock.locked():  # Another thread looks.
            return
        with self._lock:  # Not ``acquire`` and ``try``: an exception of a signal handler could come in between.
            gone = [number for number, segment in self._mapped.items() if segment.gone]
            for number in set(gone).difference(named()) if gone else ():
                del self._mapped[number]

    def disown(self) -> None:
        """In a forked child: close its end, whichever thread held the lock when it was forked."""
        self._lock = threading.Lock()
        self.close()

    def close(self) -> None:
        """Close the connection and forget the peer's memory."""
        with self._lock:
            self._connection.close()
            self._mapped.clear()


#: By now every rank is there; only a stopped process takes longer to connect.
_LIMIT_S = 60.0
_SLICE_S = 0.05
_POLL_S = 0.002
_SO_PEERPIDFD = 77
_HOST = "host (kernel and network namespace)"
_VERDICT = "shm/verdict"
_HELLO = struct.Struct(f"q{NONCE_BYTES}s")
_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """Another rank, as seen from here.

    Attributes:
        connection: socket to its process; not blocking.
        process: descriptor of its process, readable when it has ended.
        bell: its eventfd.
        memory: its control memory.
    """

    connection: socket.socket
    process: int
    bell: int
    memory: SharedMemory


class Attached(NamedTuple):
    """What a rank holds when it is connected: what it made itself, and its peers by rank."""

    memory: SharedMemory
    bell: int
    peers: dict[int, Peer]


def host_identity() -> str:
    """A text that two processes share exactly when they run on one host.

    The boot id tells kernels apart, the network namespace tells containers apart
    that do not reach each other over loopback. Where the kernel does not tell,
    the launcher's node index and the host name do.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}/node{env.get_node_rank()}"
    return f"{boot}/net{namespace.st_dev}.{namespace.st_ino}"


def attach(membership: Membership, control_bytes: int, settings: Mapping[str, int]) -> Attached:
    """Connect all ranks of ``membership``. Collective.

    Args:
        membership: the ranks.
        control_bytes: size of the control memory of each rank.
        settings: on which all ranks must agree, by name.

    Raises:
        TransportUnavailableError: on every rank, if one of them cannot.
        CollectiveTimeoutError: some ranks did not come.
    """
    with bounded(membership.store, membership.timeout_s) as store:
        meeting = _Meeting(replace(membership, store=store))
        try:
            meeting.prepare(control_bytes, settings)
            problem = meeting.connect()
            meeting.await_verdicts(problem)
            problems = gather_values(store, _VERDICT, membership.rank, membership.ranks, problem, membership.timeout_s)
            _raise_together(membership, problems)
        except BaseException:
            meeting.give_up()
            raise
        finally:
            meeting.end()
        return meeting.result()


def _raise_together(membership: Membership, problems: list[str]) -> None:
    raise_refusals(
        problems,
        membership.rank,
        membership.ranks,
        problem="shared memory cannot connect these ranks",
        advice="Leave the choice to backend=None, or use backend='gloo'.",
    )


class _Meeting:
    """One attempt to connect the ranks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rank, self._size = membership.rank, membership.size
        self._until = time.monotonic() + min(membership.timeout_s, _LIMIT_S)
        self._nonces: list[bytes] = []
        self._names: list[str] = []
        self._own: tuple[SharedMemory, int, int] | None = None
        self._listener: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        self._connections: dict[int, socket.socket] = {}

    # What this rank brings, and what the others say.

    def prepare(self, control_bytes: int, settings: Mapping[str, int]) -> None:
        """Make the own memory and sockets, and learn the names of the others'."""
        facts = {_HOST: host_identity(), "version of torch": torch.__version__, **settings}
        own: dict[str, Any] = {"facts": facts, "refusal": ""}
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            own["name"] = self._listen()
            memory, descriptor = create_memory(control_bytes, in_children=False)
            memory.view()[:NONCE_BYTES] = nonce
            self._own = (memory, descriptor, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        except OSError as error:
            own["refusal"] = f"it cannot make its shared memory and sockets: {explained(error)}"
        own["nonce"] = nonce.hex()
        membership = self._membership
        answers = gather_values(
            membership.store, "shm/addresses", self._rank, membership.ranks, own, membership.timeout_s
        )
        self._compare(answers)
        self._nonces = [bytes.fromhex(answer["nonce"]) for answer in answers]
        self._names = [answer["name"] for answer in answers]

    def _listen(self) -> str:
        name = f"bagua-{secrets.token_hex(NONCE_BYTES)}"
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(f"\0{name}")
        listener.listen(self._size)
        return name

    def _compare(self, answers: list[dict[str, Any]]) -> None:
        """Every rank sees the same answers, so all of them raise or none."""
        problems = []
        for answer in answers:
            problem = answer["refusal"]
            for name, value in answers[0]["facts"].items():
                if answer["facts"][name] != value and not problem:
                    problem = f"it has another {name} than rank {self._global(0)}"
            problems.append(problem)
        _raise_together(self._membership, problems)

    def _global(self, rank: int) -> int:
        return self._membership.ranks[rank]

    # Connections.

    def connect(self) -> str:
        """Connect to all others. Returns why that did not work, or nothing."""
        try:
            for other in range(self._rank):
                self._call(other)
            self._answer()
            for other in range(self._rank):
                self._admit(other, self._connections[other], *self._hear(self._connections[other]))
        except (OSError, CommunicationError) as error:
            self._hang_up()  # A peer must not wait for an answer.
            return explained(error)
        return ""

    def _call(self, other: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._connections[other] = connection
        connection.settimeout(self._remaining_s())
        connection.connect(f"\0{self._names[other]}")
        if not _same_user(connection):
            raise PermissionError(f"rank {self._global(other)} belongs to another user")
        self._say(connection)

    def _answer(self) -> None:
        """Wait for the ranks above; any other process is not let in."""
        listener = self._listener
        assert listener is not None
        listener.settimeout(_SLICE_S)
        while len(self._connections) < self._size - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_on_others()
                continue
            connection.settimeout(self._remaining_s())
            if not _same_user(connection) or not self._welcome(connection):
                connection.close()
                self._check_on_others()

    def _welcome(self, connection: socket.socket) -> bool:
        try:
            rank, nonce, descriptors = self._hear(connection)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise  # That is our problem, and all ranks must hear of it.
            return False
        if rank in self._connections or not self._rank < rank < self._size or nonce != self._nonces[rank]:
            _close_all(descriptors)
            return False
        self._connections[rank] = connection
        self._admit(rank, connection, rank, nonce, descriptors)
        self._say(connection)
        return True

    def _check_on_others(self) -> None:
        missing = [rank for rank in range(self._rank + 1, self._size) if rank not in self._connections]
        store = self._membership.store
        for rank in missing:
            if store.check([f"{_VERDICT}/{rank}"]) or self._has_ended(rank):  # It has given up.
                raise ConnectionError(f"rank {self._global(rank)} did not connect")
        if time.monotonic() > self._until:
            names = [self._global(rank) for rank in missing]
            raise CollectiveTimeoutError(
                f"{len(names)} of {self._membership.size} ranks did not connect",
                rank=self._global(self._rank),
                peers=names,
            )

    def await_verdicts(self, problem: str) -> None:
        """Tell how it went here, and wait until all have told, or their time is over; speak for those that ended."""
        store = self._membership.store
        verdicts = [f"{_VERDICT}/{rank}" for rank in range(self._size)]
        store.set(verdicts[self._rank], json.dumps(problem))
        looked = time.monotonic()
        while not store.check(verdicts) and (now := time.monotonic()) < self._until:
            if now - looked > _SLICE_S:
                looked = now
                for rank, verdict in enumerate(verdicts):
                    if self._has_ended(rank) and not store.check([verdict]):
                        store.compare_set(verdict, "", json.dumps("it ended while the ranks connected"))
            time.sleep(_POLL_S)

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` is gone: until it has told how it went, it listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.setblocking(False)
            return probe.connect_ex(f"\0{self._names[rank]}") == errno.ECONNREFUSED

    def _remaining_s(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def _say(self, connection: socket.socket) -> None:
        assert self._own is not None
        _, descriptor, bell = self._own
        hello = _HELLO.pack(self._rank, self._nonces[self._rank])
        socket.send_fds(connection, [hello], [descriptor, bell], socket.MSG_NOSIGNAL)

    def _hear(self, connection: socket.socket) -> tuple[int, bytes, list[int]]:
        data, descriptors, seen, _ = socket.recv_fds(connection, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
        if len(data) != _HELLO.size or len(descriptors) != 2:
            _close_all(descriptors)
            if seen & socket.MSG_CTRUNC:  # The kernel had nowhere to put them.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise ConnectionError("another rank hung up while they connected")
        rank, nonce = _HELLO.unpack(data)
        return rank, nonce, descriptors

    def _admit(self, other: int, connection: socket.socket, rank: int, nonce: bytes, descriptors: list[int]) -> None:
        """Map the memory of ``other`` and make sure that it is the one that it announced."""
        memory_descriptor, bell = descriptors
        try:
            memory = map_memory(memory_descriptor)
            self._verify(other, rank, nonce, memory)
            process = _process_descriptor(connection)
        except BaseException:
            os.close(bell)
            raise
        finally:
            os.close(memory_descriptor)
        connection.setblocking(False)
        self._peers[other] = Peer(connection, process, bell, memory)

    def _verify(self, other: int, rank: int, nonce: bytes, memory: SharedMemory) -> None:
        seen = bytes(memory.view()[:NONCE_BYTES])
        if rank != other or nonce != self._nonces[other] or seen != nonce:
            raise ConnectionError(f"what answered for rank {self._global(other)} is something else")

    # The end of the meeting.

    def result(self) -> Attached:
        """What has come of it."""
        assert self._own is not None
        memory, _, bell = self._own
        return Attached(memory, bell, self._peers)

    def end(self) -> None:
        """Close what only the meeting needed."""
        if self._listener is not None:
            self._listener.close()
        if self._own is not None:
            os.close(self._own[1])

    def _hang_up(self) -> None:
        assert self._listener is not None
        for connection in (self._listener, *self._connections.values()):
            connection.close()

    def give_up(self) -> None:
        """Close everything that ``result`` would have returned."""
        for connection in self._connections.values():
            connection.close()
        _close_all([descriptor for peer in self._peers.values() for descriptor in (peer.process, peer.bell)])
        if self._own is not None:
            os.close(self._own[2])


def explained(error: Exception) -> str:
    """What ``error`` says, and what helps where descriptors ran out."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{text}; raise `ulimit -n`, which is {limit}"
    return text


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel tells."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def _same_user(connection: socket.socket) -> bool:
    return _credentials(connection)[1] == os.geteuid()


def _process_descriptor(connection: socket.socket) -> int:
    """A pidfd of the process at the other end.

    Raises:
        OSError: it cannot be had: the process is in another pid namespace, and the kernel is old.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # Linux before 6.5 does not know the option.
    process, _ = _credentials(connection)
    if process == 0:
        raise ProcessLookupError("its process is in another pid namespace, and Linux is older than 6.5")
    descriptor = os.pidfd_open(process)
    # Had it ended meanwhile, the number could be a stranger's by now.
    look = select.poll()
    look.register(connection, 0)
    if look.poll(0):
        os.close(descriptor)
        raise ConnectionResetError("the other process ended while they connected")
    return descriptor

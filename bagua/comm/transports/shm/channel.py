"""How segments come to a peer: their descriptors travel over a socket before a notice names them."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Collection

from bagua.comm.transports.shm.segments import MappedSegment, Segment
from bagua.errors import PeerLostError, TransportUnavailableError

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
        self._peer = peer
        self._lock = threading.Lock()
        self._sent: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._mapped: dict[int, MappedSegment] = {}

    @property
    def connection(self) -> int:
        """Descriptor of the connection. It hangs up when the peer ends, runs another program, or closes."""
        return self._connection.fileno()

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

"""A transport from outside of the package: messages over plain sockets, and nothing else."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from functools import partial

import torch

import bagua.comm
from bagua.comm import DONE, Call, Handle, Membership, Transport
from bagua.errors import TransportUnavailableError

#: A thread looks up at least so often: its socket may have been closed.
_SLICE_S = 0.1


class SocketTransport(Transport):
    """Sends and receives bytes, one message at a time for each peer and direction."""

    name = "sockets"

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._connections: dict[int, socket.socket] = {}
        try:
            self._connect(membership)
        except OSError as error:
            self.close()
            raise TransportUnavailableError(f"no connection: {error}", rank=membership.ranks[self.rank]) from error

    def _connect(self, membership: Membership) -> None:
        """Connect to all lower ranks, and wait for the connections of all higher ones."""
        with socket.create_server(("127.0.0.1", 0), backlog=self.size) as server:
            membership.store.set(f"port/{self.rank}", str(server.getsockname()[1]))
            server.settimeout(membership.timeout_s)
            for peer in range(self.rank):
                address = ("127.0.0.1", int(membership.store.get(f"port/{peer}")))
                connection = socket.create_connection(address, membership.timeout_s)
                connection.sendall(self.rank.to_bytes(4, "little"))
                self._add(peer, connection)
            while len(self._connections) < self.size - 1:
                connection, _ = server.accept()
                self._add(int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little"), connection)

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connections[peer] = connection

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
        """Move all bytes before it returns."""
        connection, until = self._connections[call.root], time.monotonic() + timeout_s
        tensor = source if source is not None else target
        assert tensor is not None
        left = memoryview(tensor.numpy())
        while left:
            try:
                moved = connection.send(left) if source is not None else connection.recv_into(left)
            except BlockingIOError:
                self._await(connection, select.POLLOUT if source is not None else select.POLLIN, until)
                continue
            if not moved:
                raise ConnectionError(f"rank {call.root} closed its connection")
            left = left[moved:]
        return DONE

    def _await(self, connection: socket.socket, event: int, until: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        poll = select.poll()
        with contextlib.suppress(ValueError):  # It was closed meanwhile; the next try says so.
            poll.register(connection, event)
            poll.poll(1000 * min(left_s, _SLICE_S))

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """End all connections: calls under way raise, here and on the peers."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the sockets back."""
        self.abort("it closed its communicator")
        for connection in self._connections.values():
            connection.close()


bagua.comm.register_transport("sockets", partial(bagua.comm.LoweredTransport, SocketTransport))

"""How the members of a reconfigured group find each other, without the store where they first met.

Each group serves a store of its own as soon as somebody asks for its handle, which says where that is. The members of
what comes next meet at the store of the first of them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from bagua.comm.store.bounded import bounded
from bagua.comm.store.keys import behind_token
from bagua.comm.store.serving import connect_store, serve_store, wait_for_listener
from bagua.comm.transports.failure.notices import own_address
from bagua.errors import ConfigurationError, PeerLostError

_EXPECTED = "what get_reconfigure_handle() returned on each member, this one among them, each once"


@dataclass
class ReconfigureOptions:
    """What ``reconfigure`` of a group of backend ``bagua`` takes; torch has its own from 2.14 on, which serves as well.

    Args:
        uuid: number of this reconfiguration, a new one each time, equal on all members.
        handles: one handle of each member. A list gives the ranks; for a set they are in alphabetical order.
        timeout: how long to wait for the members; None means the default deadline of the group.
        hints: has no meaning for this backend.

    Example:
        >>> ReconfigureOptions(uuid=1, handles=["a", "b"], timeout=timedelta(seconds=10)).uuid
        1
    """

    uuid: int = 0
    handles: list[str] | set[str] = field(default_factory=list)
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


class MeetingPoint:
    """Where other processes find one group of this process again."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._store: dist.Store | None = None
        self._address = ("", 0)

    def handle(self) -> str:
        """What others need to know; the same in every call."""
        if self._store is None:
            host = own_address()
            self._store, port = serve_store(host)
            self._address = (host, port)
            behind_token(self._store).set(_key_of(self._name), "")
        return json.dumps({"bagua": self._name, "host": self._address[0], "port": self._address[1]})

    def order(self, handles: Iterable[str]) -> tuple[int, list[str]]:
        """The rank of this process among those with ``handles``, and these in the order of ranks.

        Raises:
            ConfigurationError: they are not handles of this backend, or this process has not one of them.
        """
        ordered = list(handles) if isinstance(handles, list | tuple) else sorted(handles)
        names = [_read(handle)[0] for handle in ordered]
        if len(set(names)) < len(names) or self._name not in names:
            raise _refused(f"{len(names)} handles, {names.count(self._name)} of them of this process")
        return names.index(self._name), ordered

    def close(self) -> None:
        """Serve the store no longer."""
        self._store, self._name = None, uuid.uuid4().hex


def meet(first: str, rank: int, timeout_s: float) -> dist.Store:
    """The store of the member with the handle ``first``, over a connection of its own.

    Raises:
        PeerLostError: nobody listens there.
        ConfigurationError: somebody else does, or a member of a job with another ``BAGUA_TOKEN``.
    """
    name, host, port = _read(first)
    started = time.monotonic()
    try:
        left_s = wait_for_listener(host, port, timeout_s)
        store = connect_store(port, left_s, host)
        with bounded(behind_token(store), left_s) as asked:
            is_there = asked.check([_key_of(name)])
    except (OSError, dist.DistError) as error:
        raise PeerLostError(
            "the member at whose store the others meet does not answer",
            rank=rank,
            call="reconfigure",
            peers=(0,),
            elapsed_s=time.monotonic() - started,
            timeout_s=timeout_s,
            advice="Ask the members that are left for their handles, and reconfigure with these.",
        ) from error
    if not is_there:
        raise _refused(f"one of another job, or of a member that is gone, for rank 0: {host}:{port}")
    return store


def _key_of(name: str) -> str:
    return f"bagua/handle/{name}"


def _read(handle: str) -> tuple[str, str, int]:
    """Name and address out of a handle."""
    try:
        told = json.loads(handle)
        return str(told["bagua"]), str(told["host"]), int(told["port"])
    except (ValueError, TypeError, KeyError):
        raise _refused(repr(handle)) from None


def _refused(seen: str) -> ConfigurationError:
    return ConfigurationError(
        "these are not the handles of members of this group", argument="handles", expected=_EXPECTED, seen=seen
    )

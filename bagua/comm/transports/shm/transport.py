"""The transport of processes that run on one Linux host: they read each other's memory."""

from __future__ import annotations

import logging
import os
import platform
import sys

import torch

from bagua import env
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.transports.contract import Handle, Membership, Transport
from bagua.comm.transports.memory.exchange import small_bytes
from bagua.comm.transports.memory.transport import MemoryTransport
from bagua.comm.transports.shm.attach import explained
from bagua.comm.transports.shm.peers import ShmPeers
from bagua.comm.transports.shm.segments import HEADER_BYTES, allocate
from bagua.comm.transports.threads import current_fault
from bagua.errors import TransportUnavailableError

_log = logging.getLogger("bagua")


def shm_refusal() -> Exception | None:
    """Why this process cannot share memory with others, or None. Local, quick, no side effect."""
    reason = _obstacle()
    if not reason:
        return None
    return TransportUnavailableError(
        f"the shared-memory transport cannot run here: {reason}",
        advice="Leave the choice to backend=None, or use backend='gloo'.",
    )


def shm_expected() -> bool:
    """Whether processes of this kind of machine and interpreter can usually share memory."""
    return not _unsupported()


def _unsupported() -> str:
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "it relies on the global interpreter lock, and this Python runs without"
    return ""


def _obstacle() -> str:
    if unsupported := _unsupported():
        return unsupported
    try:
        os.close(os.memfd_create("bagua", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"memfd, eventfd and pidfd are needed: {explained(error)}"
    return ""


class ShmTransport(MemoryTransport):
    """Ranks are processes of this host, all of the same user.

    Args:
        membership: the ranks.

    Raises:
        TransportUnavailableError: on all ranks, if one of them cannot.
        CollectiveTimeoutError: some ranks did not come.
    """

    name = "shm"
    #: Asynchronous calls have threads of their own; one more between these and the engine gains nothing.
    executor = "caller"

    def __init__(self, membership: Membership) -> None:
        peers = ShmPeers(membership, env.shm_staging_bytes(), current_fault())
        super().__init__(membership, peers)
        self._shm_peers = peers
        self._in_parent = True
        family.add(self)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Mark the own line broken, and wake everyone."""
        if self._in_parent:
            super().abort(reason, culprit)

    def close(self) -> None:
        """Leave, and close what the kernel holds for us."""
        if self._in_parent:
            super().close()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that peers can map, for all that is too large to be copied on the way."""
        nbytes = numel * dtype.itemsize
        if self._in_parent and device.type == "cpu" and nbytes > small_bytes(self.size):
            try:
                memory, _ = allocate(nbytes, in_children=True)
                return memory.tensor(dtype, numel, HEADER_BYTES)
            except OSError as error:
                _log.info("rank %d: ordinary memory instead of shared memory: %s", self.rank, error)
        return Transport.empty(self, numel, dtype, device)

    def disown(self) -> None:
        """In a forked child: do nothing any more, least of all to the parent's peers."""
        self._in_parent = False
        self._shm_peers.disown()
        # Instead of a question in each call of all the others.
        self.start = self._refuse  # type: ignore[assignment, method-assign]

    def _refuse(self, *_: object) -> Handle:
        raise forked_error()

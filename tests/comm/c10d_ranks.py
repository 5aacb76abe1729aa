"""Ranks on Gloo that are threads of this process, without groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagua.comm.communicator import Communicator
from bagua.comm.transports.base import Membership, Transport
from bagua.comm.transports.c10d.transport import C10dTransport
from tests.comm import memory_ranks


def run(
    size: int,
    job: Callable[[Communicator], Any],
    *,
    backend: str = "gloo",
    timeout_s: float = 20.0,
    transport: Callable[[Membership], Transport] | None = None,
) -> list[Any]:
    """What ``job(communicator)`` returns on each rank, or the error that it raises there."""
    made = transport or (lambda member: C10dTransport(backend, member))
    # Nobody closes what another rank still connects to, or uses.
    return memory_ranks.run(size, job, transport=made, timeout_s=timeout_s, together=True, label="test")

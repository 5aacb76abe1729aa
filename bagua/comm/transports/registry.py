"""From the name of a backend to the transport that implements it. One line per transport."""

from __future__ import annotations

from bagua import env
from bagua.comm.transports.base import Membership, Transport
from bagua.comm.transports.c10d.transport import C10dTransport, c10d_refusal
from bagua.comm.transports.checked import CheckedTransport, check_membership
from bagua.comm.transports.hybrid import HybridTransport
from bagua.comm.transports.shm.transport import ShmTransport, shm_refusal
from bagua.comm.transports.solo import SoloTransport
from bagua.comm.transports.threads import ThreadsTransport

__all__ = ["create_transport", "refusal"]


def create_transport(backend: str, membership: Membership) -> Transport:
    """The transport of one communicator. Collective among its members.

    Args:
        backend: ``shm``, ``hybrid``, ``threads``, ``solo``, or anything that ``torch.distributed`` knows:
            ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``, a registered third-party one.
        membership: the ranks to connect. One rank alone never needs a backend.
    """
    if membership.size == 1:
        return SoloTransport(membership)
    if backend == "threads":
        return ThreadsTransport(membership)
    hosts = len(set(membership.nodes))
    if backend == "shm" or (backend == "hybrid" and hosts == 1):
        return ShmTransport(membership)
    transport: Transport
    if backend == "hybrid" and hosts < membership.size:
        transport = HybridTransport(membership)
    else:
        transport = C10dTransport("gloo" if backend == "hybrid" else backend, membership)
    if env.debug_checks():
        return CheckedTransport(transport, C10dTransport("gloo", check_membership(membership)))
    return transport


def refusal(backend: str) -> Exception | None:
    """Why this process cannot serve ``backend``, or None if it can. Local, quick, no side effect."""
    if backend in ("threads", "solo"):
        return None
    if backend in ("shm", "hybrid"):
        return shm_refusal()
    return c10d_refusal(backend)

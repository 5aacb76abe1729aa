"""From the name of a backend to the transport that implements it. One line per transport."""

from __future__ import annotations

from bagua import env
from bagua.comm.c10d import C10dTransport, c10d_refusal
from bagua.comm.checked import CheckedTransport, check_membership
from bagua.comm.shm import ShmTransport, shm_refusal
from bagua.comm.solo import SoloTransport
from bagua.comm.threads import ThreadsTransport
from bagua.comm.transport import Membership, Transport

__all__ = ["create_transport", "refusal"]


def create_transport(backend: str, membership: Membership) -> Transport:
    """The transport of one communicator. Collective among its members.

    Args:
        backend: ``shm``, ``threads``, ``solo``, or anything that ``torch.distributed`` knows:
            ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``, a registered third-party one.
        membership: the ranks to connect. One rank alone never needs a backend.
    """
    if membership.size == 1:
        return SoloTransport(membership)
    if backend == "threads":
        return ThreadsTransport(membership)
    if backend == "shm":
        return ShmTransport(membership)
    transport = C10dTransport(backend, membership)
    if env.debug_checks():
        return CheckedTransport(transport, C10dTransport("gloo", check_membership(membership)))
    return transport


def refusal(backend: str) -> Exception | None:
    """Why this process cannot serve ``backend``, or None if it can. Local, quick, no side effect."""
    if backend in ("threads", "solo"):
        return None
    if backend == "shm":
        return shm_refusal()
    return c10d_refusal(backend)

"""From the name of a backend to the transport that implements it. One line per transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bagua import env
from bagua.comm.startup.choice import TORCH_NAME
from bagua.comm.transports.bucket import BucketTransport
from bagua.comm.transports.c10d.groups import knows, split_name
from bagua.comm.transports.c10d.torch_transport import C10dTransport, c10d_refusal
from bagua.comm.transports.checked import CheckedTransport
from bagua.comm.transports.contract import Membership, Transport
from bagua.comm.transports.hybrid import HybridTransport
from bagua.comm.transports.shm.transport import ShmTransport, shm_refusal
from bagua.comm.transports.solo import SoloTransport
from bagua.comm.transports.threads import ThreadsTransport
from bagua.errors import ConfigurationError

_OWN = ("shm", "hybrid", "threads", "solo", TORCH_NAME)


class _Registered(NamedTuple):
    factory: Callable[[Membership], Transport]
    refusal: Callable[[], Exception | None] | None


_registered: dict[str, _Registered] = {"bucket": _Registered(BucketTransport, None)}


def register_transport(
    name: str, factory: Callable[[Membership], Transport], *, refusal: Callable[[], Exception | None] | None = None
) -> None:
    """Make ``init_process_group(backend=name)`` use a transport from outside of this package.

    Called on every rank, before ``init_process_group``. ``tests/contract`` holds a transport to what it promises.

    Args:
        name: name of the backend; neither one of ours nor one that ``torch.distributed`` knows.
        factory: makes the transport of one communicator with several ranks; collective among its members. It
            raises ``TransportUnavailableError`` on all of them if it cannot connect.
        refusal: the reason why this process cannot serve the backend, or None if it can; quick, without side
            effects. It is asked before anybody connects, and one rank's reason is everyone's error.

    Raises:
        ConfigurationError: the name is taken by another transport.

    Example:
        >>> import bagua.comm
        >>> class Mine(bagua.comm.Transport):
        ...     def start(self, call, source, target, timeout_s, asynchronous): ...
        ...     def abort(self, reason, culprit=None): ...
        ...     def close(self): ...
        >>> bagua.comm.register_transport("my_network", Mine)
    """
    entry = _Registered(factory, refusal)
    taken = name in _OWN or knows(name) or _registered.get(name, entry) != entry
    if taken or not name.isidentifier():
        raise ConfigurationError(
            "this cannot be the name of a new backend",
            argument="name",
            expected="a Python identifier that names no other backend",
            seen=repr(name),
            advice="Choose another name; registering the same factory again is allowed.",
        )
    _registered[name] = entry


def create_transport(backend: str, membership: Membership) -> Transport:
    """The transport of one communicator. Collective among its members.

    Args:
        backend: ``shm``, ``hybrid``, ``threads``, ``solo``, a registered transport, or anything that
            ``torch.distributed`` knows: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``, a third-party one.
        membership: the ranks to connect. One rank alone never needs a backend.
    """
    if membership.size == 1:
        return SoloTransport(membership)
    if backend == "threads":
        return ThreadsTransport(membership)
    hosts = len(set(membership.nodes))
    if backend == "shm" or (backend == "hybrid" and hosts == 1):
        return ShmTransport(membership)
    transport = _across_hosts(backend, membership, hosts)
    if env.debug_checks() and not transport.compares_calls:
        return CheckedTransport(transport, _beside(transport, membership))
    return transport


def _beside(transport: Transport, membership: Membership) -> C10dTransport:
    """The transport of the fingerprints; if it cannot be connected, ``transport`` is given back, too."""
    try:
        return C10dTransport("gloo", membership.part("check"))
    except BaseException:
        transport.close()
        raise


def _across_hosts(backend: str, membership: Membership, hosts: int) -> Transport:
    if backend in _registered:
        return _registered[backend].factory(membership)
    if backend == "hybrid" and hosts < membership.size:
        return HybridTransport(membership)
    return C10dTransport("gloo" if backend == "hybrid" else backend, membership)


def backend_refusal(backend: str, ranks: int = 2) -> Exception | None:
    """Why this process cannot serve ``backend``, or None if it can. Local, quick, no side effect.

    Args:
        backend: its name.
        ranks: how many are to be connected. One alone needs no backend, so any name will do that there is.
    """
    own = backend in _OWN or backend in _registered
    if ranks == 1 and (own or all(knows(name) for name in split_name(backend).values())):
        return None
    if backend in ("threads", "solo"):
        return None
    if backend in ("shm", "hybrid"):
        return shm_refusal()
    if backend in _registered:
        ask = _registered[backend].refusal
        return None if ask is None else ask()
    return c10d_refusal(backend, _registered)

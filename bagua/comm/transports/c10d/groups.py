"""The backends of ``torch.distributed``: how each is built, what it can do, how it is torn down."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from bagua import env
from bagua.checks import did_you_mean
from bagua.comm.lifetime.background import beside
from bagua.comm.lifetime.forks import leak
from bagua.comm.torch_private import TORCH_NAME, backend_request, gloo_options, nccl_options, plugins
from bagua.comm.transports.c10d.lowering import Abilities, as_timedelta
from bagua.comm.transports.contract import Membership
from bagua.errors import TransportUnavailableError

_DESCRIPTORS = "/proc/self/fd"


#: Descriptor of a socket of a Gloo group, and its inode, which tells it from another one that gets the same number
#: later. It must end with the process that made it. Forked children inherit it, and so do programs that replace the
#: process. An heir would keep connections open after its parent's death or after an abort, and peers would notice
#: nothing before their deadline.
OpenSocket = tuple[int, int]


def open_sockets() -> frozenset[OpenSocket]:
    """All sockets of this process; none where the system does not list them."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return frozenset()
    found = ((int(name), _inode(int(name))) for name in names)
    return frozenset((descriptor, inode) for descriptor, inode in found if inode is not None)


def opened_since(before: frozenset[OpenSocket], count: int) -> tuple[OpenSocket, ...]:
    """The sockets opened since ``before``, none inheritable by other programs from now on.

    Args:
        before: result of ``open_sockets`` then.
        count: how many they must be.

    Returns:
        The sockets; none if there are more or fewer, as some are then another thread's.
    """
    opened = tuple(open_sockets() - before)
    if len(opened) != count:
        return ()
    for descriptor, _ in opened:
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
    return opened


def let_go(sockets: Iterable[OpenSocket]) -> None:
    """In a forked child: give up its share of ``sockets``, which stay open in the parent."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor, inode in sockets:
            if _inode(descriptor) == inode:
                # Not closed: the number stays taken, whatever torch still does with it.
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _inode(descriptor: int) -> int | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _listens(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # Too many open files: nothing is known of it.
        return True


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_ARITHMETIC = ("sum", "product", "min", "max")
_BITWISE = ("band", "bor", "bxor")


def _pairs(reductions: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> frozenset[tuple[str, torch.dtype]]:
    return frozenset((reduction, dtype) for reduction in reductions for dtype in dtypes)


class BackendGroup(ABC):
    """One backend object of torch, serving the tensors of one or more devices.

    Attributes:
        abilities: operations and dtypes that the backend serves without help.
        device_types: types of the devices whose tensors it takes.
        executor: see ``Transport``.
        overlaps: see ``Transport``.
        on_stream: works complete on the device's stream instead of in a host thread.
        connects_late: ranks connect in their first call, which holds the host until all of them have come.
    """

    abilities: Abilities
    device_types: frozenset[str] = frozenset({"cpu"})
    executor: Literal["caller", "thread", "stream"] = "thread"
    overlaps = False
    on_stream = False
    connects_late = False

    def __init__(self, name: str, store: Store, membership: Membership) -> None:
        self.name = name
        self.rank = membership.rank
        self.size = membership.size
        self.group: Any = self._create(store, membership)

    @abstractmethod
    def _create(self, store: Store, membership: Membership) -> Any:
        """Build the backend object. Collective."""

    @abstractmethod
    def break_connections(self) -> None:
        """Make calls that are under way end with an error, here and on the peers. Quick."""

    def count_closed(self) -> int:
        """How many connections to other ranks have closed, as far as that is known."""
        return 0

    def close(self) -> None:
        """Drop torch's object."""
        self.group = None

    def disown(self) -> None:
        """In a forked child: never touch torch's object again."""
        leak(self.group)


class GlooGroup(BackendGroup):
    """Gloo: CPU tensors over TCP. It neither propagates failures nor aborts.

    Its reduce-scatter is an allreduce whose work does not know when it is complete,
    and which kills the process if the output is 0-dimensional; so it is not used.
    """

    abilities = Abilities(
        copies=frozenset({*_FLOATS, *_INTEGERS, torch.bool}),
        reductions=_pairs(_ARITHMETIC, _FLOATS + _INTEGERS) | _pairs(("avg",), _FLOATS) | _pairs(_BITWISE, _INTEGERS),
        messages_from_bytes=64 * 1024,
        pairs_to_bytes=256 * 1024,  # More would use one direction of a slow link after the other.
        any_source=True,
    )
    # Gloo's own threads work on a started call. Handing it to a Python thread first costs 2 to 10 % of a step.
    executor = "caller"
    overlaps = True
    #: Users' messages have tag 0.
    _POISON_TAG = 1
    _POISON_S = 0.001
    _CONNECT_S = 120.0

    def _create(self, store: Store, membership: Membership) -> Any:
        # Everybody is here already, and every call brings its own deadline.
        timeout = as_timedelta(min(membership.timeout_s, self._CONNECT_S))
        before = open_sockets()
        options = gloo_options(timeout, len(set(membership.nodes)))
        group = dist.ProcessGroupGloo(store, membership.rank, membership.size, options)
        # One to each peer, and one where Gloo listened for them.
        self._sockets: tuple[OpenSocket, ...] = opened_since(before, membership.size)
        self._connections = [one for one in self._sockets if not _listens(one[0])]
        return group

    def count_closed(self) -> int:
        """Gloo closes what broke, but does not tell a call that sends, which would wait for its deadline."""
        return sum(_inode(one) != inode for one, inode in self._connections)

    def disown(self) -> None:
        super().disown()
        let_go(self._sockets)

    def break_connections(self) -> None:
        """Close all connections.

        Gloo has no call for this. But a receive that times out closes the connection it
        waits on, and a closed connection ends whatever waits for it, on both sides.
        """
        group = self.group
        if group is None:
            return
        poison = []
        for peer in range(self.size):
            if peer != self.rank:
                # A connection that is closed already refuses.
                with contextlib.suppress(RuntimeError):
                    poison.append(group.recv([torch.empty(1, device="cpu")], peer, self._POISON_TAG))
        for work in poison:
            with contextlib.suppress(RuntimeError):
                work.wait(as_timedelta(self._POISON_S))


class NcclGroup(BackendGroup):
    """NCCL: CUDA tensors, asynchronous to the host, aborted by ``Monitor``."""

    abilities = Abilities(
        copies=frozenset({*_FLOATS, *_INTEGERS, torch.bool}),
        reductions=_pairs(_ARITHMETIC, _FLOATS + _INTEGERS) | _pairs(("avg",), _FLOATS),
        reduce_scatters=True,
        grouped_messages=True,
        device_type="cuda",
    )
    device_types = frozenset({"cuda"})
    executor = "stream"
    on_stream = connects_late = True

    #: Torch's watchdog comes so much later than ``Monitor``: its end of a call takes long, and names nobody.
    _AFTER_THE_MONITOR_S = 60.0

    def _create(self, store: Store, membership: Membership) -> Any:
        env.prefer_nccl_clean_up()
        options = nccl_options(as_timedelta(membership.timeout_s + self._AFTER_THE_MONITOR_S))
        return dist.ProcessGroupNCCL(store, membership.rank, membership.size, options)

    def break_connections(self) -> None:
        group = self.group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """Beside the caller: NCCL waits for the other ranks, which may close later, or in another order."""
        group, self.group = self.group, None
        if group is not None:

            def shut_down() -> None:
                with contextlib.suppress(RuntimeError):
                    group.shutdown()

            beside(shut_down)


class OtherGroup(BackendGroup):
    """A backend registered with ``torch.distributed.Backend.register_backend``.

    Nothing is taken for granted but the arithmetic that every backend has.
    """

    abilities = Abilities(
        copies=frozenset({*_FLOATS, *_INTEGERS}),
        reductions=_pairs(_ARITHMETIC, (torch.float32, torch.float64, torch.int32, torch.int64)),
    )

    def _create(self, store: Store, membership: Membership) -> Any:
        plugin = plugins()[self.name.upper()]
        capability = dist.Backend.backend_capability.get(self.name, ["cpu"])
        self.device_types = frozenset(capability)
        self.on_stream = "cuda" in self.device_types and "cpu" not in self.device_types
        timeout = as_timedelta(membership.timeout_s)
        if not plugin.extended_api:
            return plugin.creator_fn(store, membership.rank, membership.size, timeout)
        options = backend_request()
        options.store = store
        options.group_rank = membership.rank
        options.group_size = membership.size
        options.timeout = timeout
        options.group_id = membership.label
        options.global_ranks_in_group = list(membership.ranks)
        return plugin.creator_fn(options, None)

    def break_connections(self) -> None:
        for name in ("abort", "shutdown"):
            method = getattr(self.group, name, None)
            if method is not None:
                # A backend without such a call says so with an error.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    method()
                    return


def split_name(name: str) -> dict[str, str]:
    """Backend by device type; the empty device type stands for "whatever it serves".

    Example:
        >>> split_name("gloo"), split_name("cpu:gloo,cuda:nccl")
        ({'': 'gloo'}, {'cpu': 'gloo', 'cuda': 'nccl'})
    """
    if ":" not in name:
        return {"": name.lower()}
    pairs = (part.split(":", 1) for part in name.lower().split(","))
    return {device.strip(): backend.strip() for device, backend in pairs}


def create_group(name: str, membership: Membership) -> BackendGroup:
    """Build backend ``name`` among the members.

    Raises:
        TransportUnavailableError: torch has no such backend here, or it cannot connect.
    """
    known: dict[str, type[BackendGroup]] = {"gloo": GlooGroup, "nccl": NcclGroup}
    group_class = known.get(name, OtherGroup)
    refusal = group_refusal(name)
    if refusal is not None:
        raise refusal
    started = time.monotonic()
    try:
        return group_class(name, PrefixStore(name, membership.store), membership)
    except Exception as error:
        raise TransportUnavailableError(
            f"backend {name} could not be set up for {membership.label}: {error}",
            rank=membership.ranks[membership.rank],
            elapsed_s=time.monotonic() - started,
            timeout_s=membership.timeout_s,
            advice="Check that all ranks run, reach each other over the network, and see their device.",
        ) from error


def knows(name: str) -> bool:
    """Whether ``torch.distributed`` has a backend of this name, here or in another build of torch."""
    return name.lower() in ("gloo", "nccl", "mpi", "ucc", "xccl") or name.upper() in plugins()


def group_refusal(name: str, others: Iterable[str] = ()) -> TransportUnavailableError | None:
    """Why backend ``name`` cannot be used in this process, or None if it can. Messages name ``others``, too."""
    if name == TORCH_NAME:
        return TransportUnavailableError(
            "backend 'bagua' of torch.distributed is made of these transports, not the other way round",
            advice="Leave the choice to backend=None, or name a transport.",
        )
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
    }.get(name, name.upper() in plugins())
    if available:
        return None
    if name == "nccl":
        return TransportUnavailableError("nccl needs a CUDA build of torch and a GPU", advice="gloo needs neither.")
    registered = sorted(plugin.lower() for plugin in plugins() if plugin.lower() != TORCH_NAME)
    known = list(dict.fromkeys(["shm", "hybrid", "gloo", "nccl", *registered, *others]))
    return TransportUnavailableError(
        f"there is no backend {name!r} here",
        advice=" ".join(filter(None, [did_you_mean(name, known), f"There are {', '.join(known)}."])),
    )

"""How the calls of a group of backend ``bagua`` are made: on which communicator or backend, and as which work."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm.addresses import own_address
from bagua.comm.communicator import Communicator
from bagua.comm.group import ProcessGroup
from bagua.comm.operands import as_seconds
from bagua.comm.store.keys import behind_token, bounded
from bagua.comm.store.serving import connect_store, serve_store, wait_for_listener
from bagua.comm.torch_backend.work import BackwardWatch, Callbacks, CallbackThread, PlainFutures, TorchWork, in_callback
from bagua.comm.torch_private import end_coalescing, gloo_options, set_default_timeout, start_coalescing
from bagua.comm.work import Work, joined
from bagua.errors import ConfigurationError, InvalidTensorError, PeerLostError

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
    """Where other processes find one group of this process again, without the store where they first met.

    Each group serves a store of its own as soon as somebody asks for its handle, which says where that is. The members
    of what comes next meet at the store of the first of them.
    """

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
        PeerLostError: no rank listens there.
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


@dataclass(frozen=True)
class TorchBackendOptions:
    """What ``pg_options`` of ``torch.distributed.init_process_group("bagua")`` and ``new_group`` take.

    Args:
        raise_in_backward: True if the end of a backward pass raises the errors of its allreduces. Without, the
            errors are left to the code that handles the futures of these calls, such as a communication hook.
        ordered_callbacks: True if callbacks of futures run in a thread of their own, in the order of the calls, so that
            they may communicate and wait. Without, they run where torch runs them: in the thread that adds them, if the
            call is complete, and else in one that completes calls, where they must not communicate.

    Example:
        >>> TorchBackendOptions(raise_in_backward=False)
        TorchBackendOptions(raise_in_backward=False, ordered_callbacks=True)
    """

    raise_in_backward: bool = True
    ordered_callbacks: bool = True


class CpuStandIn(dist.ProcessGroupGloo):
    """What torch finds registered for CPU tensors, because it asks groups for that.

    It also does what our transports do not: sparse tensors, and messages with a tag. It
    connects when it is first used, so it costs nothing until then.

    Args:
        store: key-value store of its group alone.
        rank: number of this process.
        size: number of ranks.
        timeout: default deadline of the calls of its group.
        hosts: number of hosts on which its ranks live.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, hosts: int) -> None:
        super().__init__(store, rank, size, gloo_options(timeout, hosts, lazy=True))
        self.timeout_s = timeout.total_seconds()
        #: Makes the calls instead of this one, which stays registered, since the group was reconfigured.
        self.heir: CpuStandIn | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Where torch leaves a new timeout for the group."""
        self.timeout_s = as_seconds(timeout)
        super()._set_default_timeout(timeout)
        if self.heir is not None:
            set_default_timeout(self.heir, timeout)


class Connected(NamedTuple):
    """What the calls of a group are made on.

    Attributes:
        store: meeting place of its members.
        members: our group of the same ranks.
        stand_in: makes the calls on CPU tensors that ``members`` cannot.
        backends: who serves the tensors of other devices, by device type.
    """

    store: dist.Store
    members: ProcessGroup
    stand_in: CpuStandIn
    backends: dict[str, Any]


class CallStarter:
    """What makes the calls of one group: our communicators for CPU tensors, torch's backends for others.

    Args:
        connected: group that makes the calls; it is closed with this.
        options: options of the group.

    Attributes:
        store: meeting place of its members now.
        members: our group of the same ranks.
        messages: makes the calls between two ranks.
        backends: who serves the tensors of other devices now.
        torch_backends: the stand-in and the first other backends, as torch registers them, by device type.
    """

    def __init__(self, connected: Connected, options: TorchBackendOptions = TorchBackendOptions()) -> None:
        self.torch_backends = {"cpu": connected.stand_in, **connected.backends}
        self._options = options
        self._backward = BackwardWatch() if options.raise_in_backward else None
        self._begin(connected)

    def _begin(self, connected: Connected) -> None:
        self.store, self.members, self._stand_in, self.backends = connected
        self.messages = self.members.global_communicator
        self.messages.share()  # Threads may share a group of torch.
        self.callbacks: Callbacks = PlainFutures()
        if self._options.ordered_callbacks:
            self.callbacks = CallbackThread(f"bagua-{self.members.label}-callbacks")
        #: Connected by the first collective call in a callback.
        self._nested: Communicator | None = None
        self._nesting = threading.RLock()
        #: Started calls that will be one work, by the thread that collects them.
        self._coalesced: dict[int, list[Work]] = {}
        #: Works of single numbers. With one DDP counts who has not joined; C++ waits for it and keeps no Python alive.
        self._counts: deque[TorchWork] = deque(maxlen=16)

    def renew(self, connected: Connected) -> None:
        """Make later calls with other members, after ``close``."""
        timeout_s = self.timeout_s
        self.torch_backends["cpu"].heir = connected.stand_in
        self._begin(connected)
        self.members.set_timeout(timeout_s)
        self.set_timeout(timedelta(seconds=timeout_s))

    @property
    def timeout_s(self) -> float:
        """Default deadline of the calls, in seconds."""
        return self._stand_in.timeout_s

    @property
    def collectives(self) -> Communicator:
        """Who makes the collective calls of the calling thread.

        Those in callbacks have a communicator of their own: ranks do not agree on the moment at which a
        callback runs, so not on the order of its calls and those of other threads.
        """
        if not in_callback():
            return self.messages
        with self._nesting:
            if self._nested is None:
                everyone = range(self.members.size)
                self._nested = self.members.connect(everyone, "callbacks", timeout_s=self.timeout_s)
                self._nested.share()
            return self._nested

    def elsewhere(self, tensor: Tensor, tag: int = 0) -> Any:
        """Who takes calls with this tensor instead of our communicator, if anybody."""
        if tensor.is_cpu:
            return self._stand_in if tag or tensor.layout is torch.sparse_coo else None
        try:
            return self.backends[tensor.device.type]
        except KeyError:
            raise InvalidTensorError(
                "backend bagua does not serve this device",
                argument="tensor",
                expected=f"a tensor on {' or '.join(['cpu', *self.backends])}",
                seen=tensor.device,
                advice="CUDA tensors need a build of torch with NCCL, and a GPU.",
            ) from None

    def start(
        self,
        options: Any,
        outputs: Sequence[Tensor],
        calls: Sequence[Callable[..., Work | None]],
        finish: Callable[[], None] | None = None,
        *,
        is_message: bool = False,
    ) -> TorchWork:
        """Start ``calls`` of our communicator as torch's options say.

        Those that are not asynchronous are made here and now, mostly in the calling thread: on
        shared memory that takes a fraction of the time.
        """
        seconds = options.timeout.total_seconds()
        timeout_s = seconds if seconds > 0 else self._stand_in.timeout_s
        started = [call(async_op=options.asyncOp, timeout=timeout_s) for call in calls]
        works = [work for work in started if work is not None]
        if not works:
            if finish is not None:
                finish()
            return TorchWork(None, outputs, self.callbacks)
        work = works[0] if finish is None and len(works) == 1 else joined(works, finish)
        if self._coalesced and (collected := self._coalesced.get(threading.get_ident())) is not None:
            collected.append(work)
        made = TorchWork(work, outputs, self.callbacks, is_message=is_message)
        if len(outputs) == 1 and outputs[0].numel() == 1:
            self._counts.append(made)
        return made

    def raise_in_backward(self, started: TorchWork) -> None:
        """Let the end of the backward pass that runs raise the error of ``started``, if that is asked for."""
        if started.pending is not None and self._backward is not None:
            self._backward.add(started.pending)

    def start_coalescing(self, device: torch.device) -> None:
        """Collect what the calling thread starts for ``device`` from now on."""
        if device.type in self.backends:
            start_coalescing(self.backends[device.type])
        else:
            self._coalesced[threading.get_ident()] = []

    def end_coalescing(self, device: torch.device) -> Any:
        """One work of all that was collected."""
        if device.type in self.backends:
            return end_coalescing(self.backends[device.type])
        works = self._coalesced.pop(threading.get_ident(), None)
        # Messages may be among them.
        return TorchWork(joined(works, None) if works else None, [], self.callbacks, is_message=True)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default deadline of all later calls."""
        for backend in {*self.torch_backends.values(), *self.backends.values()}:
            set_default_timeout(backend, timeout)

    def abort(self, reason: str) -> None:
        """Break all connections, from any thread."""
        self.members.abort(reason)
        for backend in self.backends.values():
            with contextlib.suppress(RuntimeError):  # Without a connection there is nothing to abort.
                backend.abort()

    def idle(self) -> bool:
        """Whether nothing is under way on our communicators."""
        return self.members.idle()

    def close(self) -> None:
        """Tell the peers, as Gloo does, and give back what is ours. Idempotent."""
        self.members.close()
        self.callbacks.stop()

    def shutdown(self) -> None:
        """Close, and shut down the backends of torch."""
        self.close()
        for backend in self.backends.values():
            with contextlib.suppress(RuntimeError):
                backend.shutdown()

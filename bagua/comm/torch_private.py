"""Private names of ``torch.distributed`` that this package cannot do without, and who sees the calls on its groups.

``tests/comm/test_torch_private.py`` says which one is gone when torch is upgraded.
"""

from __future__ import annotations

import contextlib
import sys
import time
import timeit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import env
from bagua.errors import NotInitializedError, TransportUnavailableError

#: Under this name ``torch.distributed`` knows our transports.
TORCH_NAME = "bagua"

#: What C++ takes for a work. Subclasses in Python are called back through it; a public class for that is not there.
Work = dist._Work
#: A backend in C++, which subclasses in Python may stand for from torch 2.14 on.
CppBackend = torch._C._distributed_c10d.Backend
#: Makes a ``ReduceOp.PREMUL_SUM`` of a number or a tensor, which is its factor.
make_premul_sum = dist._make_nccl_premul_sum


def unwrapped(backend: str | None) -> str | None:
    """What ``backend`` means to us: torch's name for our transports leaves the choice to us.

    Example:
        >>> unwrapped("bagua"), unwrapped("gloo")
        (None, 'gloo')
    """
    return None if backend == TORCH_NAME else backend


def premul_factor(op: dist.ReduceOp) -> Any:
    """The factor of a ``ReduceOp.PREMUL_SUM``; older versions of torch have it in its state for pickle alone."""
    return op.__getstate__()[1]  # type: ignore[attr-defined]  # not in the stub


# Groups of torch.


def default_store() -> dist.Store:
    """The store of torch's default group, to meet the same ranks there."""
    return c10d._get_default_store()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of a group of torch, to meet its ranks there.

    Groups of backend bagua have one of their own: torch's part of the store may have another name on each rank.
    """
    return getattr(group, "store_of_members", None) or c10d._get_process_group_store(group)


def all_groups() -> list[dist.ProcessGroup]:
    """The groups that torch has, to keep them from being destroyed in forked children."""
    return list(c10d._world.pg_map)


def plugins() -> dict[str, Any]:
    """What was registered with torch, by upper-case name: its creator, and how to call that."""
    return dist.Backend._plugins


def backend_request() -> Any:
    """An empty request as creators of registered backends take it."""
    return c10d._DistributedBackendOptions()


def requested_backends() -> c10d.BackendConfig | None:
    """What torch made of the string of backends; for a creator of a backend only.

    Torch does not hand it to creators, and drops the second backend of a string such as ``cpu:gloo,cuda:bagua``. So it
    comes from torch's frame; None if that has changed.
    """
    # This function, the creator, perhaps the one of ``bagua.plugin``, and torch.
    frames = (sys._getframe(2), sys._getframe(3))
    return next((frame.f_locals["backend_config"] for frame in frames if "backend_config" in frame.f_locals), None)


# Backends.


def gloo_options(timeout: timedelta, hosts: int, *, lazy: bool = False) -> Any:
    """Options of a Gloo backend, which is on the network devices that the user names, else on loopback for one host.

    Args:
        timeout: default deadline of its calls.
        hosts: number of hosts on which its ranks live.
        lazy: True if it connects when it is first used.
    """
    gloo = dist.ProcessGroupGloo
    devices = [gloo.create_device(interface=name, lazy_init=lazy) for name in env.gloo_interfaces()]
    if not devices and hosts == 1:
        devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=lazy)]
    options = gloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._devices = devices or [gloo.create_default_device(lazy_init=lazy)]
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    return options


def nccl_options(timeout: timedelta, options: Any = None) -> Any:
    """Options of an NCCL backend, new ones or those given, with this deadline: it has no other name there."""
    options = dist.ProcessGroupNCCL.Options() if options is None else options
    options._timeout = timeout
    return options


def set_default_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the deadline of all later calls on a backend."""
    backend._set_default_timeout(timeout)


def set_sequence_number(backend: Any) -> None:
    """Let the members of a backend agree on the number of its first call, as torch does when it has made one."""
    backend._set_sequence_number_for_group()


#: Names of methods before torch 2.13, by their later ones. Backends in C++ still have these.
_FORMER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def method_of(backend: Any, name: str) -> Callable[..., Any]:
    """A method of a backend, whichever name it has there; to call one that is missing is a ``NotImplementedError``."""
    for spelling in (name, _FORMER.get(name, name)):
        method: Callable[..., Any] | None = getattr(backend, spelling, None)
        if method is not None:
            return method

    def missing(*_: object) -> None:
        raise NotImplementedError(f"this backend has no {name}")

    return missing


def start_coalescing(backend: Any) -> None:
    """Collect the calls that follow: NCCL starts messages between ranks as one group, or they wait for each other."""
    backend._start_coalescing()


def end_coalescing(backend: Any) -> Any:
    """One work for all calls since ``start_coalescing``."""
    return backend._end_coalescing()


def source_rank(work: Any) -> int:
    """The sender of the message that a receive from any rank took."""
    return int(work._source_rank())


# Process groups in Python.


#: What a group may leave to torch: facts, names, and what only Gloo and NCCL have.
_LEFT_TO_TORCH = frozenset(
    {"rank", "size", "name", "boxed", "unbox", "merge_remote_group", "monitored_barrier"}
    | {"use_pg_for_symm_mem_rendezvous"}
)
#: From torch 2.14 on: none of the first communicates, the last three call the methods that we have.
_LEFT_TO_LATER_TORCH = frozenset(
    {"get_backend", "register_abort_hook", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook"}
    | {"allgather_into_tensor_coalesced", "alltoall_base", "reduce_scatter_tensor_coalesced"}
)
#: C++ calls groups by these names, too.
_CALLS_WITH_UNDERSCORE = frozenset({"_allgather_base", "_reduce_scatter_base"})


def _unknown_calls(group_class: type[dist.ProcessGroup]) -> list[str]:
    """Methods that ``group_class`` inherits from torch, and should not."""
    methods = {name for name, value in vars(dist.ProcessGroup).items() if _is_method(name, value)}
    calls = {name for name in methods if not name.startswith("_")} | (methods & _CALLS_WITH_UNDERSCORE)
    own = {name for kind in group_class.__mro__ if not issubclass(dist.ProcessGroup, kind) for name in vars(kind)}
    return sorted(calls - own - _LEFT_TO_TORCH - _LEFT_TO_LATER_TORCH)


def _is_method(name: str, value: object) -> bool:
    return callable(value) and not isinstance(value, type) and not name.startswith("__")


def require_known_calls(group_class: type[dist.ProcessGroup]) -> None:
    """Refuse a torch whose groups have calls that ``group_class`` does not have.

    C++ looks up the methods of a group in Python by name. One that is missing falls through to
    a method of torch that holds the interpreter's lock while it waits: a deadlock.

    Raises:
        TransportUnavailableError: names them.
    """
    unknown = _unknown_calls(group_class)
    if unknown:
        raise TransportUnavailableError(
            f"process groups of torch {torch.__version__} have calls that backend bagua does not know: "
            f"{', '.join(unknown)}",
            advice="They would never return. Use another backend, or the version of torch in constraints.txt.",
        )


#: Methods of groups, by which argument is this rank's input; those that only wait or receive have but the group.
_INPUT = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"), 1),
    **dict.fromkeys(("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather"), 2),
    **dict.fromkeys(("_allgather_base", "all_gather_single", "all_gather_single_coalesced"), 2),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single", "scatter"), 2),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), 2),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), 2),
    **dict.fromkeys(("barrier", "monitored_barrier", "recv", "recv_anysource"), 0),
}
_KEY = "bagua/watch/{}"


class TorchCalls:
    """Counts the calls that Python makes on torch's groups, from now until ``end``. Results are those of torch.

    Calls that C++ makes, as those of ``DistributedDataParallel``, do not pass here, and neither do those of backends in
    Python. Only time in which the thread that calls is blocked counts: waits of a GPU's streams do not.

    Attributes:
        calls: how many.
        input_bytes: bytes of this rank's input.
        blocked_s: seconds in calls and in waits for them.

    Raises:
        NotInitializedError: torch has no default group yet.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise NotInitializedError("call init_process_group before bagua.watch()")
        self.calls, self.input_bytes, self.blocked_s = 0, 0, 0.0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = default_store()
        self._former: list[tuple[Any, str, Any]] = []
        for name, position in _INPUT.items():
            if name in vars(dist.ProcessGroup):
                self._see(dist.ProcessGroup, name, position)
        self._see(Work, "wait", 0, calls=0)
        self._see(dist, "_broadcast_coalesced", 1)  # buffers and first weights of DistributedDataParallel

    def _see(self, owner: Any, name: str, position: int, calls: int = 1) -> None:
        act = getattr(owner, name)

        def seen(*arguments: Any, **options: Any) -> Any:
            self.calls += calls
            self.input_bytes += _nbytes(arguments[position : position + 1])
            begun = time.perf_counter()
            try:
                return act(*arguments, **options)
            finally:
                self.blocked_s += time.perf_counter() - begun

        self._former.append((owner, name, vars(owner)[name]))  # An attribute of the class would not bind its object.
        setattr(owner, name, seen)

    def end(self) -> None:
        """Give torch its functions back."""
        while self._former:
            setattr(*self._former.pop())

    def way_s(self) -> float:
        """Seconds of a way to the store of the job: the fastest of a few."""
        return min(timeit.repeat(lambda: self._store.check([_KEY.format(self.rank)]), number=1, repeat=3)) / 2

    def tell(self, said: str) -> None:
        """Leave a message for rank 0 in the store of the job."""
        self._store.set(_KEY.format(self.rank), said)

    def told(self, limit_s: float) -> dict[int, bytes]:
        """What ranks have left, of those that leave something within ``limit_s`` seconds."""
        found: dict[int, bytes] = {}
        until = time.monotonic() + limit_s
        for rank in range(self.size):
            key = _KEY.format(rank)
            with contextlib.suppress(RuntimeError):  # It has not come, or the store is gone.
                self._store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.01)))
                found[rank] = self._store.get(key)
        return found


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all in nested lists."""
    if isinstance(tensors, (list, tuple)):
        return sum(map(_nbytes, tensors))
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else 0

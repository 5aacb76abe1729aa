"""What calls of ``torch.distributed`` carry, and how long they block: seen by wrapping torch's own groups."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm import torch_private
from bagua.errors import NotInitializedError

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
        self._store = torch_private.default_store()
        self._former: list[tuple[Any, str, Any]] = []
        for name, position in _INPUT.items():
            if name in vars(dist.ProcessGroup):
                self._see(dist.ProcessGroup, name, position)
        self._see(torch_private.Work, "wait", 0, calls=0)
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
        ways = []
        for _ in range(3):
            begun = time.perf_counter()
            self._store.check([_KEY.format(self.rank)])
            ways.append((time.perf_counter() - begun) / 2)
        return min(ways)

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

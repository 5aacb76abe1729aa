"""Chapter 5: ranks that ask for different things are told so, all of them, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bagua.comm import Communicator, ReduceOp
from bagua.errors import BaguaError, CommunicatorClosedError
from tests.contract.exercises import CallSetting, communicator, home, perform
from tests.contract.failures import CULPRIT, GRACE_S, SOON_S, caught

DISAGREEMENTS = ("kind", "size", "dtype", "reduction", "root", "root_again", "empty", "coalesced", "asynchronous")
#: Deadline where no rank is late on purpose; a busy machine may delay one.
CALM_S = 30.0


def other_call(comm: Communicator, disagreement: str) -> tuple[Callable[[], Any], str, torch.Tensor]:
    """What a rank calls, how messages name it, and its tensor: something else on the culprit."""
    culprit = comm.rank == CULPRIT
    dtype = torch.float64 if disagreement == "dtype" and culprit else torch.float32
    numel = 5 if culprit and disagreement == "size" else 0 if culprit and disagreement == "empty" else 4
    tensor = torch.full((numel,), 3.0, dtype=dtype, device=home(comm))
    dtype_name = str(dtype).removeprefix("torch.")
    asynchronous = disagreement == "asynchronous"
    if disagreement in ("root", "root_again"):
        for _ in range(4 if disagreement == "root_again" else 0):
            comm.broadcast(tensor, 0)  # What a rank knows of this call must not stand for the next one.
        root = 1 if culprit else 0
        return lambda: comm.broadcast(tensor, root), f"root {root}", tensor
    if culprit and disagreement in ("kind", "asynchronous"):
        return lambda: _finish(comm.broadcast(tensor, async_op=asynchronous)), "broadcast", tensor
    if disagreement == "coalesced":
        more = tensor[: 2 if culprit else 3]
        return lambda: comm.allreduce_coalesced([tensor, more]), f"{4 + len(more)} x", tensor
    op = ReduceOp.MAX if culprit and disagreement == "reduction" else ReduceOp.SUM
    name = f"allreduce({numel} x {dtype_name}, {'max' if op == ReduceOp.MAX else 'sum'}"
    return lambda: _finish(comm.allreduce(tensor, op, async_op=asynchronous)), name, tensor


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def disagree(disagreement: str) -> tuple[BaguaError, str]:
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    call, name, tensor = other_call(comm, disagreement)
    error, seconds = caught(call)
    assert bool((tensor == 3.0).all()), "ranks that disagree got a result"
    assert seconds < SOON_S, f"it took {seconds:.1f} s to see that ranks disagree"
    assert not comm.usable
    assert isinstance(caught(comm.barrier).error, CommunicatorClosedError)
    return error, name


def disagree_in_pairs(way: str, deadline_s: float) -> BaguaError | None:
    """Rank 0 and the culprit want different things of each other; the others may notice."""
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    tensor = torch.full((4,), 3.0, device=home(comm))
    dtype = torch.float64 if way == "message_type" else torch.float32
    other = torch.full((4 if way == "message_type" else 5,), 3.0, dtype=dtype, device=home(comm))
    if way == "counts":
        counts = [4] + [0] * (comm.size - 1) if comm.rank == CULPRIT else [0] * comm.size
        expected = [0, 3 if comm.rank == 0 else 0, *[0] * (comm.size - 2)]
        output = tensor[: sum(expected)]
        call = partial(comm.alltoall_v, output, tensor[: sum(counts)].clone(), expected, counts, timeout=deadline_s)
    elif comm.rank == 0:
        call = partial(comm.recv, tensor, CULPRIT, timeout=deadline_s)
    elif way == "message_against_collective":
        call = partial(comm.allreduce, tensor, timeout=deadline_s)
    elif comm.rank == CULPRIT:
        call = partial(comm.send, other, 0, timeout=deadline_s)
    else:
        return None
    error, seconds = caught(call)
    assert seconds < deadline_s + GRACE_S, f"it took {seconds:.1f} s"
    assert bool((tensor == 3.0).all()), "ranks that disagree got a result"
    return error

"""Chapter 2: arguments. What cannot work is refused on the rank that asks, and nothing has happened then."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from bagua.comm import Communicator, ReduceOp
from bagua.errors import (
    BaguaError,
    ConfigurationError,
    InvalidRankError,
    InvalidReduceOpError,
    InvalidTensorError,
)
from tests.contract.exercises import CallSetting, communicator, home, perform
from tests.contract.reference import LEGAL, REDUCED, assert_same, values

#: A call, the error it gets, and the argument that the error names.
Refused = tuple[Callable[[Communicator], Any], type[BaguaError], str]


def expect(call: Callable[[Communicator], Any], kind: type[BaguaError], argument: str) -> None:
    """Fail unless ``call`` is refused with this error, which names the argument and both sides."""
    comm = communicator()
    before = comm.history()
    try:
        call(comm)
    except kind as error:
        named = getattr(error, "argument", None)
        assert named is not None, f"{error!r} names no argument"
        assert argument in named, f"{error!r} names {named}, not {argument}"
        assert argument in str(error), str(error)
        assert "expected" in str(error), str(error)
        assert "seen" in str(error), str(error)
    else:
        raise AssertionError(f"nothing was refused where {kind.__name__} about {argument} is due")
    assert comm.usable, "a refused argument broke the communicator"
    assert comm.history() == before, "a refused call was counted"


def try_meaningless_reductions() -> None:
    comm = communicator()
    for op, legal in LEGAL:
        for dtype in [dtype for dtype in REDUCED if dtype not in legal] + [torch.float8_e5m2]:
            numbers = values((comm.size, 3), torch.float32, comm.rank).to(dtype)
            tensor = numbers.to(home(comm), copy=True)
            for call in reductions(tensor, op):
                expect(call, InvalidReduceOpError, "op")
            assert_same(tensor, numbers, f"refused {op} of {dtype}")
    tensor = torch.ones((comm.size, 3), device=home(comm))
    for unknown in ("sum", None, 17, ReduceOp.PREMUL_SUM):
        for call in reductions(tensor, unknown):
            expect(call, InvalidReduceOpError, "op")
    perform("allreduce", comm, CallSetting())


def reductions(tensor: torch.Tensor, op: Any) -> list[Callable[[Communicator], Any]]:
    share = tensor[0].clone()
    return [
        lambda c: c.allreduce(tensor, op),
        lambda c: c.allreduce(tensor, op, async_op=True),
        lambda c: c.reduce(tensor, 0, op),
        lambda c: c.reduce_scatter(share, tensor, op),
        lambda c: c.allreduce_coalesced([tensor], op),
    ]


def unsuitable(device: torch.device) -> list[Any]:
    """What no transport carries."""
    meta = torch.ones(2, device="meta")
    sparse = torch.eye(2, device=device).to_sparse()
    foreign = torch.empty(2, dtype=torch.bits16, device=device)
    return [[1.0, 2.0], None, 3.0, meta, sparse, foreign]


def try_wrong_tensors() -> None:
    comm = communicator()
    good = torch.ones(comm.size, device=home(comm))
    for bad in unsuitable(home(comm)):
        for case in calls_with(bad, good, (comm.rank + 1) % comm.size):
            expect(*case)
    try_outputs_that_overlap_themselves()
    for none_at_all in (good, 5, None):
        expect(lambda c, given=none_at_all: c.allreduce_coalesced(given), InvalidTensorError, "tensors")
        expect(lambda c, given=none_at_all: c.broadcast_coalesced(given), InvalidTensorError, "tensors")
    assert good.tolist() == [1.0] * comm.size
    perform("allreduce", comm, CallSetting())


def calls_with(bad: Any, good: torch.Tensor, other: int) -> list[Refused]:
    """Every place in which a tensor can be passed."""
    ones = [1] * good.numel()
    refused: list[Refused] = [
        (lambda c: c.allreduce(bad), InvalidTensorError, "tensor"),
        (lambda c: c.reduce(bad, 0), InvalidTensorError, "tensor"),
        (lambda c: c.broadcast(bad), InvalidTensorError, "tensor"),
        (lambda c: c.allgather(good, bad), InvalidTensorError, "tensor"),
        (lambda c: c.allgather(bad, good[:1]), InvalidTensorError, "output"),
        (lambda c: c.gather(None, bad), InvalidTensorError, "tensor"),
        (lambda c: c.scatter(bad), InvalidTensorError, "output"),
        (lambda c: c.reduce_scatter(bad, good), InvalidTensorError, "output"),
        (lambda c: c.reduce_scatter(good[:1], bad), InvalidTensorError, "tensor"),
        (lambda c: c.alltoall(bad, good), InvalidTensorError, "output"),
        (lambda c: c.alltoall(good, bad), InvalidTensorError, "tensor"),
        (lambda c: c.alltoall_v(bad, good, ones, ones), InvalidTensorError, "output"),
        (lambda c: c.alltoall_v(good, bad, ones, ones), InvalidTensorError, "tensor"),
        (lambda c: c.sendrecv(bad, good, other, other), InvalidTensorError, "output"),
        (lambda c: c.sendrecv(good, bad, other, other), InvalidTensorError, "tensor"),
        (lambda c: c.allreduce_coalesced([good, bad]), InvalidTensorError, "tensors"),
        (lambda c: c.broadcast_coalesced([good, bad]), InvalidTensorError, "tensors"),
    ]
    if good.numel() > 1:
        refused += [
            (lambda c: c.send(bad, other), InvalidTensorError, "tensor"),
            (lambda c: c.recv(bad, other), InvalidTensorError, "tensor"),
        ]
    return refused


def try_outputs_that_overlap_themselves() -> None:
    size = communicator().size
    good = torch.ones(2 * size, device=home(communicator()))
    repeated = torch.ones(1, device=good.device).expand(2 * size)
    windows = torch.ones(2 * size, device=good.device).as_strided((size, 2), (1, 1))
    for bad in (repeated, windows) if size > 1 else (repeated,):
        for case in outputs_into(bad, good):
            expect(*case)
        assert bool((bad == 1).all())


def outputs_into(bad: torch.Tensor, good: torch.Tensor) -> list[Refused]:
    return [
        (lambda c: c.allreduce(bad), InvalidTensorError, "tensor"),
        (lambda c: c.reduce(bad, 0), InvalidTensorError, "tensor"),
        (lambda c: c.allgather(bad, good[:2]), InvalidTensorError, "output"),
        (lambda c: c.alltoall(bad, good), InvalidTensorError, "output"),
        (lambda c: c.scatter(bad), InvalidTensorError, "output"),
        (lambda c: c.allreduce_coalesced([bad]), InvalidTensorError, "tensors"),
    ]


def try_wrong_ranks() -> None:
    comm = communicator()
    tensor = torch.ones(2, device=home(comm))
    for bad in (-1, comm.size, True, "0", None, 0.0):
        for case in calls_to(bad, tensor):
            expect(*case)
    expect(lambda c: c.send(tensor, c.rank), InvalidRankError, "dst")
    expect(lambda c: c.recv(tensor, c.rank), InvalidRankError, "src")
    if comm.size > 1:
        other = (comm.rank + 1) % comm.size
        expect(lambda c: c.sendrecv(tensor, tensor.clone(), c.rank, other), InvalidRankError, "src")
        expect(lambda c: c.sendrecv(tensor, tensor.clone(), other, c.rank), InvalidRankError, "dst")
    assert tensor.tolist() == [1.0, 1.0]
    perform("allreduce", comm, CallSetting())


def calls_to(bad: Any, tensor: torch.Tensor) -> list[Refused]:
    """Every place in which a rank can be passed."""
    return [
        (lambda c: c.reduce(tensor, bad), InvalidRankError, "dst"),
        (lambda c: c.broadcast(tensor, bad), InvalidRankError, "root"),
        (lambda c: c.gather(None, tensor, bad), InvalidRankError, "dst"),
        (lambda c: c.scatter(tensor, None, bad), InvalidRankError, "root"),
        (lambda c: c.send(tensor, bad), InvalidRankError, "dst"),
        (lambda c: c.recv(tensor, bad), InvalidRankError, "src"),
        (lambda c: c.sendrecv(tensor, tensor.clone(), bad, 0), InvalidRankError, "src"),
        (lambda c: c.broadcast_coalesced([tensor], bad), InvalidRankError, "root"),
        (lambda c: c.broadcast_object("x", bad), InvalidRankError, "root"),
        (lambda c: c.gather_object("x", bad), InvalidRankError, "dst"),
        (lambda c: c.scatter_object(None, bad), InvalidRankError, "root"),
    ]


def try_wrong_sizes() -> None:
    comm = communicator()
    size, device = comm.size, home(comm)
    share, whole = torch.ones(3, device=device), torch.ones(3 * size, device=device)
    halves = torch.ones(3 * size, dtype=torch.float16, device=device)
    ones = [1] * size
    fractions: Any = [1.0] * size
    refused: list[Refused] = [
        (lambda c: c.allgather(whole[1:], share), InvalidTensorError, "output"),
        (lambda c: c.allgather(halves, share), InvalidTensorError, "output"),
        (lambda c: c.gather(whole[1:] if c.rank == 0 else share, share), InvalidTensorError, "output"),
        (lambda c: c.gather(None if c.rank == 0 else whole, share), InvalidTensorError, "output"),
        (lambda c: c.scatter(share, whole[1:] if c.rank == 0 else share), InvalidTensorError, "tensor"),
        (lambda c: c.scatter(share, None if c.rank == 0 else whole), InvalidTensorError, "tensor"),
        (lambda c: c.reduce_scatter(share, whole[1:]), InvalidTensorError, "tensor"),
        (lambda c: c.reduce_scatter(share, halves), InvalidTensorError, "tensor"),
        (lambda c: c.alltoall(whole[1:], whole), InvalidTensorError, "output"),
        (lambda c: c.alltoall(halves, whole), InvalidTensorError, "output"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, ones[1:]), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones[1:], ones), ConfigurationError, "output_counts"),
        (lambda c: c.alltoall_v(whole, whole[:size], ones, ones), ConfigurationError, "output_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole, ones, ones), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, fractions), ConfigurationError, "input_counts"),
        (lambda c: c.alltoall_v(halves[:size], whole[:size], ones, ones), InvalidTensorError, "output"),
        (lambda c: c.sendrecv(halves, whole, (c.rank - 1) % size, (c.rank + 1) % size), InvalidTensorError, "output"),
    ]
    if size > 1:
        negative = [-1, *ones[2:], 3]
        refused += [
            (lambda c: c.alltoall(whole[1:], whole[1:]), InvalidTensorError, "tensor"),
            (lambda c: c.alltoall_v(whole[:size], whole[:size], ones, negative), ConfigurationError, "input_counts"),
        ]
    for case in refused:
        expect(*case)
    assert share.tolist() + whole.tolist() == [1.0] * (3 + 3 * size)
    perform("allreduce", comm, CallSetting())


def refuse_the_root() -> None:
    """What only the root passes is wrong there only. The others wait for its next call."""
    comm = communicator()
    share, whole = torch.ones(3, device=home(comm)), torch.ones(3 * comm.size, device=home(comm))
    for kind, call, argument in (
        ("gather", lambda c: c.gather(whole[1:], share), "output"),
        ("scatter", lambda c: c.scatter(share, whole[1:]), "tensor"),
    ):
        if comm.rank == 0:
            expect(call, InvalidTensorError, argument)
        perform(kind, comm, CallSetting())


def try_wrong_timeouts() -> None:
    comm = communicator()
    tensor = torch.ones(2, device=home(comm))
    for bad in (0, -1.0, float("nan"), "1", True, timedelta(0)):
        for case in calls_within(bad, tensor):
            expect(*case)
    assert tensor.tolist() == [1.0, 1.0]
    perform("allreduce", comm, CallSetting())


def calls_within(bad: Any, tensor: torch.Tensor) -> list[Refused]:
    return [
        (lambda c: c.allreduce(tensor, timeout=bad), ConfigurationError, "timeout"),
        (lambda c: c.barrier(timeout=bad), ConfigurationError, "timeout"),
        (lambda c: c.allgather_object(1, timeout=bad), ConfigurationError, "timeout"),
        (lambda c: c.allreduce_coalesced([tensor], timeout=bad), ConfigurationError, "timeout"),
    ]


def use_endless_timeouts() -> None:
    """Longer than the clocks of a transport can tell is as long as they can."""
    for timeout in (float("inf"), 1e15, timedelta.max):
        for async_op in (False, True):
            options = {"timeout": timeout, "async_op": async_op}
            for kind in ("allreduce", "allgather", "barrier"):
                perform(kind, communicator(), CallSetting(options=options))
        work = communicator().barrier(async_op=True)
        assert work is not None
        assert work.wait(timeout)


def try_unknown_options() -> None:
    comm = communicator()
    tensor = torch.ones(2, device=home(comm))
    call: Callable[..., Any]
    for call, arguments, unknown in (
        (comm.allreduce, (tensor,), {"asynchronous": True}),
        (comm.broadcast, (tensor,), {"source": 0}),
        (comm.barrier, (), {"group": None}),
    ):
        try:
            call(*arguments, **unknown)
        except TypeError:
            continue
        raise AssertionError("an unknown option was swallowed")
    perform("allreduce", comm, CallSetting())


def use_timedelta() -> None:
    perform("allreduce", communicator(), CallSetting(options={"timeout": timedelta(minutes=1)}))
    perform("allreduce", communicator(), CallSetting(options={"timeout": 60}))

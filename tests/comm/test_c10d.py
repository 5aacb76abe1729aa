"""The transport over torch's backends: what is supplied where a backend lacks it, deadlines, and the end."""

import contextlib
import dataclasses
import functools
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from bagua import errors
from bagua.comm import Call, Communicator, Membership, long_wait
from bagua.comm.reduction import OPERATIONS, ReduceOp
from bagua.comm.transports.c10d import torch_transport as c10d
from bagua.comm.transports.c10d.groups import GlooGroup, NcclGroup, OtherGroup, split_name
from bagua.comm.transports.c10d.handles import HostHandle
from bagua.comm.transports.c10d.lowering import Abilities, Lowering, as_timedelta
from tests.comm.memory_ranks import on_communicators, run_on_gloo, values
from tests.contract.exercises import CallSetting, communicator, perform
from tests.contract.results import COPYING, REDUCING, carry_everything, exercise_all, reduce_all_of_it
from tests.harness import on_ranks, until
from tests.versions import TORCH, needs

pytestmark = pytest.mark.gloo


def limited_to(abilities: Abilities) -> Any:
    """Builds transports on Gloo that is trusted with no more than ``abilities``, and asked for nothing else."""

    def ask(method: Any, *arguments: Any) -> Any:
        reduction = getattr(arguments[-1], "reduceOp", None) if arguments else None
        for dtype in {tensor.dtype for tensor in tree_leaves(arguments) if isinstance(tensor, torch.Tensor)}:
            if reduction is None:
                assert dtype in abilities.copies, f"{method.__name__} of {dtype}"
            else:
                known = [OPERATIONS[name] for name, reduced in abilities.reductions if reduced is dtype]
                assert any(reduction == one for one in known), f"{method.__name__} with {reduction.op} of {dtype}"
        return method(*arguments)

    class Narrow(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            method = getattr(self.backend, name)
            return functools.partial(ask, method) if callable(method) else method

    class Limited(c10d.C10dTransport):
        def _add_channel(self, device_type: str, group: Any) -> None:
            group.abilities = abilities
            group.group = Narrow(backend=group.group)
            super()._add_channel(device_type, group)

    return functools.partial(Limited, "gloo")


#: As little as may be taken for granted, and what NCCL has. The contract has all of Gloo.
ABILITIES = {
    "nothing": Abilities(copies=frozenset({torch.uint8}), reductions=frozenset()),
    "other": OtherGroup.abilities,
    "nccl": dataclasses.replace(NcclGroup.abilities, grouped_messages=False),
}
#: Gloo takes the place of NCCL, and did not divide before torch 2.13.
DIVIDES = needs("reduce_scatter of Gloo that divides for AVG", TORCH >= (2, 13))


@pytest.mark.parametrize("abilities", ["nothing", "other", pytest.param("nccl", marks=DIVIDES)])
def test_reductions_that_a_backend_lacks_are_supplied(abilities: str) -> None:
    """What we fold is added in float32."""
    job = functools.partial(reduce_all_of_it, numels=(0, 1, 7), rounds_once=abilities == "nothing")
    values(run_on_gloo(3, job, transport=limited_to(ABILITIES[abilities])))


def test_copies_keep_every_bit_of_every_dtype() -> None:
    job = functools.partial(carry_everything, shapes=((0,), (1,), (7,)))
    values(run_on_gloo(3, job, transport=limited_to(ABILITIES["nothing"])))


def test_messages_of_nccl_start_as_one_group_and_barriers_run_on_the_current_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
    group = Mock()
    lowering = Lowering(group, 0, 3, NcclGroup.abilities)
    call = Call("sendrecv", torch.float32, 2, "", 1, 2, (), (2,))
    works, _ = lowering.start(call, torch.ones(2), torch.zeros(2), 5.0)
    assert works == (group._end_coalescing.return_value,)
    lowering.start(Call("barrier", torch.uint8), None, None, 5.0)
    *messages, (name, (options,), _) = group.method_calls
    assert [name for name, *_ in messages] == ["_start_coalescing", "send", "recv", "_end_coalescing"]
    assert (name, options.device) == ("barrier", torch.device("cuda", 5))


@on_communicators(2, run_on_gloo)
def test_ranks_on_one_gpu_are_told_what_to_call(comm: Communicator) -> None:
    problem = "NCCL error in: NCCLUtils.cpp, invalid usage. Last error: Duplicate GPU detected : rank 1"
    comm.pipeline._transport._channels["cpu"].start = Mock(side_effect=RuntimeError(problem))
    with pytest.raises(errors.TransportUnavailableError, match=r"set_device\(int\(os.environ") as caught:
        comm.allreduce(torch.ones(2))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not comm.usable


def test_every_call_carries_its_own_deadline() -> None:
    group = Mock()
    lowering = Lowering(group, 0, 2, GlooGroup.abilities)
    for kind in ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "alltoall", "barrier"):
        reduction = "sum" if "reduce" in kind else ""
        for timeout_s in (3.0, 7.0, 3.0):
            tensor, pair = torch.ones(2), torch.ones(4)
            source = pair if kind in ("scatter", "alltoall") else tensor
            target = pair if kind in ("allgather", "gather", "alltoall") else tensor
            lowering.start(Call(kind, torch.float32, 2, reduction, 0), source, target, timeout_s)
        *_, three, seven, again = [arguments[-1] for _, arguments, _ in group.method_calls]
        assert (three.timeout, seven.timeout) == (as_timedelta(3.0), as_timedelta(7.0)), kind
        assert again is three, "options are made once"
    assert as_timedelta(1e-9).total_seconds() == 0.001, "it is never no deadline"


def test_a_backend_that_was_built_is_closed_if_the_next_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(GlooGroup, "close", lambda group: closed.append(group.rank))
    for outcome in run_on_gloo(2, lambda _: None, backend="cpu:gloo,cuda:nowhere"):
        assert isinstance(outcome, errors.TransportUnavailableError)
    assert sorted(closed) == [0, 1]


def test_a_name_may_hold_a_backend_for_each_device() -> None:
    def job(comm: Communicator) -> tuple[str, frozenset[str]]:
        tensor = torch.ones(3)
        comm.allreduce(tensor)
        assert tensor.equal(torch.full((3,), 2.0))
        return comm.backend, comm.device_types

    assert values(run_on_gloo(2, job, backend="cpu:gloo")) == [("cpu:gloo", frozenset({"cpu"}))] * 2
    assert split_name("CPU:Gloo, cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}


def test_a_backend_that_does_not_exist_is_refused() -> None:
    refusal = c10d.c10d_refusal("cpu:gloo,cuda:carrier-pigeon")
    assert "carrier-pigeon" in str(refusal)
    assert c10d.c10d_refusal("gloo") is None
    for refused in (refusal, *run_on_gloo(2, lambda _: None, backend="carrier-pigeon")):
        assert isinstance(refused, errors.TransportUnavailableError)


@pytest.mark.parametrize("name", ["tiny", "tinyextended"])
def test_a_backend_registered_with_torch_serves(name: str) -> None:
    """Gloo under another name, as a third party would register it."""
    made = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(rank)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def create_extended(options: Any, _: Any) -> Any:
        return create(options.store, options.group_rank, options.group_size, options.timeout)

    creator = create if name == "tiny" else create_extended
    dist.Backend.register_backend(name, creator, extended_api=name == "tinyextended", devices=["cpu"])

    def job(comm: Communicator) -> str:
        for kind in COPYING:
            perform(kind, comm, CallSetting((5,), torch.bool))
        for kind in REDUCING:
            perform(kind, comm, CallSetting((5,), torch.float16, ReduceOp.AVG))
        comm.barrier()
        return comm.backend

    assert values(run_on_gloo(3, job, backend=name)) == [name] * 3
    assert sorted(made) == [0, 1, 2]


@on_communicators(2, run_on_gloo)
def test_tensors_of_other_devices_travel_by_way_of_the_cpu(comm: Communicator) -> None:
    transport = comm._transport
    tensor = torch.full((3,), float(comm.rank))
    transport._start_staged(Call("allreduce", torch.float32, 3, "sum"), tensor, tensor, 5.0, False).wait()
    assert tensor.equal(torch.full((3,), 1.0))
    output = torch.zeros(6)
    transport._start_staged(Call("allgather", torch.float32, 3, sequence=2), tensor, output, 5.0, True).wait()
    assert output.equal(torch.full((6,), 1.0))
    transport._start_staged(Call("barrier", torch.uint8, sequence=3), None, None, 5.0, True).wait()


@on_communicators(2, run_on_gloo)
def test_a_deadline_that_passed_before_anybody_waited(comm: Communicator) -> None:
    if comm.rank == 0:
        work = comm.allreduce(torch.ones(2), async_op=True, timeout=0.2)
        time.sleep(0.5)
        with pytest.raises(errors.CollectiveTimeoutError, check=lambda error: error.peers == (1,)):
            work.wait()


@pytest.mark.parametrize("broken", [False, True])
def test_closing_frees_the_backend_without_the_garbage_collector(broken: bool) -> None:
    """What is still alive when the interpreter ends aborts the process."""

    def job(comm: Communicator) -> Any:
        comm.allreduce(torch.ones(2))
        transport = comm._transport
        found = weakref.ref(transport._default.start.__self__), weakref.ref(transport)  # type: ignore[attr-defined]
        if broken:
            comm.barrier()
            comm.abort("to see what stays")
        return found

    gc.disable()
    try:
        found = values(run_on_gloo(2, job))
        assert [lowering() for lowering, _ in found] == [None, None]
    finally:
        gc.enable()
    gc.collect()
    assert [transport() for _, transport in found] == [None, None]


@on_communicators(3, run_on_gloo)
def test_ctrl_c_while_closing_tells_the_others_leaves_nothing_open(comm: Communicator) -> None:
    comm.barrier()
    mailbox = comm._transport.failures._mailbox
    mailbox.tell = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        comm.close()
    assert (comm._transport._channels, mailbox._listener.fileno()) == ({}, -1)


class LateWork:
    """A work of Gloo that ends after two slices of waiting."""

    slices = 2

    def wait(self, timeout: Any = None) -> None:
        if self.slices:
            self.slices -= 1
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return not self.slices


def test_a_wait_of_several_slices_leaves_nothing_for_the_garbage_collector() -> None:
    failures: Any = SimpleNamespace(judge=None, peers_left=lambda: False)
    work = LateWork()
    gone = weakref.ref(work)
    gc.disable()
    try:
        HostHandle(failures, (work,), None, 20.0, None).wait()
        del work
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("well", [False, True])
def test_what_a_rank_has_found_comes_before_what_its_peers_did_meanwhile(monkeypatch: pytest.MonkeyPatch, well) -> None:
    """They found it, too, and left; a call that ended well meanwhile has no error."""
    monkeypatch.setattr(long_wait, "FIRST_WARNING_S", 0.0)
    work = Mock(**{"wait.side_effect": RuntimeError("timed out"), "is_completed.return_value": False})

    def judge() -> errors.CollectiveMismatchError:
        work.is_completed.return_value = True
        work.wait.side_effect = None if well else RuntimeError("the connection was closed")
        return errors.CollectiveMismatchError("ranks wait for each other")

    failures: Any = SimpleNamespace(judge=judge, warn_of=lambda *_: None, peers_left=lambda: True)
    told = contextlib.nullcontext() if well else pytest.raises(errors.CollectiveMismatchError, match="for each other")
    with told:
        HostHandle(failures, (work,), None, 20.0, None).wait()


@pytest.mark.parametrize(("kind", "shared"), [("recv", False), ("allreduce", True), ("recv", True)])
def test_closing_ends_the_call_that_another_thread_waits_for(kind: str, shared: bool, monkeypatch) -> None:
    """Rank 1 waits meanwhile; or it comes later, where threads share the communicator."""
    waits, called = threading.Event(), threading.Event()
    wait = HostHandle._wait

    def told(handle: HostHandle, timeout_s: float | None) -> None:
        waits.set()
        wait(handle, timeout_s)

    monkeypatch.setattr(HostHandle, "_wait", told)

    def job(comm: Communicator) -> object:
        if comm.rank == 1:
            assert not shared or called.wait(60)
            with pytest.raises(errors.PeerLostError, match="lost rank 0: it closed its communicator during a call"):
                comm.allreduce(torch.ones(3)) if shared else comm.recv(torch.ones(3), 0)
            return None
        if shared:
            comm.share()
        with ThreadPoolExecutor(1) as thread:
            ended = thread.submit(getattr(comm, kind), torch.ones(3), *([1] if kind == "recv" else []))
            assert waits.wait(60)
            until(lambda: comm.pipeline.in_use.locked() != shared)  # A turn that is shared ends before the wait.
            comm.close()
            error = ended.exception(60)
        called.set()
        return [error]

    (error,), _ = values(run_on_gloo(2, job, timeout_s=600.0))
    assert isinstance(error, errors.CommunicatorClosedError)
    assert error.rank == 0
    assert f"{kind}(" in str(error.call)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_two_ranks_get_the_bits_of_one_of_two_that_are_no_numbers(op: ReduceOp.RedOpType) -> None:
    def job(comm: Communicator) -> torch.Tensor:
        tensor = torch.full((8,), 0x7FC00001 + comm.rank, dtype=torch.int32).view(torch.float32)
        comm.allreduce(tensor, op)
        return tensor.view(torch.int32)

    first, second = values(run_on_gloo(2, job))
    assert torch.equal(first, second)


def test_a_sum_with_fewer_elements_of_the_other_rank_is_refused() -> None:
    """Gloo ends the process of that rank, and takes on this one what came."""

    class Short:
        def alltoall_base(self, output: torch.Tensor, sent: torch.Tensor, *_: object) -> None:
            output[: len(sent) - 2].copy_(sent[2:])

    tensor = torch.ones(5)
    call = Call("allreduce", torch.float32, 5, "sum")
    _, add = Lowering(Short(), 0, 2, GlooGroup.abilities).start(call, tensor, tensor, 1.0)
    assert add is not None
    with pytest.raises(errors.CollectiveMismatchError, match="fewer elements on the other rank"):
        add()
    assert torch.equal(tensor, torch.ones(5))


@on_communicators(2, run_on_gloo)
def test_an_open_receive_keeps_no_call_that_came_after_it(comm: Communicator) -> None:
    received = comm.recv(torch.ones(1), 1, async_op=True) if comm.rank == 0 else None
    for _ in range(100):
        comm.allreduce(torch.ones(4), async_op=True).wait()
    kept = len(comm._transport._outstanding)
    if received is None:
        comm.send(torch.ones(1), 0)
    else:
        received.wait()
    assert kept <= 33


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_dies_while_others_connect_is_named(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could not connect itself is not: all of them may go on with another backend."""
    met = threading.Barrier(3)

    def create(_: str, members: Membership) -> Any:
        met.wait(60)
        if dies and members.rank == 2:
            raise LookupError  # It closes its mailbox, as the kernel does for a process that ended.
        raise errors.TransportUnavailableError("no connection", rank=members.rank, elapsed_s=1.0)

    monkeypatch.setattr(c10d, "create_group", create)
    outcomes = run_on_gloo(3, lambda _: None)
    if not dies:
        assert [type(outcome) for outcome in outcomes] == [errors.TransportUnavailableError] * 3
        return
    for rank, outcome in enumerate(outcomes[:2]):
        assert isinstance(outcome, errors.PeerLostError)
        assert (outcome.rank, outcome.peers) == (rank, (2,))
        assert isinstance(outcome.__cause__, errors.TransportUnavailableError)


@on_ranks(3, pool="process_pool")
def test_large_shares_are_messages() -> None:
    """Shares just below and just from where messages begin arrive, and of which kinds of calls they travel as such."""
    begin = 16 * 1024  # Elements of float32.
    exercise_all(CallSetting(shape=(begin,)))
    exercise_all(CallSetting(shape=(begin,), dtype=torch.complex64))  # Which Gloo moves as bytes.
    takes_messages = communicator()._transport._default.takes_messages
    calls = [(kind, numel) for kind in ("alltoall", "allgather", "allreduce") for numel in (begin - 1, begin)]
    found = [takes_messages(Call(kind, torch.float32, numel, "sum")) for kind, numel in calls]
    assert found == [False, True, False, True, False, False]

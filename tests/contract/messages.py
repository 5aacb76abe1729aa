"""Chapter 7: messages from any rank. Each goes to the receive that was started first, of those that can take it."""

from __future__ import annotations

import torch

import bagua.comm
from bagua.comm import Communicator, Work
from bagua.errors import CommunicationError, InvalidRankError, PeerLostError, TransportUnavailableError
from tests.contract.exercises import CallSetting, communicator, home, perform
from tests.contract.failures import caught, say, wait_until_said
from tests.contract.reference import assert_same

#: Several pieces on a transport that moves messages in pieces.
LARGE = 300_007
DTYPES = (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2)


def receive_from_all() -> None:
    """Rank 0 learns who sent what, however the others come; they wait for it in turn."""
    comm = communicator()
    if comm.size == 1:
        error = caught(lambda: comm.recv_any(torch.zeros(1, device=home(comm)))).error
        assert isinstance(error, InvalidRankError), f"{error!r}"
        return
    for async_op in (False, True):
        if comm.rank == 0:
            assert {receive_one(comm, async_op) for _ in range(comm.size - 1)} == set(range(1, comm.size))
        else:
            comm.send(torch.full((3,), float(comm.rank), device=home(comm)), 0)
        comm.barrier()
    perform("allreduce", comm, CallSetting())


def receive_one(comm: Communicator, async_op: bool) -> int:
    tensor = torch.zeros(3, device=home(comm))
    received = comm.recv_any(tensor, async_op=async_op)
    sender = received if isinstance(received, int) else int(received.result())
    assert tensor.tolist() == [float(sender)] * 3
    return sender


def receive_every_kind() -> None:
    """Sizes, dtypes and layouts; all but rank 0 send."""
    comm = communicator()
    settings = [CallSetting(shape=(LARGE,)), CallSetting(shape=()), CallSetting(shape=(0,))]
    settings += [CallSetting(dtype=dtype) for dtype in DTYPES]
    for setting in settings:
        if comm.rank:
            comm.send(setting.place(setting.own(comm.rank), comm), 0)
        for _ in range(comm.size - 1 if comm.rank == 0 else 0):
            tensor = setting.room((*setting.shape, 2), comm)[..., 0]
            sender = comm.recv_any(tensor)
            assert isinstance(sender, int)
            assert_same(tensor, setting.own(sender), f"{setting.dtype} {setting.shape} from rank {sender}")
        comm.barrier()
    with torch.inference_mode():
        if comm.rank == 1:
            comm.send(torch.ones(3, device=home(comm)), 0)
        if comm.rank == 0:
            tensor = torch.zeros(3, device=home(comm))
            work = comm.recv_any(tensor, async_op=True)
            assert not isinstance(work, int)
            assert work.result() == 1
            assert tensor.tolist() == [1.0] * 3


def receive_in_order() -> None:
    """Rank 1 sends three numbers; rank 0 waits for them by name, from anybody, and by name again."""
    comm = communicator()
    tensors = [torch.zeros(1, device=home(comm)) for _ in range(3)]
    if comm.rank == 1:
        wait_until_said("receives", 1)
        for number in (1.0, 2.0, 3.0):
            comm.send(torch.full((1,), number, device=home(comm)), 0)
    if comm.rank == 0:
        works = [
            comm.recv(tensors[0], 1, async_op=True),
            comm.recv_any(tensors[1], async_op=True),
            comm.recv(tensors[2], 1, async_op=True),
        ]
        say("receives")
        for work in works:
            assert work is not None
            assert not isinstance(work, int)
            work.wait()
        assert [tensor.item() for tensor in tensors] == [1.0, 2.0, 3.0]
    comm.barrier()


def wait_for_nobody(deadline_s: float) -> tuple[BaseException, float] | None:
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    if comm.rank:
        wait_until_said("gave up", 1)
        comm.close()
        return None
    error, seconds = caught(lambda: comm.recv_any(torch.zeros(3, device=home(comm)), timeout=deadline_s))
    say("gave up")
    assert isinstance(error, CommunicationError), f"{error!r}"
    assert not comm.usable
    return error, seconds


def outlive_those_who_closed() -> None:
    """Ranks that closed in peace are not missed while one is left that sends."""
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    tensor = torch.ones(1, device=home(comm))
    if comm.rank < 2:
        wait_until_said("closed", comm.size - 2)
    if comm.rank == 0:
        assert comm.recv_any(tensor) == 1
    if comm.rank == 1:
        comm.send(tensor, 0)
    comm.close()
    say("closed")


def receive_from_a_broken_communicator() -> None:
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    if comm.rank == 1:
        wait_until_said("receives", 1)
        comm.abort("because of this test")
    if comm.rank == 0:
        work = comm.recv_any(torch.zeros(1, device=home(comm)), async_op=True)
        assert isinstance(work, Work)
        say("receives")
        error = caught(work.wait).error
        assert isinstance(error, PeerLostError), f"{error!r}"
        assert error.peers == (1,), f"{error!r}"
        assert "because of this test" in str(error), str(error)


def be_refused() -> None:
    comm = communicator()
    error = caught(lambda: comm.recv_any(torch.zeros(1, device=home(comm)))).error
    assert isinstance(error, TransportUnavailableError | InvalidRankError), f"{error!r}"

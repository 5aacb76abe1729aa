"""Chapter 2: calls that are waited for later, communicators side by side, and messages from any rank."""

import contextlib
import gc
import itertools
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.comm import Work
from bagua.errors import BaguaError, CommunicationError, CommunicatorClosedError, PeerLostError
from tests.contract.exercises import EXERCISES, CallSetting, Exercise, assert_same, communicator, home, perform
from tests.contract.failures import caught, say, wait_until_said
from tests.contract.results import LARGE
from tests.harness import until

#: How long something that must happen may take, in seconds. An upper bound, never reached.
PATIENCE_S = 60.0


def start(kind: str, setting: CallSetting) -> Exercise:
    exercise = EXERCISES[kind](communicator(), setting.with_options(async_op=True))
    assert all(isinstance(work, Work) for work in exercise.works), f"{kind} returned {exercise.works}"
    return exercise


def finish(exercise: Exercise) -> None:
    assert all(work is None or work.wait() is True for work in exercise.works)
    exercise.check()


def exercise_asynchronously() -> None:
    for kind in EXERCISES:
        finish(start(kind, CallSetting(shape=(4,))))
        finish(start(kind, CallSetting(shape=(4,)).with_options(timeout=PATIENCE_S)))


def mix_with_synchronous() -> None:
    comm = communicator()
    tensor = torch.ones(100_000, device=home(comm))
    work = comm.allreduce(tensor, async_op=True)
    perform("allreduce", comm, CallSetting(seed=5))
    work.wait()
    assert bool((tensor == comm.size).all())
    coalesced = start("allreduce_coalesced", CallSetting(seed=6))
    perform("broadcast_coalesced", comm, CallSetting(seed=7))
    perform("allreduce", comm, CallSetting(seed=8))
    finish(coalesced)
    obj = comm.allgather_object(comm.rank, async_op=True)
    perform("allreduce", comm, CallSetting(seed=9))
    assert obj.result() == list(range(comm.size))


def use_all_of_work() -> None:
    comm = communicator()
    tensor = torch.full((3,), comm.rank + 1.0, device=home(comm))
    total = comm.size * (comm.size + 1) / 2
    work = comm.allreduce(tensor, async_op=True)
    until(work.is_completed, PATIENCE_S)
    assert work.exception() is None
    assert work.wait() is True
    assert work.wait(timeout=PATIENCE_S) is True, "waiting twice is allowed"
    assert work.result() is tensor
    assert tensor.tolist() == [total] * 3
    work = comm.allreduce(tensor, async_op=True)
    assert work.get_future().wait().tolist() == [total * comm.size] * 3
    work = comm.allgather_object({"rank": comm.rank}, async_op=True)
    assert work.get_future().wait() == [{"rank": rank} for rank in range(comm.size)]


def forget_tensors() -> None:
    """The memory of a started call is not given to the next tensors."""
    comm = communicator()
    works = []
    for i in range(5):
        works.append(comm.allreduce(torch.full((50_000,), float(i), device=home(comm)), async_op=True))
        torch.full((50_000,), -1.0, device=home(comm))
    for i, work in enumerate(works):
        assert bool((work.result() == i * comm.size).all()), f"call {i} lost its tensor"


def forget_works() -> None:
    """No rank waits: the group still closes (the pool does that) and the process ends."""
    comm = communicator()
    for _ in range(3):
        comm.allreduce(torch.ones(1000, device=home(comm)), async_op=True)
    comm.barrier()


def open_and_close() -> None:
    """However many communicators come and go, what the process has stays as much as after the first."""
    for broken in (True, False):
        use_and_close_a_group(broken)
    time.sleep(0.3)  # what ends by itself may take a moment; it must not hide what does not
    before = resources()
    communicator().barrier()
    for number in range(6):
        use_and_close_a_group(broken=number % 2 == 0)
    until = time.monotonic() + PATIENCE_S
    while (after := resources()).total() > before.total() and time.monotonic() < until:
        time.sleep(0.05)
    communicator().barrier()  # ranks that are threads count each other's
    assert after.total() <= before.total(), f"more than before: {after - before}; fewer: {before - after}"


def use_and_close_a_group(broken: bool) -> None:
    group = bagua.comm.get_default_group().duplicate()
    comm = group.global_communicator
    for options in ({}, {"async_op": True}):
        for shape in ((2, 3), (LARGE,)):
            finish(EXERCISES["allreduce"](comm, CallSetting(shape, options=options)))
    finish(EXERCISES["send_and_recv"](comm, CallSetting((LARGE,))))
    comm.allreduce(comm.empty(LARGE, dtype=torch.float32, device=home(comm)).fill_(1.0))
    communicator().barrier()
    if broken:
        group.abort("to see what stays")
    group.close()
    communicator().barrier()


def resources() -> Counter[str]:
    """How many threads and open files there are of each name, and mappings of shared memory."""
    gc.collect()
    found = Counter({"mappings": Path("/proc/self/maps").read_text().count("memfd:bagua")})
    for path in [*Path("/proc/self/task").iterdir(), *Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            name = (path / "comm").read_text().strip() if path.parent.name == "task" else os.readlink(path)
            found[f"{path.parent.name} {name.partition(':[')[0]}"] += 1
    return found


def close_before_calls_end() -> None:
    """What others never come to ends with the communicator of the rank that waits."""
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    communicator().barrier()  # All have come to have it.
    if comm.rank == 0:
        tensor = torch.ones(2, device=home(comm))
        works = [comm.allreduce(tensor, async_op=True), comm.recv(tensor.clone(), 1, async_op=True)]
        comm.close()
        for work in works:
            with pytest.raises(CommunicatorClosedError):
                work.wait(PATIENCE_S)
            assert isinstance(work.exception(), CommunicatorClosedError)
    communicator().barrier()
    comm.close()


def cross_two_communicators() -> None:
    """Started in one order on even ranks and in the other on odd ones."""
    group = bagua.comm.get_default_group()
    one, other = group.global_communicator, group.duplicate().global_communicator
    for seed in range(1, 6):
        order = [(one, 2 * seed), (other, 2 * seed + 1)]
        if one.rank % 2:
            order.reverse()
        setting = CallSetting(shape=(1000,), options={"async_op": True})
        for exercise in [EXERCISES["allreduce"](comm, replace(setting, seed=number)) for comm, number in order]:
            finish(exercise)
    assert one.stats()["allreduce"].calls == other.stats()["allreduce"].calls == 5
    other.close()
    perform("allreduce", one, CallSetting())


def receive_every_kind() -> None:
    """Sizes, dtypes and layouts; all but rank 0 send, and it learns who sent what, however they come."""
    comm = communicator()
    settings = [CallSetting(shape=shape) for shape in ((LARGE,), (), (0,))]
    dtypes = (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2)
    settings += [CallSetting(dtype=dtype) for dtype in dtypes]
    for setting, async_op in itertools.product(settings, (False, True)):
        if comm.rank:
            comm.send(setting.place(setting.own(comm.rank), comm), 0)
        else:
            assert {receive_one(setting, async_op) for _ in range(comm.size - 1)} == set(range(1, comm.size))
        comm.barrier()
    with torch.inference_mode():
        if comm.rank == 1:
            comm.send(CallSetting().place(CallSetting().own(1), comm), 0)
        if comm.rank == 0:
            assert receive_one(CallSetting(), async_op=True) == 1
    perform("allreduce", comm, CallSetting())


def receive_one(setting: CallSetting, async_op: bool) -> int:
    """The rank whose numbers came."""
    comm = communicator()
    tensor = setting.room((*setting.shape, 2), comm)[..., 0]
    received = comm.recv_any(tensor, async_op=async_op)
    sender = received.result() if isinstance(received, Work) else received
    assert (type(sender), isinstance(received, Work)) == (int, async_op)
    assert_same(tensor, setting.own(sender), f"{setting.dtype} {setting.shape} from rank {sender}")
    return sender


def receive_in_order() -> None:
    """Rank 1 sends three numbers; rank 0 waits for them by name, from anybody, and by name again."""
    comm = communicator()
    tensors = [torch.zeros(1, device=home(comm)) for _ in range(3)]
    if comm.rank == 1:
        wait_until_said("receives", 1)
        for number in (1.0, 2.0, 3.0):
            comm.send(torch.full((1,), number, device=home(comm)), 0)
    if comm.rank == 0:
        works = [comm.recv(tensors[0], 1, async_op=True), comm.recv_any(tensors[1], async_op=True)]
        works.append(comm.recv(tensors[2], 1, async_op=True))
        say("receives")
        for work in works:
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


def wait_in_vain() -> None:
    """The communicator breaks while a rank waits for anybody."""
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    if comm.rank == 1:
        wait_until_said("receives", 1)
        comm.abort("because of this test")
    if comm.rank == 0:
        work = comm.recv_any(torch.zeros(1, device=home(comm)), async_op=True)
        say("receives")
        error = caught(work.wait, PeerLostError, "because of this test").error
        assert error.peers == (1,), f"{error!r}"


def be_refused(kind: type[BaguaError]) -> None:
    comm = communicator()
    caught(lambda: comm.recv_any(torch.zeros(1, device=home(comm))), kind)

"""Chapter 3: calls that are started now and waited for later, and communicators side by side."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.comm import Work
from bagua.errors import CommunicatorClosedError
from tests.contract.exercises import EXERCISES, CallSetting, Exercise, communicator, home, perform
from tests.contract.results import LARGE
from tests.harness import until

#: How long something that must happen may take, in seconds. An upper bound, never reached.
PATIENCE_S = 60.0


def start(kind: str, setting: CallSetting) -> Exercise:
    exercise = EXERCISES[kind](communicator(), setting.with_options(async_op=True))
    assert all(isinstance(work, Work) for work in exercise.works), f"{kind} returned {exercise.works}"
    return exercise


def works_of(exercise: Exercise) -> list[Work]:
    return [work for work in exercise.works if work is not None]


def finish(exercise: Exercise) -> None:
    for work in works_of(exercise):
        assert work.wait() is True
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
    assert work is not None
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
    assert work is not None
    until(work.is_completed, PATIENCE_S)
    assert work.exception() is None
    assert work.wait() is True
    assert work.wait(timeout=PATIENCE_S) is True, "waiting twice is allowed"
    assert work.result() is tensor
    assert tensor.tolist() == [total] * 3
    work = comm.allreduce(tensor, async_op=True)
    assert work is not None
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
        assert work is not None
        assert bool((work.result() == i * comm.size).all()), f"call {i} lost its tensor"


def forget_works() -> None:
    """No rank waits: the group still closes (the pool does that) and the process ends."""
    comm = communicator()
    for _ in range(3):
        comm.allreduce(torch.ones(1000, device=home(comm)), async_op=True)
    comm.barrier()


def open_and_close() -> None:
    """However many communicators come and go, what the process has stays as much as after the first."""
    use_and_close_a_group()
    time.sleep(0.3)  # what ends by itself may take a moment; it must not hide what does not
    before = resources()
    communicator().barrier()
    for _ in range(5):
        use_and_close_a_group()
    until = time.monotonic() + PATIENCE_S
    while (after := resources()).total() > before.total() and time.monotonic() < until:
        time.sleep(0.05)
    communicator().barrier()  # ranks that are threads count each other's
    assert after.total() <= before.total(), f"more than before: {after - before}; fewer: {before - after}"


def use_and_close_a_group() -> None:
    group = bagua.comm.get_default_group().duplicate()
    comm = group.global_communicator
    for options in ({}, {"async_op": True}):
        for shape in ((2, 3), (LARGE,)):
            finish(EXERCISES["allreduce"](comm, CallSetting(shape, options=options)))
    finish(EXERCISES["send_and_recv"](comm, CallSetting((LARGE,))))
    comm.allreduce(comm.empty(LARGE, dtype=torch.float32, device=home(comm)).fill_(1.0))
    communicator().barrier()
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
    if comm.rank == 0:
        tensor = torch.ones(2, device=home(comm))
        works = [comm.allreduce(tensor, async_op=True), comm.recv(tensor.clone(), 1, async_op=True)]
        comm.close()
        for work in works:
            assert work is not None
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
        exercises = [
            EXERCISES["allreduce"](comm, CallSetting(shape=(1000,), seed=number, options={"async_op": True}))
            for comm, number in order
        ]
        for exercise in exercises:
            finish(exercise)
    assert one.stats()["allreduce"].calls == 5
    assert other.stats()["allreduce"].calls == 5
    other.close()
    perform("allreduce", one, CallSetting())

"""Chapter 4: failures. Ranks that are late, silent or dead; aborts; use by two threads; use after the end."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import bagua.comm
from bagua.errors import (
    BaguaError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConcurrentUseError,
    PeerLostError,
)
from bagua.testing.ranks import die, fall_silent
from tests.contract.exercises import EXERCISES, CallSetting, communicator, home, perform
from tests.harness import until

#: Every error must be there one second after the deadline at the latest. The other seconds are for a machine
#: that has more to do than to run this suite, and may leave any thread alone for that long.
GRACE_S = 1.0 + 29.0
#: What must happen soon happens within this many seconds; deadlines in these tests are longer.
SOON_S = 30.0
PATIENT_S = 90.0
#: So long the culprit waits for what the others are expected to do, before it goes on without that.
UNTIL_S = 60.0
#: The rank that causes the trouble.
CULPRIT = 1

#: After the loss of a rank, some ranks of these have all that they need and may succeed.
NEEDS_EVERYONE = ("allreduce", "allgather", "alltoall", "barrier", "reduce_scatter", "allreduce_coalesced")
NEEDS_SOME = ("broadcast", "reduce", "gather", "scatter", "sendrecv", "send_and_recv")


class Caught(NamedTuple):
    """An error and how long it took to come."""

    error: BaguaError
    seconds: float


def caught(call: Callable[[], Any]) -> Caught:
    """The error that ``call`` raises; failing if it raises none."""
    started = time.monotonic()
    try:
        call()
        learn_from_the_device()
    except BaguaError as error:
        return Caught(error, time.monotonic() - started)
    raise AssertionError("no error was raised")


def learn_from_the_device() -> None:
    """On a stream a call is over for the host at once: its error comes out of a later one."""
    if "cpu" not in communicator().device_types:
        torch.cuda.synchronize()
        communicator().barrier()


def say(what: str) -> None:
    """Let ranks know that ask with ``wait_until_said``."""
    group = bagua.comm.get_default_group()
    group.store.set(f"contract/{what}/{group.rank}", "said")


def wait_until_said(what: str, ranks: int) -> None:
    """Wait until so many ranks have said it. No sleep is long enough where threads may be late.

    Should they never say it, this rank goes on, and what the others wrongly wait for ends.
    """
    group = bagua.comm.get_default_group()
    until = time.monotonic() + UNTIL_S
    while time.monotonic() < until:
        if sum(group.store.check([f"contract/{what}/{rank}"]) for rank in range(group.size)) >= ranks:
            return
        time.sleep(0.01)


def die_last(victim: bool, others: int, end: Callable[[], None] = die) -> None:
    """Kill this rank, if it is the victim, when so many others are here: they have what they got from it before."""
    if victim:
        wait_until_said("has what came before", others)
        end()
    say("has what came before")


# A rank that is lost.


def lose_a_rank(kind: str, way: str, deadline_s: float) -> tuple[Caught, Caught]:
    """The survivors' errors: of the call in which a rank is missing (or the one after it), and of the next."""
    comm = communicator()
    setting = CallSetting(shape=(1000,), root=CULPRIT)
    perform("allreduce", comm, setting)
    perform(kind, comm, setting)
    comm.barrier()
    die_last(comm.rank == CULPRIT, comm.size - 1, die if way == "die" else fall_silent)
    try:
        first = caught(lambda: EXERCISES[kind](comm, setting.with_options(timeout=deadline_s)))
    except AssertionError:
        assert kind in NEEDS_SOME, f"{kind} succeeded without rank {CULPRIT}"
        first = caught(lambda: comm.barrier(timeout=deadline_s))
    assert not comm.usable
    return first, caught(lambda: perform("allreduce", comm, CallSetting()))


def lose_a_rank_asynchronously(deadline_s: float) -> None:
    comm = communicator()
    comm.barrier()
    die_last(comm.rank == CULPRIT, comm.size - 1)
    work = comm.allreduce(torch.ones(10, device=home(comm)), async_op=True, timeout=deadline_s)
    assert work is not None
    until(work.is_completed, PATIENT_S)
    error = work.exception()
    assert isinstance(error, (PeerLostError, CollectiveTimeoutError)), f"{error!r}"
    for attempt in (work.wait, work.result):
        assert caught(attempt).error is error, "a work raises its error each time"
    future = work.get_future()
    with pytest.raises(Exception, match="allreduce"):
        future.wait()
    assert not comm.usable


# Ranks that are late.


def without_the_culprit(call: Callable[[], Any]) -> Caught:
    """The error of ``call``, which the culprit makes when another rank has got one."""
    if communicator().rank == CULPRIT:
        wait_until_said("gave up", 1)
    result = caught(call)
    say("gave up")
    return result


def send_again_and_again(tensor: torch.Tensor) -> None:
    """A send may be over before its sender learns that the connection is: the system keeps small ones."""
    while True:
        communicator().send(tensor, 0)
        time.sleep(0.01)


def come_late(kind: str, deadline_s: float) -> Caught:
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    late, tensor = comm.rank == CULPRIT, torch.ones(3, device=home(comm))
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: comm.allreduce(tensor, timeout=deadline_s),
        "recv": lambda: send_again_and_again(tensor) if late else comm.recv(tensor, CULPRIT, timeout=deadline_s),
        "allgather_object": lambda: comm.allgather_object("x", timeout=deadline_s),
        "broadcast_coalesced": lambda: comm.broadcast_coalesced([tensor], CULPRIT, timeout=deadline_s),
    }
    found = without_the_culprit(calls[kind])
    copy = pickle.loads(pickle.dumps(found.error))
    assert type(copy) is type(found.error)
    assert str(copy) == str(found.error)
    assert vars(copy) == vars(found.error)
    return found


def come_just_in_time() -> None:
    comm = communicator()
    for kind in ("allreduce", "broadcast", "barrier"):
        if comm.rank == CULPRIT:
            time.sleep(0.4)
        perform(kind, comm, CallSetting(options={"timeout": PATIENT_S}))


def time_out_with_facts(deadline_s: float) -> BaguaError:
    comm = communicator()
    for kind in ("broadcast", "barrier", "allreduce"):
        perform(kind, comm, CallSetting())
    tensor = torch.ones(3, dtype=torch.float64, device=home(comm))
    return without_the_culprit(lambda: comm.allreduce(tensor, timeout=deadline_s)).error


def wait_with_timeout() -> Caught:
    """Rank 0 loses patience; the others would have waited for much longer."""
    comm = communicator()
    perform("allreduce", comm, CallSetting())

    def wait() -> None:
        work = comm.allreduce(torch.ones(3, device=home(comm)), async_op=True, timeout=PATIENT_S)
        assert work is not None
        work.wait(0.4 if comm.rank == 0 else None)

    result = without_the_culprit(wait)
    assert not comm.usable
    return result


# The end.


def abort_from_thread() -> Caught:
    """All wait for the culprit, until a thread of rank 0 ends that."""
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    if comm.rank == 0:
        threading.Timer(0.5, comm.abort, ["because of this test"]).start()
    result = without_the_culprit(lambda: comm.allreduce(torch.ones(3, device=home(comm)), timeout=PATIENT_S))
    comm.abort("once more")
    assert not comm.usable
    assert isinstance(caught(comm.barrier).error, CommunicatorClosedError)
    return result


def use_from_two_threads() -> None:
    """While one thread waits in a call, another one is refused, and the first notices nothing."""
    group = bagua.comm.get_default_group()
    comm, signals = group.global_communicator, group.duplicate().global_communicator
    tensor = torch.zeros(1, device=home(comm))
    flag = torch.ones(1, device=home(comm))
    if comm.rank == 0:
        waiting = threading.Thread(target=comm.recv, args=(tensor, 1))
        waiting.start()
        until(lambda: any("recv" in call for call in comm.history()), SOON_S)
        time.sleep(0.1)
        for refused in (comm.barrier, lambda: comm.allreduce(flag)):
            error = caught(refused).error
            assert isinstance(error, ConcurrentUseError)
            assert "duplicate()" in str(error)
        signals.send(flag, 1)
        waiting.join(SOON_S)
        assert not waiting.is_alive()
        assert tensor.item() == 7.0
    if comm.rank == 1:
        signals.recv(flag, 0)
        comm.send(tensor + 7.0, 0)
    assert comm.usable
    perform("allreduce", comm, CallSetting())


def close_twice() -> None:
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    perform("allreduce", comm, CallSetting())
    comm.barrier()
    comm.close()
    comm.close()
    assert not comm.usable
    for kind in EXERCISES:
        if kind == "send_and_recv" and comm.size == 1:
            continue  # a line of one rank has no messages
        error = caught(partial(EXERCISES[kind], comm, CallSetting())).error
        assert isinstance(error, CommunicatorClosedError), f"{kind} on a closed communicator: {error!r}"
    assert isinstance(caught(lambda: comm.broadcast_object(1)).error, CommunicatorClosedError)
    comm.abort("after the end")
    perform("allreduce", communicator(), CallSetting())


def break_one_of_two() -> None:
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    perform("allreduce", comm, CallSetting())
    communicator().barrier()
    comm.abort("to see what happens to the other")
    assert isinstance(caught(comm.barrier).error, CommunicatorClosedError)
    perform("allreduce", communicator(), CallSetting())
    comm.close()

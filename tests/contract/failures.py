"""Chapter 3: ranks that ask for different things, are late, silent or dead; aborts; use after the end."""

import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import bagua.comm
from bagua import errors
from bagua.comm import Communicator, ReduceOp
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

    error: errors.BaguaError
    seconds: float


def caught(call: Callable[[], Any], kind: type[errors.BaguaError] = errors.BaguaError, said: str = "") -> Caught:
    """The error that ``call`` raises; failing if it raises none, one of another kind, or one that says other words."""
    started = time.monotonic()
    try:
        call()
        if "cpu" not in communicator().device_types:  # On a stream a call is over for the host at once.
            torch.cuda.synchronize()
            communicator().barrier()  # Its error comes out of a later one.
    except errors.BaguaError as error:
        seconds = time.monotonic() - started
        assert isinstance(error, kind), f"{error!r}"
        assert said in str(error), str(error)
        return Caught(error, seconds)
    raise AssertionError("no error was raised")


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
    until(work.is_completed, PATIENT_S)
    error = work.exception()
    assert isinstance(error, (errors.PeerLostError, errors.CollectiveTimeoutError)), f"{error!r}"
    for attempt in (work.wait, work.result):
        assert caught(attempt).error is error, "a work raises its error each time"
    future = work.get_future()
    with pytest.raises(Exception, match="allreduce"):
        future.wait()
    assert not comm.usable


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
    facts, copied = ((type(one), str(one), vars(one)) for one in (found.error, pickle.loads(pickle.dumps(found.error))))
    assert copied == facts
    return found


def come_just_in_time() -> None:
    comm = communicator()
    for kind in ("allreduce", "broadcast", "barrier"):
        if comm.rank == CULPRIT:
            time.sleep(0.4)
        perform(kind, comm, CallSetting(options={"timeout": PATIENT_S}))


def time_out_with_facts(deadline_s: float) -> errors.BaguaError:
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
        work.wait(0.4 if comm.rank == 0 else None)

    result = without_the_culprit(wait)
    assert not comm.usable
    return result


def abort_from_thread() -> Caught:
    """All wait for the culprit, until a thread of rank 0 ends that."""
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    if comm.rank == 0:
        threading.Timer(0.5, comm.abort, ["because of this test"]).start()
    result = without_the_culprit(lambda: comm.allreduce(torch.ones(3, device=home(comm)), timeout=PATIENT_S))
    comm.abort("once more")
    assert not comm.usable
    caught(comm.barrier, errors.CommunicatorClosedError)
    return result


def use_from_two_threads() -> None:
    """While one thread waits in a call, another one is refused, and the first notices nothing."""
    group = bagua.comm.get_default_group()
    comm, signals = group.global_communicator, group.duplicate().global_communicator
    tensor, flag = torch.zeros(1, device=home(comm)), torch.ones(1, device=home(comm))
    if comm.rank == 0:
        waiting = threading.Thread(target=comm.recv, args=(tensor, 1))
        waiting.start()
        until(lambda: any("recv" in call for call in comm.history()), SOON_S)
        time.sleep(0.1)
        for refused in (comm.barrier, lambda: comm.allreduce(flag)):
            caught(refused, errors.ConcurrentUseError, "duplicate()")
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
        assert isinstance(error, errors.CommunicatorClosedError), f"{kind} on a closed communicator: {error!r}"
    caught(lambda: comm.broadcast_object(1), errors.CommunicatorClosedError)
    comm.abort("after the end")
    perform("allreduce", communicator(), CallSetting())


def break_one_of_two() -> None:
    comm = bagua.comm.get_default_group().duplicate().global_communicator
    perform("allreduce", comm, CallSetting())
    communicator().barrier()
    comm.abort("to see what happens to the other")
    caught(comm.barrier, errors.CommunicatorClosedError)
    perform("allreduce", communicator(), CallSetting())
    comm.close()


DISAGREEMENTS = ("kind", "size", "dtype", "reduction", "root", "root_again", "empty", "coalesced", "asynchronous")
WAYS_OF_PAIRS = ("counts", "message", "message_again", "message_type", "message_against_collective")
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


def disagree(disagreement: str) -> tuple[errors.BaguaError, str]:
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    call, name, tensor = other_call(comm, disagreement)
    error, seconds = caught(call)
    assert bool((tensor == 3.0).all()), "ranks that disagree got a result"
    assert seconds < SOON_S, f"it took {seconds:.1f} s to see that ranks disagree"
    assert not comm.usable
    caught(comm.barrier, errors.CommunicatorClosedError)
    return error, name


def disagree_in_pairs(way: str, deadline_s: float) -> errors.BaguaError | None:
    """Rank 0 and the culprit want different things of each other; the others may notice."""
    comm = communicator()
    perform("allreduce", comm, CallSetting())
    tensor = torch.full((4,), 3.0, device=home(comm))
    dtype = torch.float64 if way == "message_type" else torch.float32
    other = torch.full((4 if way == "message_type" else 5,), 3.0, dtype=dtype, device=home(comm))
    for _ in range(3 if way == "message_again" and comm.rank in (0, CULPRIT) else 0):
        comm.recv(tensor, CULPRIT) if comm.rank == 0 else comm.send(tensor, 0)  # It must not stand for the next one.
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
